"""Speculative decoding with a draft model, which keeps a cache of its own, on both nodes or on one of
them.

The target has full attention. With other kinds of layers vLLM 0.32 itself answers differently on a CPU if it
drafts; `docs/vllm.md` says how.
"""

from __future__ import annotations

import re

import pytest
import torch
from safetensors.torch import load_file, save_file

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SIZE = {"hidden_size": 128, "head_dim": 32, "max_position_embeddings": 2048}
PATIENCE = {"lease_s": 60, "connect_timeout_s": 40, "claim_timeout_s": 40}
DRAFTED, ACCEPTED = "vllm:spec_decode_num_draft_tokens_total", "vllm:spec_decode_num_accepted_tokens_total"
LEFT_OUT = re.compile(r"peer '.*' does not have layers draft:\S+")


def _copy_of_the_target(folder):
    """A draft model that drafts what the target says, if it sees the same prompt."""
    from tests.support.tiny_models import write_tiny_model

    return write_tiny_model(folder, **SIZE)


def _eagle_head(folder):
    """A random layer that drafts from the target's hidden states."""
    from tests.support.tiny_models import write_tiny_model

    write_tiny_model(folder, num_hidden_layers=1, seed=1, **SIZE)
    weights = {
        name.removeprefix("model."): tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
        if "layers." in name and "input_layernorm" not in name
    }
    weights["fc.weight"] = torch.zeros(SIZE["hidden_size"], 2 * SIZE["hidden_size"]).fill_(0.01)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


DRAFTS = {"draft_model": _copy_of_the_target, "eagle": _eagle_head}


@pytest.fixture(scope="module", params=DRAFTS)
def method(request):
    return request.param


@pytest.fixture(scope="module")
def drafting(method, start_module_pair, tmp_path_factory):
    """Two nodes with the same draft model."""
    draft = DRAFTS[method](tmp_path_factory.mktemp("draft"))
    settings = {"model": str(draft), "method": method, "num_speculative_tokens": 3}
    return start_module_pair(speculative_config=settings, extra=PATIENCE)


@pytest.fixture(scope="module", params=["both", "decode", "prefill"])
def side(request):
    """Which node has the draft model."""
    return request.param


@pytest.fixture(scope="module")
def running_pair(side, drafting, shm_pair):
    nodes = {
        "both": (drafting.prefill, drafting.decode),
        "decode": (shm_pair.prefill, drafting.decode),
        "prefill": (drafting.prefill, shm_pair.decode),
    }
    return type(drafting)(*nodes[side], drafting.names)


@pytest.mark.parametrize("num_tokens", [5, 33, 400])
def test_tokens_equal_those_of_one_node(pair, prompt, num_tokens):
    tokens = prompt(num_tokens)
    answer = pair.hand_over(tokens, max_tokens=24)
    assert answer["reason"] == "length"
    pair.assert_like_alone(tokens, answer, max_tokens=24)


def test_a_prefix_that_another_request_loaded(pair, prompt):
    """vLLM finds the loaded blocks in its prefix cache, whether or not the draft model's part came
    with them.
    """
    tokens = prompt(400)
    pair.hand_over(tokens)
    answer = pair.decode.ask(next(pair.names), [*tokens, 1, 2, 3], 24)
    pair.assert_like_alone([*tokens, 1, 2, 3], answer, max_tokens=24)


def test_the_draft_models_cache_crosses_if_both_nodes_have_the_model(method, side, pair, prompt):
    """A draft model that is a copy of the target model drafts what the target says, if it sees the prompt."""
    tokens = prompt(401)
    before = [pair.decode.metric(name) for name in (DRAFTED, ACCEPTED)]
    pair.hand_over(tokens, max_tokens=40)
    drafted, accepted = (
        pair.decode.metric(name) - was for name, was in zip((DRAFTED, ACCEPTED), before, strict=True)
    )
    assert (drafted > 0) == (side != "prefill")
    if side == "both" and method == "draft_model":
        assert accepted > 0.8 * drafted  # the last step drafts past the answer's end
    if side == "decode":
        assert LEFT_OUT.search(pair.decode.log)


@pytest.mark.parametrize("cached", ["prefill", "decode", "both"])
def test_answers_with_a_prefix_that_is_already_cached(pair, prompt, cached):
    """First a beginning of the prompt is in the caches, and then all of it."""
    tokens = prompt(402)
    alone = pair.alone(tokens, 24)
    for known in (tokens[:200], tokens):
        for name, node in (("prefill", pair.prefill), ("decode", pair.decode)):
            node.order("forget")
            if cached in (name, "both"):
                node.ask(next(pair.names), known)
        answer = pair.hand_over(tokens, max_tokens=24)
        pair.assert_like_alone(tokens, answer, max_tokens=24, alone=alone)
