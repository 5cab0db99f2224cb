"""A peer dies, restarts or is incompatible: the other node survives, and its requests end within seconds."""

from __future__ import annotations

import os
import signal

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SOON_S = 10.0


@pytest.fixture(scope="session", params=["shm", "reference"])
def running_pair(request):
    return request.getfixturevalue(f"{request.param}_pair")


@pytest.fixture(scope="module")
def start_alike(start_node, running_pair):
    """Start a node with the same kind of engine as the pair's."""

    def start(**arguments):
        return start_node(host=running_pair.decode.host, **arguments)

    return start


@pytest.fixture(scope="module")
def victims(start_alike):
    """Nodes that tests kill. They start at the same time, after the nodes that survive."""
    return [start_alike() for _ in range(4)]


@pytest.fixture
def doomed(victims, pair):
    """A pair whose prefill node may be killed."""
    return type(pair)(victims.pop().wait_until_ready(), pair.decode, pair.names)


def test_prefill_node_killed_before_it_is_asked(doomed, prompt):
    tokens = prompt(100)
    params = doomed.prefilled(tokens)
    doomed.prefill.kill()
    name = next(doomed.names)
    doomed.decode.start(name, tokens, 8, params)
    doomed.assert_ended_by("fail", doomed.decode.result(name, SOON_S), tokens)


def test_prefill_node_killed_while_it_is_asked(doomed, prompt):
    tokens = prompt(100)
    params = doomed.prefilled(tokens)
    doomed.prefill.signal(signal.SIGSTOP)
    name = next(doomed.names)
    doomed.decode.order("policy", policy="recompute")
    doomed.decode.start(name, tokens, 8, params)
    doomed.decode.wait_for_status(lambda status: status["num_loading"] == 1)
    doomed.prefill.kill()
    doomed.assert_ended_by("recompute", doomed.decode.result(name, SOON_S), tokens)


def test_prefill_node_killed_while_the_load_is_queued(doomed, prompt):
    tokens = prompt(100)
    name = next(doomed.names)
    with doomed.busy(doomed.decode):
        doomed.decode.start(name, tokens, 8, doomed.prefilled(tokens))
        doomed.prefill.kill()
    doomed.assert_ended_by("fail", doomed.decode.result(name, SOON_S), tokens)


def test_decode_node_killed_while_the_load_is_queued(victims, pair, prompt, is_at_rest):
    decode = victims.pop().wait_until_ready()
    tokens = prompt(100)
    params = pair.prefilled(tokens)
    pair.fill(decode)
    decode.start(next(pair.names), tokens, 8, params)
    decode.kill()
    pair.prefill.wait_for_status(is_at_rest)


def test_restart_at_the_same_address(start_alike, pair, prompt):
    address = {"address": f"shm://@kvferry-restart-{pair.decode.host}-{os.getpid()}"}
    tokens = prompt(100)
    first = type(pair)(start_alike(extra=address).wait_until_ready(), pair.decode, pair.names)
    stale = first.prefilled(tokens)
    first.prefill.kill()
    second = type(pair)(start_alike(extra=address).wait_until_ready(), pair.decode, pair.names)
    answer = second.decode.ask(next(second.names), tokens, 8, stale)
    second.assert_ended_by("fail", answer, tokens)
    second.decode.order("forget")
    answer = second.hand_over(tokens)
    second.assert_like_alone(tokens, answer)
    assert second.prefill.stop() == 0


def test_another_model(start_alike, tmp_path, pair, prompt):
    """The other model has the same size and shape, but a larger maximum length."""
    from tests.support.tiny_models import write_tiny_model

    other = write_tiny_model(tmp_path / "other", hidden_size=128, head_dim=32, max_position_embeddings=4096)
    stranger = type(pair)(start_alike(model=other).wait_until_ready(), pair.decode, pair.names)
    tokens = prompt(100)
    answer = stranger.hand_over(tokens)
    stranger.assert_ended_by("fail", answer, tokens)
    assert "incompatible peer: configuration differs" in stranger.decode.log
    stranger.prefill.close()


def test_an_engine_ends_when_it_is_stopped(start_alike):
    node = start_alike().wait_until_ready()
    assert node.stop() == 0
