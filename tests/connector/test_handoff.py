"""Each built-in connector keeps every promise of the conformance suite."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from kvferry.connector.testing import (
    ConnectorConformance,
    HandoffConformance,
    MakeNode,
    Request,
    load,
)
from kvferry.transports.testing import built_in


class TestOurs(HandoffConformance):
    @pytest.fixture(params=built_in())
    def transfer(self, request: pytest.FixtureRequest) -> Mapping[str, Any]:
        return {"kv_connector": request.param}

    def test_the_mechanism_that_moved_the_bytes_is_named(
        self, make_node: MakeNode, transfer: Mapping[str, Any]
    ) -> None:
        producer, consumer = make_node(), make_node()
        load(consumer, producer, Request("d", 18, producer.prefill("p", 18)[1]))
        (record,) = consumer.stats.transfers
        name = transfer["kv_connector"]
        chosen = ("shm", "on this host") if name == "auto" else (name, "")
        assert (record.transport, record.reason) == chosen


class TestSeveralInOne(ConnectorConformance):
    @pytest.fixture
    def transfer(self) -> Mapping[str, Any]:
        children = [{"kv_connector": "shm"}, {"kv_connector": "zeromq"}]
        return {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": children}}
