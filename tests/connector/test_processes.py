"""Handoffs between real processes over shared memory: the survivor stays intact when the other one is
killed.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import pytest
import torch

from kvferry.connector.handoff.events import Identity
from kvferry.connector.handoff.messages import SPOKEN_VERSIONS
from kvferry.connector.p2p import worker
from kvferry.connector.testing import CacheShape, ModelFreeNode, Request, assert_whole, engine_config
from kvferry.connector.testing.harness import begin_load
from tests.support.patience import DEADLINE_S

SHAPE = CacheShape()
#: Big enough that a kill hits a read in flight: 60 blocks of 1 MiB.
BIG = CacheShape(num_layers=4, num_blocks=61, block_size=16, num_kv_heads=32, head_size=64)


def serve(pipe: Connection, shape: CacheShape, spoken: range, options: dict[str, Any]) -> None:
    """Run a node in its own process. It carries out the orders from the pipe, and steps in between."""
    torch.set_num_threads(1)
    worker.Identity = partial(Identity, spoken=spoken)  # type: ignore[attr-defined]
    config = engine_config(
        "shm", block_size=shape.block_size, engine_id="child", kv_connector_extra_config=options
    )
    with ModelFreeNode(config, shape) as node:
        pipe.send("ready")
        while True:
            node.step()
            if not pipe.poll(0.001):
                continue
            match pipe.recv():
                case ("prefill", request_id, num_tokens, seed):
                    _, params = node.prefill(request_id, num_tokens, seed=seed)
                    pipe.send(params)
                case ("load", request_id, num_tokens, params):
                    request = Request(request_id, num_tokens, params)
                    node.add(request, computes=False)
                    node.step_until(lambda id=request_id: node.num_reports(id, "recving") > 0)  # type: ignore[misc]
                    pipe.send(node.load_error(request_id))
                case ("claim", request_id, num_tokens, params):
                    node.add(Request(request_id, num_tokens, params), is_queued=True)
                    pipe.send(None)
                case "free":
                    pipe.send((len(node.pool.free_blocks), node.stats.counters))
                case "stop":
                    return


class Child:
    """The process that runs `serve`, and the other end of its pipe."""

    def __init__(self, process: BaseProcess, pipe: Connection) -> None:
        self._process = process
        self._pipe = pipe

    def ask(self, *what: Any) -> Any:
        self.send(*what)
        return self.receive()

    def send(self, *what: Any) -> None:
        self._pipe.send(what[0] if len(what) == 1 else what)

    def receive(self) -> Any:
        assert self._pipe.poll(DEADLINE_S), "the child does not answer"
        return self._pipe.recv()

    def kill(self) -> None:
        """Send SIGKILL, which leaves no time for a goodbye message."""
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGKILL)
        self._process.join(DEADLINE_S)

    def signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def stop(self) -> None:
        if self._process.is_alive():
            self._pipe.send("stop")
            self._process.join(DEADLINE_S)
            assert self._process.exitcode == 0
        self._pipe.close()
        self._process.close()


@contextmanager
def child(shape: CacheShape = SHAPE, spoken: range = SPOKEN_VERSIONS, **options: Any) -> Iterator[Child]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, shape, spoken, options), daemon=True)
    process.start()
    theirs.close()
    assert ours.poll(60)
    assert ours.recv() == "ready"
    made = Child(process, ours)
    try:
        yield made
    finally:
        made.stop()


@pytest.fixture
def consumer() -> Iterator[ModelFreeNode]:
    with ModelFreeNode(engine_config("shm", block_size=SHAPE.block_size), SHAPE) as node:
        yield node


def expected_contents(num_tokens: int, seed: int, shape: CacheShape = SHAPE) -> torch.Tensor:
    """Return what `prefill` writes, which is the same in every process."""
    with ModelFreeNode(engine_config("inproc", block_size=shape.block_size), shape) as node:
        blocks, _ = node.prefill("x", num_tokens, seed=seed)
        return node.contents(blocks)


def wait_for_load(consumer: ModelFreeNode, request_id: str) -> str:
    consumer.step_until(lambda: consumer.num_reports(request_id, "recving") > 0, timeout_s=DEADLINE_S)
    consumer.step()
    assert consumer.num_reports(request_id, "recving") == 1
    return consumer.load_error(request_id)


@pytest.mark.slow
class TestAnotherVersion:
    """One of the two processes speaks another version of the handoff protocol, as during a rolling
    upgrade.
    """

    def test_neighbours_hand_over_in_both_directions(self, consumer: ModelFreeNode) -> None:
        newest = SPOKEN_VERSIONS[-1]
        with child(spoken=range(newest, newest + 2)) as other:
            request = Request("d", 18, other.ask("prefill", "p", 18, 1))
            blocks = begin_load(consumer, request)
            assert wait_for_load(consumer, "d") == ""
            assert torch.equal(consumer.contents(blocks), expected_contents(18, 1))
            consumer.finish(request.request_id, "stop")
            _, params = consumer.prefill("ours", 18, seed=2)
            other.send("load", "theirs", 18, params)
            consumer.step_until(lambda: consumer.num_reports("ours", "sending") > 0, timeout_s=DEADLINE_S)
            assert other.receive() == ""

    def test_others_are_refused_with_what_to_upgrade(self, consumer: ModelFreeNode) -> None:
        newest = SPOKEN_VERSIONS[-1]
        with child(spoken=range(newest + 2, newest + 3)) as other:
            request = Request("d", 18, other.ask("prefill", "p", 18, 1))
            begin_load(consumer, request)
            assert f"remote {newest + 2} (kvferry" in (error := wait_for_load(consumer, "d"))
            assert "upgrade this node first" in error
            consumer.finish(request.request_id, "error")
            _, params = consumer.prefill("ours", 18, seed=2)
            assert "upgrade the peer first" in other.ask("load", "theirs", 18, params)


@pytest.mark.slow
class TestKilledProducer:
    def test_while_reading(self) -> None:
        num_tokens = 60 * BIG.block_size
        expected = expected_contents(num_tokens, 4, BIG)
        with (
            ModelFreeNode(engine_config("shm", block_size=BIG.block_size), BIG) as consumer,
            child(BIG) as producer,
        ):
            request = Request("d", num_tokens, producer.ask("prefill", "p", num_tokens, 4))
            blocks = begin_load(consumer, request)
            producer.kill()
            error = wait_for_load(consumer, "d")
            # The read may end before the kill. The load must fail with invalid blocks, or succeed with right
            # bytes.
            if error:
                assert consumer.invalid_block_ids == set(blocks)
            else:
                assert torch.equal(consumer.contents(blocks), expected)
            consumer.finish(request.request_id, "stop")
            assert_whole(consumer)


@pytest.mark.slow
class TestOtherDeaths:
    def test_a_stopped_producer_can_be_read(self, consumer: ModelFreeNode) -> None:
        """After the grant, a read does not need the producer's engine."""
        with child() as producer:
            request = Request("d", 18, producer.ask("prefill", "p", 18, 7))
            consumer.add(request, is_queued=True, computes=False)
            consumer.step()
            warm = Request("d0", 5, producer.ask("prefill", "p0", 5, 7))
            consumer.add(warm, computes=False)
            assert wait_for_load(consumer, "d0") == ""  # so the earlier claim has been granted
            producer.signal(signal.SIGSTOP)
            consumer.start("d")
            error = wait_for_load(consumer, "d")
            producer.signal(signal.SIGCONT)
            assert error == ""
            assert torch.equal(consumer.contents(consumer.blocks_of("d")), expected_contents(18, 7))

    def test_a_killed_consumer_frees_the_producer_at_once(self) -> None:
        with ModelFreeNode(engine_config("shm", block_size=SHAPE.block_size), SHAPE) as producer:
            with child() as other:
                _, params = producer.prefill("p", 18)
                producer.step()
                other.ask("claim", "d", 18, params)
                _, params = producer.prefill("p2", 5)
                producer.step()
                assert other.ask("load", "d2", 5, params) == ""  # so the earlier claim has arrived
                producer.step_until(lambda: list(producer.held) == ["p"])
                other.kill()
                producer.step_until(lambda: not producer.held, timeout_s=8)  # its lease is 30 s
            assert_whole(producer)
            assert producer.stats.counters["offers_aborted_total"] == 1
