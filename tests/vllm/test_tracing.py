"""Spans of a handoff between vLLM nodes, which leave through the exporter that vLLM sets up."""

from __future__ import annotations

import pytest

from tests.support.collector import collecting

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TRACE, ROUTER_SPAN = "4" * 32, "7" * 16


def test_spans_of_both_nodes_are_in_the_trace_of_the_params(start_module_pair, prompt, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    with collecting() as collector:
        pair = start_module_pair(extra={"transport": "shm"}, otlp_traces_endpoint=collector.url)
        wish = {"do_remote_decode": True, "traceparent": f"00-{TRACE}-{ROUTER_SPAN}-01"}
        offered = pair.prefill.ask("p", prompt(100), params=wish)["params"]
        pair.decode.ask("d", prompt(100), 2, offered)
        pair.prefill.wait_for_status(lambda status: status["num_requests"] == 0)
        for node in (pair.prefill, pair.decode):
            node.close()  # vLLM exports what is left when the process ends
    spans = {span.name: span for span in collector.spans if span.trace_id == TRACE}
    assert {"kvferry.offer", "kvferry.grant", "kvferry.claim", "kvferry.load", "kvferry.read"} <= set(spans)
    assert spans["kvferry.grant"].parent_id == spans["kvferry.claim"].span_id
    assert spans["kvferry.offer"].parent_id == spans["kvferry.load"].parent_id == ROUTER_SPAN
    assert spans["kvferry.load"].attributes["kvferry.outcome"] == "loaded"
