"""The built-in connectors keep every promise of the conformance suite."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import pytest

from kvferry.connector.testing import (
    HandoffConformance,
    MakeNode,
    Request,
    load,
)
from kvferry.connector.testing.harness import compute, fetch, settle
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
