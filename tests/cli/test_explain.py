"""`kvferry explain`: how it joins what servers tell, and the spans that a server keeps."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import pytest

from kvferry.cli.errors import CommandError
from kvferry.cli.explain import ask
from kvferry.cli.main import main
from kvferry.connector.spans import (
    MAX_EVENTS,
    MAX_REQUESTS,
    MAX_SPANS,
    PART,
    RecentSpans,
    ServerSpans,
    Span,
    SpanRecord,
)
from kvferry.lab.engine.types import GenerationRequest, RequestMetrics, RequestOutput
from kvferry.lab.node.phases import Phases
from kvferry.router.seen.explain import Told, tell

METRICS = RequestMetrics(8, 1, 0, 7, 0, 0.25, None)
REQUEST = GenerationRequest("cmpl-x-12345678", (1, 2), kv_transfer_params={"do_remote_prefill": True})


def _output(finish_reason: Any, error: str = "") -> RequestOutput:
    return RequestOutput("cmpl-x-12345678", (1,), "a", finish_reason, error, None, METRICS)


def _spans_of(*outputs: RequestOutput, reason: str = "") -> dict[str, SpanRecord]:
    """Return the spans of a node whose engine gave these outputs."""
    kept: list[SpanRecord] = []
    with Span("node", kept.append, "x") as node:
        phases = Phases(REQUEST, node)
        for output in outputs:
            phases.observe(output)
        phases.end("the client left")
    assert {span.request_id for span in kept} == {"x"}
    return {span.name: span for span in kept}


def test_a_request_is_found_by_every_id_that_a_client_may_know() -> None:
    spans = RecentSpans()
    spans.keep(SpanRecord("a-b", "node", 1.0, 2.0))
    for wanted in ("a-b", "cmpl-a-b", "chatcmpl-a-b", "cmpl-a-b-12345678"):
        assert [span.request_id for span in spans.find(wanted)] == ["a-b"]
    assert spans.find("b") == spans.find("a") == ()


def test_an_answer_has_a_span_until_its_first_token_and_one_of_the_rest() -> None:
    spans = _spans_of(*map(_output, (None, None, "length")))
    assert list(spans) == ["load_and_first_token", "generate", "node"]
    first, rest = spans["load_and_first_token"], spans["generate"]
    assert first.start <= first.end == rest.start <= rest.end
    assert (rest.attributes["loaded_tokens"], rest.attributes["finish_reason"]) == (7, "length")
    assert spans["node"].attributes["phase"] == "decode"


def test_an_answer_that_fails_or_is_left_says_so() -> None:
    failed = _spans_of(_output("error", "the load failed"))
    assert failed["generate"].error == failed["node"].error == "the load failed"
    assert _spans_of(_output(None))["generate"].attributes["finish_reason"] == "the client left"


def test_spans_and_their_events_are_bounded_and_the_last_ones_of_a_request_are_kept() -> None:
    spans = RecentSpans()
    for number in range(MAX_REQUESTS + 1):
        spans.keep(SpanRecord(f"{number}", "node", 0.0, 1.0))
    assert len(spans.latest()) == MAX_REQUESTS
    assert spans.find("0") == ()
    for number in range(MAX_SPANS + 1):
        spans.keep(SpanRecord("1", f"{number}", 0.0, 1.0))
    kept = [span.name for span in spans.find("1")]
    assert (len(kept), kept[-1]) == (MAX_SPANS, f"{MAX_SPANS}")
    with Span("load", spans.keep, "2") as load:
        for _ in range(MAX_EVENTS + 1):
            load.note("progress")
    assert len(spans.find("2")[-1].events) == MAX_EVENTS


def test_spans_of_several_servers_are_told_in_the_order_of_their_times() -> None:
    def told(process: str, name: str, start: float, **more: Any) -> dict[str, Any]:
        span = SpanRecord("a/b", name, start, start + 0.2, **more)
        return dataclasses.asdict(ServerSpans(process, "e", (span,)))

    event = {"at": 1.15, "name": "claim parked", "reason": "r"}
    pages = {
        "http://r/nodes": {"nodes": [{"url": "http://d"}, {"url": "http://p/"}]},
        "http://r/admin/requests/a%2Fb": told("router", "router", 1.0),
        "http://p/admin/requests/a%2Fb": told("prefill", "grant", 1.1, events=(event,)),
        "http://d/admin/requests/a%2Fb": told("decode", "claim", 1.3, error="stale", attributes={"ranks": 2}),
    }

    def get(url: str, timeout_s: float, body: bytes = b"") -> str:
        if url in pages:
            return json.dumps(pages[url])
        raise CommandError('HTTP status 404: {"error": {"message": "no spans"}}')

    servers = ask("a/b", ["http://r", "http://x"], get)
    assert [server.error for server in servers] == ["", "", "", "no spans"]
    rows = [line.split() for line in tell("a/b", servers)]
    table = rows[rows.index(["starts", "at", "lasts", "where", "what"]) + 1 : -2]
    assert [[*row[:2], *(word for word in row[2:] if not set(word) <= set("=|"))] for row in table] == [
        ["0.0", "ms", "200.0", "ms", "router", "router"],
        ["100.0", "ms", "200.0", "ms", "prefill", "grant"],
        ["150.0", "ms", "prefill", "claim", "parked", "reason", "r"],
        ["300.0", "ms", "200.0", "ms", "decode", "claim", "failed:", "stale,", "ranks", "2"],
    ]
    bars = ["".join(word for word in row if set(word) <= set("=|")) for row in table]
    assert bars == ["=" * 10, "=" * 10, "|", "=" * 10]


def test_the_time_until_the_first_token_is_told_in_parts_that_add_up_to_it() -> None:
    def part(kind: str, seconds: Any, **more: Any) -> dict[str, Any]:
        return {
            "at": 1.5,
            "name": PART,
            "kind": kind,
            "node": "http://p",
            "seconds": seconds,
            "also": "",
            **more,
        }

    events = (
        *(part("routing", 0.01, node=""), part("prefill", 0.07, also="queue"), part("decode", 0.02)),
        # What no honest router says.
        *(part("decode", "long"), part("decode", -1.0), {"at": 1.5, "name": PART}),
    )
    span = SpanRecord("a", "router", 1.0, 2.0, events=events)
    lines = tell("a", [Told("http://r", "router", spans=(span,))])
    first = lines.index("the first token came after 100.0 ms:")
    assert [line.split() for line in lines[first + 1 : first + 4]] == [
        ["10.0", "ms", "10%", "==", "router"],
        f"70.0 ms 70% {'=' * 17} prompt, and queue, which its node does not tell apart http://p".split(),
        ["20.0", "ms", "20%", "=" * 5, "first", "step", "http://p"],
    ]
    assert not any(line.split()[-1:] == [PART] for line in lines)


def _told_of_calls(*calls: str, errors: Sequence[str] = (), **attributes: str) -> list[str]:
    """Return the account of a router that made these calls, in this order."""
    spans = [SpanRecord("a", "router", 1.0, 2.0, attributes)]
    for number, name in enumerate(calls):
        error = errors[number] if number < len(errors) else ""
        spans.append(
            SpanRecord("a", name, 1.1 + number / 10, 1.2 + number / 10, {"node": "http://n"}, error=error)
        )
    return tell("a", [Told("http://r", "router", spans=tuple(spans))])


@pytest.mark.parametrize(
    ("calls", "errors", "is_traced"),
    [
        (("decode_call",), (), True),
        (("prefill_call", "decode_call"), ("NodeGoneError: lost",), True),
        (("prefill_call", "decode_call"), (), False),
    ],
)
def test_only_for_a_handover_the_option_that_shows_its_reads_is_named(
    calls: Sequence[str], errors: Sequence[str], is_traced: bool
) -> None:
    text = "\n".join(_told_of_calls(*calls, errors=errors))
    assert ("nothing was handed over: the node that answered computed the prompt" in text) is is_traced
    assert ("trace=true" in text) is not is_traced


def test_a_node_that_was_asked_alone_says_that_nothing_was_handed_over() -> None:
    generate = SpanRecord("a", "generate", 1.0, 2.0, {"phase": "alone"})
    lines = tell("a", [Told("http://n", "node", spans=(SpanRecord("a", "node", 1.0, 2.0), generate))])
    assert "nothing was handed over" in "\n".join(lines)


def test_a_request_that_reached_no_node_is_told_without_advice() -> None:
    text = "\n".join(_told_of_calls())
    assert "trace=true" not in text
    assert "handed over" not in text


def test_the_choice_of_the_nodes_has_a_line_of_its_own() -> None:
    lines = _told_of_calls("decode_call", placement="local: the only way; first token 27 ms")
    assert [line for line in lines if "the only way" in line] == [
        "the router chose local: the only way; first token 27 ms (estimated)"
    ]


def test_a_lost_call_is_told_as_time_of_its_node() -> None:
    parts = (
        {"at": 5.0, "name": PART, "kind": "routing", "node": "", "seconds": 0.004},
        {"at": 5.0, "name": PART, "kind": "lost", "node": "http://p", "seconds": 3.916},
    )
    lines = tell(
        "a", [Told("http://r", "router", spans=(SpanRecord("a", "router", 1.0, 5.0, events=parts),))]
    )
    (line,) = [line for line in lines if "3916.0 ms" in line]
    assert "call of a node that was lost" in line
    assert line.endswith("http://p")


def test_what_a_router_cannot_tell_apart_is_told_by_the_spans_of_a_vllm_node() -> None:
    parts = (
        {"at": 2.0, "name": PART, "kind": "prefill", "node": "http://p", "seconds": 0.5, "also": "queue"},
        {
            "at": 2.0,
            "name": PART,
            "kind": "decode",
            "node": "http://d",
            "seconds": 0.3,
            "also": "queue, exposed",
        },
    )
    router = Told("http://r", "router", spans=(SpanRecord("a", "router", 1.0, 3.0, events=parts),))
    prefill = Told(
        "http://p", "vllm", spans=(SpanRecord("a", "queue", 1.1, 1.2), SpanRecord("a", "prefill", 1.2, 1.5))
    )
    # It waited for the load while the prompt was computed, of which the prefill node's part tells.
    waits = (SpanRecord("a", "queue", 1.05, 1.06), SpanRecord("a", "load_wait", 1.06, 1.7, error="gone"))
    lines = tell("a", [router, prefill, Told("http://d", "vllm", spans=waits)])
    assert "the load failed: gone" in "\n".join(lines)
    first = lines.index("the first token came after 800.0 ms:")
    told = [
        (line.split()[0], " ".join(line.replace("=", " ").split()[3:]))
        for line in lines[first + 1 : first + 5]
    ]
    assert told == [
        ("100.0", "queue http://p"),
        ("400.0", "prompt http://p"),
        ("200.0", "cache, what the prompt did not hide of it http://d"),
        ("100.0", "first step http://d"),
    ]


def test_a_url_without_its_scheme_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "a", "localhost:8000"]) == 2
    assert "did you mean 'http://localhost:8000'" in capsys.readouterr().err
