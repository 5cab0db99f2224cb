"""A vLLM engine says what it is, and does not continue an answer that another model began."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]


def test_an_engine_describes_itself(pair, prompt):
    told = pair.decode.ask(next(pair.names), prompt(1), 1, {"describe": True})["params"]
    assert (told["kv_role"], told["load_failure_policy"]) == ("kv_both", "fail")
    assert told["identity_fields"]["weights"]
    offered = pair.decode.ask(next(pair.names), prompt(40), 1, {"do_remote_decode": True})["params"]
    for key in ("remote_identity", "remote_engine_id", "remote_epoch"):
        assert told[key] == offered[key]
    flags = {"do_remote_prefill": False, "do_remote_decode": False, "do_release": True}
    pair.decode.ask(next(pair.names), [1], 1, {**offered, **flags})


def test_it_refuses_to_continue_another_models_answer_whatever_its_policy(pair, prompt, policy):
    """A load that fails would be recomputed under one of the two policies, and the answer would go on with
    another model.
    """
    tokens = prompt(100)
    offered = pair.prefilled(tokens)
    params = {**offered, "continues": {"model": "0" * 64}}
    refused = pair.decode.ask(next(pair.names), [*tokens, 7], 8, params)
    assert len(refused["tokens"]) == 1
    assert refused["stop_reason"].startswith("kvferry refused to continue: ")
    flags = {"do_remote_prefill": False, "do_remote_decode": False, "do_release": True}
    pair.prefill.ask(next(pair.names), [1], 1, {**offered, **flags})


def test_it_continues_its_own_models(pair, prompt, policy):
    own = pair.decode.ask(next(pair.names), prompt(1), 1, {"describe": True})["params"]["remote_identity"]
    tokens = [*prompt(100), 7]
    params = {**pair.prefilled(tokens[:-1]), "continues": {"model": own}}
    answer = pair.decode.ask(next(pair.names), tokens, 8, params)
    pair.assert_like_alone(tokens, answer)
