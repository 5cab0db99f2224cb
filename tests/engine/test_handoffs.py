"""The scheduler's side of a connector, by itself."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import pytest

from kvferry.connector import InProcConnector, KVConnectorRole
from kvferry.connector.kv_cache_specs import KVCacheConfig
from kvferry.connector.output import KVConnectorOutput
from kvferry.connector.testing import engine_config
from reference.engine.handoffs import Handoffs


class Chronicler(InProcConnector):
    """Has something to tell once."""

    events: Iterable[str] = ("block 7 arrived",)

    def take_events(self) -> Iterable[str]:
        events, self.events = self.events, ()
        return events


def test_what_a_connector_tells_is_taken(caplog: pytest.LogCaptureFixture) -> None:
    connector = Chronicler(engine_config("inproc"), KVConnectorRole.SCHEDULER, KVCacheConfig(2, (), ()))
    handoffs = Handoffs(connector)
    with caplog.at_level(logging.DEBUG, "reference.engine.handoffs"):
        handoffs.apply(KVConnectorOutput(), {})
        handoffs.apply(KVConnectorOutput(), {})
    assert caplog.messages == ["the connector reports block 7 arrived"]
