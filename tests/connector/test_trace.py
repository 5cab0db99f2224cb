"""The option `trace`: the spans of a handoff among each node's stats."""

from __future__ import annotations

import json

from kvferry.connector.handoff.events import Send
from kvferry.connector.handoff.messages import Claim, Grant, Parked
from kvferry.connector.p2p.orders import Announcement, RequestOrders
from kvferry.connector.p2p.trace import HandoffTrace
from kvferry.connector.spans import SpanRecord
from kvferry.connector.stats import KVConnectorStats
from kvferry.connector.testing import CacheShape, ModelFreeNode, Request, engine_config, load, settle

TRACED = engine_config("inproc", kv_connector_extra_config={"trace": True})


def _by_name(stats: KVConnectorStats) -> dict[str, SpanRecord]:
    spans = {span.name: span for span in stats.spans}
    assert len(spans) == len(stats.spans)
    return spans


def _events(span: SpanRecord) -> list[str]:
    return [str(event["name"]) for event in span.events]


def test_both_sides_of_a_handoff_tell_what_they_did() -> None:
    shape = CacheShape()
    with ModelFreeNode(TRACED, shape) as producer, ModelFreeNode(TRACED, shape) as consumer:
        _, params = producer.prefill("p", 18)
        producer.step()  # it orders the offer; a claim that came earlier would be parked
        load(consumer, producer, Request("d", 18, params))
        settle(producer)
        ours, theirs = _by_name(producer.stats), _by_name(consumer.stats)
        told = consumer.stats
    assert {name: span.request_id for name, span in ours.items()} == {"offer": "p", "grant": "p"}
    assert _events(ours["offer"]) == ["release"]
    assert ours["offer"].attributes["outcome"] == "delivered"
    assert ours["grant"].attributes["outcome"] == "granted"
    assert {name: span.request_id for name, span in theirs.items()} == dict.fromkeys(
        ("claim", "read", "load"), "d"
    )
    claim, read, loaded = theirs["claim"], theirs["read"], theirs["load"]
    assert _events(claim) == ["claim sent"]
    assert (claim.attributes["producer_request"], claim.attributes["outcome"]) == ("p", "granted")
    assert (read.attributes["guard"], read.attributes["mechanism"]) == ("held", "memory")
    assert _events(loaded) == ["release"]
    (record,) = told.transfers
    figures = {"bytes": record.num_bytes, "blocks": record.num_blocks, "regions": record.num_regions}
    assert {name: loaded.attributes[name] for name in figures} == figures
    assert loaded.attributes["rounds"] == 1
    assert claim.start <= claim.end <= read.start <= read.end <= loaded.end
    assert not any(span.error for span in (*ours.values(), *theirs.values()))
    assert KVConnectorStats.from_dict(json.loads(json.dumps(told.to_dict()))) == told


def test_without_the_option_nothing_is_kept() -> None:
    shape = CacheShape()
    with ModelFreeNode(engine_config("inproc"), shape) as producer:
        producer.prefill("p", 18)
        assert producer.stats.spans == ()


def test_a_claim_that_comes_before_its_request_is_a_span_of_the_request() -> None:
    """In a rendezvous the decode node may be faster, and then its claim names what the prefill node does not
    know yet.
    """
    kept: list[SpanRecord] = []
    trace, name = HandoffTrace(kept.append, rank=0), "5" * 32
    trace.received(Claim(name, 7, rank=1, num_ranks=2, rendezvous=True))
    trace.performed(Send(0, Parked(name, 7)))
    trace.ordered(RequestOrders("p", announcement=Announcement(7, name)))
    trace.performed(Send(0, Grant(name, 7, guard_index=0, num_tokens=18, num_ready=9, block_ids=((1,),))))
    (grant,) = kept
    assert (grant.name, grant.request_id, _events(grant)) == (
        "grant",
        "p",
        ["claim parked until the offer is made"],
    )
    assert (grant.attributes["outcome"], grant.attributes["ready"]) == ("granted", 9)
