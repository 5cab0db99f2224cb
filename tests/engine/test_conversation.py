"""Conversations over a prefill and a decode engine that offers its answers: each turn computes only what is new."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

NUM_ANSWER = 9
OPTIONS = {"offer_answer": True, "answer_lease_s": 30.0}


@dataclass
class Conversation:
    """A conversation between a user and a pair of engines.

    Attributes:
        tokens: All tokens so far, those of the newest answer included.
        params: What the newest answer offers; None if nothing.
    """

    prefill: Any
    decode: Any
    drive: Callable[..., None]
    tokens: list[int] = field(default_factory=list)
    params: Any = None
    num_turns: int = 0

    def say(self, message: Sequence[int]) -> list[int]:
        """Take a turn with this message; return the answer."""
        self.tokens += message
        self.num_turns += 1
        name = f"turn{self.num_turns}"
        wish = {**(self.params or {}), "do_remote_decode": True}
        self.prefill.add(name, self.tokens, max_tokens=1, kv_transfer_params=wish)
        self.drive(self.prefill, self.decode, until=lambda: self.prefill.is_over(name))
        offered = self.prefill.last(name).kv_transfer_params
        self.decode.add(name, self.tokens, max_tokens=NUM_ANSWER, kv_transfer_params=offered)
        self.drive(self.prefill, self.decode, until=lambda: self.decode.is_over(name))
        self.params = self.decode.last(name).kv_transfer_params
        answer = self.decode.tokens(name)
        self.tokens += answer
        return answer

    @property
    def num_computed(self) -> int:
        """Prompt tokens that the prefill engine computed in the newest turn."""
        metrics = self.prefill.last(f"turn{self.num_turns}").metrics
        return metrics.num_prompt_tokens - metrics.num_cached_tokens - metrics.num_loaded_tokens

    @property
    def load_error(self) -> str:
        """Why the prefill engine could not load the newest turn's answer; empty if it could, or did not try."""
        transfer = self.prefill.last(f"turn{self.num_turns}").metrics.transfer
        return "" if transfer is None else transfer.error


@pytest.fixture
def converse(make_node: Any, drive: Any) -> Iterator[Callable[..., Conversation]]:
    """Begin a conversation over two new engines. At the end of the test neither holds a block."""
    begun: list[Conversation] = []

    def begin(family: str = "llama", options: Any = (), **settings: Any) -> Conversation:
        extra = {"kv_connector_extra_config": {**OPTIONS, **dict(options)}}
        both = {"connector": "inproc", "options": extra}
        prefill = make_node(family, role="kv_producer", **both)
        decode = make_node(family, role="kv_consumer", **both, **settings)
        begun.append(Conversation(prefill, decode, drive))
        return begun[-1]

    yield begin
    for conversation in begun:
        if conversation.params is not None:  # a router lets go of an offer that no turn will use
            flags = {"do_remote_prefill": False, "do_release": True}
            conversation.decode.add(
                "last", [1], kv_transfer_params={**conversation.params, **flags}, max_tokens=1
            )
        nodes = conversation.prefill, conversation.decode
        drive(*nodes, until=lambda nodes=nodes: not any(node.core.has_work for node in nodes))
        assert all(node.is_whole for node in nodes)


def message(seed: int, length: int) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(256) for _ in range(length)]


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_in_five_turns_the_prefill_engine_computes_only_new_messages(
    family: str, converse: Any, assert_same: Any
) -> None:
    conversation = converse(family)
    for turn, length in enumerate((22, 5, 7, 4, 11)):
        new = message(turn, length)
        prompt = [*conversation.tokens, *new]
        assert_same(conversation.say(new), family, prompt, NUM_ANSWER)
        # No engine has computed the last token of an answer: it was sampled, and nothing followed it.
        assert conversation.num_computed == length + (turn > 0)


def test_only_blocks_past_the_engines_own_prefix_are_loaded(converse: Any) -> None:
    conversation = converse()
    conversation.say(message(0, 24))
    conversation.say(message(1, 5))
    assert conversation.prefill.last("turn2").metrics.num_cached_tokens == 24
    assert conversation.prefill.last("turn2").metrics.transfer.num_blocks == 2  # 8 tokens of an answer of 9


def test_another_prefill_engine_loads_the_whole_conversation(
    converse: Any, make_node: Any, assert_same: Any
) -> None:
    conversation = converse()
    conversation.say(message(0, 24))
    conversation.prefill = make_node(
        connector="inproc", role="kv_producer", options={"kv_connector_extra_config": OPTIONS}
    )
    new = message(1, 5)
    prompt = [*conversation.tokens, *new]
    assert_same(conversation.say(new), "llama", prompt, NUM_ANSWER)
    assert conversation.num_computed == 6


def test_an_answer_whose_lease_has_run_out_is_computed_again(
    converse: Any, assert_same: Any, drive: Any
) -> None:
    conversation = converse(options={"answer_lease_s": 0.05})
    conversation.say(message(0, 24))
    drive(conversation.decode, until=lambda: conversation.decode.is_whole)
    new = message(1, 5)
    prompt = [*conversation.tokens, *new]
    assert_same(conversation.say(new), "llama", prompt, NUM_ANSWER)
    assert "is over" in conversation.load_error
    assert conversation.num_computed == NUM_ANSWER + 5


def test_an_answer_of_a_node_that_is_gone_is_computed_again(
    converse: Any, make_node: Any, assert_same: Any
) -> None:
    conversation = converse(options={"connect_timeout_s": 0.2})
    conversation.say(message(0, 24))
    with conversation.decode.at_work() as core:
        core.close()
    extra = {"kv_connector_extra_config": OPTIONS}
    conversation.decode = make_node(connector="inproc", role="kv_consumer", options=extra)
    new = message(1, 5)
    prompt = [*conversation.tokens, *new]
    assert_same(conversation.say(new), "llama", prompt, NUM_ANSWER)
    assert conversation.load_error


def test_after_an_edit_the_tokens_are_computed_again_and_the_offer_ends(
    converse: Any, assert_same: Any, drive: Any
) -> None:
    conversation = converse()
    answer = conversation.say(message(0, 24))
    edited = (answer[0] + 1) % 256
    conversation.tokens[24] = edited
    new = message(1, 5)
    prompt = [*conversation.tokens, *new]
    held_by_turn_1 = conversation.params
    assert_same(conversation.say(new), "llama", prompt, NUM_ANSWER)
    assert "was not computed from this request's prompt" in conversation.load_error
    assert held_by_turn_1 != conversation.params
    drive(conversation.decode, until=lambda: conversation.decode.core.stats().num_offered == 1)


def test_a_decode_engine_without_free_blocks_gives_up_answers(
    converse: Any, assert_same: Any, drive: Any
) -> None:
    conversation = converse(options={"answer_pool_percent": 100}, num_blocks=31)
    decode = conversation.decode
    prompts = [message(seed, 24) for seed in range(6)]  # with its answer, each needs 8 or 9 of 30 blocks
    for number, prompt in enumerate(prompts):
        name = f"r{number}"
        decode.add(name, prompt, max_tokens=NUM_ANSWER, kv_transfer_params={"offer_answer": True})
        drive(decode, until=lambda name=name: decode.is_over(name))
        assert_same(decode.tokens(name), "llama", prompt, NUM_ANSWER)
    assert decode.core.stats().num_offered <= 3
    for number in range(6):
        conversation.params = decode.last(f"r{number}").kv_transfer_params
        release = {**conversation.params, "do_remote_prefill": False, "do_release": True}
        decode.add(f"end{number}", [1], max_tokens=1, kv_transfer_params=release)
    conversation.params = None


def test_an_aborted_answer_is_not_offered(converse: Any, drive: Any) -> None:
    conversation = converse()
    decode = conversation.decode
    decode.add("a", message(0, 24), max_tokens=100, kv_transfer_params={"offer_answer": True})
    drive(decode, until=lambda: "a" in decode.outputs)
    decode.abort("a")
    assert decode.last("a").kv_transfer_params is None
    drive(decode, until=lambda: decode.is_whole)
