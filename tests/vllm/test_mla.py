"""Latent attention (MLA), with a small random model in the form of DeepSeek-V2."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

#: vLLM's CPU kernel knows only the latent of the large ones, 512 + 64.
LATENT = {
    "model_type": "deepseek_v2",
    "hidden_size": 128,
    "head_dim": 64,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "first_k_dense_replace": 3,  # no experts
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "n_group": 1,
    "topk_group": 1,
}


@pytest.fixture(scope="module")
def latent_model(tmp_path_factory):
    from tests.support.tiny_models import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("latent"), **LATENT)


@pytest.fixture(scope="module")
def running_pair(start_module_pair, latent_model):
    # The other backend for CPUs needs AMX, and has no float32.
    return start_module_pair(model=latent_model, attention_backend="CPU_MLA")


@pytest.mark.parametrize("num_tokens", [5, 33, 400])
def test_tokens_equal_those_of_one_node(pair, prompt, num_tokens):
    """The prompt ends with the node's own first token, so that its own answer goes on with the same kernel as the handoff.

    vLLM's CPU kernels for prompts and for single tokens differ by more than a near-tie with random weights.
    """
    tokens = prompt(num_tokens)
    first, *expected = pair.alone(tokens, 9)
    answer = pair.hand_over([*tokens, first])
    assert answer["reason"] == "length"
    assert answer["tokens"] == expected
