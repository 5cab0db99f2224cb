"""Which part of a model each rank keeps, which models cannot be sharded, and what is sent between the
processes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from kvferry.lab.engine.attention import attention_layers
from kvferry.lab.engine.core import EngineCore
from kvferry.lab.engine.parallel.codec import decode, encode
from kvferry.lab.engine.parallel.sharding import layers_of_rank, shard
from kvferry.lab.engine.parallel.steps import StepMirror, StepSender
from kvferry.lab.engine.request import Request
from kvferry.lab.engine.settings import EngineSettings
from kvferry.lab.engine.step import ScheduledRequest, StepPlan
from kvferry.lab.engine.types import GenerationRequest, SamplingParams
from kvferry.lab.engine.weights import load_model
from kvferry.transports.errors import ConfigurationError
from tests.support.tiny_models import write_tiny_model

SMOLLM2 = {"num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536}


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_ranks_together_have_every_weight_and_replicate_kv_heads_only_if_necessary(
    num_ranks: int, tiny_model: Callable[[str], Path]
) -> None:
    def parts(num: int, rank: int) -> Any:
        model = load_model(tiny_model("llama"), torch.float32, torch.device("cpu"), "eager")
        shard(model, rank, num)
        return model.model.layers[1]

    whole = parts(1, 0)
    ranks = [parts(num_ranks, rank) for rank in range(num_ranks)]

    def joined(axis: int, get: Callable[[Any], Any]) -> torch.Tensor:
        return torch.cat([get(rank).weight for rank in ranks], axis)

    for name in ("gate_proj", "up_proj", "down_proj"):
        axis = 1 if name == "down_proj" else 0
        assert torch.equal(joined(axis, lambda r, n=name: getattr(r.mlp, n)), getattr(whole.mlp, name).weight)
    assert torch.equal(joined(0, lambda rank: rank.self_attn.q_proj), whole.self_attn.q_proj.weight)
    assert torch.equal(joined(1, lambda rank: rank.self_attn.o_proj), whole.self_attn.o_proj.weight)
    # There are two heads: each of two ranks has one, and with four ranks each head is on two ranks.
    head = [whole.self_attn.k_proj.weight[:16], whole.self_attn.k_proj.weight[16:]]
    assert torch.equal(
        joined(0, lambda rank: rank.self_attn.k_proj),
        torch.cat([head[r * 2 // num_ranks] for r in range(num_ranks)]),
    )
    layers = attention_layers(AutoConfig.from_pretrained(tiny_model("llama")))
    assert {layer.num_kv_heads for layer in layers_of_rank(layers, num_ranks)} == {1}


def test_a_number_of_ranks_that_does_not_divide_the_heads_is_refused_with_those_that_do(
    tmp_path: Path,
) -> None:
    write_tiny_model(tmp_path, num_hidden_layers=1, hidden_size=72, head_dim=8, **SMOLLM2)
    with pytest.raises(
        ConfigurationError, match="9 attention heads, 3 key/value heads.*sizes that fit: 1, 3$"
    ) as error:
        EngineCore(EngineSettings(str(tmp_path), tensor_parallel_size=2))
    assert error.value.key == "tensor_parallel_size"


def test_a_worker_gets_each_step_exactly_as_planned() -> None:
    sender, mirror = StepSender(), StepMirror()
    request = Request("a", GenerationRequest("a", (5, 6, 7), SamplingParams(seed=1)), lambda _: [], 0.0)

    def cross(*items: ScheduledRequest, **more: Any) -> StepPlan:
        return mirror.plan(decode(encode(sender.step(StepPlan(items, **more)))))

    for num_computed, num_new, token in ((0, 2, 0), (2, 1, 8), (3, 1, 9), (0, 5, 10)):
        request.num_computed_tokens = num_computed
        item = ScheduledRequest(request, num_computed, num_new, ([1, 2], [3]))
        (theirs,) = cross(item, preempted_req_ids={"b"}).scheduled_requests
        for field in ("request_id", "num_computed_tokens", "num_scheduled_tokens", "block_ids"):
            assert getattr(theirs, field) == getattr(item, field)
        assert theirs.yields_token == item.yields_token
        assert theirs.request.all_token_ids == request.all_token_ids
        assert theirs.request.num_computed_tokens == num_computed
        assert theirs.request.source.sampling == request.source.sampling
        if token:
            request.append_token(token)
    assert cross(finished_req_ids={"a"}).finished_req_ids == {"a"}
    assert (sender._num_sent, mirror._requests) == ({}, {})
