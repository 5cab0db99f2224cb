"""A model with one KV head on a node with two ranks and on a node with one rank. Every rank has complete pages."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TWO_RANKS = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
# Workers busy-poll while they wait for each other, so on shared cores their signs of life can be late.
PATIENCE = {"lease_s": 60, "connect_timeout_s": 40, "claim_timeout_s": 40}


@pytest.fixture(scope="module")
def nodes(start_module_pair, tmp_path_factory):
    """A node with two ranks and a node with one rank, for a model with one KV head."""
    from tests.support.tiny_models import write_tiny_model

    folder = tmp_path_factory.mktemp("one-head")
    size = {"hidden_size": 128, "head_dim": 32, "max_position_embeddings": 2048}
    model = write_tiny_model(folder, num_key_value_heads=1, **size)
    return start_module_pair(prefill=TWO_RANKS, model=model, extra=PATIENCE)


@pytest.fixture(scope="module", params=["two to one", "one to two"])
def running_pair(request, nodes):
    if request.param == "two to one":
        return nodes
    return type(nodes)(nodes.decode, nodes.prefill, nodes.names)


@pytest.mark.parametrize("num_tokens", [33, 400])
def test_tokens_equal_those_of_one_node(pair, prompt, num_tokens):
    tokens = prompt(num_tokens)
    answer = pair.hand_over(tokens)
    assert answer["reason"] == "length"
    pair.assert_like_alone(tokens, answer["tokens"])
