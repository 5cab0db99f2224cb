"""Nodes of unlike shapes: each rank reads the heads and layers that it keeps from the ranks that keep
them.
"""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

# Workers busy-poll while they wait for each other, so on shared cores their signs of life can be late.
PATIENCE = {"lease_s": 60, "connect_timeout_s": 40, "claim_timeout_s": 40}

#: Tensor-parallel ranks and pipeline stages of the first node, the same of the second one, and the model's KV
#: heads.
SHAPES = {
    "two ranks and one, two KV heads": ((2, 1), (1, 1), 2),
    "two ranks and one, one KV head": ((2, 1), (1, 1), 1),
    "four ranks and two, four KV heads": ((4, 1), (2, 1), 4),
    "two stages and one": ((1, 2), (1, 1), 2),
    "two stages and two ranks": ((1, 2), (2, 1), 2),
}


def _ranks(tensor, stages):
    if tensor * stages == 1:
        return {}
    sizes = {"tensor_parallel_size": tensor, "pipeline_parallel_size": stages}
    # vLLM's runner for CPUs makes the buffer between stages while it warms up, and it does so only if it may
    # compile.
    return {**sizes, "distributed_executor_backend": "mp", "enforce_eager": stages == 1}


@pytest.fixture(scope="module", params=SHAPES.values(), ids=SHAPES)
def nodes(request, start_module_pair, tmp_path_factory):
    """Two nodes of unlike shapes, for a model with grouped-query heads."""
    from tests.support.tiny_models import write_tiny_model

    first, second, num_heads = request.param
    size = {"hidden_size": 128, "head_dim": 32, "max_position_embeddings": 2048}
    model = write_tiny_model(tmp_path_factory.mktemp("model"), num_key_value_heads=num_heads, **size)
    return start_module_pair(prefill=_ranks(*first), decode=_ranks(*second), model=model, extra=PATIENCE)


@pytest.fixture(scope="module", params=["first to second", "second to first"])
def running_pair(request, nodes):
    if request.param == "first to second":
        return nodes
    return type(nodes)(nodes.decode, nodes.prefill, nodes.names)


@pytest.mark.parametrize("num_tokens", [5, 33, 400])
def test_tokens_equal_those_of_one_node(pair, prompt, num_tokens):
    tokens = prompt(num_tokens)
    answer = pair.hand_over(tokens)
    assert answer["reason"] == "length"
    pair.assert_like_alone(tokens, answer)
