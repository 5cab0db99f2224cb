"""Nodes that sleep and wake, with the real halves of two nodes over real transports.

vLLM's CPU build cannot sleep. So vLLM's own `EngineCore.sleep` and `wake_up` run on an engine whose executor
makes the calls that vLLM 0.33's workers make, in the same order.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvferry.connector.p2p.params import LOAD_ERROR
from kvferry.connector.testing import ModelFreeNode, Request, settle
from tests.connector.test_sleep import hold_next_read
from tests.vllm.test_changed_weights import SEEDS, refused
from tests.vllm.test_weights import Model

from .conftest import Pair

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # warnings about vLLM's and torch's own code
    try:
        from kvferry.connector.testing.vllm import _only_connector, groups_of_one, nodes_of
    except ImportError as error:
        pytest.skip(f"this vLLM is too old for the nodes: {error}", allow_module_level=True)
    from vllm.v1.engine.core import EngineCore

ASLEEP = "the node is asleep"


class Executor:
    """vLLM's executor and its one worker, as far as sleep, wake and calls of the worker go.

    Attributes:
        connector: The worker half.
        model: Its weights.
        sleeping_tags: What is asleep.
        has_looked_asleep: Whether something touched weights whose memory was not there.
    """

    def __init__(self, connector: Any) -> None:
        self.connector, self.model = connector, Model()
        self.sleeping_tags: set[str] = set()
        self.has_looked_asleep = False

    @property
    def is_sleeping(self) -> bool:
        return bool(self.sleeping_tags)

    def collective_rpc(
        self, method: Any, timeout: Any = None, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> list[Any]:
        with _only_connector(self.connector):
            return [getattr(self, method)(*args) if isinstance(method, str) else method(self, *args)]

    def get_model(self) -> Model:
        self.has_looked_asleep |= "weights" in self.sleeping_tags
        return self.model

    def scale(self, factor: float) -> None:
        self.get_model().linear.weight.data.mul_(factor)

    def sleep(self, level: int) -> None:
        self.connector.unregister_kv_caches()
        if level == 2:
            self.model.linear.weight.data.fill_(7)  # lost
        self.sleeping_tags = {"weights", "kv_cache"}

    def wake_up(self, tags: list[str] | None) -> None:
        self.sleeping_tags -= set(tags or self.sleeping_tags)
        if tags is None or "kv_cache" in tags:
            self.connector.restore_kv_caches()


class Engine:
    """Runs methods of vLLM's engine core, which kvferry watches, on the halves of one node.

    Attributes:
        pause_scheduler: Step until nothing is left, and reset the prefix cache, as vLLM does first.
    """

    def __init__(self, node: ModelFreeNode) -> None:
        halves: Any = node
        self.node = node
        self.connector = halves.scheduler._scheduler._connector
        self.model_executor = Executor(halves.worker._worker._connector)
        self.scheduler = SimpleNamespace(
            get_kv_connector=lambda: self.connector,
            reset_prefix_cache=lambda _, reset_connector: not reset_connector or self.connector.reset_cache(),
        )

    def sleep(self, level: int = 1) -> None:
        EngineCore.sleep(self, level)

    def wake_up(self, *tags: str) -> None:
        EngineCore.wake_up(self, list(tags) or None)
        if not self.model_executor.is_sleeping:
            self._set_kv_connector_handshake_metadata()  # by itself since 0.33

    def update_weights(self, factor: float) -> None:
        """Change the weights as a trainer does, by a call of the workers, and reset the prefix cache."""
        EngineCore.collective_rpc(self, "scale", args=(factor,))
        EngineCore.reset_prefix_cache(self, True, True)

    def pause_scheduler(self, mode: str, clear_cache: bool) -> None:
        self.node.step_until(lambda: not self.node.is_busy)
        if clear_cache:
            assert EngineCore.reset_prefix_cache(self, True, True)

    def resume_scheduler(self) -> None:
        """Do nothing: the node steps when a test says so."""

    def _set_kv_connector_handshake_metadata(self) -> None:
        known = copy.deepcopy(self.model_executor.connector.get_handshake_metadata())  # another process's
        self.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): known})


@pytest.fixture(scope="module", autouse=True)
def _groups() -> Iterator[None]:
    with groups_of_one():
        yield


@pytest.fixture(params=["shm", "tcp"])
def engines(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Engine, Engine]]:
    """Two nodes that have handed over to each other. A lease outlasts what a test waits for."""
    transfer = {
        "kv_connector": "KvferryConnector",
        "kv_connector_module_path": "kvferry.connector.vllm",
        "kv_connector_extra_config": {"transport": request.param, "lease_s": 60},
    }
    with nodes_of(transfer, tmp_path) as make_node:
        engines = Engine(make_node()), Engine(make_node())
        for first, second in (engines, engines[::-1]):
            assert hand_over(first, second) == ""
        yield engines
        settle(*(engine.node for engine in engines))


NAMES = (f"request-{number}" for number in count())


def offer(engine: Engine) -> Any:
    """Have a node compute a prompt and offer it; return the params."""
    _, params = engine.node.prefill(next(NAMES), 18)
    engine.node.step()  # the offer is ordered with the step after the answer
    return params


def load(engine: Engine, producer: Engine, params: Any) -> str:
    """Have a node load a prompt, and return why that failed; empty if it did not.

    The node checks each byte that it loads.
    """
    node, name = engine.node, next(NAMES)
    node.add(Request(name, 18, params), num_wanted_tokens=0)
    node.step()
    node.step_until(lambda: not node.is_running(name), producer.node)
    assert (name in node.failed_loads) != (name in node.num_loaded_tokens)
    return str((node.params[name] or {}).get(LOAD_ERROR, ""))


def hand_over(producer: Engine, consumer: Engine) -> str:
    """Hand a prompt over, and give the offer up if it was not loaded."""
    params = offer(producer)
    error = load(consumer, producer, params)
    if error:
        release = {**params, "do_remote_prefill": False, "do_release": True}
        producer.node.add(Request(next(NAMES), 1, release), seed=9)
    producer.node.step_until(lambda: not producer.node.held, consumer.node)
    return error


def hand_over_anew(producer: Engine, consumer: Engine) -> str:
    """The same, after the connection was closed: a load that begins before its node has noticed fails for
    that.
    """
    errors = (hand_over(producer, consumer) for _ in range(20))
    return next(error for error in errors if "is not connected" not in error and "lost" not in error)


@pytest.mark.parametrize("level", [1, 2])
def test_offers_of_before_are_refused_and_a_new_handoff_is_right(
    engines: tuple[Engine, Engine], level: int
) -> None:
    producer, consumer = engines
    params = offer(producer)
    assert producer.node.held
    producer.sleep(level)  # it does not wait for the lease
    assert not producer.node.held
    assert ASLEEP in load(consumer, producer, params)
    producer.wake_up()
    if level == 2:
        assert "weights" in hand_over_anew(producer, consumer)
        producer.model_executor.model.load_state_dict(Model().state_dict())
        producer.update_weights(1)
    assert "restarted" in load(consumer, producer, params)
    assert hand_over_anew(producer, consumer) == ""
    assert hand_over_anew(consumer, producer) == ""


def test_a_load_that_waits_for_a_node_fails_when_that_falls_asleep(engines: tuple[Engine, Engine]) -> None:
    """Its policy applies at once, and not after a timeout."""
    producer, consumer = engines
    params = offer(producer)
    name = next(NAMES)
    consumer.node.add(Request(name, 18, params), is_queued=True, computes=False)
    consumer.node.step()
    producer.sleep()
    consumer.node.start(name)
    consumer.node.step_until(lambda: consumer.node.num_reports(name, "recving") > 0)
    assert consumer.node.load_error(name)
    consumer.node.finish(name, "error")
    producer.wake_up()


def test_a_read_in_flight_ends_before_the_memory_goes(engines: tuple[Engine, Engine]) -> None:
    """Nothing is written into the pool afterwards, and the load is reported as failed, once."""
    producer, consumer = engines
    params, name, node = offer(producer), next(NAMES), consumer.node
    half = consumer.model_executor.connector._worker._half
    is_reading = hold_next_read(half)
    node.add(Request(name, 18, params), computes=False)
    node.step()
    assert is_reading.wait(20)
    consumer.model_executor.sleep(1)
    blocks = node.blocks_of(name)
    node.pool.fill(blocks, seed=7)  # as if the memory were another's now
    before = node.contents(blocks)
    consumer.model_executor.wake_up(None)
    consumer._set_kv_connector_handshake_metadata()
    node.step_until(lambda: node.num_reports(name, "recving") > 0, producer.node)
    assert name in node.failed_loads
    producer.node.step_until(lambda: not producer.node.held, node)
    assert torch.equal(node.contents(blocks), before)
    assert node.num_reports(name, "recving") == 1
    node.finish(name, "error")
    assert hand_over_anew(producer, consumer) == ""


@pytest.mark.parametrize("changed", [0, 1], ids=["producer", "consumer"])
def test_weights_that_change_during_a_sleep_are_noticed(engines: tuple[Engine, Engine], changed: int) -> None:
    """In a trainer's order: sleep, wake the weights, send new ones, wake the cache."""
    for engine in (engines[changed], engines[1 - changed]):
        engine.sleep(1)
        engine.wake_up("weights")
        engine.update_weights(2)
        engine.wake_up("kv_cache")
        error = hand_over_anew(*engines)
        assert ("weights" in error and "changed in memory to" in error) == (engine is engines[changed])
    assert error == ""


def test_weights_that_are_asleep_are_not_looked_at(engines: tuple[Engine, Engine]) -> None:
    """Their memory is gone, and a look would end the process on a GPU."""
    engine = engines[0]
    engine.sleep(1)
    EngineCore.collective_rpc(engine, "__repr__")  # any call of the workers
    EngineCore.reset_prefix_cache(engine, True, True)
    engine.wake_up()
    assert not engine.model_executor.has_looked_asleep
    assert hand_over_anew(*engines) == ""


def test_a_pause_without_sleep_ends_nothing(engines: tuple[Engine, Engine]) -> None:
    producer, consumer = engines
    params = offer(producer)
    producer.pause_scheduler = lambda mode, clear_cache: None  # type: ignore[method-assign]
    producer.sleep(0)
    EngineCore.wake_up(producer, ["scheduling"])
    assert load(consumer, producer, params) == ""


def test_a_sleep_that_fails_leaves_the_node_awake(engines: tuple[Engine, Engine]) -> None:
    engine = engines[0]

    def fail(level: int) -> None:
        raise RuntimeError("no memory to keep the weights in")

    engine.model_executor.sleep = fail  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="no memory"):
        engine.sleep()
    assert hand_over_anew(*engines) == ""


# -- real engines ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def running_pair(start_module_pair: Any) -> Pair:
    pair: Pair = start_module_pair(
        worker_cls="tests.support.sleeping_worker.SleepingWorker",
        extra={"lease_s": 60, "connect_timeout_s": 20},
    )
    return pair


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("level", [1, 2])
def test_engines_that_slept_give_right_answers(pair: Pair, prompt: Any, level: int) -> None:
    tokens = prompt(100, next(SEEDS))
    params = pair.prefilled(tokens)
    # In one process vLLM does not wait for offers, which end with the next step and not with their lease.
    assert "Failed to reset KV cache" in pair.prefill.order("sleep", level=level)["refused"]
    pair.prefill.wait_for_status(lambda status: status["num_requests"] == 0)
    for node in (pair.prefill, pair.decode):
        assert not node.order("sleep", level=level)["refused"]
        node.order("wake_up")
    assert "restarted" in refused(pair, tokens, params)
    tokens = prompt(100, next(SEEDS))
    loads = pair.decode.order("figures")["num_loads"]
    answer = pair.hand_over(tokens)
    assert pair.decode.order("figures")["num_loads"] == loads + 1
    pair.assert_like_alone(tokens, answer)
