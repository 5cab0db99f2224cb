"""The option `trace`: what each node's stats tell about a handoff."""

from __future__ import annotations

import json

from kvferry.connector.stats import KVConnectorStats
from kvferry.connector.testing import CacheShape, ModelFreeNode, Request, engine_config, load, settle


def _names(stats: KVConnectorStats, request_id: str) -> list[str]:
    return [event.name for event in stats.events if event.request_id == request_id]


def test_both_sides_of_a_handoff_are_told_in_their_order() -> None:
    config = engine_config("inproc", kv_connector_extra_config={"trace": True})
    shape = CacheShape()
    with ModelFreeNode(config, shape) as producer, ModelFreeNode(config, shape) as consumer:
        _, params = producer.prefill("p", 18)
        producer.step()  # it orders the offer; a claim that came earlier would be parked
        load(consumer, producer, Request("d", 18, params))
        settle(producer)
        ours, theirs = producer.stats, consumer.stats
    assert _names(ours, "p") == [
        "offer announced",
        "offer made",
        "claim received",
        "grant sent",
        "release received",
        "offer delivered",
    ]
    assert [name for name in _names(theirs, "d") if name != "blocks allocated"] == [
        "claim ordered",
        "claim sent",
        "grant received",
        "read started",
        "read ended",
        "release sent",
        "load loaded",
    ]
    (read,) = (event for event in theirs.events if event.name == "read ended")
    assert read.details["guard"] == "held"
    assert read.details["mechanism"] == "memory"
    assert KVConnectorStats.from_dict(json.loads(json.dumps(theirs.to_dict()))) == theirs


def test_without_the_option_nothing_is_kept() -> None:
    shape = CacheShape()
    with ModelFreeNode(engine_config("inproc"), shape) as producer:
        producer.prefill("p", 18)
        assert producer.stats.events == ()
