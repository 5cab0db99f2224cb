"""A model with sliding windows: several KV cache groups, and blocks that are freed during the request."""

from __future__ import annotations

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1 import supports_hma

from kvferry.connector.vllm import KvferryConnector

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

WINDOW = 96


@pytest.fixture(scope="module")
def hybrid_model(tmp_path_factory):
    from tests.support.tiny_models import write_tiny_model

    return write_tiny_model(
        tmp_path_factory.mktemp("hybrid"),
        "gemma3",
        hidden_size=128,
        head_dim=32,
        max_position_embeddings=2048,
        sliding_window=WINDOW,
    )


@pytest.fixture(scope="module", params=["vllm", "reference"])
def running_pair(request, start_pair, hybrid_model):
    return start_pair(model=hybrid_model, host=request.param)


def test_there_are_several_groups(pair):
    if pair.decode.host == "vllm" and not supports_hma(KvferryConnector):
        pytest.skip("this vLLM makes one group of all layers")
    assert pair.decode.order("status")["num_groups"] > 1


@pytest.mark.parametrize("num_tokens", [20, 96, 97, 200, 500])
def test_tokens_equal_those_of_one_node(pair, prompt, num_tokens):
    tokens = prompt(num_tokens)
    answer = pair.hand_over(tokens)
    assert answer["reason"] == "length"
    pair.assert_like_alone(tokens, answer)


def test_a_prompt_longer_than_the_offer_is_continued(pair, prompt):
    tokens = prompt(500)
    params = pair.prefilled(tokens[:350])
    answer = pair.decode.ask(next(pair.names), tokens, 8, params)
    pair.assert_like_alone(tokens, answer)


def test_a_prefix_that_is_already_cached(pair, prompt):
    tokens = prompt(500)
    pair.decode.ask(next(pair.names), tokens[:256])
    answer = pair.hand_over(tokens)
    pair.assert_like_alone(tokens, answer)


def test_an_offer_that_was_already_read(pair, prompt, policy):
    """With several groups, vLLM cannot be told about single invalid blocks.

    It is told about the failed request.
    """
    tokens = prompt(200)
    params = pair.prefilled(tokens)
    pair.decode.ask(next(pair.names), tokens, 8, params)
    pair.decode.order("forget")
    answer = pair.decode.ask(next(pair.names), tokens, 8, params)
    pair.assert_ended_by(policy, answer, tokens)
