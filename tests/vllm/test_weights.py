"""The hash of weights in memory changes exactly with the weights, and a node that does not know its weights
says so.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from kvferry.connector.config import KVTransferConfig
from kvferry.connector.kv_cache_specs import KVCacheConfig
from kvferry.connector.p2p.orders import WorkerAddress
from kvferry.connector.p2p.scheduler import HandoffScheduler
from kvferry.connector.vllm.metadata import WorkerHandshake
from kvferry.connector.vllm.scheduler import SchedulerSide
from kvferry.connector.vllm.sharing import SharedOffers
from kvferry.connector.vllm.weights import (
    UNKNOWN,
    LoadedWeights,
    WeightsWatch,
    digest_of,
    files_in_worker,
    stamp_in_worker,
    sums_of,
)
from kvferry.connector.vllm.windows import WindowBlocks


class Model(torch.nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.linear = torch.nn.Linear(4, 4, bias=False)
        self.linear.weight = torch.nn.Parameter(torch.randn(4, 4, generator=generator), requires_grad=False)
        self.register_buffer("correction", torch.ones(3))
        self.register_buffer("angles", torch.ones(3), persistent=False)
        self.scale, self.scale_of_keys = 0.5, torch.tensor(1.0)
        self.impl = SimpleNamespace(scale=0.5)
        self.scratch = torch.zeros(3)
        self.packed = torch.nn.Module()
        self.packed.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)
        self.packed.kernel = lambda x: x


CHANGES: dict[str, Callable[[Model], object]] = {
    "an element": lambda model: model.linear.weight.data[3, 3].add_(1e-3),
    "through inference mode": lambda model: torch.inference_mode()(model.linear.weight.mul_)(2),
    "a replaced parameter": lambda model: setattr(
        model.linear, "weight", torch.nn.Parameter(model.linear.weight + 1)
    ),
    "the order of equal numbers": lambda model: model.linear.weight.data.copy_(
        model.linear.weight.flip(0).clone()
    ),
    "the type": lambda model: model.half(),
    "the strides": lambda model: setattr(
        model.linear, "weight", torch.nn.Parameter(model.linear.weight.clone().t())
    ),
    "a buffer": lambda model: model.correction.zero_(),
    "a buffer that is in no checkpoint": lambda model: model.angles.mul_(1.01),
    "a number of a layer": lambda model: setattr(model, "scale", 0.25),
    "a number in a tensor of a layer": lambda model: model.scale_of_keys.mul_(2),
    "a number of an attention kernel": lambda model: setattr(model.impl, "scale", 0.25),
    "one byte less": lambda model: setattr(model, "correction", torch.ones(2)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_each_change_shows(change: Callable[[Model], object]) -> None:
    model, loaded = Model(), LoadedWeights()
    before = loaded.stamp(model)
    assert before == loaded.stamp(model) == LoadedWeights().stamp(Model()) != UNKNOWN
    change(model)
    assert loaded.stamp(model) not in (before, UNKNOWN)


def test_what_is_no_weight_does_not_show() -> None:
    model, loaded = Model(), LoadedWeights()
    before = loaded.stamp(model)
    model.scratch.add_(1)
    assert loaded.stamp(model) == before


def test_a_replaced_kernel_makes_the_weights_unknown_until_they_are_loaded_anew() -> None:
    model, loaded = Model(), LoadedWeights()
    before = loaded.stamp(model)
    model.packed.kernel = lambda x: 2 * x
    assert loaded.stamp(model) == UNKNOWN
    assert loaded.stamp(model, is_loaded_anew=True) == before
    assert loaded.stamp(model) == before


def test_weights_that_are_being_loaded_are_unknown() -> None:
    model, loaded = Model(), LoadedWeights()
    model.linear.to("meta")
    assert loaded.stamp(model) == UNKNOWN


@pytest.mark.parametrize("num_bytes", [0, 1, 7, 8, 9, 4096, (8 << 20) + 8 + 3])
def test_the_sums_of_a_gpu_change_with_each_byte(num_bytes: int) -> None:
    data = torch.randint(
        0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(num_bytes)
    )
    before = sums_of(data)
    assert sums_of(data.clone()) == before
    for place in {0, num_bytes // 2, num_bytes - 1} if num_bytes else ():
        changed = data.clone()
        changed[place] ^= 128
        assert sums_of(changed) != before
    if num_bytes >= 16:
        words = data[: num_bytes // 8 * 8].view(-1, 8)
        swapped = torch.cat([words.flip(0).flatten(), data[num_bytes // 8 * 8 :]])
        assert sums_of(swapped) != before


def test_a_view_is_hashed_with_the_memory_around_it() -> None:
    whole = torch.arange(8.0)
    before = digest_of(whole[2:4])
    whole[7] = 0
    assert digest_of(whole[2:4]) != before


class Workers:
    """Runs functions in two workers in turn, as vLLM's executors do, and notes what they describe to
    peers.
    """

    def __init__(self) -> None:
        self.models = [Model(1), Model(2)]
        self.loaded = [LoadedWeights(), LoadedWeights()]
        self.files = "files"
        self.described: list[str] = []

    def run(self, function: Callable[..., str], timeout_s: float, arguments: tuple[object, ...] = ()) -> list:
        if function is stamp_in_worker:
            pairs = zip(self.loaded, self.models, strict=True)
            return [loaded.stamp(model, is_loaded_anew=bool(arguments[0])) for loaded, model in pairs]
        if function is files_in_worker:
            return [self.files, self.files]
        self.described.append(str(arguments[0]))
        return [None, None]


def make_side() -> SchedulerSide:
    half = HandoffScheduler(KVTransferConfig("KvferryConnector", "kv_both"), KVCacheConfig(8, (), ()))
    side = SchedulerSide(half, SharedOffers(True), WindowBlocks({}))
    side.set_handshake_metadata({0: WorkerHandshake(WorkerAddress("shm:x", 5, 0), {"weights": "files"})})
    return side


class Node:
    """An engine's watch over two workers."""

    def __init__(self) -> None:
        self.workers, self.side = Workers(), make_side()
        self.watch = WeightsWatch(self.workers.run, [self.side])

    def call(self, change: Callable[[Model], object] = lambda model: None, rank: int = 1) -> None:
        self.watch.before_call()
        change(self.workers.models[rank])
        self.watch.after_call()


def test_two_nodes_describe_equal_changes_equally() -> None:
    first, second = Node(), Node()
    for node in (first, second):
        node.call()
        assert node.workers.described == []
        node.call(CHANGES["an element"])
    assert first.workers.described == second.workers.described
    assert first.side.identity == second.side.identity != ""
    first.call(CHANGES["an element"], rank=0)
    assert first.workers.described[-1] != second.workers.described[-1]


def test_a_node_that_has_computed_is_unknown_until_its_prefix_cache_is_reset() -> None:
    node, twin = Node(), Node()
    for each in (node, twin):
        each.side.has_computed = True
        each.call(CHANGES["an element"])
        assert each.side.identity == ""
        assert "reset the prefix cache" in each.workers.described[-1]
    # Two nodes that do not know their weights must not take each other for equal.
    assert node.workers.described != twin.workers.described
    node.call(CHANGES["a buffer"])
    assert len(node.workers.described) == 1
    node.watch.cache_was_reset()
    assert "changed in memory to" in node.workers.described[-1]
    assert node.side.identity != ""


def test_weights_that_are_what_they_were_are_described_by_their_files_again() -> None:
    node = Node()
    before = node.side.identity
    node.call(lambda model: model.linear.weight.data.mul_(2))
    assert node.side.identity != before
    node.call(lambda model: model.linear.weight.data.mul_(0.5))
    assert node.side.identity == before
    assert node.workers.described[-1] == "files"


def test_other_files_are_described_with_what_they_were_loaded_over() -> None:
    """Files need not have all weights of the model."""
    descriptions = []
    for change in (lambda model: None, CHANGES["an element"]):
        node = Node()
        node.call(change)
        node.workers.files = "other files"
        node.watch.before_call()
        node.watch.after_reload()
        descriptions.append(node.workers.described[-1])
    assert all(text.startswith("other files, loaded over ") for text in descriptions)
    assert len(set(descriptions)) == 2


def test_a_worker_that_cannot_say_what_it_has_makes_the_node_unknown() -> None:
    node = Node()
    node.watch = WeightsWatch(_failing, [node.side])
    node.call()
    assert node.side.identity == ""


def _failing(*_: object) -> list[str]:
    raise RuntimeError("a worker is gone")


def test_another_connector_is_left_alone() -> None:
    from vllm.v1.engine.core import EngineCore

    from kvferry.connector.vllm.weights import watch_engine_cores

    watch_engine_cores()
    watch_engine_cores()
    executor = SimpleNamespace(collective_rpc=lambda method, timeout, args, kwargs: [method, args, kwargs])
    engine = SimpleNamespace(
        model_executor=executor, scheduler=SimpleNamespace(get_kv_connector=lambda: None)
    )
    answer = EngineCore.collective_rpc(engine, "check_health", args=(1,))
    assert answer == ["check_health", (1,), None]
