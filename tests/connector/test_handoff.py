"""The built-in connectors keep every promise of the conformance suite."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import pytest

from kvferry.connector.p2p.options import ConnectorOptions
from kvferry.connector.testing import (
    HandoffConformance,
    MakeNode,
    Request,
    load,
)
from kvferry.connector.testing.harness import compute, fetch, node_maker, settle
from kvferry.transports.errors import ConfigurationError
from kvferry.transports.registry import BUILT_IN
from kvferry.transports.testing import built_in

#: Built-in connectors differ only in their transport, which has a suite of its own. So `make test` drives one
#: that maps memory, and one that sends messages. `make test ALL=1` also drives one that copies in one
#: process, and `make test-transports` these others.
OTHERS = set(BUILT_IN) - set(os.environ.get("CONNECTORS", "shm zeromq").split())
IN_ONE_PROCESS = [] if "CONNECTORS" in os.environ else [pytest.param("inproc", marks=pytest.mark.full)]


class TestOurs(HandoffConformance):
    @pytest.fixture(params=[*built_in(without=OTHERS), *IN_ONE_PROCESS])
    def transfer(self, request: pytest.FixtureRequest) -> Mapping[str, Any]:
        # No test here is about silence, and the I/O threads of a busy machine may be silent for a second.
        patient = (
            {"transport_options": {"peer_timeout_s": 20.0}}
            if request.param in ("tcp", "ucx", "zeromq")
            else {}
        )
        return {"kv_connector": request.param, "kv_connector_extra_config": patient}

    def test_the_mechanism_that_moved_the_bytes_is_named(
        self, make_node: MakeNode, transfer: Mapping[str, Any]
    ) -> None:
        producer, consumer = make_node(), make_node()
        load(consumer, producer, Request("d", 18, producer.prefill("p", 18)[1]))
        (record,) = consumer.stats.transfers
        name = transfer["kv_connector"]
        chosen = ("shm", "on this host") if name == "auto" else (name, "")
        assert (record.transport, record.reason) == chosen

    def test_two_nodes_load_one_offer(self, make_node: MakeNode) -> None:
        producer, *consumers = make_node(), make_node(), make_node()
        params = compute(producer, Request("p", 18, {"do_remote_decode": True, "num_loads": 2}))
        for consumer in consumers:
            assert producer.held
            fetch(consumer, producer, Request("d", 18, params))
        settle(producer, *consumers)


@pytest.mark.parametrize(
    ("transport", "required", "refused"),
    [
        ("auto", ["shm"], ""),
        ("auto", ["ucx:rc*", "zeromq"], "'shm' (on this host)"),
        ("zeromq", ["shm", "zeromq"], ""),
        ("zeromq", ["shm"], "'zeromq'"),
        ("ucx", ["ucx:rc*+tcp"], ""),
        ("ucx", ["shm", "ucx:rc*"], "'ucx:tcp'"),
    ],
)
def test_a_node_reads_from_no_peer_that_it_reaches_in_another_way_than_is_required(
    transport: str, required: list[str], refused: str
) -> None:
    if transport == "ucx":
        pytest.importorskip("ucxx", reason="ucxx is not installed")
    config = {"kv_connector": transport, "kv_connector_extra_config": {"require_transport": required}}
    with node_maker(config, 30.0) as make:
        producer, consumer = make(), make()
        load(consumer, producer, Request("d", 18, producer.prefill("p", 18)[1]))
        (record,) = consumer.stats.transfers
        assert bool(record.error) == bool(refused)
        if refused:
            assert f"the peer is reached by {refused}: repair the faster network" in record.error
            assert not record.num_bytes


def test_an_unknown_transport_that_is_required_ends_the_start() -> None:
    with pytest.raises(ConfigurationError, match="'ucxx': did you mean 'ucx'") as caught:
        ConnectorOptions.from_mapping({"require_transport": ["shm", "ucxx:rc"]})
    assert caught.value.key == "require_transport"
