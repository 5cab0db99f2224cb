"""Malformed requests, aborts, other models: the engine core survives, requests end, and blocks are freed."""

from __future__ import annotations

import signal

import pytest

pytestmark = pytest.mark.timeout(600)

VALID = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "somebody",
    "remote_epoch": "1f",
    "remote_request_id": "r",
    "remote_lease": "1",
    "remote_addresses": ["shm://@nobody-listens-here"],
    "remote_num_tokens": 100,
    "remote_block_ids": [[1, 2, 3, 4]],
    "tp_size": 1,
}
MALFORMED = {
    "only the flag": {"do_remote_prefill": True},
    "params of vLLM's own connector": {
        **VALID,
        "remote_addresses": None,
        "remote_host": "h",
        "remote_port": 1,
    },
    "a negative block": {**VALID, "remote_block_ids": [[-1]]},
    "no blocks": {**VALID, "remote_block_ids": []},
    "a flag that is not a boolean": {"do_remote_prefill": "yes"},
    "another number of ranks": {**VALID, "tp_size": 4},
}


@pytest.mark.parametrize("params", MALFORMED.values(), ids=MALFORMED)
def test_malformed_params(pair, prompt, policy, params):
    tokens = prompt(100)
    answer = pair.decode.ask(next(pair.names), tokens, 8, params)
    pair.assert_ended_by(policy, answer, tokens)
    if policy == "recompute":
        assert "kv_transfer_params" in answer["params"]["load_error"]


@pytest.mark.parametrize(
    "changes",
    [{}, {"remote_addresses": ["zeromq://127.0.0.1:1"]}, {"remote_addresses": ["?"]}],
    ids=["no node there", "another transport's address", "no address"],
)
def test_params_of_a_node_that_is_not_there(pair, prompt, policy, changes):
    tokens = prompt(100)
    answer = pair.decode.ask(next(pair.names), tokens, 8, VALID | changes)
    pair.assert_ended_by(policy, answer, tokens)
    if policy == "recompute":
        assert answer["params"]["load_error"]


def test_an_offer_is_read_once(pair, prompt, policy):
    tokens = prompt(100)
    params = pair.prefilled(tokens)
    pair.decode.ask(next(pair.names), tokens, 8, params)
    pair.decode.order("forget")
    answer = pair.decode.ask(next(pair.names), tokens, 8, params)
    pair.assert_ended_by(policy, answer, tokens)


def test_an_offer_of_another_prompt(pair, prompt, policy, is_at_rest):
    """A router may mix up two offers. No wrong block stays in the cache, and the offer's blocks are freed."""
    tokens, other = prompt(100, seed=11), prompt(100, seed=12)
    params = pair.prefilled(tokens)
    pair.assert_ended_by(policy, pair.decode.ask(next(pair.names), other, 8, params), other)
    pair.prefill.wait_for_status(is_at_rest)
    pair.assert_like_alone(other, pair.decode.ask(next(pair.names), other, 8))


def test_half_of_the_prompt_is_cached_and_the_other_half_fails_to_load(pair, prompt, policy):
    tokens = prompt(200)
    pair.decode.ask(next(pair.names), tokens[:96])
    answer = pair.decode.ask(next(pair.names), tokens, 8, VALID)
    pair.assert_ended_by(policy, answer, tokens)


def test_abort_while_loading(pair, prompt):
    tokens = prompt(100, seed=3)  # a prompt that no other test has left in the cache
    params = pair.prefilled(tokens)
    pair.prefill.signal(signal.SIGSTOP)
    try:
        name = next(pair.names)
        pair.decode.start(name, tokens, 8, params)
        pair.decode.wait_for_status(lambda status: status["num_loading"] == 1)
        pair.decode.order("abort", request=name)
    finally:
        pair.prefill.signal(signal.SIGCONT)


def test_abort_while_queued(pair, prompt, is_at_rest):
    with pair.busy(pair.decode):
        tokens = prompt(100)
        name = next(pair.names)
        pair.decode.start(name, tokens, 8, pair.prefilled(tokens))
        pair.decode.order("abort", request=name)
        pair.prefill.wait_for_status(is_at_rest)


def test_abort_while_the_prompt_is_computed(pair, prompt):
    name = next(pair.names)
    pair.prefill.start(name, prompt(1200), 1, {"do_remote_decode": True})
    pair.prefill.order("abort", request=name)


@pytest.mark.slow
class TestContinuing:
    """An engine says what it is, and does not continue an answer that another model began."""

    def test_an_engine_describes_itself(self, pair, prompt):
        told = pair.decode.ask(next(pair.names), prompt(1), 1, {"describe": True})["params"]
        assert (told["kv_role"], told["load_failure_policy"]) == ("kv_both", "fail")
        assert told["identity_fields"]["weights"]
        offered = pair.decode.ask(next(pair.names), prompt(40), 1, {"do_remote_decode": True})["params"]
        assert told["remote_identity"]
        for key in ("remote_engine_id", "remote_epoch"):
            assert told[key] == offered[key]
        flags = {"do_remote_prefill": False, "do_remote_decode": False, "do_release": True}
        pair.decode.ask(next(pair.names), [1], 1, {**offered, **flags})

    def test_it_refuses_to_continue_another_models_answer_whatever_its_policy(self, pair, prompt, policy):
        """A load that fails would be recomputed under one of the policies, and another model would go on."""
        tokens = prompt(100)
        offered = pair.prefilled(tokens)
        params = {**offered, "continues": {"model": "0" * 64}}
        refused = pair.decode.ask(next(pair.names), [*tokens, 7], 8, params)
        assert len(refused["tokens"]) == 1
        assert refused["stop_reason"].startswith("kvferry refused to continue: ")
        flags = {"do_remote_prefill": False, "do_remote_decode": False, "do_release": True}
        pair.prefill.ask(next(pair.names), [1], 1, {**offered, **flags})

    def test_it_continues_its_own_models(self, pair, prompt, policy):
        own = pair.decode.ask(next(pair.names), prompt(1), 1, {"describe": True})["params"]["remote_identity"]
        tokens = [*prompt(100), 7]
        params = {**pair.prefilled(tokens[:-1]), "continues": {"model": own}}
        answer = pair.decode.ask(next(pair.names), tokens, 8, params)
        pair.assert_like_alone(tokens, answer)
