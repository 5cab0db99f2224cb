"""Recurrent states: a model with Mamba layers beside attention, and one that keeps nothing but states."""

from __future__ import annotations

from itertools import repeat
from typing import ClassVar

import pytest
import torch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

#: Family → its shape. vLLM's CPU attention needs heads of 32 elements.
MODELS = {
    "granitemoehybrid": {"hidden_size": 128, "head_dim": 32, "mamba_d_head": 32},
    "falcon_h1": {"hidden_size": 128, "head_dim": 32, "mamba_d_head": 32, "mamba_d_ssm": 128},
    "mamba2": {"intermediate_size": 128},
}


@pytest.fixture(scope="module", params=MODELS)
def running_pair(request, start_module_pair, tmp_path_factory):
    from tests.support.tiny_models import write_tiny_model

    shape = {"max_position_embeddings": 2048, **MODELS[request.param]}
    model = write_tiny_model(tmp_path_factory.mktemp("states"), request.param, **shape)
    # With prefix caching vLLM 0.32 keeps a state for each block, and its kernels for CPUs fail.
    return start_module_pair(
        model=model, enable_prefix_caching=False, max_num_batched_tokens=128, extra={"lease_s": 20}
    )


@pytest.mark.parametrize("num_tokens", [2, 33, 64, 400])
def test_tokens_equal_those_of_one_node(pair, prompt, num_tokens):
    tokens = prompt(num_tokens)
    params = pair.prefilled(tokens)
    assert params["remote_num_tokens"] == num_tokens - 1
    before = pair.decode.order("figures")["num_loads"]
    answer = pair.decode.ask(next(pair.names), tokens, 8, params)
    assert answer["reason"] == "length"
    assert pair.decode.order("figures")["num_loads"] == before + 1
    pair.assert_like_alone(tokens, answer)


@pytest.mark.parametrize("lengths", [range(2, 35), range(123, 133)], ids=lambda lengths: f"{lengths[0]} on")
def test_prompts_of_every_length(pair, prompt, lengths):
    """Across the end of a block, and of a chunk of a prompt; the pool has room for all of them."""
    prompts = [prompt(length, seed=1) for length in lengths]
    before = pair.decode.order("figures")["num_loads"]
    offers = pair.answers(pair.prefill, prompts, 1, repeat({"do_remote_decode": True}))
    answers = pair.answers(pair.decode, prompts, 8, [offer["params"] for offer in offers])
    assert pair.decode.order("figures")["num_loads"] - before == len(prompts)
    pair.assert_all_like_alone(prompts, answers)


def test_a_prompt_longer_than_the_offer_is_continued(pair, prompt):
    tokens = prompt(300)
    params = pair.prefilled(tokens[:200])
    answer = pair.decode.ask(next(pair.names), tokens, 8, params)
    pair.assert_like_alone(tokens, answer)


def test_an_offer_that_was_already_read(pair, prompt, policy):
    tokens = prompt(100)
    params = pair.prefilled(tokens)
    pair.decode.ask(next(pair.names), tokens, 8, params)
    answer = pair.decode.ask(next(pair.names), tokens, 8, params)
    pair.assert_ended_by(policy, answer, tokens)


def test_an_answer_of_several_tokens_is_right_and_its_state_is_not_offered(pair, prompt):
    """The state is past the prompt by then, and no node could continue it."""
    tokens = prompt(50)
    answer = pair.prefill.ask(next(pair.names), tokens, 8, {"do_remote_decode": True})
    assert answer["params"] is None
    pair.assert_like_alone(tokens, answer)


@pytest.mark.skipif(
    not torch.cpu._is_avx512_bf16_supported(), reason="vLLM's kernels for gated delta nets need AVX-512 BF16"
)
class TestWithPrefixCaching:
    """vLLM then keeps a state for the last token of each block, in a table with one column per block."""

    #: For its kernels.
    SHAPE: ClassVar = {
        "hidden_size": 256,
        "head_dim": 64,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "max_position_embeddings": 2048,
    }

    @pytest.fixture(scope="class")
    @classmethod
    def running_pair(cls, start_module_pair, tmp_path_factory):
        from tests.support.tiny_models import write_tiny_model

        model = write_tiny_model(tmp_path_factory.mktemp("gated"), "qwen3_next", **cls.SHAPE)
        return start_module_pair(model=model, dtype="bfloat16")

    @pytest.mark.parametrize("num_tokens", [33, 288, 700])
    def test_tokens_equal_those_of_one_node(self, pair, prompt, num_tokens):
        """The prompt ends with the node's own first token, so that its own answer goes on with the same
        kernel as the handoff.
        """
        tokens = prompt(num_tokens)
        alone = pair.alone(tokens, 9)
        pair.decode.order("forget")
        before = pair.decode.order("figures")["num_loads"]
        answer = pair.hand_over([*tokens, alone["tokens"][0]])
        assert pair.decode.order("figures")["num_loads"] == before + 1
        assert answer["reason"] == "length"
        pair.assert_continues(alone, answer, "bfloat16")

    def test_a_prefix_that_is_already_cached(self, pair, prompt):
        tokens = prompt(700)
        alone = pair.alone(tokens, 9)
        answer = pair.hand_over([*tokens, alone["tokens"][0]])  # into a cache that has its first blocks
        pair.assert_continues(alone, answer, "bfloat16")
