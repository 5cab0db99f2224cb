"""Prefix affinity: the ring, bounded loads, and which prompts belong together. Without sockets or clocks."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.router.policies import LeastLoaded, PrefixAffinity, prefix_key
from kvferry.router.ring import Ring, choose
from kvferry.router.states import bound

KEYS = [f"key {index}".encode() for index in range(2000)]


def urls(number: int) -> list[str]:
    return [f"http://10.0.0.{index}:8100" for index in range(number)]


def homes(ring: Ring) -> list[str]:
    return [next(ring.walk(key)) for key in KEYS]


@pytest.mark.parametrize("number", [1, 2, 3, 8])
def test_one_more_node_takes_its_share_of_the_keys_and_moves_no_other(number: int) -> None:
    before, after = homes(Ring(urls(number))), homes(Ring(urls(number + 1)))
    moved = [new for old, new in zip(before, after, strict=True) if old != new]
    assert set(moved) == {urls(number + 1)[-1]}
    assert len(moved) / len(KEYS) == pytest.approx(1 / (number + 1), rel=0.35)


def test_every_node_has_about_the_same_number_of_keys() -> None:
    counts = Counter(homes(Ring(urls(5))))
    assert all(count / len(KEYS) == pytest.approx(1 / 5, rel=0.35) for count in counts.values())
    assert len(counts) == 5


def test_a_node_that_cannot_be_used_is_passed_over_as_if_it_were_not_on_the_ring() -> None:
    whole, without = Ring(urls(4)), Ring(urls(3))
    loads = dict.fromkeys(urls(3), 0)
    assert [choose(whole, key, loads, 1.25) for key in KEYS] == homes(without)


def test_all_routers_have_the_same_ring() -> None:
    # It must not depend on the process, the order of the nodes, or the release.
    assert list(Ring(reversed(urls(4))).walk(b"a")) == list(Ring(urls(4)).walk(b"a"))
    assert [url[-6] for url in Ring(urls(4)).walk(b"a")] == ["3", "2", "0", "1"]


@given(
    loads=st.lists(st.integers(0, 50), min_size=1, max_size=8),
    factor=st.floats(1.0, 4.0),
    key=st.binary(max_size=8),
)
@settings(max_examples=60)
def test_the_first_node_with_room_is_chosen_and_there_always_is_one(
    loads: list[int], factor: float, key: bytes
) -> None:
    ring = Ring(urls(len(loads)))
    by_url = dict(zip(urls(len(loads)), loads, strict=True))
    limit = bound(by_url, factor)
    assert limit == math.ceil(factor * (sum(loads) + 1) / len(loads))
    expected = [url for url in ring.walk(key) if by_url[url] + 1 <= limit]
    assert choose(ring, key, by_url, factor) == expected[0]


def test_a_hot_prefix_spills_over_to_the_next_nodes_in_a_fixed_order() -> None:
    ring = Ring(urls(3))
    loads = dict.fromkeys(urls(3), 0)
    order = list(ring.walk(b"hot"))
    chosen = []
    for _ in range(12):
        url = choose(ring, b"hot", loads, 1.25)
        loads[url] += 1
        chosen.append(url)
    assert chosen[0] == order[0]
    assert [loads[url] for url in order] == [5, 5, 2]  # ceil(1.25 * 12 / 3) = 5


@dataclass
class Node:
    url: str
    in_flight: int = 0
    num_others: int = 0
    last_used: int = 0


def test_the_node_with_the_fewest_requests_is_taken() -> None:
    nodes = [Node("a", in_flight=2), Node("b", in_flight=1, last_used=2), Node("c", in_flight=1, last_used=1)]
    assert LeastLoaded().choose(nodes, {}).url == "c"


def test_of_nodes_that_others_use_too_the_two_used_least_lately_are_compared() -> None:
    """Ten routers that all took the node which the last check showed as the best would make it the worst."""
    nodes = [
        Node(url, num_others=others, last_used=turn)
        for turn, (url, others) in enumerate(zip("abcd", [6, 4, 9, 0], strict=True))
    ]
    policy, chosen = LeastLoaded(), []
    for turn in range(10, 22):
        node = policy.choose(nodes, {})
        node.last_used = turn
        node.in_flight += 1
        chosen.append(node.url)
    assert chosen[0] == "b", "it has fewer requests than a; d was used later"
    assert set(chosen[:4]) >= {"b", "d"}
    assert chosen.count("c") <= chosen.count("a") <= chosen.count("b")


def test_the_policy_counts_prompts_at_their_first_node_and_at_later_ones() -> None:
    policy = PrefixAffinity()
    nodes = [Node(url) for url in urls(2)]
    policy.nodes_changed(urls(2))
    body = {"prompt": "once upon a time"}
    first = policy.choose(nodes, body)
    assert policy.choose(nodes, body) is first
    first.in_flight = 3
    assert policy.choose(nodes, body) is not first
    report = policy.report()
    assert (report["num_at_first_node"], report["num_at_later_node"]) == (2, 1)


SYSTEM = {"role": "system", "content": "You are a ferryman. " * 20}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"prompt": "a" * 256 + "b"}, {"prompt": "a" * 256 + "c", "max_tokens": 7}),
        ({"prompt": ["a b"]}, {"prompt": "a b"}),
        ({"prompt": list(range(64))}, {"prompt": list(range(200))}),
        ({"messages": [SYSTEM]}, {"messages": [SYSTEM, {"role": "user", "content": "hi"}], "stream": True}),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x" * 300}]}]},
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x" * 300 + "y"}]}]},
        ),
    ],
)
def test_prompts_with_the_same_beginning_have_the_same_key(
    one: dict[str, Any], other: dict[str, Any]
) -> None:
    assert prefix_key(one, 256) == prefix_key(other, 256)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"prompt": "a" * 255 + "b"}, {"prompt": "a" * 255 + "c"}),
        ({"prompt": "a", "model": "adapter"}, {"prompt": "a"}),
        ({"prompt": "a", "cache_salt": "s"}, {"prompt": "a"}),
        ({"prompt": [1, 2, 3]}, {"prompt": [1, 2, 4]}),
        ({"prompt": [12, 3]}, {"prompt": [1, 23]}),
        (
            {"messages": [{"role": "user", "content": "a"}]},
            {"messages": [{"role": "system", "content": "a"}]},
        ),
        (
            {"messages": [SYSTEM], "tools": [{"type": "function", "function": {"name": "row"}}]},
            {"messages": [SYSTEM], "tools": [{"type": "function", "function": {"name": "moor"}}]},
        ),
    ],
)
def test_prompts_that_share_no_cache_have_different_keys(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert prefix_key(one, 256) != prefix_key(other, 256)


@pytest.mark.parametrize(
    "body", [{}, {"prompt": None}, {"messages": 3}, {"prompt": {}}, {"prompt": "\ud800"}]
)
def test_a_malformed_prompt_has_a_key_too(body: dict[str, Any]) -> None:
    assert isinstance(prefix_key(body, 256), bytes)


def test_a_length_of_affinity_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="--prefix-length 0"):
        PrefixAffinity(length=0)
