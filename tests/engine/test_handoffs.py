"""How the engine uses a connector's scheduler half, without the rest of the engine."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import pytest

from kvferry.connector import InProcConnector, KVConnectorRole
from kvferry.connector.kv_cache_specs import KVCacheConfig
from kvferry.connector.output import KVConnectorOutput
from kvferry.connector.testing import engine_config
from kvferry.lab.engine.handoffs import Handoffs
from kvferry.lab.engine.request import Request
from kvferry.lab.engine.types import GenerationRequest, SamplingParams


class Chronicler(InProcConnector):
    """Has an event to report, once."""

    events: Iterable[str] = ("block 7 arrived",)

    def take_events(self) -> Iterable[str]:
        events, self.events = self.events, ()
        return events


def test_a_connectors_events_are_taken_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    connector = Chronicler(engine_config("inproc"), KVConnectorRole.SCHEDULER, KVCacheConfig(2, (), ()))
    handoffs = Handoffs(connector)
    with caplog.at_level(logging.DEBUG, "kvferry.lab.engine.handoffs"):
        handoffs.apply(KVConnectorOutput(), {})
        handoffs.apply(KVConnectorOutput(), {})
    assert caplog.messages == ["the connector reports block 7 arrived"]


class OffersAll(InProcConnector):
    """Offers each request's blocks, even those of one that was aborted while it was loading."""

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        return True, None


@pytest.mark.parametrize(
    "reports",
    [
        [KVConnectorOutput(finished_recving={"r"}), KVConnectorOutput(finished_sending={"r"})],
        [KVConnectorOutput(finished_sending={"r"}), KVConnectorOutput(finished_recving={"r"})],
        [KVConnectorOutput(finished_sending={"r"}, finished_recving={"r"})],
    ],
)
def test_blocks_that_are_being_loaded_and_offered_wait_for_both_ends(
    reports: list[KVConnectorOutput],
) -> None:
    handoffs = Handoffs(
        OffersAll(engine_config("inproc"), KVConnectorRole.SCHEDULER, KVCacheConfig(2, (), ()))
    )
    source = GenerationRequest("r", (1, 2, 3), SamplingParams(), None)
    request = Request("r", source, lambda request: [], 0.0)
    handoffs.on_load_started(request)
    assert handoffs.loading == {"r": request}
    assert handoffs.on_finished(request, [[1]])[0]
    assert (handoffs.loading, handoffs.num_offered) == ({}, 1)
    *early, last = reports
    for report in early:
        assert not handoffs.apply(report, {}).released
    assert handoffs.is_pending
    assert handoffs.apply(last, {}).released == {"r"}
    assert not handoffs.is_pending
