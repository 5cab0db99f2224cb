"""Caches of 8-bit floats, which hold rounded keys and values: both nodes must have the same kind, and then
answer alike.
"""

from __future__ import annotations

import pytest
import torch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not torch.cpu._is_avx512_supported(), reason="vLLM's caches of 8-bit floats need AVX-512 on a CPU"
    ),
]


KINDS = ("fp8_e4m3", "fp8_e5m2")


@pytest.fixture(scope="module")
def pairs(start_module_pair):
    backend = pytest.importorskip("vllm.v1.attention.backends.cpu_attn").CPUAttentionBackend
    if KINDS[0] not in getattr(backend, "supported_kv_cache_dtypes", ()):
        pytest.skip("this version of vLLM has no such caches on a CPU")
    return {kind: start_module_pair(kv_cache_dtype=kind) for kind in KINDS}


@pytest.fixture(scope="module", params=KINDS)
def running_pair(request, pairs):
    return pairs[request.param]


@pytest.mark.parametrize("num_tokens", [31, 32, 100, 500])
def test_tokens_equal_those_of_one_node(pair, prompt, num_tokens):
    tokens = prompt(num_tokens)
    answer = pair.hand_over(tokens)
    assert answer["reason"] == "length"
    pair.assert_like_alone(tokens, answer)


def test_a_load_moves_a_quarter_of_the_bytes(pair, shm_pair, prompt):
    """Of those of the same model with a cache of 32-bit floats."""
    tokens = prompt(320)
    shm_pair.decode.order("forget")

    def num_read(one):
        before = one.decode.order("figures")["num_bytes"]
        one.hand_over(tokens)
        return one.decode.order("figures")["num_bytes"] - before

    assert 4 * num_read(pair) == num_read(shm_pair)


def test_a_node_with_a_cache_of_whole_floats_is_refused(pair, shm_pair, prompt):
    mixed = type(pair)(pair.prefill, shm_pair.decode, pair.names)
    shm_pair.decode.order("forget")  # other tests have prompts of it, too
    mixed.assert_ended_by("fail", mixed.hand_over(prompt(100)), prompt(100))
    assert "incompatible peer: cache_dtype differs" in shm_pair.decode.log


def test_a_node_that_rounds_in_another_way_is_refused(pairs, prompt):
    """The bytes have the same type then, and another meaning."""
    one, other = pairs.values()
    mixed = type(one)(one.prefill, other.decode, one.names)
    tokens = prompt(100)
    mixed.assert_ended_by("fail", mixed.hand_over(tokens), tokens)
    assert (
        "incompatible peer: kv_cache_dtype differs: local 'fp8_e5m2', remote 'fp8_e4m3'" in other.decode.log
    )
