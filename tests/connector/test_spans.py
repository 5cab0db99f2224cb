"""OpenTelemetry spans of a handoff, as the SDK's own exporter receives them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest

from kvferry.connector.spans import active_tracer
from kvferry.connector.testing import CacheShape, ModelFreeNode, Request, engine_config, load, settle

sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="OpenTelemetry's SDK is not installed")

TRACE = "5" * 32
PARENT = "6" * 16
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The host has set up the SDK; its exporter keeps the spans in memory."""
    from opentelemetry import trace
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    provider, exporter = sdk.TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    # Not `set_tracer_provider`, which works once per process.
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    yield exporter
    provider.shutdown()


def _hand_over(params: dict[str, Any]) -> dict[str, Any]:
    """Hand one prompt over between two nodes; return the params that the producer gave."""
    config, shape = engine_config("inproc"), CacheShape()
    with ModelFreeNode(config, shape) as producer, ModelFreeNode(config, shape) as consumer:
        producer.add(Request("p", 18, {"do_remote_decode": True, **params}))
        producer.step_until(lambda: not producer.is_running("p"))
        offered = producer.params["p"]
        assert offered is not None
        load(consumer, producer, Request("d", 18, offered))
        settle(producer)
    return offered


def test_the_spans_of_both_halves_form_one_tree(exported: Any) -> None:
    offered = _hand_over({"traceparent": TRACEPARENT})
    assert offered["traceparent"] == TRACEPARENT
    spans = {span.name.removeprefix("kvferry."): span for span in exported.get_finished_spans()}
    assert set(spans) == {"offer", "grant", "claim", "load", "read"}
    assert {f"{span.context.trace_id:032x}" for span in spans.values()} == {TRACE}
    ids = {span.context.span_id: name for name, span in spans.items()} | {int(PARENT, 16): "request"}
    assert {name: ids[span.parent.span_id] for name, span in spans.items()} == {
        "offer": "request",
        "grant": "claim",
        "claim": "request",
        "load": "request",
        "read": "load",
    }
    assert all(span.start_time <= span.end_time for span in spans.values())
    attributes = {name: dict(span.attributes) for name, span in spans.items()}
    assert attributes["offer"]["kvferry.outcome"] == "delivered"
    assert attributes["grant"]["kvferry.outcome"] == attributes["claim"]["kvferry.outcome"] == "granted"
    assert attributes["read"]["kvferry.guard"] == "held"
    done = attributes["load"]
    assert (done["kvferry.outcome"], done["kvferry.mechanism"]) == ("loaded", "memory")
    assert done["kvferry.bytes"] == attributes["read"]["kvferry.bytes"] > 0
    assert done["kvferry.blocks"] > 0
    assert done["kvferry.exposed_seconds"] >= 0
    assert {span.status.status_code.name for span in spans.values()} == {"UNSET"}


def test_a_request_without_a_trace_begins_its_own(exported: Any) -> None:
    _hand_over({"traceparent": "garbage"})
    spans = exported.get_finished_spans()
    assert {span.name: span.parent is None for span in spans}["kvferry.offer"]
    assert TRACE not in {f"{span.context.trace_id:032x}" for span in spans}


def test_a_load_that_fails_is_an_error(exported: Any) -> None:
    config, shape = engine_config("inproc"), CacheShape()
    with ModelFreeNode(config, shape) as producer, ModelFreeNode(config, shape) as consumer:
        _, params = producer.prefill("p", 18)
        stale = {**params, "remote_epoch": "1"}
        load(consumer, producer, Request("d", 18, stale))
    (failed,) = (span for span in exported.get_finished_spans() if span.name == "kvferry.load")
    assert failed.status.status_code.name == "ERROR"
    assert "restarted" in failed.status.description


def test_a_host_without_the_sdk_imports_nothing_of_opentelemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("opentelemetry")]:
        monkeypatch.delitem(sys.modules, name)
    assert active_tracer() is None
    _hand_over({"traceparent": TRACEPARENT})
    assert not [name for name in sys.modules if name.startswith("opentelemetry")]
