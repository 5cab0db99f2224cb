"""LoRA adapters: each prompt's cache is handed over only to requests with the same adapter."""

from __future__ import annotations

import pytest

from tests.support.tiny_models import write_adapter

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

#: Layer → its inputs and outputs in the model of these tests.
TARGETS = {
    "model.layers.0.self_attn.q_proj": (128, 128),
    "model.layers.1.self_attn.v_proj": (128, 64),
    "model.layers.2.mlp.down_proj": (96, 128),
}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    """What requests name: adapter → its name and folder.

    The third has the first one's name and other weights.
    """
    root, modules = tmp_path_factory.mktemp("adapters"), ["q_proj", "v_proj", "down_proj"]
    folders = [write_adapter(root / str(seed), TARGETS, seed, target_modules=modules) for seed in range(3)]
    names = ("polite", "terse", "polite")
    return {
        f"{name} {number}": [name, str(folder)]
        for number, (name, folder) in enumerate(zip(names, folders, strict=True))
    }


@pytest.fixture(scope="module")
def running_pair(start_module_pair):
    return start_module_pair(enable_lora=True, max_loras=2, max_lora_rank=8)


def test_tokens_equal_those_of_one_node_with_the_same_adapter(pair, prompt, adapters):
    tokens = prompt(100)
    answers = set()
    for adapter in (None, adapters["polite 0"], adapters["terse 1"]):
        before = pair.decode.order("figures")["num_loads"]
        answer = pair.hand_over(tokens, adapter=adapter)
        assert pair.decode.order("figures")["num_loads"] == before + 1
        pair.assert_like_alone(tokens, answer, adapter=adapter)
        answers.add(tuple(answer["tokens"]))
    assert len(answers) == 3


@pytest.mark.parametrize("other", ["none", "terse 1", "polite 2"])
def test_an_offer_made_with_another_adapter_is_not_loaded(pair, prompt, policy, adapters, other, is_at_rest):
    """The offer is refused before a byte is read, and the prefill node frees its blocks."""
    tokens = prompt(100, seed=5)
    before = pair.decode.order("figures")
    params = pair.prefilled(tokens, adapter=adapters["polite 0"])
    answer = pair.decode.ask(next(pair.names), tokens, 8, params, adapter=adapters.get(other))
    pair.prefill.wait_for_status(is_at_rest)
    after = pair.decode.order("figures")
    assert (after["num_failures"], after["num_bytes"]) == (before["num_failures"] + 1, before["num_bytes"])
    assert "was not computed from this request's prompt" in pair.decode.log
    pair.assert_ended_by(policy, answer, tokens, adapter=adapters.get(other))


def test_files_that_changed_after_the_adapter_was_loaded_are_not_taken_for_it(
    pair, prompt, policy, tmp_path, is_at_rest
):
    """The prefill node has the old weights in memory; the decode node loads the new ones, from a copy."""
    modules = ["q_proj", "v_proj", "down_proj"]
    old = write_adapter(tmp_path / "old", TARGETS, 3, target_modules=modules)
    new = write_adapter(tmp_path / "new", TARGETS, 4, target_modules=modules)
    pair.prefilled(prompt(40, seed=7), adapter=["same", str(old)])
    pair.prefill.wait_for_status(is_at_rest)
    write_adapter(old, TARGETS, 4, target_modules=modules)
    tokens = prompt(100, seed=6)
    params = pair.prefilled(tokens, adapter=["same", str(old)])
    answer = pair.decode.ask(next(pair.names), tokens, 8, params, adapter=["same", str(new)])
    pair.prefill.wait_for_status(is_at_rest)
    pair.assert_ended_by(policy, answer, tokens, adapter=["same", str(new)])
