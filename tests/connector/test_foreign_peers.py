"""Addresses that a node cannot connect to: of another transport, too many of them, or without a node."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from kvferry.connector.testing import CacheShape, ModelFreeNode, Request, assert_whole, engine_config, load
from kvferry.connector.testing.harness import begin_load

#: Far below any deadline, and far more than a busy machine needs.
AT_ONCE_S = 8.0


class Nodes(ExitStack):
    """Makes nodes, and closes them at the end."""

    def make(self, connector: str, **options: Any) -> ModelFreeNode:
        config = engine_config(connector, kv_connector_extra_config=options)
        return self.enter_context(ModelFreeNode(config, CacheShape()))


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    with Nodes() as nodes:
        yield nodes


def address_of(node: ModelFreeNode) -> str:
    return node.worker.get_handshake_metadata().address  # type: ignore[union-attr]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("here", "there"), [("zeromq", "shm"), ("shm", "zeromq"), ("auto", "shm"), ("zeromq", "auto")]
)
def test_a_peer_of_another_transport_fails_each_load_at_once_and_is_warned_about_once(
    here: str, there: str, nodes: Nodes, caplog: pytest.LogCaptureFixture
) -> None:
    consumer, producer = nodes.make(here), nodes.make(there)
    began = time.monotonic()
    for number in range(5):
        _, params = producer.prefill(f"p{number}", 9)
        request = Request(f"d{number}", 9, params)
        load(consumer, producer, request)
        consumer.finish(request.request_id, "error")
    assert time.monotonic() - began < AT_ONCE_S  # no request waits for the backoff after a failed connection
    for said in (consumer.load_error("d0"), consumer.load_error("d4"), consumer.worker.warning):
        assert repr(address_of(consumer)) in said
        assert repr(address_of(producer)) in said
        assert "use the same connector on both nodes, or 'auto'" in said
    assert len(warnings(caplog)) == 1
    assert consumer.stats.counters["unreachable_peers_total"] == 5
    assert consumer.worker.failure == ""
    assert_whole(consumer)


def test_a_malformed_address_of_the_own_transport_is_not_taken_for_another_transport(nodes: Nodes) -> None:
    consumer, producer = nodes.make("zeromq"), nodes.make("zeromq")
    _, params = producer.prefill("p", 9)
    request = Request("d", 9, {**(params or {}), "remote_addresses": ["zeromq://nowhere"]})
    load(consumer, producer, request)
    consumer.finish(request.request_id, "error")
    assert "zeromq://nowhere" in consumer.load_error("d")
    assert consumer.worker.warning == ""


@pytest.mark.parametrize("connector", ["inproc", "shm", "zeromq"])
@pytest.mark.parametrize("num_addresses", [350, 64])
def test_forged_addresses_fail_one_request(connector: str, num_addresses: int, nodes: Nodes) -> None:
    """More addresses than a node may have, or exactly as many: meanwhile other requests are handed over."""
    consumer, producer = nodes.make(connector, connect_timeout_s=2.0), nodes.make(connector)
    offered, params = producer.prefill("p", 9, seed=1)
    expected = producer.contents(offered)
    _, forged = producer.prefill("forged", 9)
    names = {"inproc": "inproc://{}", "shm": "shm://@kvferry-test-{}", "zeromq": "zeromq://127.0.0.1:{}"}
    addresses = [names[connector].format(number) for number in range(1, num_addresses + 1)]
    request = Request(
        "forged", 9, {**(forged or {}), "remote_addresses": addresses, "tp_size": num_addresses}
    )
    begin_load(consumer, request)
    honest = Request("d", 9, params)
    blocks = load(consumer, producer, honest)
    assert consumer.load_error("d") == ""
    assert torch.equal(consumer.contents(blocks), expected)
    consumer.step_until(lambda: consumer.num_reports("forged", "recving") > 0, producer)
    consumer.finish(request.request_id, "error")
    consumer.finish(honest.request_id, "stop")
    assert ("max_peer_ranks" in consumer.load_error("forged")) == (num_addresses > 64)
    assert consumer.load_error("forged") != ""
    assert consumer.worker.failure == ""
    assert_whole(consumer)
