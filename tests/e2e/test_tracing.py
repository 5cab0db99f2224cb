"""Traces and logs of a request over router, prefill node and decode node, as real processes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvferry.lab.servers import LaunchedProcess, Launcher
from tests.support.client import DO_REMOTE_DECODE, Client
from tests.support.collector import CollectedSpan, collecting

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="kvferry[otel] is not installed")

pytestmark = pytest.mark.full

#: A client's own span, as it sends it to the router.
TRACE, CLIENT_SPAN = "4" * 32, "7" * 16
HEADERS = {"traceparent": f"00-{TRACE}-{CLIENT_SPAN}-01", "X-Request-Id": "told-by-the-client"}
PROMPT = "Tell me where this request has been. " * 8

#: Name of each span of a handed over request → name of its parent.
TREE = {
    ("router", "kvferry.router"): ("", ""),
    ("router", "kvferry.queue"): ("router", "kvferry.router"),
    ("router", "kvferry.prefill_call"): ("router", "kvferry.router"),
    ("router", "kvferry.decode_call"): ("router", "kvferry.router"),
    ("prefill", "kvferry.node"): ("router", "kvferry.prefill_call"),
    ("prefill", "kvferry.prefill"): ("prefill", "kvferry.node"),
    ("prefill", "kvferry.generate"): ("prefill", "kvferry.node"),
    ("prefill", "kvferry.offer"): ("prefill", "kvferry.node"),
    ("prefill", "kvferry.grant"): ("decode", "kvferry.claim"),
    ("decode", "kvferry.node"): ("router", "kvferry.decode_call"),
    ("decode", "kvferry.claim"): ("decode", "kvferry.node"),
    ("decode", "kvferry.load"): ("decode", "kvferry.node"),
    ("decode", "kvferry.read"): ("decode", "kvferry.load"),
    ("decode", "kvferry.load_and_first_token"): ("decode", "kvferry.node"),
    ("decode", "kvferry.generate"): ("decode", "kvferry.node"),
}


def _ended(process: LaunchedProcess) -> str:
    """Stop a process as a service manager would; return its log. By then it has sent its last spans."""
    process.terminate()
    process.wait(30)
    return process.log_tail


@pytest.fixture
def told(
    launcher: Launcher, tiny_single_arguments: Sequence[str]
) -> Iterator[tuple[list[CollectedSpan], dict[str, list[dict[str, Any]]]]]:
    """The spans and logs of one request through a router, and of one whose decode node was called without
    headers.
    """
    with collecting() as collector:
        observed = (
            *("--otlp-traces-endpoint", collector.url, "--log-format", "json", "--log-level", "info"),
        )
        nodes = [
            launcher.start_node(role, role, *tiny_single_arguments, *observed)
            for role in ("prefill", "decode")
        ]
        launcher.wait_listening(nodes, 110)
        router = launcher.start_router("router", nodes[:1], nodes[1:], *observed)
        launcher.wait_ready([*nodes, router], 110)
        client = Client(router)
        with client.requesting("/v1/completions", {"prompt": PROMPT, "max_tokens": 4}, HEADERS) as answer:
            assert answer.status == 200
            assert json.loads(answer.read())["metrics"]["transfer"]["num_blocks"] > 0
        # Another control plane passes the params on as they are, and no header.
        wish = {**DO_REMOTE_DECODE, "traceparent": f"00-{'3' * 32}-{CLIENT_SPAN}-01"}
        offered = Client(nodes[0]).complete(PROMPT[::-1], max_tokens=1, kv_transfer_params=wish)
        params = offered.body["kv_transfer_params"]
        Client(nodes[1]).complete(PROMPT[::-1], max_tokens=2, kv_transfer_params=params)
        logs = {process.name: _ended(process) for process in (router, *nodes)}
        yield (
            collector.spans,
            {
                name: [json.loads(line) for line in log.splitlines() if line.startswith("{")]
                for name, log in logs.items()
            },
        )


def test_one_request_is_one_trace_and_its_logs_name_it(
    told: tuple[list[CollectedSpan], dict[str, list[dict[str, Any]]]],
) -> None:
    spans, logs = told
    ours = [span for span in spans if span.trace_id == TRACE]
    names = {span.span_id: (span.service.removeprefix("kvferry-"), span.name) for span in ours}
    names[CLIENT_SPAN] = ("", "")
    assert {names[span.span_id]: names[span.parent_id] for span in ours} == TREE
    # The prompt crosses while it is computed, so there are several reads; of the others there is one each.
    assert len([span for span in ours if span.name != "kvferry.read"]) == len(TREE) - 1
    assert not any(span.is_error for span in ours)
    load = next(span.attributes for span in ours if span.name == "kvferry.load")
    assert load["kvferry.mechanism"] == "mapped"
    assert load["kvferry.outcome"] == "loaded"
    assert min(load["kvferry.bytes"], load["kvferry.blocks"]) > 0
    assert load["kvferry.exposed_seconds"] >= 0

    # Without headers, `kvferry_transfer_params` carry the trace.
    passed_on = {(span.service, span.name) for span in spans if span.trace_id == "3" * 32}
    assert {("kvferry-prefill", "kvferry.offer"), ("kvferry-decode", "kvferry.load")} <= passed_on

    # Nothing failed, so no line reads as if something had.
    lines = [line for name in logs for line in logs[name]]
    assert {line["level"] for line in lines} <= {"info"}, lines
    assert all(line["program"] in ("router", "prefill", "decode") for line in lines)
    assert all(line["time"].endswith("Z") and line["logger"] and line["message"] for line in lines)
    about = [line for line in lines if line.get("request_id") == "told-by-the-client"]
    assert {line["program"] for line in about} == {"router", "prefill", "decode"}
    assert {line["trace_id"] for line in about} == {TRACE}


def test_an_endpoint_without_opentelemetry_is_a_clear_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from kvferry.router.http import tracing
    from kvferry.router.http.serving import StartupError

    monkeypatch.setattr(tracing, "_NEEDED", ("opentelemetry_is_not.installed",))
    # This is undone afterwards, whatever the call sets.
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "")
    with pytest.raises(StartupError, match=r"is not installed; run `pip install '\.\[otel\]'`"):
        tracing.set_up_tracing("http://127.0.0.1:4318/v1/traces", "router")
