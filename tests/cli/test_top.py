"""`kvferry top`: what it makes of the metrics of nodes."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvferry.cli.main import main
from kvferry.cli.metrics_page import MetricsPage
from kvferry.cli.top import Scrape, Watch, table, view_of
from kvferry.connector.stats import HandoffMetrics, KVConnectorStats, TransferRecord


class Node:
    """A node's page of metrics, made by the class that every host uses."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()

        def kind(of: Callable[..., object]) -> Callable[..., object]:
            return lambda **options: of(**options, registry=self._registry)

        self._metrics = HandoffMetrics(kind(Counter), kind(Histogram), kind(Gauge))

    def load(self, num_bytes: int, seconds: float, exposed_seconds: float) -> None:
        record = TransferRecord(
            request_id="r",
            transport="shm",
            mechanism="mapped",
            layout="uniform",
            num_blocks=1,
            num_regions=1,
            num_regions_per_layer=1,
            num_bytes=num_bytes,
            seconds=seconds,
            exposed_seconds=exposed_seconds,
        )
        self._metrics.observe(KVConnectorStats((record,)))

    def count(self, key: str) -> None:
        self._metrics.observe(KVConnectorStats(counters={key: 1}))

    def text(self) -> str:
        return generate_latest(self._registry).decode()

    def scrape(self, at: float) -> Scrape:
        return Scrape(at, MetricsPage(self.text()))


def test_rates_and_means_are_those_of_the_interval() -> None:
    node = Node()
    node.load(5_000_000, 9.0, 9.0)
    before = node.scrape(10.0)
    node.load(1_000_000_000, 0.002, 0.001)
    node.load(3_000_000_000, 0.004, 0.001)
    node.count("offers_expired_total")
    view = view_of("http://node", before, node.scrape(12.0))
    assert view.loads_per_s == pytest.approx(1.0)
    assert view.gb_per_s == pytest.approx(2.0)
    assert view.load_ms == pytest.approx(3.0)
    assert view.exposed_ms == pytest.approx(1.0)
    assert (view.failed_loads, view.expired_leases, view.new_failures) == (0, 1, 1)
    assert view.by_transport == {"shm:mapped": pytest.approx(2.0)}
    assert "shm:mapped 2.00 GB/s" in "\n".join(table([view]))


def test_a_node_without_a_load_transfers_nothing() -> None:
    node = Node()
    view = view_of("http://node", node.scrape(1.0), node.scrape(2.0))
    assert (view.loads_per_s, view.gb_per_s, view.load_ms, view.error) == (0, 0, None, "")
    assert view.live_leases == 0


def test_a_restarted_node_does_not_transfer_backwards() -> None:
    old, new = Node(), Node()
    old.load(9_000_000_000, 1.0, 1.0)
    new.load(1_000_000_000, 1.0, 1.0)
    view = view_of("http://node", old.scrape(1.0), new.scrape(2.0))
    assert view.gb_per_s == pytest.approx(1.0)


def test_a_router_stands_for_its_nodes() -> None:
    router = 'kvferry_router_node_healthy{role="prefill",url="http://a:1"} 1.0\n'
    router += 'kvferry_router_node_healthy{role="decode",url="http://b:2/"} 0.0\n'
    pages = {"http://router/metrics": router, "http://a:1/metrics": Node().text(), "http://b:2/metrics": ""}
    views = Watch(["http://router"], lambda url, timeout_s: pages[url]).look()
    assert [view.url for view in views] == ["http://a:1", "http://b:2"]
    assert "nothing of kvferry" in views[1].error


def test_values_are_read_as_prometheus_writes_them() -> None:
    page = MetricsPage('# HELP a b\na{x="1,\\"}",y="z"} 1e3 170000\na{x="2"} 5\nb NaN-not\nc +Inf\n')
    assert page.total("a") == 1005
    assert page.samples("a")[0].labels == {"x": '1,"}', "y": "z"}
    assert (page.total("b"), page.total("c")) == (None, float("inf"))


@pytest.fixture
def url() -> Iterator[str]:
    """A server whose `/metrics` is a node's."""
    text = Node().text().encode()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/metrics" else 404)
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *args: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_one_interval_names_a_node_that_does_not_answer(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    once = ["--once", "--json", "--interval", "0.01"]
    assert main(["top", f"{url}/", *once]) == 0
    assert json.loads(capsys.readouterr().out)[0]["failed_loads"] == 0
    assert main(["top", url, "http://127.0.0.1:1", *once]) == 1
    assert "refused" in json.loads(capsys.readouterr().out)[1]["error"]


def test_a_url_without_its_scheme_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "localhost:8000"]) == 2
    assert "did you mean 'http://localhost:8000'" in capsys.readouterr().err
