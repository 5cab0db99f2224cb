"""Adapters and images: each prompt's cache is handed over only to requests with the same ones."""

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
#: What requests have → vLLM's settings for it.
SETTINGS = {
    "adapter": {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8},
    # vLLM needs the tokenizer to replace the placeholder of an image.
    "image": {"skip_tokenizer_init": False, "limit_mm_per_prompt": {"image": 1}},
}


def _write_adapter(folder, seed):
    modules = ["q_proj", "v_proj", "down_proj"]
    return str(write_adapter(folder, TARGETS, seed, target_modules=modules))


@pytest.fixture(scope="module", params=SETTINGS)
def what(request):
    return request.param


@pytest.fixture(scope="module")
def running_pair(what, pair_of, tmp_path_factory):
    from kvferry.lab.prove.models import write_tiny_image_model

    models = {"image": {"model": write_tiny_image_model(tmp_path_factory.mktemp("images"))}}
    with pair_of(**SETTINGS[what], **models.get(what, {})) as pair:
        yield pair


@pytest.fixture(scope="module")
def kinds(what, tmp_path_factory):
    """What requests name.

    The last adapter has the name of the second one, and other weights.
    """
    if what == "image":
        return [{"image": color} for color in ("red", "blue")]
    root = tmp_path_factory.mktemp("adapters")
    names = enumerate(("polite", "terse", "polite"))
    adapters = [[name, _write_adapter(root / str(seed), seed)] for seed, name in names]
    return [{"adapter": adapter} for adapter in (None, *adapters)]


@pytest.fixture
def tokens(what, prompt):
    """A prompt. The placeholder of an image begins before the boundary of two blocks and ends after it."""
    from kvferry.lab.prove.models import IMAGE_TOKEN

    found = prompt(100)
    return [*found[:28], IMAGE_TOKEN, *found[28:]] if what == "image" else found


def test_answers_are_those_of_one_node(pair, tokens, kinds):
    answers = set()
    for kind in kinds:
        before = pair.decode.order("figures")["num_loads"]
        answer = pair.hand_over(tokens, **kind)
        assert pair.decode.order("figures")["num_loads"] == before + 1
        pair.assert_like_alone(tokens, answer, **kind)
        answers.add(tuple(answer["tokens"]))
    assert len(answers) == len(kinds)


def test_an_offer_made_with_another_is_not_loaded(pair, tokens, policy, kinds, is_at_rest):
    """The offer is refused before a byte is read, and the prefill node frees its blocks."""
    offered, *others = kinds[-1], *kinds[:-1]
    for other in others:
        pair.decode.order("forget")
        before = pair.decode.order("figures")
        params = pair.prefilled(tokens, **offered)
        answer = pair.decode.ask(next(pair.names), tokens, 8, params, **other)
        pair.prefill.wait_for_status(is_at_rest)
        after = pair.decode.order("figures")
        assert after["num_failures"] == before["num_failures"] + 1
        assert after["num_bytes"] == before["num_bytes"]
        assert "was not computed from this request's prompt" in pair.decode.log
        pair.assert_ended_by(policy, answer, tokens, **other)


def test_a_cached_prefix_with_another_is_not_used(pair, tokens, kinds):
    """An image ends after the first block, so the whole prompt is loaded, as into an empty cache."""
    loaded, (other, own) = [], kinds[-2:]
    for cached in (None, other):
        pair.decode.order("forget")
        if cached is not None:
            pair.decode.ask(next(pair.names), tokens, **cached)
        before = pair.decode.order("figures")["num_bytes"]
        answer = pair.hand_over(tokens, **own)
        loaded.append(pair.decode.order("figures")["num_bytes"] - before)
        pair.assert_like_alone(tokens, answer, **own)
    assert loaded[0] == loaded[1] > 0


def test_files_that_changed_after_the_adapter_was_loaded_are_not_taken_for_it(
    what, pair, prompt, policy, tmp_path, is_at_rest
):
    """The prefill node has the old weights in memory; the decode node loads the new ones, from a copy."""
    if what != "adapter":
        pytest.skip("an image is part of the request")
    old, new = (_write_adapter(tmp_path / name, seed) for name, seed in (("old", 3), ("new", 4)))
    pair.prefilled(prompt(40, seed=7), adapter=["same", old])
    pair.prefill.wait_for_status(is_at_rest)
    _write_adapter(tmp_path / "old", 4)
    tokens = prompt(100, seed=6)
    params = pair.prefilled(tokens, adapter=["same", old])
    answer = pair.decode.ask(next(pair.names), tokens, 8, params, adapter=["same", new])
    pair.prefill.wait_for_status(is_at_rest)
    pair.assert_ended_by(policy, answer, tokens, adapter=["same", new])
