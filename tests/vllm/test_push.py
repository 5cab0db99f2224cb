"""A decode node that is pushed to: it reserves its blocks, and a prefill node that need not know of it writes them."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MECHANISMS = {"shm": "push/mapped", "zeromq": "push/tcp"}


@pytest.fixture(scope="module", params=MECHANISMS)
def transport(request):
    return request.param


@pytest.fixture(scope="module")
def running_pair(request, transport, start_node):
    pair = request.getfixturevalue(f"{transport}_pair")
    decode = start_node(extra={"transport": transport, "transfer": "push"}).wait_until_ready()
    yield type(pair)(pair.prefill, decode, pair.names)
    decode.close()


@pytest.mark.parametrize("num_tokens", [5, 33, 800])
def test_tokens_equal_those_of_one_node(pair, prompt, num_tokens, transport):
    tokens = prompt(num_tokens)
    before = pair.decode.metric("kvferry_transfers_total", mechanism=MECHANISMS[transport])
    answer = pair.hand_over(tokens)
    assert pair.decode.metric("kvferry_transfers_total", mechanism=MECHANISMS[transport]) == before + 1
    pair.assert_like_alone(tokens, answer["tokens"])


def test_an_offer_that_is_over(pair, prompt, policy):
    tokens = prompt(100)
    params = pair.prefilled(tokens)
    pair.decode.ask(next(pair.names), tokens, 8, params)
    pair.decode.order("forget")
    answer = pair.decode.ask(next(pair.names), tokens, 8, params)
    pair.assert_ended_by(policy, answer, tokens)
