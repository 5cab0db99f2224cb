"""Nodes with unlike numbers of ranks: each rank reads the heads that it keeps from the ranks that keep them."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

# Workers busy-poll while they wait for each other, so on shared cores their signs of life can be late.
PATIENCE = {"lease_s": 60, "connect_timeout_s": 40, "claim_timeout_s": 40}


def _ranks(number):
    return {"tensor_parallel_size": number, "distributed_executor_backend": "mp"} if number > 1 else {}


@pytest.fixture(
    scope="module",
    params=[(2, 1, 2), (2, 1, 1), (4, 2, 4)],
    ids=[
        "two ranks and one, two KV heads",
        "two ranks and one, one KV head",
        "four ranks and two, four KV heads",
    ],
)
def nodes(request, start_module_pair, tmp_path_factory):
    """Two nodes with unlike numbers of ranks, for a model with grouped-query heads."""
    from tests.support.tiny_models import write_tiny_model

    first, second, num_heads = request.param
    size = {"hidden_size": 128, "head_dim": 32, "max_position_embeddings": 2048}
    model = write_tiny_model(tmp_path_factory.mktemp("model"), num_key_value_heads=num_heads, **size)
    return start_module_pair(prefill=_ranks(first), decode=_ranks(second), model=model, extra=PATIENCE)


@pytest.fixture(scope="module", params=["more to fewer", "fewer to more"])
def running_pair(request, nodes):
    if request.param == "more to fewer":
        return nodes
    return type(nodes)(nodes.decode, nodes.prefill, nodes.names)


@pytest.mark.parametrize("num_tokens", [5, 33, 400])
def test_tokens_equal_those_of_one_node(pair, prompt, num_tokens):
    tokens = prompt(num_tokens)
    answer = pair.hand_over(tokens)
    assert answer["reason"] == "length"
    pair.assert_like_alone(tokens, answer["tokens"])
