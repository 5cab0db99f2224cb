"""Conversations with two `vllm serve` processes behind the router, which offer answers: the prefill server computes only what is new."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest

from kvferry.lab.engine.default_model import default_model_folder
from kvferry.lab.servers import KVFERRY, Launcher, start_vllm
from tests.support.client import Client, wait_until
from tests.support.vllm_servers import FAILURES, LOADS, USAGE, Server, logprobs_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

START_S = 400.0
#: Longer than a busy machine needs from the end of an answer to the next turn. Tests wait until the last answer's lease ends.
ANSWER_LEASE_S = 10.0
#: Much less than the lease, which must not be what frees the blocks.
SOON_S = 4.0
#: That of `ARGUMENTS`.
BLOCK_SIZE = 32
MAX_TOKENS = 48
#: The token with which the model ends an answer.
END = 2
KEPT = "kvferry_router_kept_answers"
#: vLLM's nodes do not say what became of an offer, so the router counts each that it sent to one as unknown.
RESULTS = {"unknown": 0, "loaded": 0, "failed": 0, "none": 0, "unused": 0}
#: By form of the answers: the first message of a chat. With these the model writes sentences. The tokenizer would not split the
#: text of a list in the way in which this model writes it.
SYSTEMS = {
    "streamed": "Stream of thought: answer briefly.",
    "whole": "Whole: you answer each question in one short sentence.",
}
#: What the user says in each turn, and the limit of the answer. One of them cuts it off, the others do not.
MESSAGES = {
    "Name three animals that live in the sea.": MAX_TOKENS,
    "Which of them is the largest?": MAX_TOKENS,
    "Write one sentence about it for a child.": 6,
    "What does it eat?": MAX_TOKENS,
    "Thank you. What is the capital of France?": MAX_TOKENS,
}


@dataclass(frozen=True)
class Turn:
    """What the client of one turn received, and what the prefill server did for it.

    Attributes:
        logprobs: The log probability of each token of the answer.
        num_computed: Tokens of the prompt that the prefill server computed.
        num_cached: Tokens of the prompt that were in its prefix cache.
        num_loaded: Tokens of the prompt that it loaded.
    """

    prompt: list[int]
    answer: list[int]
    logprobs: list[float]
    num_computed: int
    num_cached: int
    num_loaded: int


@dataclass(frozen=True)
class Served:
    """The router and its two servers."""

    prefill: Server
    decode: Server
    router: Server

    def results(self):
        """Return how many answers had each result so far."""
        counter = "kvferry_router_answers_total"
        return {result: self.router.metric(counter, result=result) for result in RESULTS}

    def by_source(self):
        """Return how many prompt tokens the prefill server has computed, found in its prefix cache, and loaded."""
        sources = "local_compute", "local_cache_hit", "external_kv_transfer"
        counter = "vllm:prompt_tokens_by_source_total"
        return [int(self.prefill.metric(counter, source=source)) for source in sources]

    def counted_since(self, before, num_prompt):
        """Return what one prompt has added to `by_source`. Wait for it, because vLLM counts after it has answered."""
        wait_until(lambda: sum(self.by_source()) >= sum(before) + num_prompt)
        return [now - then for now, then in zip(self.by_source(), before, strict=True)]

    def ask(self, path, body, headers=None):
        """Send a request to the router. Returns the events of a stream, or one event, the whole answer."""
        body = {"model": "model", "temperature": 0, "max_tokens": MAX_TOKENS, **body}
        with Client(self.router.process).requesting(path, body, headers or {}) as response:
            assert response.status == 200, response.read()
            raw = response.read().decode()
        assert "remote_" not in raw, "the client sees nothing of the offer"
        pieces = [line.removeprefix("data: ") for line in raw.splitlines() if line.strip()]
        return [json.loads(piece) for piece in pieces if piece != "[DONE]"]

    def wait_until_kept(self):
        """Wait until the router has the offer of an answer: after a stream it asks for it in the background."""
        self.router.wait_for(KEPT, lambda num_kept: num_kept == 1)


class Chat:
    """A conversation as a client has it: it knows texts, and sends them all with each turn.

    Args:
        system: The first message. Another one begins with another block, so that no prefix cache helps.
        headers: Name the conversation. Without them the router knows it by its messages.
    """

    def __init__(self, served, system, *, stream, headers=None):
        self.served, self.stream, self.headers = served, stream, headers
        self.messages = [{"role": "system", "content": system}]
        self.turns = []

    def say(self, text, max_tokens=MAX_TOKENS):
        self.messages.append({"role": "user", "content": text})
        before = self.served.by_source()
        body = {
            "messages": self.messages,
            "max_tokens": max_tokens,
            "stream": self.stream,
            "return_token_ids": True,
            "logprobs": True,
        }
        events = self.served.ask("/v1/chat/completions", body, self.headers)
        (prompt,) = [event["prompt_token_ids"] for event in events if event.get("prompt_token_ids")]
        choices = [choice for event in events for choice in event["choices"]]
        parts = [choice["delta" if self.stream else "message"] for choice in choices]
        answer = [token for choice in choices for token in choice.get("token_ids") or ()]
        self.messages.append(
            {"role": "assistant", "content": "".join(part.get("content") or "" for part in parts)}
        )
        assert choices[-1]["finish_reason"] == ("stop" if answer[-1] == END else "length")
        logprobs = [score for choice in choices if choice["logprobs"] for score in logprobs_of(choice)]
        self.turns.append(Turn(prompt, answer, logprobs, *self.served.counted_since(before, len(prompt))))
        return self.turns[-1]

    def assert_like_alone(self):
        """Fail unless each answer is that of one server that computed the whole prompt itself."""
        for turn in self.turns:
            answer = {"token_ids": turn.answer, "logprobs": {"token_logprobs": turn.logprobs}}
            self.served.decode.assert_like_alone(turn.prompt, answer, len(turn.answer))


@pytest.fixture(scope="module")
def servers():
    transfer = {**KVFERRY, "kv_load_failure_policy": "fail"}
    transfer["kv_connector_extra_config"] = {"offer_answer": True, "answer_lease_s": ANSWER_LEASE_S}
    model = str(default_model_folder())
    with Launcher() as launcher:
        processes = [
            start_vllm(launcher, f"{role} server", model, transfer=transfer) for role in ("prefill", "decode")
        ]
        launcher.wait_ready(processes, START_S)
        router = launcher.start_router("router", processes[:1], processes[1:], "--ask-for-answers")
        launcher.wait_ready([router], START_S)
        started = Served(*map(Server, processes), Server(router))
        # From the first answer on the router knows that the decode server offers them.
        Chat(started, "You wake up.", stream=False).say("Good morning.")
        yield started


@pytest.fixture
def served(servers):
    """The servers. Before and after the test no offer holds a block. The decode server never fails to load."""
    _wait_until_idle(servers)
    yield servers
    _wait_until_idle(servers)
    assert servers.decode.metric(FAILURES) == 0


def _wait_until_idle(served):
    served.router.wait_for(KEPT, lambda num_kept: num_kept == 0)
    for server in (served.prefill, served.decode):
        server.assert_no_block_is_in_use()


@pytest.mark.parametrize("form", SYSTEMS)
def test_in_five_turns_the_prefill_server_computes_only_new_messages(form, served):
    headers = {"X-Session-ID": form} if form == "whole" else None
    chat = Chat(served, SYSTEMS[form], stream=form == "streamed", headers=headers)
    results, loads = served.results(), served.prefill.metric(LOADS)
    (opening, *later) = MESSAGES.items()
    first = chat.say(*opening)
    assert (first.num_computed, first.num_cached, first.num_loaded) == (len(first.prompt), 0, 0)
    for number, message in enumerate(later, start=1):  # each at once: the router waits for the offer
        before, turn = chat.turns[-1], chat.say(*message)
        # The last token of an answer was sampled, and nothing followed it, so no node has computed it. In an answer that was not
        # cut off, that is the end token.
        known = before.prompt + before.answer[:-1]
        # A precondition: the tokenizer splits the client's text in the way in which the model wrote it.
        assert turn.prompt[: len(known)] == known
        # So exactly this is left to compute: that token, the message, and what the chat template puts around it.
        assert turn.num_computed == len(turn.prompt) - len(known)
        # The prefix cache has the whole blocks of the earlier prompt. Loads know no such limit: they end with the last token.
        assert turn.num_cached == len(before.prompt) // BLOCK_SIZE * BLOCK_SIZE
        assert turn.num_loaded == len(known) - turn.num_cached
        assert served.results() == {**results, "unknown": results["unknown"] + number}
        assert served.prefill.metric(LOADS) == loads + number
    assert {turn.answer[-1] == END for turn in chat.turns} == {True, False}, "both ends of an answer"
    chat.assert_like_alone()


def test_a_request_outside_a_conversation_offers_nothing(served):
    results, loads = served.results(), served.decode.metric(LOADS)
    for number, form in enumerate(("whole", "streamed"), start=1):
        served.ask("/v1/completions", {"prompt": f"A {form} box. " * 20, "stream": form == "streamed"})
        # It was handed over, so only the router's word keeps the decode server from offering the answer.
        served.decode.wait_for(LOADS, lambda num_loads, least=loads + number: num_loads >= least)
    # The router would have counted a whole answer's offer as unused. It would not know of a streamed one's, which would hold
    # blocks until its lease ends.
    assert served.results() == results
    assert served.router.metric(KEPT) == 0
    wait_until(lambda: served.decode.metric(USAGE) == 0, SOON_S)


def test_an_edited_answer_is_computed_although_vllms_policy_is_to_fail(served):
    chat = Chat(served, SYSTEMS["streamed"] + " Be kind.", stream=True)
    first = chat.say("Name three animals that live in the sea.")
    served.wait_until_kept()
    chat.messages[-1]["content"] = "Whales, seals and eels."
    results, failures = served.results(), served.prefill.metric(FAILURES)
    turn = chat.say("Which of them is the largest?")
    num_cached = len(first.prompt) // BLOCK_SIZE * BLOCK_SIZE
    found = turn.num_computed, turn.num_cached, turn.num_loaded
    assert found == (len(turn.prompt) - num_cached, num_cached, 0)
    assert served.results() == {**results, "failed": results["failed"] + 1}
    assert served.prefill.metric(FAILURES) == failures + 1
    chat.assert_like_alone()


def test_a_turn_after_the_lease_is_computed(served):
    chat = Chat(served, "You are patient.", stream=True)
    results = served.results()
    first = chat.say("Name three animals that live in the sea.")
    served.wait_until_kept()
    _wait_until_idle(served)
    turn = chat.say("Which of them is the largest?")
    num_cached = len(first.prompt) // BLOCK_SIZE * BLOCK_SIZE
    found = turn.num_computed, turn.num_cached, turn.num_loaded
    assert found == (len(turn.prompt) - num_cached, num_cached, 0)
    assert served.results() == results
    chat.assert_like_alone()
