"""Over a network the prefill node takes part in a read, and can die in the middle of it."""

from __future__ import annotations

import signal

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SOON_S = 10.0


@pytest.fixture(scope="session", params=["zeromq", "ucx"])
def running_pair(request):
    return request.getfixturevalue(f"{request.param}_pair")


@pytest.fixture
def doomed(request, start_node, running_pair, pair):
    """A pair whose prefill node may be killed."""
    transport = request.node.callspec.params["running_pair"]
    prefill = start_node(extra={"transport": transport}).wait_until_ready()
    yield type(pair)(prefill, pair.decode, pair.names)
    prefill.close()


def test_prefill_node_killed_while_it_is_read(doomed, prompt):
    """The load is granted while the request queues.

    Before its read starts, the prefill node is stopped, then killed.
    """
    doomed.hand_over(prompt(64))
    tokens = prompt(800)
    name = next(doomed.names)
    with doomed.busy(doomed.decode):
        doomed.decode.start(name, tokens, 8, doomed.prefilled(tokens))
        doomed.prefill.order("status")
        doomed.prefill.signal(signal.SIGSTOP)
    doomed.decode.wait_for_status(lambda status: status["num_loading"] == 1)
    doomed.prefill.kill()
    doomed.assert_ended_by("fail", doomed.decode.result(name, SOON_S), tokens)
