"""A peer dies, keeps its cache in another way, or is incompatible: the other node survives, and its requests
end within seconds.
"""

from __future__ import annotations

import signal

import pytest

from .conftest import Pair

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SOON_S = 10.0


@pytest.fixture
def start_peer(start_node, pair):
    """Start a node that ends with the test."""
    nodes = []

    def start(**arguments):
        nodes.append(start_node(**arguments).wait_until_ready())
        return nodes[-1]

    yield start
    for node in nodes:
        node.close()


class TestOverNetworks:
    """Over a network the prefill node takes part in a read, and can die in the middle of it."""

    @pytest.fixture(scope="class", params=["zeromq", "ucx"])
    @classmethod
    def running_pair(cls, request, pair_over):
        return pair_over(request.param)

    def test_prefill_node_killed_while_it_is_read(self, request, start_peer, pair, prompt):
        """The load is granted while the request queues.

        Before its read starts, the prefill node is stopped, then killed.
        """
        transport = request.node.callspec.params["running_pair"]
        doomed = Pair(start_peer(extra={"transport": transport}), pair.decode, pair.names)
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


def test_decode_node_killed_while_the_load_is_queued(start_peer, pair, prompt, is_at_rest):
    decode = start_peer()
    tokens = prompt(100)
    params = pair.prefilled(tokens)
    pair.fill(decode)
    decode.start(next(pair.names), tokens, 8, params)
    decode.kill()
    pair.prefill.wait_for_status(is_at_rest)


def test_another_model(start_peer, tmp_path, pair, prompt):
    """The other model has the same size and shape, but a larger maximum length."""
    from tests.support.tiny_models import write_tiny_model

    other = write_tiny_model(tmp_path / "other", hidden_size=128, head_dim=32, max_position_embeddings=4096)
    stranger = Pair(start_peer(model=other), pair.decode, pair.names)
    tokens = prompt(100)
    answer = stranger.hand_over(tokens)
    stranger.assert_ended_by("fail", answer, tokens)
    assert "incompatible peer: configuration differs" in stranger.decode.log
    assert stranger.prefill.stop() == 0


def test_a_node_that_packs_keys_differently(start_peer, pair, prompt):
    """CPU attention stores keys in an order that depends on the processor."""
    elsewhere = start_peer(connector=("PacksOtherwise", "tests.vllm.elsewhere"))
    tokens = prompt(100)
    answer = Pair(elsewhere, pair.decode, pair.names).hand_over(tokens)
    pair.assert_ended_by("fail", answer, tokens)
    assert "incompatible peer: packing differs" in pair.decode.log


def test_a_node_whose_memory_peers_cannot_map(start_peer, pair, prompt):
    """A mapped pool can be read into any memory; other memory is read through the kernel."""
    hookless = start_peer(connector=("WithoutHook", "tests.vllm.children"))
    assert "vLLM's memory, which peers cannot map" in hookless.log
    for prefill, decode, mechanism in (
        (hookless, pair.decode, "process_vm_readv"),
        (pair.prefill, hookless, "mapped"),
    ):
        mixed = Pair(prefill, decode, pair.names)
        for num_tokens in (5, 33, 800):
            tokens = prompt(num_tokens)
            decode.order("forget")
            before = decode.metric("kvferry_load_seconds_count", mechanism=mechanism)
            answer = mixed.hand_over(tokens)
            assert decode.metric("kvferry_load_seconds_count", mechanism=mechanism) == before + 1
            mixed.assert_like_alone(tokens, answer)
