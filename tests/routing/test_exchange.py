"""One request is one exchange: its table is that of the docs, and every order of events keeps its
promises.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvferry.router.answer.endings import CUT, EMPTY, Heard, objection_to
from kvferry.router.answer.exchange import TRANSITIONS, Exchange, State
from kvferry.router.choice.ways import TABLE, Facts, Offer, Options, Way, named_offer, way_of
from kvferry.router.http.json_body import object_of
from kvferry.router.http.sse import DONE, Event
from tests.support.exchange_bugs import BUGS
from tests.support.exchange_simulator import Node, run_drawn
from tests.support.explore import first_broken
from tests.support.fake_nodes import PLACE

ROUTER_DOC = Path(__file__).parents[2] / "docs" / "router-design.md"
NUM_SCHEDULES = 100_000


def rows_of(heading: str) -> list[list[str]]:
    """Return the rows of the first table below a heading."""
    _, _, section = ROUTER_DOC.read_text().partition(f"# {heading}\n")
    lines = section.partition("\n#")[0].splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")]
    return rows[2:]


def test_the_table_of_states_is_that_of_the_code() -> None:
    found = {
        (state.strip(), target.strip())
        for states, _, targets, _ in rows_of("The states of a request")
        for state in states.split(",")
        for target in targets.split(",")
    }
    in_code = {(state.value, target.value) for state, targets in TRANSITIONS.items() for target in targets}
    assert {(state, target) for state, target in found if target not in ("same", state)} == in_code


def test_the_table_of_ways_is_that_of_the_code() -> None:
    assert rows_of("Which way a request goes") == [[row.when, row.way.value] for row in TABLE]


# -- complete answers ----------------------------------------------------------------------------------


def chunk(index: int, reason: str | None, text: str = "x") -> Event:
    return Event.of({"choices": [{"index": index, "text": text, "finish_reason": reason}]})


COUNTS = Event.of({"choices": [], "usage": {"completion_tokens": 1}})


@pytest.mark.parametrize(
    ("events", "n", "missing"),
    [
        ([], 1, EMPTY),
        ([Event(b": still here\n\n")], 1, EMPTY),
        ([chunk(0, None, "")], 1, EMPTY),
        ([Event.of({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})], 1, EMPTY),
        ([chunk(0, None)], 1, CUT),
        ([chunk(0, None), chunk(0, "stop", "")], 1, ""),
        ([chunk(0, "stop")], 2, CUT),
        ([chunk(0, "stop"), chunk(0, "stop")], 2, CUT),
        ([chunk(1, "stop"), chunk(0, "length")], 2, ""),
        ([Event.of({"choices": [{"text": '"finish_reason": "stop"'}]})], 1, CUT),
        ([Event.of({"error": {"message": "no"}})], 2, ""),
    ],
)
@pytest.mark.parametrize("end", [DONE, COUNTS], ids=["done", "counts"])
def test_a_stream_is_complete_after_a_reason_for_each_choice(
    events: list[Event], n: int, missing: str, end: Event
) -> None:
    heard = Heard(n)
    for event in events:
        assert not heard.objection(event)
        heard.add(event)
    assert heard.missing() == missing
    names_reasons = any(b'"finish_reason":' in event.raw for event in events)
    # A node that never gives reasons is believed, if it has said something.
    assert heard.objection(end) == (missing if names_reasons or missing == EMPTY else "")


@pytest.mark.parametrize("whole", [b'{"choices": [{"finish_reason": "stop"}]}', b"{}", b' {"a": "}"}\n'])
def test_a_whole_answer_is_one_json_object(whole: bytes) -> None:
    assert not objection_to(whole, object_of(whole))
    for end in range(len(whole.strip())):
        assert objection_to(whole.strip()[:end], object_of(whole.strip()[:end]))
    for other in (b"[]", b"null", b"<html></html>", whole * 2):
        assert objection_to(other, object_of(other))


# -- every order of events ---------------------------------------------------------------------------


@pytest.mark.full  # `test_every_exchange` is exhaustive within its bounds; this goes further, at random
@pytest.mark.timeout(300)
def test_no_order_of_answers_losses_and_leaving_clients_breaks_a_promise() -> None:
    assert first_broken(run_drawn, range(NUM_SCHEDULES)) is None


def test_a_few_orders_break_no_promise() -> None:
    assert first_broken(run_drawn, range(NUM_SCHEDULES, NUM_SCHEDULES + 5_000)) is None


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_each_planted_bug_is_caught(bug: type[Exchange]) -> None:
    broken = first_broken(partial(run_drawn, kind=bug), range(10_000))
    assert broken is not None
    assert broken.promise.startswith(BUGS[bug])


def test_a_change_that_the_table_does_not_have_is_refused() -> None:
    exchange = Exchange("/v1/completions", {}, {"X-Request-Id": "r"})
    exchange._move(State.PREFILLING)
    with pytest.raises(AssertionError, match="<exchange 'r': prefilling> cannot become rendezvous"):
        exchange._move(State.RENDEZVOUS)


# -- ways --------------------------------------------------------------------------------------------


class FakeNode:
    """As much of a node as decides the way."""

    def __init__(self, **changes: Any) -> None:
        self.place: dict[str, Any] = PLACE
        self.num_at_once, self.protocol = 0, 7
        vars(self).update(changes)


@pytest.mark.parametrize(
    ("changes", "way"),
    [
        ({}, Way.AT_ONCE),
        ({"options": Options(rendezvous=False)}, Way.IN_TURN),
        ({"may_ask_both": False}, Way.IN_TURN),
        ({"prefill": FakeNode(place={})}, Way.IN_TURN),
        ({"prefill": FakeNode(num_at_once=8)}, Way.IN_TURN),
        ({"prefill": None}, Way.IN_TURN),
        ({"decode": FakeNode(protocol=0)}, Way.IN_TURN),
        ({"decode": None}, Way.IN_TURN),
    ],
)
def test_each_line_of_the_table_decides(changes: dict[str, Any], way: Way) -> None:
    known: dict[str, Any] = {"prefill": FakeNode(), "decode": FakeNode(), "options": Options()}
    facts = Facts(**{**known, **changes})
    assert way_of(facts) is way
    assert (named_offer(facts) is None) == (way is Way.IN_TURN)


# -- which nodes may be asked again --------------------------------------------------------------------


def test_each_attempt_may_ask_every_prefill_node() -> None:
    exchange = Exchange("/v1/completions", {}, {"X-Request-Id": "r"})
    prefill, decode = Node("prefill", 1), Node("decode", 1)
    exchange.begin()
    exchange.placed(Offer(prefill, {"n": 0}, "name"), decode)  # type: ignore[arg-type]
    exchange.tried_prefill = {prefill: None}  # type: ignore[dict-item]
    exchange.prefill_lost(ConnectionError("reset"))
    exchange.placed()
    assert exchange.tried_prefill == {}


@pytest.mark.parametrize(
    ("answers", "error", "may_have_it_again"),
    [
        ("another", None, True),
        ("itself", None, False),  # it took its answer back, because no other node took it
        ("another", ConnectionError("reset"), False),
    ],
)
def test_a_node_that_stopped_an_answer_may_have_it_again_unless_it_has_it_or_failed(
    answers: str, error: Exception | None, may_have_it_again: bool
) -> None:
    exchange: Any = Exchange("/v1/completions", {}, {"X-Request-Id": "r"})
    stopped, another = Node("decode", 1), Node("decode", 2)
    exchange.moved_from, exchange.decode = stopped, another if answers == "another" else stopped
    exchange.tried_decode = {stopped: error, another: None}
    exchange._forgive()
    assert (stopped not in exchange.tried_decode) is may_have_it_again
    assert another in exchange.tried_decode
