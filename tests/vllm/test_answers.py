"""Conversations between vLLM engines that offer their answers: the prefill engine computes only what is new."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]

NUM_ANSWER = 12


@pytest.fixture(scope="module")
def running_pair(start_module_pair):
    return start_module_pair(extra={"offer_answer": True, "answer_lease_s": 20, "answer_pool_percent": 100})


class Conversation:
    """A conversation over a pair of engines; `params` is what the newest answer offers."""

    def __init__(self, pair):
        self.pair, self.tokens, self.params = pair, [], None

    def prefill(self, message):
        self.tokens += message
        wish = {**(self.params or {}), "do_remote_decode": True}
        return self.pair.prefill.ask(next(self.pair.names), self.tokens, params=wish)

    def say(self, message):
        """Take a turn; return the number of tokens that the prefill engine computed, and the answer."""
        before = computed(self.pair.prefill)
        offered = self.prefill(message)["params"]
        num_computed = computed(self.pair.prefill) - before
        answer = self.pair.decode.ask(next(self.pair.names), self.tokens, NUM_ANSWER, offered)
        self.params = answer["params"]
        self.tokens += answer["tokens"]
        return num_computed, answer

    def release(self):
        flags = {"do_remote_prefill": False, "do_release": True}
        self.pair.decode.ask(next(self.pair.names), [1], params={**self.params, **flags})


def computed(node):
    return node.metric("vllm:prompt_tokens_by_source_total", source="local_compute")


@pytest.fixture
def conversation(pair):
    begun = Conversation(pair)
    yield begun
    if begun.params is not None:
        begun.release()


def test_in_five_turns_the_prefill_engine_computes_only_new_messages(conversation, prompt):
    answers = []
    for turn, length in enumerate((200, 40, 31, 64, 7)):
        num_computed, answer = conversation.say(prompt(length, seed=turn))
        # The last token of an answer was sampled and not computed.
        assert num_computed == length + (turn > 0)
        answers.append((conversation.tokens[:-NUM_ANSWER], answer))
    conversation.release()
    conversation.params = None
    for tokens, answer in answers:
        conversation.pair.assert_like_alone(tokens, answer, NUM_ANSWER)


def test_an_edited_answer_is_an_error_or_computed_again_as_the_policy_says(conversation, prompt, pair):
    conversation.say(prompt(100))
    conversation.tokens[105] = (conversation.tokens[105] + 1) % 256
    pair.prefill.order("policy", policy="recompute")
    num_computed, answer = conversation.say(prompt(20, seed=1))
    # Blocks have 32 tokens, so the first 96 are in the prefix cache.
    assert num_computed == 100 + NUM_ANSWER + 20 - 96
    conversation.release()
    conversation.params = None
    pair.assert_like_alone(conversation.tokens[:-NUM_ANSWER], answer, NUM_ANSWER)


def test_answers_yield_to_requests_that_need_blocks(pair, prompt):
    for seed in range(12):  # each holds 13 of 127 blocks
        answer = pair.decode.ask(next(pair.names), prompt(400, seed=seed), NUM_ANSWER, {"offer_answer": True})
        assert answer["reason"] == "length"
        assert answer["params"]
    pair.decode.wait_for_status(lambda status: status["num_remembered"] <= 9)


def test_an_aborted_answer_is_not_offered(pair, prompt):
    name = next(pair.names)
    pair.decode.start(name, prompt(100), 1000, {"offer_answer": True})
    pair.decode.wait_for_first_token(name)
    pair.decode.order("abort", request=name)
