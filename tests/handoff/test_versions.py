"""Nodes of neighbouring protocol versions hand over; others say which of them to upgrade first."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgpack
import pytest

from kvferry.connector.handoff.config import HandoffConfig
from kvferry.connector.handoff.consumer import ConsumerProtocol
from kvferry.connector.handoff.events import (
    Action,
    Connect,
    Disconnect,
    GroupBlocks,
    Identity,
    LoadEnded,
    RemoteOffer,
    Send,
    StartRead,
)
from kvferry.connector.handoff.messages import (
    OLDEST_VERSION,
    PROTOCOL_VERSION,
    SPOKEN_VERSIONS,
    Claim,
    Deny,
    Grant,
    Heartbeat,
    Hello,
    Message,
    Parked,
    Progress,
    Release,
    Revoke,
    Welcome,
    decode,
    encode,
)
from kvferry.connector.handoff.node import NodeProtocol
from kvferry.connector.handoff.producer import ProducerProtocol
from kvferry.connector.planning.layout import KVLayout
from kvferry.connector.planning.slots import SlotArray
from kvferry.transports.errors import KVTransferError, ProtocolError, VersionMismatchError
from tests.support.ranks import ONLY_RANK

ADDRESS, PEER = "sim://there", 1
OFFER = RemoteOffer("there", 22, "theirs", 3, (ADDRESS,), 12, ((4, 5, 6),))
BLOCKS = (GroupBlocks(0, (1, 2, 3)),)

#: The fields of version 6, which release 0.1.0 speaks, and those that later versions added.
FIELDS_OF_6: dict[str, tuple[Message, set[str]]] = {
    "Hello": (Hello(6, "d", 1, "x", "0.2"), {"version", "engine_id", "epoch", "digest"}),
    "Welcome": (
        Welcome(6, "p", 1, "x", {}, {}, "0.2"),
        {"version", "engine_id", "epoch", "digest", "fields", "layout"},
    ),
    "Claim": (
        Claim("r", 1, **ONLY_RANK, traceparent=f"00-{'5' * 32}-{'6' * 16}-01"),
        {"request_id", "lease", "rank", "num_ranks"},
    ),
    "Grant": (
        Grant("r", 1, guard_index=0, num_tokens=4, num_ready=4, block_ids=((1,),), content="c"),
        {"request_id", "lease", "guard_index", "num_tokens", "num_ready", "block_ids", "content"},
    ),
    "Parked": (Parked("r", 1), {"request_id", "lease"}),
    "Progress": (
        Progress("r", 1, num_ready=4, more_block_ids=((1,),)),
        {"request_id", "lease", "num_ready", "more_block_ids"},
    ),
    "Deny": (Deny("r", 1, "over"), {"request_id", "lease", "reason"}),
    "Heartbeat": (Heartbeat((1,)), {"leases"}),
    "Release": (
        Release("r", 1, delivered=True, **ONLY_RANK),
        {"request_id", "lease", "delivered", "rank", "num_ranks"},
    ),
    "Revoke": (Revoke("r", 1, "over"), {"request_id", "lease", "reason"}),
}
ADDED_BY_7 = {
    "Hello": {"release"},
    "Welcome": {"release"},
    "Claim": {"traceparent", "rendezvous"},
    "Grant": {"guard_value"},
}


class Sides:
    """A consumer and a producer, connected, and every message that went between them."""

    def __init__(self, identity: Identity, config: HandoffConfig, consumer: range, producer: range) -> None:
        here = replace(identity, spoken=consumer)
        there = replace(identity, engine_id="there", epoch=22, release="9.9", spoken=producer)
        self.consumer, self.producer = (
            NodeProtocol(ProducerProtocol(side, config, 2), ConsumerProtocol(side, config))
            for side in (here, there)
        )
        self.wire: list[bytes] = []
        self.done: list[Action] = []
        self.producer.producer.offer("theirs", 3, ((4, 5, 6),), 12, 0.0)
        (connect,) = self.consumer.consumer.claim("ours", OFFER, 0.0)
        assert isinstance(connect, Connect)
        self.consumer.consumer.connecting(ADDRESS, PEER, 0.0)
        self.producer.peer_connected(PEER, incoming=True, now=0.0)
        self.carry_out(self.consumer, self.consumer.peer_connected(PEER, incoming=False, now=0.0))

    def carry_out(self, side: NodeProtocol, actions: list[Action]) -> None:
        """Deliver what a side sends, and what the other answers."""
        other = self.producer if side is self.consumer else self.consumer
        for action in actions:
            if isinstance(action, Send):
                self.wire.append(encode(action.message, action.version))
                self.carry_out(other, other.message_received(PEER, self.wire[-1], 0.0))
            else:
                self.done.append(action)

    def load(self) -> None:
        self.carry_out(self.consumer, self.consumer.consumer.load("ours", BLOCKS, 0.0))

    @property
    def error(self) -> KVTransferError | None:
        (ended,) = (action for action in self.done if isinstance(action, LoadEnded))
        return ended.error


@pytest.mark.parametrize("tag", FIELDS_OF_6)
def test_the_fields_of_a_version_never_change(tag: str) -> None:
    """A field that is added needs the next version, a `Since` and a line in `ADDED_BY_…`; one that is removed, more."""
    message, fields_of_6 = FIELDS_OF_6[tag]
    fields_of_7 = fields_of_6 | ADDED_BY_7.get(tag, set())
    for version, names in ((6, fields_of_6), (7, fields_of_7)):
        assert set(msgpack.unpackb(encode(message, version))[1]) == names
    if tag not in ADDED_BY_7:
        assert decode(encode(message, 6), 6) == message


@pytest.mark.parametrize(
    ("consumer", "producer", "spoken"),
    [
        (range(6, 8), range(6, 8), 7),
        (range(6, 8), range(6, 7), 6),
        (range(6, 7), range(6, 8), 6),
        (range(6, 8), range(7, 9), 7),
        (range(7, 9), range(6, 8), 7),
        (range(5, 10), range(6, 7), 6),
    ],
    ids=str,
)
def test_neighbours_speak_the_newest_version_that_both_know(
    identity: Identity, config: HandoffConfig, consumer: range, producer: range, spoken: int
) -> None:
    sides = Sides(identity, config, consumer, producer)
    assert sides.consumer.version_with(PEER) == sides.producer.version_with(PEER) == spoken
    sides.load()
    (read,) = (action for action in sides.done if isinstance(action, StartRead))
    sides.carry_out(sides.consumer, sides.consumer.consumer.read_ended(read, None, 0.0))
    assert sides.error is None
    assert sides.producer.producer.num_offers == 0


@pytest.mark.parametrize(("version", "has_slots"), [(6, False), (7, True)])
def test_slots_that_move_together_are_described_only_to_a_version_that_knows_them(
    identity: Identity, config: HandoffConfig, version: int, has_slots: bool
) -> None:
    slots = SlotArray("u1", 1, 64, 4, 64, 0, 0, 64, grain=4)
    layers = tuple(replace(layer, block_size=4, slots=slots) for layer in identity.layout.layers[:1])
    packing = replace(identity, layout=replace(identity.layout, pool_bytes=1 << 20, layers=layers))
    producer = ProducerProtocol(packing, config, 2)
    producer.peer_connected(PEER, 0.0)
    (sent,) = producer.answer_hello(PEER, version)
    assert isinstance(sent, Send)
    assert isinstance(sent.message, Welcome)
    (layer,) = KVLayout.from_plain(sent.message.layout).layers
    assert layer.slots == (slots if has_slots else None)


@pytest.mark.parametrize(
    ("consumer", "producer", "text"),
    [
        (
            range(6, 8),
            range(9, 11),
            "protocol version differs: local 6 to 7, remote 9 (kvferry '9.9'); upgrade this node first",
        ),
        (
            range(9, 11),
            range(7, 9),
            "differs: local 9 to 10, remote 8 (kvferry '9.9'); upgrade the peer first",
        ),
        (range(8, 9), range(6, 7), "differs: local 8, remote 6; upgrade the peer first"),
    ],
    ids=str,
)
def test_strangers_name_both_versions_and_which_side_to_upgrade(
    identity: Identity, config: HandoffConfig, consumer: range, producer: range, text: str
) -> None:
    sides = Sides(identity, config, consumer, producer)
    assert sides.done == [Disconnect(PEER)]
    sides.load()
    assert isinstance(sides.error, VersionMismatchError)
    assert text in str(sides.error)
    assert sides.error.oldest == consumer[0]
    # The producer keeps its offer: another consumer may take it. The peer that never said a hello it knows is dropped.
    assert sides.producer.producer.num_offers == 1
    assert sides.producer.advance(config.connect_timeout_s) == [Disconnect(PEER)]


def packed(tag: str, **fields: Any) -> bytes:
    return bytes(msgpack.packb([tag, fields]))


class TestRelease010:
    """The release that knows version 6 only. Its messages are written out here."""

    def test_it_loads_from_us(self, identity: Identity, config: HandoffConfig) -> None:
        node = NodeProtocol(ProducerProtocol(identity, config, 2), ConsumerProtocol(identity, config))
        node.producer.offer("r", 3, ((4, 5, 6),), 12, 0.0, "c")
        node.peer_connected(PEER, incoming=True, now=0.0)
        hello = packed("Hello", version=6, engine_id="old", epoch=1, digest=identity.digest)
        answers = [
            *node.message_received(PEER, hello, 0.0),
            *node.message_received(PEER, packed("Claim", request_id="r", lease=3, rank=0, num_ranks=1), 0.0),
        ]
        for answer, tag in zip(answers, ("Welcome", "Grant"), strict=True):
            assert isinstance(answer, Send)
            got, fields = msgpack.unpackb(encode(answer.message, answer.version))
            assert (got, set(fields)) == (tag, FIELDS_OF_6[tag][1])
            assert fields.get("version", 6) == 6

    def test_we_load_from_it(self, identity: Identity, config: HandoffConfig) -> None:
        """It refuses our first hello by answering with its version, and waits for another one."""
        node = NodeProtocol(ProducerProtocol(identity, config, 2), ConsumerProtocol(identity, config))
        node.consumer.claim("ours", OFFER, 0.0)
        node.consumer.connecting(ADDRESS, PEER, 0.0)
        welcome = packed(
            "Welcome",
            version=6,
            engine_id="there",
            epoch=22,
            digest=identity.digest,
            fields=identity.fields,
            layout=identity.layout.to_plain(),
        )
        sent = [
            *node.peer_connected(PEER, incoming=False, now=0.0),
            *node.message_received(PEER, welcome, 0.0),
            *node.message_received(PEER, welcome, 0.0),
        ]
        wire = [
            msgpack.unpackb(encode(send.message, send.version)) for send in sent if isinstance(send, Send)
        ]
        assert [tag for tag, _ in wire] == ["Hello", "Hello", "Claim"]
        assert [fields.get("version") for _, fields in wire] == [PROTOCOL_VERSION, 6, None]
        for tag, fields in wire[1:]:
            assert set(fields) == FIELDS_OF_6[tag][1]


def test_a_field_of_a_later_version_is_refused_from_a_peer_that_speaks_an_earlier_one() -> None:
    later = msgpack.unpackb(encode(Hello(7, "d", 1, "x", "0.2")))[1]
    with pytest.raises(ProtocolError, match=r"Hello\.release is unknown"):
        decode(packed("Hello", **later | {"version": 6}))


def test_a_producer_must_not_raise_the_version(identity: Identity, config: HandoffConfig) -> None:
    """Otherwise two nodes could exchange hellos for ever."""
    sides = Sides(identity, config, SPOKEN_VERSIONS, range(OLDEST_VERSION, OLDEST_VERSION + 1))
    node = NodeProtocol(ProducerProtocol(identity, config, 2), ConsumerProtocol(identity, config))
    node.consumer.claim("ours", OFFER, 0.0)
    node.consumer.connecting(ADDRESS, PEER, 0.0)
    node.peer_connected(PEER, incoming=False, now=0.0)
    old = sides.wire[1]
    (hello,) = node.message_received(PEER, old, 0.0)
    assert isinstance(hello, Send)
    assert isinstance(hello.message, Hello)
    welcome = decode(old)
    assert isinstance(welcome, Welcome)
    node.message_received(PEER, encode(replace(welcome, version=PROTOCOL_VERSION)), 0.0)
    (ended,) = node.consumer.load("ours", BLOCKS, 0.0)
    assert isinstance(ended, LoadEnded)
    assert "it has version 7, our Hello had 6" in str(ended.error)


def test_other_rules_for_describing_a_model_are_a_version_too(
    identity: Identity, config: HandoffConfig
) -> None:
    """A release that computes `configuration` in another way must not look like a node with another model."""
    ours = {**identity.fields, "protocol": 6}
    theirs = {**identity.fields, "protocol": 7, "configuration": "computed in another way"}
    node = NodeProtocol(
        ProducerProtocol(identity, config, 2),
        ConsumerProtocol(replace(identity, fields=ours, digest="a"), config),
    )
    node.consumer.claim("ours", OFFER, 0.0)
    node.consumer.connecting(ADDRESS, PEER, 0.0)
    node.peer_connected(PEER, incoming=False, now=0.0)
    welcome = Welcome(PROTOCOL_VERSION, "there", 22, "b", theirs, identity.layout.to_plain())
    assert node.message_received(PEER, encode(welcome), 0.0) == [Disconnect(PEER)]
    (ended,) = node.consumer.load("ours", BLOCKS, 0.0)
    assert isinstance(ended, LoadEnded)
    assert "local 6, remote 7; upgrade this node first" in str(ended.error)
