"""The hash of weights in memory changes exactly with the weights, and a node that does not know its weights
says so.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from kvferry.connector.vllm.weights import (
    UNKNOWN,
    LoadedWeights,
    WeightsWatch,
    digest_of,
    sums_of,
)
from tests.vllm.test_adapter import _side


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


def test_a_worker_that_cannot_say_what_it_has_makes_the_node_unknown() -> None:
    side = _side(fields={"weights": "files"})
    assert side.identity != ""
    watch = WeightsWatch(_failing, [side])
    watch.before_call()
    watch.after_call()
    assert side.identity == ""


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
