"""Images among a prompt's tokens, with a small random model in the form of Idefics3."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def running_pair(start_module_pair, tmp_path_factory):
    from kvferry.lab.prove.models import write_tiny_image_model

    model = write_tiny_image_model(tmp_path_factory.mktemp("images"))
    # vLLM needs the tokenizer to replace the placeholder of an image.
    return start_module_pair(model=model, skip_tokenizer_init=False, limit_mm_per_prompt={"image": 1})


@pytest.fixture
def illustrated(prompt):
    """A prompt with a placeholder for an image, which begins before the boundary of two blocks and ends after
    it.
    """
    from kvferry.lab.prove.models import IMAGE_TOKEN

    tokens = prompt(100)
    return [*tokens[:28], IMAGE_TOKEN, *tokens[28:]]


def test_tokens_equal_those_of_one_node(pair, illustrated):
    answers = set()
    for image in ("red", "blue"):
        before = pair.decode.order("figures")["num_loads"]
        answer = pair.hand_over(illustrated, image=image)
        assert pair.decode.order("figures")["num_loads"] == before + 1
        pair.assert_like_alone(illustrated, answer, image=image)
        answers.add(tuple(answer["tokens"]))
    assert len(answers) == 2


def test_an_offer_with_another_image_is_not_loaded(pair, illustrated, policy, is_at_rest):
    """The text is the same.

    The offer is refused before a byte is read, and the prefill node frees its blocks.
    """
    before = pair.decode.order("figures")
    params = pair.prefilled(illustrated, image="green")
    answer = pair.decode.ask(next(pair.names), illustrated, 8, params, image="yellow")
    pair.prefill.wait_for_status(is_at_rest)
    after = pair.decode.order("figures")
    assert (after["num_failures"], after["num_bytes"]) == (before["num_failures"] + 1, before["num_bytes"])
    assert "was not computed from this request's prompt" in pair.decode.log
    pair.assert_ended_by(policy, answer, illustrated, image="yellow")


def test_a_cached_prefix_with_another_image_is_not_used(pair, illustrated):
    """The first block ends inside the image's tokens, so the whole prompt is loaded, as into an empty
    cache.
    """
    loaded = []
    for image in (None, "red"):
        pair.decode.order("forget")
        if image is not None:
            pair.decode.ask(next(pair.names), illustrated, image=image)
        before = pair.decode.order("figures")["num_bytes"]
        answer = pair.hand_over(illustrated, image="blue")
        loaded.append(pair.decode.order("figures")["num_bytes"] - before)
        pair.assert_like_alone(illustrated, answer, image="blue")
    assert loaded[0] == loaded[1] > 0
