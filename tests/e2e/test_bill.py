"""A pair reports as many cached prompt tokens as a single node does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

import pytest

from kvferry.lab.servers import LaunchedProcess, Launcher, Spawn
from tests.e2e.conftest import LEASE, START_TIMEOUT_S
from tests.support.client import Client

NUM_TOKENS = 200
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
CONTINUOUS = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
#: A router finds out at once that a node has ended or drains.
CHECKS = ("--check-interval-s", "0.2", "--check-timeout-s", "10")

#: How many requests were sent to both nodes at once.
AT_ONCE = "kvferry_router_rendezvous_total"

#: A request: at which router, with which fields. `prompt` counts how many tokens it has.
Step = tuple[str, Mapping[str, Any]]


def prompt_of(case: int, num_tokens: int = NUM_TOKENS) -> list[int]:
    """Return a prompt of whose blocks no other case has one."""
    return [3 + (case * 31 + position * 7) % 200 for position in range(num_tokens)]


def usage_of(client: Client, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the counts that an answer ends with."""
    fields = {"max_tokens": 4, "ignore_eos": True, **body}
    if not fields.get("stream"):
        reply = client.complete(fields.pop("prompt"), **fields)
        assert reply.status == 200, reply.body
        return dict(reply.body["usage"])
    with client.streaming(fields.pop("prompt"), **fields) as events:
        return dict([event["usage"] for event in events if event.get("usage")][-1])


@pytest.fixture(scope="module")
def doors(spawn: Spawn, tiny_arguments: Sequence[str]) -> Iterator[Mapping[str, Client]]:
    """Routers before the same prefill node: to two decode nodes, to one of them without rendezvous; and one
    before a node that computes its prompts itself.
    """
    with Launcher(spawn) as launcher:
        roles = ("prefill", "decode", "decode", "both")
        nodes = [
            launcher.start_node(f"{role}-{number}", role, *tiny_arguments, *LEASE)
            for number, role in enumerate(roles)
        ]
        launcher.wait_ready(nodes, START_TIMEOUT_S)
        prefill, one, two, both = nodes
        doors = {
            "one": launcher.start_router("one", [prefill], [one]),
            "two": launcher.start_router("two", [prefill], [two]),
            "in turn": launcher.start_router("in-turn", [prefill], [one], "--rendezvous", "off"),
            "local": launcher.start("local", "router", "--port", "0", "--node", both.url),
        }
        launcher.wait_ready(doors.values(), START_TIMEOUT_S)
        yield {name: Client(door) for name, door in doors.items()}


WAYS: Mapping[str, Sequence[Step]] = {
    "whole, again": [("one", {}), ("one", {})],
    "in turn": [("in turn", {}), ("in turn", {})],
    "at a second decode node": [("one", {}), ("two", {})],
    "streamed": [("one", STREAM), ("two", STREAM)],
    "in turn, streamed": [("two", STREAM), ("in turn", STREAM)],
    "continuous": [("one", CONTINUOUS), ("two", CONTINUOUS)],
    "several answers": [("one", {"n": 2}), ("two", {"n": 2}), ("two", {"n": 2, **STREAM})],
    "a longer prompt": [("one", {"tokens": 150}), ("two", {}), ("one", STREAM)],
    "next turn": [("one", {"max_tokens": 40}), ("one", {"turn": True})],
    "prompts": [("one", {"prompts": 2}), ("two", {"prompts": 3})],
    "prompts, streamed": [("one", {"prompts": 2, **STREAM}), ("two", {"prompts": 3, **STREAM})],
    "prompts, several answers": [("one", {"prompts": 2, "n": 2}), ("in turn", {"prompts": 2, "n": 2})],
    "local": [("local", {}), ("local", STREAM)],
}


@pytest.mark.parametrize("way", WAYS)
def test_a_pair_counts_as_a_single_node_does(
    doors: Mapping[str, Client], tiny_single: Client, way: str
) -> None:
    case = list(WAYS).index(way) * 4
    answer: list[int] = []
    for door, asked in WAYS[way]:
        fields = {key: value for key, value in asked.items() if key not in ("tokens", "prompts", "turn")}
        prompt: Any = prompt_of(case, asked.get("tokens", NUM_TOKENS))
        if asked.get("turn"):
            prompt = [*prompt, *answer, *prompt_of(case + 1, 20)]
        if num := asked.get("prompts"):
            prompt = [prompt_of(case + number) for number in range(num)]
        body = {"prompt": prompt, **fields}
        if "max_tokens" in asked:
            answer = tiny_single.complete(prompt, ignore_eos=True, **fields).token_ids
            assert doors[door].complete(prompt, ignore_eos=True, **fields).token_ids == answer
            continue
        expected, before = usage_of(tiny_single, body), doors[door].metric(AT_ONCE)
        assert usage_of(doors[door], body) == expected, (door, asked)
        assert (doors[door].metric(AT_ONCE) > before) == (door in ("one", "two"))
    assert expected["prompt_tokens_details"]["cached_tokens"] >= 144


END: Mapping[str, Callable[[LaunchedProcess], None]] = {
    "moved": LaunchedProcess.terminate,
    "lost": LaunchedProcess.kill,
}


#: How many tokens which nodes have of a prompt. What a node that is killed had itself is not known.
KNOWN = [
    ("moved", "", 0),
    ("moved", "prefill", 192),
    ("moved", "decode", 96),
    ("lost", "", 0),
    ("lost", "prefill", 192),
]


@pytest.mark.parametrize(("how", "knows", "num_known"), KNOWN)
def test_an_answer_that_goes_on_elsewhere_keeps_the_count_of_the_first_attempt(
    launcher: Launcher,
    tiny_arguments: Sequence[str],
    tiny_single: Client,
    how: str,
    knows: str,
    num_known: int,
) -> None:
    roles = ("prefill", "decode", "decode")
    nodes = [
        launcher.start_node(f"{role}-{number}", role, *tiny_arguments, *LEASE)
        for number, role in enumerate(roles)
    ]
    launcher.wait_ready(nodes, START_TIMEOUT_S)
    prefill, *decodes = nodes
    router = launcher.start_router("router", [prefill], decodes, *CHECKS).wait_ready(START_TIMEOUT_S)
    prompt = prompt_of(100 + KNOWN.index((how, knows, num_known)))
    for node in {"": [], "prefill": [prefill], "decode": decodes}[knows]:
        Client(node).complete(prompt[: num_known + 1], max_tokens=1)
        tiny_single.complete(prompt[: num_known + 1], max_tokens=1)
    body = {"max_tokens": 200, "ignore_eos": True, **STREAM}
    expected = usage_of(tiny_single, {"prompt": prompt, **body})
    with Client(router).streaming(prompt, **body) as events, closing(events):  # type: ignore[type-var]
        next(events)
        busy = max(decodes, key=lambda node: Client(node).metric("kvferry_engine_running_requests"))
        END[how](busy)
        assert [event["usage"] for event in events if event.get("usage")] == [expected]
    fact = {"moved": "stopped", "lost": "moved"}[how]
    assert Client(router).metric(f"kvferry_router_{fact}_answers_total") == 1
    assert expected["prompt_tokens_details"]["cached_tokens"] == num_known
