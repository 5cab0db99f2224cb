"""Two real engines: the decode node continues a prompt that it has not computed."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from kvferry.lab.engine.weights import load_model

pytestmark = pytest.mark.timeout(600)

#: For the tests' model: layers, keys and values, heads, elements, bytes per element, tokens per block.
BYTES_PER_BLOCK = 3 * 2 * 2 * 32 * 4 * 32


@pytest.fixture(
    scope="module",
    params=[
        "shm",
        pytest.param("zeromq", marks=pytest.mark.slow),
        pytest.param("tcp", marks=pytest.mark.slow),
        pytest.param("ucx", marks=pytest.mark.slow),
        pytest.param(
            "nixl",
            marks=[
                pytest.mark.slow,
                pytest.mark.skipif(find_spec("nixl_cu12") is None, reason="nixl_cu12 is not installed"),
            ],
        ),
    ],
)
def running_pair(request, pair_over):
    return pair_over(request.param)


@pytest.mark.parametrize("num_tokens", [5, 32, 33, 200, 800])
def test_tokens_equal_those_of_one_node(pair, prompt, num_tokens):
    tokens = prompt(num_tokens)
    answer = pair.hand_over(tokens)
    assert answer["reason"] == "length"
    pair.assert_like_alone(tokens, answer)


def test_one_token_on_each_side(pair, prompt):
    """Both requests end with the step that gives their first token."""
    tokens = prompt(64)
    answer = pair.hand_over(tokens, max_tokens=1)
    pair.assert_like_alone(tokens, answer, max_tokens=1)


@pytest.mark.parametrize(("num_tokens", "num_cached", "num_read"), [(96, 96, 1), (320, 224, 3), (65, 65, 0)])
def test_only_missing_blocks_are_read(pair, prompt, num_tokens, num_cached, num_read):
    """vLLM always computes at least one token, so it finds one block less in its cache than a prompt of whole
    blocks has.
    """
    tokens = prompt(num_tokens)
    pair.decode.ask(next(pair.names), tokens[:num_cached])
    before = pair.decode.order("figures")["num_bytes"]
    answer = pair.hand_over(tokens)
    assert pair.decode.order("figures")["num_bytes"] - before == num_read * BYTES_PER_BLOCK
    pair.assert_like_alone(tokens, answer)


def test_a_prompt_longer_than_the_offer_is_continued(pair, prompt):
    tokens = prompt(300)
    params = pair.prefilled(tokens[:150])
    answer = pair.decode.ask(next(pair.names), tokens, 8, params)
    pair.assert_like_alone(tokens, answer)


def test_more_concurrent_requests_than_fit_into_the_pool(pair, prompt):
    """Four sequences of 34 blocks in a pool of 127: vLLM must preempt one of them."""
    prompts = [prompt(900, seed) for seed in range(4)]
    names = [next(pair.names) for _ in prompts]
    before = pair.decode.order("figures")["num_preemptions"]
    params = [pair.prefilled(tokens) for tokens in prompts]
    for name, tokens, told in zip(names, prompts, params, strict=True):
        pair.decode.start(name, tokens, 160, told)
    answers = [pair.decode.result(name) for name in names]
    assert pair.decode.order("figures")["num_preemptions"] > before
    for tokens, answer in zip(prompts, answers, strict=True):
        pair.assert_like_alone(tokens, answer, 160)


def test_requests_that_were_preempted_before_they_are_offered(pair, prompt):
    """One of the four computes its prompt twice, and offers it once."""
    prompts = [prompt(900, seed) for seed in range(4)]
    names = [next(pair.names) for _ in prompts]
    before = pair.prefill.order("figures")["num_preemptions"]
    for name, tokens in zip(names, prompts, strict=True):
        pair.prefill.start(name, tokens, 160, {"do_remote_decode": True})
    answers = []
    for name, tokens in zip(names, prompts, strict=True):
        # Load each offer at once, because offered blocks are not available to the other requests.
        told = pair.prefill.result(name)["params"]
        answers.append(pair.decode.ask(next(pair.names), tokens, 8, told))
    assert pair.prefill.order("figures")["num_preemptions"] > before
    for tokens, answer in zip(prompts, answers, strict=True):
        pair.assert_like_alone(tokens, answer)


def test_any_difference_is_found(pair, prompt):
    """Check that the comparison in all these tests can fail.

    A cache with a wrong block often changes no token, and a request whose load fails may end too early.
    """
    tokens = prompt(100)
    right = pair.alone(tokens)
    pair.assert_like_alone(tokens, right)
    for position in (0, 3, 7):
        at = f"a mismatch at token {position} of the answer"
        wrong = {name: list(right[name]) for name in ("tokens", "logprobs")}
        wrong["tokens"][position] = (wrong["tokens"][position] + 1) % 256
        with pytest.raises(AssertionError, match=at):
            pair.assert_like_alone(tokens, wrong)
        wrong = {**wrong, "tokens": right["tokens"]}
        wrong["logprobs"][position] -= 1e-3
        with pytest.raises(AssertionError, match=f"{at}: token .* has log probability"):
            pair.assert_like_alone(tokens, wrong)
        short = {name: right[name][:position] for name in wrong}
        with pytest.raises(AssertionError, match=f"{at}: the end"):
            pair.assert_like_alone(tokens, short)


def test_the_two_largest_logits_differ_by_as_much_as_the_models(pair, prompt, model):
    tokens = prompt(100)
    expected = pair.expectation(tokens, 8)
    assert list(expected.token_ids) == pair.alone(tokens)["tokens"]
    (first, larger), (second, smaller) = expected.top_logits
    with torch.inference_mode():
        logits = load_model(model, torch.float32, torch.device("cpu"), "eager")(torch.tensor([tokens])).logits
    two = logits[0, -1].topk(2)
    assert [first, second] == two.indices.tolist()
    assert larger - smaller == pytest.approx(float(two.values[0] - two.values[1]), abs=1e-3)


def test_a_request_without_params_offers_nothing(pair, prompt):
    assert pair.prefill.ask(next(pair.names), prompt(40))["params"] is None
