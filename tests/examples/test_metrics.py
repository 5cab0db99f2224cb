"""Metrics: declared once, the same for every host, named by Prometheus' conventions, and listed in
`docs/observing.md`.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvferry.connector.stats import COUNTERS, METRICS, KVConnectorStats, TransferRecord
from kvferry.lab.engine.types import EngineStats, EngineTotals, RequestMetrics, RequestOutput
from kvferry.lab.node.metrics import MeasuredRequest, NodeMetrics
from kvferry.router.answer.handoffs import Handoffs
from kvferry.router.nodes.pool import UpstreamNode
from kvferry.router.seen.metrics import RouterMetrics
from tests.support.metrics_page import assert_promtool_is_content, declared, with_rows

DOCS = Path(__file__).parents[2] / "docs" / "observing.md"
RECORD = TransferRecord("a", "shm", "mapped", "uniform", 5, 1, 9, 4096, 0.25)


@pytest.fixture
def node_page() -> str:
    """Return the page of a node that has done everything once."""
    stats = EngineStats(
        healthy=True, num_blocks=60, totals=EngineTotals(num_finished={"stop": 2, "abort": 1})
    )
    metrics = NodeMetrics(lambda: stats)
    figures = RequestMetrics(9, 1, 0, 0, 0, 0.1, RECORD)
    request = MeasuredRequest(metrics)
    for reason in (None, "stop"):
        request.observe(RequestOutput("a", (1,), "a", reason, "", None, figures))
    metrics.observe_handoffs(KVConnectorStats((RECORD,), dict.fromkeys(COUNTERS, 1)))
    return metrics.text().decode()


@pytest.fixture
def router_page() -> str:
    """Return the page of a router that has counted everything once."""
    handoffs = Handoffs()
    handoffs.pairs["http://p", "http://d"].counts["loaded"] += 1
    metrics = RouterMetrics(lambda: [UpstreamNode("prefill", "http://p")], handoffs)
    metrics.requests.labels("200").inc()
    for fact in metrics.facts:
        metrics.facts[fact].inc()
    metrics.note_piece("in_turn", 0.1, None)
    metrics.note_piece("in_turn", 0.2, 0.1)
    return metrics.text().decode()


def test_a_node_exports_every_metric_of_the_table(node_page: str) -> None:
    shown = declared(node_page)
    for metric in METRICS:
        found = shown[metric.name]
        assert (found.kind, found.text) == (metric.kind, metric.text)
        assert found.labels == tuple(sorted(metric.labels))


def test_a_node_exports_every_number_of_its_engine(node_page: str) -> None:
    assert "kvferry_engine_blocks 60.0" in node_page
    assert 'kvferry_engine_finished_requests_total{reason="stop"} 2.0' in node_page
    assert "kvferry_engine_healthy 1.0" in node_page


def test_names_follow_prometheus_conventions(node_page: str, router_page: str) -> None:
    assert_promtool_is_content(node_page)
    assert_promtool_is_content(router_page)


def test_the_page_in_docs_is_what_the_code_declares(node_page: str, router_page: str) -> None:
    """`make format` sets the variable, and so writes the rows of the page."""
    written = DOCS.read_text()
    expected = with_rows(written, declared(node_page) | declared(router_page))
    if "KVFERRY_WRITE_DOCS" in os.environ:
        DOCS.write_text(expected)
    else:
        assert written.splitlines() == expected.splitlines(), "docs/observing.md: run `make format`"
