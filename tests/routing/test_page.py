"""The router's page: what it says of each request, and that it is safe to look at."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import ClientTimeout, web

from kvferry.connector.spans import Span
from kvferry.router.answer.exchange import Exchange
from kvferry.router.answer.handoffs import Handoffs
from kvferry.router.http.sse import Event
from kvferry.router.seen.metrics import RouterMetrics
from kvferry.router.seen.records import (
    MAX_CALLS,
    MAX_ERROR_CHARS,
    MAX_ID_CHARS,
    MAX_RECENT,
    Observer,
    RecentRequests,
    RequestRecord,
    View,
    mark,
)
from tests.support.fake_nodes import NodeHandler, let_rendezvous, routed

PARAMS = {"do_remote_prefill": True, "remote_engine_id": "e", "remote_block_ids": [[3]], "remote_host": "h"}
#: The figures of a node of `serve.py`, in seconds. They are small, because a request takes at least as long.
PREFILL_METRICS = {"queue_s": 0.001, "num_prompt_tokens": 40, "ttft_s": 0.002}
DECODE_METRICS = {
    "queue_s": 0.001, "num_prompt_tokens": 40, "num_output_tokens": 7, "num_loaded_tokens": 39, "num_cached_tokens": 0,
    "ttft_s": 0.005,
    "transfer": {"transport": "shm", "mechanism": "mapped", "num_bytes": 5000, "seconds": 0.006, "exposed_seconds": 0.002},
}  # fmt: skip


class Node:
    """Answers after a while, whole or as a stream of events."""

    def __init__(self, *events: Mapping[str, Any], wait_s: float = 0.02, is_stream: bool = False) -> None:
        self._events = events
        self._wait_s = wait_s
        self._is_stream = is_stream

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if not self._is_stream:
            await asyncio.sleep(self._wait_s)
            return web.json_response(self._events[0])
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in self._events:
            await asyncio.sleep(self._wait_s)
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response


PREFILL = Node({"kv_transfer_params": PARAMS, "metrics": PREFILL_METRICS})
DECODE = Node({"choices": [], "metrics": DECODE_METRICS})


async def record(
    prefill: Sequence[NodeHandler], decode: Sequence[NodeHandler], *, request_id: str = "r7", **options: Any
) -> dict[str, Any]:
    """Send one request, and return what the page is told about it."""
    async with routed(prefill, decode, **options) as client:
        headers = {"X-Request-Id": request_id}
        async with client.post("/v1/completions", json={"prompt": "p"}, headers=headers) as answer:
            await answer.read()
        (record,) = (await (await client.get("/page/state")).json())["finished"]
    check_parts(record)
    return dict(record)


class Watched:
    """A request whose facts a test tells."""

    def __init__(self, **marks: float) -> None:
        self.exchange = Exchange("/v1/completions", {}, {"X-Request-Id": "r7"})
        self.record = RequestRecord("r7", "/v1/completions", Span("router", None))
        mark(self.record.span, **marks)
        self.observer = Observer(self.exchange, self.record, RouterMetrics(lambda: (), Handoffs()))

    def asks_alone(self, node: str) -> None:
        self.exchange.is_alone = True
        self.observer.asks("decode", node)

    def stream_begins(self) -> None:
        self.observer.decode_began(SimpleNamespace(is_stream=True))  # type: ignore[arg-type]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    for name in ("monotonic", "time"):
        monkeypatch.setattr(f"kvferry.connector.spans.time.{name}", lambda: now[0])
    return now


def check_parts(record: Mapping[str, Any]) -> None:
    """Check that the parts follow each other without a gap and add up to the whole time."""
    end_ms = 0.0
    for part in record["parts"]:
        assert part["ms"] >= 0
        assert part["start_ms"] == pytest.approx(end_ms, abs=0.01)
        end_ms = part["start_ms"] + part["ms"]
    assert end_ms == pytest.approx(record["total_ms"], abs=0.01)


def times(record: Mapping[str, Any]) -> dict[str, float]:
    return {part["kind"]: part["ms"] for part in record["parts"]}


async def test_the_parts_of_a_request_add_up_to_its_time() -> None:
    one = await record([PREFILL], [DECODE])
    assert [part["kind"] for part in one["parts"] if part["kind"] != "routing"] == [
        *("queue", "prefill", "queue", "exposed", "decode")
    ]
    assert times(one)["exposed"] == 2.0
    assert times(one)["prefill"] > 15
    assert times(one)["decode"] > 10
    assert (one["prompt_tokens"], one["output_tokens"], one["status"], one["error"]) == (40, 7, 200, "")
    assert one["transfer"] == {"transport": "shm", "mechanism": "mapped", "bytes": 5000, "ms": 6.0}
    assert not any(part["includes"] for part in one["parts"])


@pytest.mark.parametrize("hop", ["nothing", "queue", "routing", "prefill", "exposed", "decode"])
def test_a_delay_lengthens_the_part_in_which_it_is_until_the_first_token(
    hop: str, clock: list[float]
) -> None:
    def passes(kind: str, seconds: float) -> float:
        seconds += 0.5 if kind == hop else 0.0
        clock[0] += seconds
        return seconds

    request = Watched()
    mark(request.record.span, admitted_s=passes("queue", 0.25))
    passes("routing", 0.125)
    request.observer.asks("prefill", "http://p")
    passes("prefill", 1.0)
    request.observer.prefill_answered({"metrics": {"queue_s": 0.0}})
    request.observer.asks("decode", "http://d")
    exposed_s = passes("exposed", 0.0625)
    passes("decode", 0.03125)
    request.stream_begins()
    passes("after the first token", 7.0)
    transfer = {"seconds": exposed_s, "exposed_seconds": exposed_s}
    metrics = {"queue_s": 0.0, "num_loaded_tokens": 9, "transfer": transfer}
    request.observer.decode_reported([Event.of({"metrics": metrics})])
    request.observer.ended(200)
    expected = {"queue": 0.25, "routing": 0.125, "prefill": 1.0, "exposed": 0.0625, "decode": 0.03125}
    expected |= {hop: expected[hop] + 0.5} if hop in expected else {}
    view = View(request.record)
    parts = view.first_token_parts()
    assert {part.kind: part.seconds for part in parts} == expected
    assert sum(part.seconds for part in parts) == view.first_token_s == sum(expected.values())


class TestALostCall:
    def test_is_time_of_its_node(self, clock: list[float]) -> None:
        request = Watched()
        request.observer.asks("prefill", "http://p")
        clock[0] += 4.0
        request.observer.happened("prefill lost", None)
        clock[0] += 0.5
        request.asks_alone("http://d")
        clock[0] += 0.25
        request.stream_begins()
        parts = [(part.kind, part.node, part.seconds) for part in View(request.record).first_token_parts()]
        assert parts == [("lost", "http://p", 4.0), ("routing", "", 0.5), ("decode", "http://d", 0.25)]

    def test_keeps_the_first_token_that_the_client_has(self, clock: list[float]) -> None:
        request = Watched()
        for node in ("http://a", "http://b"):
            request.asks_alone(node)
            clock[0] += 1.0
            request.stream_begins()
            request.observer.sends(1)
            clock[0] += 2.0
            request.observer.happened("decode lost", None)
            clock[0] += 0.5
        request.observer.ended(502)
        view = View(request.record)
        assert view.first_token_s == 1.0
        (first,) = view.first_token_parts()
        assert (first.kind, first.node, first.seconds) == ("decode", "http://a", 1.0)
        parts = [(part.kind, part.node, part.seconds) for part in view.parts()]
        assert parts == [
            *(
                ("decode", "http://a", 3.0),
                ("routing", "", 0.5),
                ("decode", "http://b", 3.0),
                ("routing", "", 0.5),
            )
        ]

    def test_is_kept_while_there_are_few(self, clock: list[float]) -> None:
        request = Watched()
        for number in range(MAX_CALLS + 10):
            request.asks_alone(f"http://{number}")
            clock[0] += 1.0
            request.observer.happened("decode lost", None)
        request.observer.ended(502)
        parts = View(request.record).parts()
        # The first one is the router's: the calls that are forgotten.
        assert len(parts) == 1 + MAX_CALLS
        assert sum(part.seconds for part in parts) == MAX_CALLS + 10

    async def test_is_the_nodes_also_behind_a_real_router(self) -> None:
        class Breaks(Node):
            async def handle(self, request: web.Request) -> web.StreamResponse:
                await asyncio.sleep(0.2)
                assert request.transport is not None
                request.transport.abort()
                return await super().handle(request)

        one = await record([Breaks()], [DECODE], decode_alone="always")
        (lost,) = [part for part in one["parts"] if part["kind"] == "lost"]
        assert lost["node"].startswith("http://")
        assert lost["ms"] >= 199


async def test_a_stream_counts_in_the_percentiles_of_the_last_minutes() -> None:
    decode = Node(*[{"choices": [{"text": "x"}]}] * 4, is_stream=True, wait_s=0.05)
    async with routed([PREFILL], [decode]) as client:
        async with client.post("/v1/completions", json={"prompt": "p", "stream": True}) as answer:
            await answer.read()
        latencies = (await (await client.get("/page/state")).json())["latencies"]
    assert (
        latencies["first"]["all"][0] >= 60
    )  # the prefill node waited 20 ms, and percentiles may be 5 % lower
    assert latencies["next"]["all"][-1] >= 40
    assert sum(slot is not None for slot in latencies["next"]["slots"]) in (1, 2)


async def test_in_a_rendezvous_a_part_of_the_transfer_is_hidden_by_the_prefill() -> None:
    prefill = Node({"kv_transfer_params": PARAMS, "metrics": PREFILL_METRICS}, wait_s=0.04)
    decode = Node({"choices": []}, {"metrics": DECODE_METRICS}, is_stream=True, wait_s=0.04)
    let_rendezvous(prefill, decode)
    one = await record([prefill], [decode])
    assert one["hidden"]["ms"] == 4.0
    exposed = next(part for part in one["parts"] if part["kind"] == "exposed")
    assert one["hidden"]["start_ms"] + 4.0 == pytest.approx(exposed["start_ms"], abs=0.01)
    assert one["first_token_ms"] < one["total_ms"]


async def test_nodes_that_report_no_figures_get_parts_that_say_what_they_include() -> None:
    usage = {"prompt_tokens": 40, "completion_tokens": 7}
    one = await record(
        [Node({"kv_transfer_params": PARAMS, "usage": usage})], [Node({"choices": [], "usage": usage})]
    )
    includes = {part["kind"]: part["includes"] for part in one["parts"] if part["kind"] != "routing"}
    assert includes == {"prefill": ["queue"], "decode": ["queue", "exposed"]}
    assert (one["prompt_tokens"], one["output_tokens"]) == (40, 7)


async def test_a_prompt_that_the_decode_node_computed_counts_as_prefill_there() -> None:
    metrics = {**DECODE_METRICS, "num_loaded_tokens": 0, "transfer": {"error": "the lease has ended"}}
    one = await record([PREFILL], [Node({"choices": [], "metrics": metrics})])
    last = [part for part in one["parts"] if part["kind"] == "prefill"][-1]
    assert last["node"] == one["decode"]
    assert one["error"] == "the lease has ended"


async def test_figures_that_no_honest_node_sends_change_no_sum() -> None:
    absurd = {"queue_s": 10**400, "ttft_s": -1, "num_output_tokens": "many", "num_loaded_tokens": True}
    transfer = {"seconds": 1e300, "exposed_seconds": 1e14, "transport": ["x"], "mechanism": "m" * 9999}
    answer = {"choices": [], "metrics": {**absurd, "transfer": transfer}, "usage": [1]}
    one = await record([Node({"kv_transfer_params": PARAMS, "metrics": 7})], [Node(answer)])
    assert one["output_tokens"] is None
    assert one["transfer"]["transport"] == ""
    assert len(one["transfer"]["mechanism"]) == MAX_ID_CHARS


@pytest.mark.parametrize("phase", ["prefill", "decode"])
async def test_a_request_that_fails_says_why(phase: str) -> None:
    async def refuse(request: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": "<b>no</b>" + "x" * 9999}}, status=400)

    node = Node()
    node.handle = refuse  # type: ignore[method-assign]
    nodes = ([node], [DECODE]) if phase == "prefill" else ([PREFILL], [node])
    one = await record(*nodes, request_id="i" * 999)
    assert one["status"] == 400
    assert one["error"].startswith("<b>no</b>")
    assert (len(one["error"]), len(one["id"])) == (MAX_ERROR_CHARS, MAX_ID_CHARS)


async def test_each_of_several_prompts_is_recorded() -> None:
    async with routed(
        [PREFILL], [Node({"choices": [{"index": 0, "text": "x"}], "metrics": DECODE_METRICS})]
    ) as client:
        headers = {"X-Request-Id": "r7"}
        body = {"prompt": ["a", "b"]}
        assert (await client.post("/v1/completions", json=body, headers=headers)).status == 200
        state = await (await client.get("/page/state")).json()
    found = {(one["id"], one["status"], one["output_tokens"]) for one in state["finished"]}
    assert found == {("r7-0", 200, 7), ("r7-1", 200, 7)}
    for one in state["finished"]:
        check_parts(one)


def test_pieces_of_a_stream_are_counted_and_its_longest_pause_is_shown(clock: list[float]) -> None:
    request = Watched()
    for after_s, num in ((5.0, 1), (0.1, 1), (0.7, 3), (0.2, 1)):
        clock[0] += after_s
        request.observer.sends(num)
    report = View(request.record).report(1)
    # The five seconds before the first piece are no pause.
    assert (report["pieces"], report["longest_pause_ms"]) == (6, 700.0)


def test_a_wait_for_a_turn_at_the_router_is_queue() -> None:
    span = Span("router", None, at=time.time() - 2.0)
    mark(span, admitted_s=1.5)
    (first, *_) = View(RequestRecord("r7", "/v1/completions", span)).parts()
    assert (first.kind, first.node, first.seconds) == ("queue", "", pytest.approx(1.5))


async def test_a_request_in_flight_is_shown_and_so_is_a_client_that_left() -> None:
    async with routed([PREFILL], [Node({}, wait_s=60.0)]) as client:
        asked = asyncio.create_task(client.post("/v1/completions", json={}, timeout=ClientTimeout(60)))
        while True:
            state = await (await client.get("/page/state")).json()
            if state["in_flight"] and state["in_flight"][0]["decode"]:
                break
        (one,) = state["in_flight"]
        assert (one["is_done"], state["num_in_flight"], state["last"]) == (False, 1, 0)
        check_parts(one)
        assert [node["in_flight"] for node in state["nodes"]] == [0, 1]
        asked.cancel()
        with suppress(asyncio.CancelledError):
            await asked
        while not (state := await (await client.get("/page/state")).json())["finished"]:
            pass
        assert (state["finished"][0]["status"], state["in_flight"]) == (499, [])
        assert sum(state["history"]["failed"]) == 1


async def test_an_answer_that_breaks_off_has_failed() -> None:
    broken = Node(*[{"choices": [{"index": 0, "text": "a", "finish_reason": None}]}] * 2, is_stream=True)
    async with routed([PREFILL], [broken]) as client:
        answer = await client.post("/v1/completions", json={"stream": True})
        assert (answer.status, b'"error"' in await answer.read()) == (200, True)
        state = await (await client.get("/page/state")).json()
    assert (state["finished"][0]["status"], sum(state["history"]["failed"])) == (502, 1)


def test_a_bounded_number_of_requests_is_kept_and_each_is_reported_once() -> None:
    recent = RecentRequests()
    for number in range(MAX_RECENT + 10):
        record = RequestRecord(str(number), "/v1/completions", Span("router", None))
        if number == MAX_RECENT + 8:
            last = recent.report(0)["last"]
        with recent.following(record):
            record.ended(200)
    whole = recent.report(0)
    assert [one["id"] for one in whole["finished"]] == [str(number) for number in range(10, MAX_RECENT + 10)]
    assert recent.report(last)["finished"] == whole["finished"][-2:]
    assert sum(whole["history"]["done"]) == MAX_RECENT + 10


class TestThePage:
    async def test_it_may_run_its_own_script_and_ask_its_own_router_and_nothing_else(self) -> None:
        async with routed([PREFILL], [DECODE]) as client:
            answer = await client.get("/")
            html = await answer.text()
            policy = dict(
                directive.strip().partition(" ")[::2]
                for directive in answer.headers["Content-Security-Policy"].split(";")
            )
        assert policy["default-src"] == "'none'"
        assert policy["connect-src"] == "'self'"
        for kind in ("script-src", "style-src"):
            assert re.fullmatch("'sha256-[A-Za-z0-9+/]{43}='", policy[kind])
        assert answer.content_type == "text/html"
        assert "http://www.w3.org" not in re.sub(r"createElementNS\([^,]*|xmlns='[^']*'", "", html)
        assert not re.search(
            r"\b(innerHTML|outerHTML|insertAdjacentHTML|document\.write|style=|onclick=)", html
        )
        assert not re.search(r"(src|href)=\"(?!#|data:)", html)

    @pytest.mark.parametrize("since", ["-1", "x", "9" * 20, "١"])
    async def test_a_wrong_since_is_refused(self, since: str) -> None:
        async with routed([PREFILL], [DECODE]) as client:
            answer = await client.get("/page/state", params={"since": since})
            assert answer.status == 400
            assert "since=" in (await answer.json())["error"]["message"]
