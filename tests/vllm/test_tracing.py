"""Spans of a handoff between vLLM nodes, which leave through the exporter that vLLM sets up."""

from __future__ import annotations

import pytest

from tests.support.client import wait_until
from tests.support.collector import collecting

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NAMES = {f"kvferry.{name}" for name in ("offer", "grant", "claim", "load", "read")}
TRACE, ROUTER_SPAN = "4" * 32, "7" * 16


@pytest.fixture(scope="module")
def collector():
    with collecting() as collector:
        yield collector


@pytest.fixture(scope="module")
def running_pair(collector, start_module_pair):
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
        environment.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")  # milliseconds
        return start_module_pair(extra={"transport": "shm"}, otlp_traces_endpoint=collector.url)


def test_spans_of_both_nodes_are_in_the_trace_of_the_params(pair, collector, prompt):
    wish = {"do_remote_decode": True, "traceparent": f"00-{TRACE}-{ROUTER_SPAN}-01"}
    offered = pair.prefill.ask("p", prompt(100), params=wish)["params"]
    pair.decode.ask("d", prompt(100), 2, offered)
    wait_until(lambda: {span.name for span in collector.spans} >= NAMES, timeout_s=20)
    spans = {span.name: span for span in collector.spans if span.trace_id == TRACE}
    assert set(spans) >= NAMES
    assert spans["kvferry.grant"].parent_id == spans["kvferry.claim"].span_id
    assert spans["kvferry.offer"].parent_id == spans["kvferry.load"].parent_id == ROUTER_SPAN
    assert spans["kvferry.load"].attributes["kvferry.outcome"] == "loaded"
