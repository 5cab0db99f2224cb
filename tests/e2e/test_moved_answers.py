"""Answers outlive the nodes that compute them: another node goes on, and the client sees no difference.

KVFERRY_LOSSES is how many nodes each test loses. `make soak LOSSES=60` loses 60.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from kvferry.lab.servers import Spawn
from tests.e2e.conftest import LEASE, START_TIMEOUT_S
from tests.support.chaos.services import Service
from tests.support.client import Client, wait_until
from tests.support.losses import (
    NUM_CLIENTS,
    NUM_LOSSES,
    SEED,
    Fleet,
    Kind,
    Question,
    Report,
    ask,
    computed_tokens,
    learn,
    lose_nodes,
    metrics_of,
)

pytestmark = [pytest.mark.full, pytest.mark.timeout(240 + 30 * NUM_LOSSES)]

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
PROMPT = "A ferry that sinks leaves its cargo to the next one, which goes on from where it was. "
NUM_TOKENS = 120
#: An answer that is sure to run still when its node is killed after its first token.
NUM_LONG = 400
BLOCK_SIZE = 16  # of `tiny_arguments`
NUM_QUESTIONS = 14
LOADS = "kvferry_live_loads"
#: A killed node is found gone at once, and one that is only slow must not be.
CHECKS = ("--check-interval-s", "0.2", "--check-timeout-s", "10")
#: For nodes that are frozen. On a full machine three busy nodes are silent for less than that, or no request
#: would find one.
IMPATIENT = ("--check-timeout-s", "2")
#: What a stream may ask for, and be continued; and what a whole answer may ask for, which is given again.
ASKED: tuple[dict[str, Any], ...] = (
    {"temperature": 0, "return_token_ids": True, "stream": True},
    {"temperature": 0, "stream_options": {"include_usage": True}, "stream": True},
    {"temperature": 0.9, "seed": 7, "top_p": 0.9, "stream": True},
    {"temperature": 0, "return_token_ids": True},
    {"temperature": 0, "stop": ["\x00\x01\x02"], "return_token_ids": True, "stream": True},
    {"temperature": 0, "messages": [], "stream": True},
    {"temperature": 0.9, "seed": 8, "n": 2, "logprobs": 1, "return_token_ids": True},
)


@pytest.fixture(scope="module")
def questions(tiny_single: Client) -> list[Question]:
    """Questions with one right answer each."""
    return list(itertools.islice(_learned(tiny_single), NUM_QUESTIONS))


def _learned(single: Client) -> Iterator[Question]:
    for number in itertools.count():
        body = {"max_tokens": NUM_TOKENS, "ignore_eos": True, **ASKED[number % len(ASKED)]}
        text = f"{number} {PROMPT * (1 + number % 3)}"
        if "messages" in body:
            body["messages"] = [{"role": "user", "content": text}]
        else:
            body["prompt"] = text
        if question := learn(single.process, CHATS if "messages" in body else COMPLETIONS, body):
            yield question


@dataclass
class Starter:
    """Starts fleets of nodes that keep their ports."""

    spawn: Spawn
    arguments: Sequence[str]
    folder: Path
    stack: ExitStack

    def start(self, roles: Sequence[str], mortal: str, *options: str) -> Fleet:
        """Start nodes of these roles, and a router before them.

        Those with the role `mortal` are to be lost.
        """
        nodes = [self._node(number, role) for number, role in enumerate(roles)]
        for node in nodes:
            node.wait_ready(START_TIMEOUT_S)
        names = {"prefill": "--prefill", "decode": "--decode", "both": "--node"}
        urls = [
            word for role, node in zip(roles, nodes, strict=True) for word in (names[role], node.process.url)
        ]
        router = self._service("router", "router", (*urls, *CHECKS, *options))
        router.wait_ready(START_TIMEOUT_S)
        mortals = [node for node in nodes if node.name.startswith(mortal)]
        role = "decode" if mortal == "both" else mortal
        return Fleet(nodes, mortals, router, self.folder / "router (1).log", role)

    def _node(self, number: int, role: str) -> Service:
        return self._service(f"{role} {number}", "serve", ("--role", role, *self.arguments, *LEASE))

    def _service(self, name: str, program: str, words: Sequence[str]) -> Service:
        service = Service(name, self.spawn, program, words, self.folder, self.folder)
        return self.stack.enter_context(service)


@pytest.fixture
def starter(spawn: Spawn, tiny_arguments: tuple[str, ...], tmp_path: Path) -> Iterator[Starter]:
    with ExitStack() as stack:
        yield Starter(spawn, tiny_arguments, tmp_path, stack)


def assert_nothing_was_lost(report: Report) -> None:
    print(f"\nseed {SEED}: {report}")
    assert not report.problems, "\n".join(report.problems)


@pytest.mark.every_transport
@pytest.mark.parametrize("kind", ["kill", "freeze"])
def test_answers_outlive_their_decode_node(starter: Starter, questions: list[Question], kind: Kind) -> None:
    options = IMPATIENT if kind == "freeze" else ()
    fleet = starter.start(["prefill", "decode", "decode", "decode"], "decode", *options)
    report = lose_nodes(fleet, questions, kind, NUM_LOSSES, attrgetter("num_known"))
    assert_nothing_was_lost(report)
    assert report.num_known, "no stream went on at another node"


@pytest.mark.parametrize("roles", [("prefill", "decode", "decode"), ("both", "both")])
def test_only_without_a_prefill_node_the_prompt_is_computed_again(
    starter: Starter, tiny_single: Client, roles: Sequence[str]
) -> None:
    body = {"prompt": PROMPT * 3, "max_tokens": NUM_LONG, "ignore_eos": True, **ASKED[2]}
    question = learn(tiny_single.process, COMPLETIONS, body)
    assert question
    fleet = starter.start(roles, roles[-1], *([] if "prefill" in roles else ["--placement", "never"]))
    fleet.await_ready()
    killed: list[Service] = []

    def kill_its_node(piece: object) -> None:
        if not killed:
            killed.extend(fleet.await_busy())
            killed[0].kill()

    told, _ = ask(fleet.router.port, COMPLETIONS, question.body, "load-0", kill_its_node)
    assert told == question.expected
    others = {node.name: computed_tokens(node.process) for node in fleet.nodes if node not in killed}
    if "prefill" in roles:
        again = others.pop("prefill 0") - question.num_prompt_tokens
        # What is not a whole block of its prefix cache.
        assert 0 <= again <= 2 * BLOCK_SIZE
        assert sum(others.values()) <= 2 * BLOCK_SIZE
    else:
        assert list(others.values()) == [question.num_prompt_tokens]


@pytest.mark.parametrize("kind", ["kill", pytest.param("freeze", marks=pytest.mark.full)])
def test_whole_answers_are_given_again(starter: Starter, questions: list[Question], kind: Kind) -> None:
    options = IMPATIENT if kind == "freeze" else ()
    fleet = starter.start(["prefill", "decode", "decode", "decode"], "decode", *options)
    whole = [each for each in questions if not each.body.get("stream")]
    report = lose_nodes(fleet, whole, kind, NUM_LOSSES, attrgetter("repeated"), most_pieces=2 * NUM_CLIENTS)
    assert_nothing_was_lost(report)
    assert report.repeated, "no request was repeated"


@pytest.mark.parametrize("rendezvous", ["auto", pytest.param("off", marks=pytest.mark.full)])
def test_answers_outlive_their_prefill_node(
    starter: Starter, questions: list[Question], rendezvous: str
) -> None:
    """It is killed before it has computed a prompt, during the handoff, and while its caches are used."""
    fleet = starter.start(["prefill", "prefill", "decode", "decode"], "prefill", "--rendezvous", rendezvous)
    decodes = [node for node in fleet.nodes if node not in fleet.mortals]
    moments = itertools.cycle(("before", "during", "after"))

    def await_moment(node: Service) -> None:
        match next(moments):
            case "before":
                node.pause()
                wait_until(lambda: fleet.states()[node.process.url]["in_flight"] > 0)
            case "during":
                node.pause()
                wait_until(lambda: any(metrics_of(each.process)[LOADS] for each in decodes))
            case "after":
                wait_until(lambda: fleet.states()[node.process.url]["in_flight"] == 0)

    report = lose_nodes(fleet, questions, "kill", NUM_LOSSES, attrgetter("repeated"), before_end=await_moment)
    assert_nothing_was_lost(report)
    assert report.repeated, "no request was repeated"
