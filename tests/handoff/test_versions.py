"""Nodes of neighbouring protocol versions hand over; others say which of them to upgrade first."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any

import msgpack
import pytest

from kvferry.connector.handoff import messages
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
    PROTOCOL_VERSION,
    SPOKEN_VERSIONS,
    Claim,
    Deny,
    Grant,
    Heartbeat,
    Hello,
    Lease,
    Message,
    Parked,
    Progress,
    Release,
    Revoke,
    Since,
    Welcome,
    decode,
    encode,
)
from kvferry.connector.handoff.node import NodeProtocol
from kvferry.connector.handoff.producer import ProducerProtocol
from kvferry.transports.checked import integer
from kvferry.transports.errors import KVTransferError, ProtocolError, VersionMismatchError
from tests.support.ranks import ONLY_RANK

ADDRESS, PEER = "sim://there", 1
OFFER = RemoteOffer("there", 22, "theirs", 3, (ADDRESS,), 12, ((4, 5, 6),))
BLOCKS = (GroupBlocks(0, (1, 2, 3)),)

#: Of each message, the fields of version 7.
FIELDS: dict[str, tuple[Message, set[str]]] = {
    "Hello": (Hello(7, "d", 1, "x", "0.2"), {"version", "engine_id", "epoch", "digest", "release"}),
    "Welcome": (
        Welcome(7, "p", 1, "x", {}, {}, "0.2"),
        {"version", "engine_id", "epoch", "digest", "fields", "layout", "release"},
    ),
    "Claim": (
        Claim("r", 1, **ONLY_RANK, traceparent=f"00-{'5' * 32}-{'6' * 16}-01"),
        {"request_id", "lease", "rank", "num_ranks", "traceparent", "rendezvous"},
    ),
    "Grant": (
        Grant("r", 1, guard_index=0, num_tokens=4, num_ready=4, block_ids=((1,),), content="c"),
        {
            *("request_id", "lease", "guard_index", "num_tokens", "num_ready", "block_ids"),
            *("content", "guard_value"),
        },
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
NEXT = PROTOCOL_VERSION + 1


@dataclass(frozen=True)
class Hint:
    """A message with a field that the next version would add."""

    lease: Lease
    num_tokens: Annotated[int, integer(0, 100), Since(NEXT)] = 0


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


@pytest.mark.parametrize("tag", FIELDS)
def test_the_fields_of_a_version_never_change(tag: str) -> None:
    """A field that is added needs the next version and a `Since`; one that is removed, a new
    `OLDEST_VERSION`.
    """
    message, names = FIELDS[tag]
    assert set(msgpack.unpackb(encode(message))[1]) == names
    assert decode(encode(message)) == message


@pytest.fixture
def hint(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The messages have a made-up one more, and what it is packed to."""
    monkeypatch.setattr(messages, "_FORMS", dict(messages._FORMS))
    monkeypatch.setattr(messages, "_TAGS", dict(messages._TAGS))
    messages._message("Hint")(Hint)
    return Hint(1, num_tokens=5)


def test_a_field_travels_only_between_nodes_that_both_know_it(hint: Any) -> None:
    assert decode(encode(hint, NEXT), NEXT) == hint
    assert encode(hint, PROTOCOL_VERSION) == packed("Hint", lease=1)
    assert decode(packed("Hint", lease=1), PROTOCOL_VERSION) == replace(hint, num_tokens=0)


def test_a_field_of_a_later_version_is_refused_from_a_peer_that_speaks_an_earlier_one(hint: Any) -> None:
    with pytest.raises(ProtocolError, match=r"Hint\.num_tokens is unknown"):
        decode(encode(hint, NEXT), PROTOCOL_VERSION)
    with pytest.raises(ProtocolError, match=r"Hint\.num_tokens is missing"):
        decode(encode(hint, PROTOCOL_VERSION), NEXT)


@pytest.mark.parametrize(
    ("consumer", "producer", "spoken"),
    [
        (range(7, 9), range(7, 9), 8),
        (range(7, 9), range(7, 8), 7),
        (range(7, 8), range(7, 9), 7),
        (range(7, 9), range(8, 10), 8),
        (range(8, 10), range(7, 9), 8),
        (range(6, 11), range(7, 8), 7),
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


@pytest.mark.parametrize(
    ("consumer", "producer", "text"),
    [
        (
            SPOKEN_VERSIONS,
            range(9, 11),
            "protocol version differs: local 7, remote 9 (kvferry '9.9'); upgrade this node first",
        ),
        (
            range(9, 11),
            range(7, 9),
            "differs: local 9 to 10, remote 8 (kvferry '9.9'); upgrade the peer first",
        ),
        (SPOKEN_VERSIONS, range(6, 7), "differs: local 7, remote 6 (kvferry '9.9'); upgrade the peer first"),
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
    # The producer keeps its offer: another consumer may take it. The peer that never said a hello it knows is
    # dropped.
    assert sides.producer.producer.num_offers == 1
    assert sides.producer.advance(config.connect_timeout_s) == [Disconnect(PEER)]


def packed(tag: str, **fields: Any) -> bytes:
    return bytes(msgpack.packb([tag, fields]))


def test_a_producer_must_not_raise_the_version(identity: Identity, config: HandoffConfig) -> None:
    """Otherwise two nodes could exchange hellos for ever."""
    here = replace(identity, spoken=range(PROTOCOL_VERSION, NEXT + 1))
    node = NodeProtocol(ProducerProtocol(here, config, 2), ConsumerProtocol(here, config))
    node.consumer.claim("ours", OFFER, 0.0)
    node.consumer.connecting(ADDRESS, PEER, 0.0)
    node.peer_connected(PEER, incoming=False, now=0.0)
    welcome = Welcome(
        PROTOCOL_VERSION, "there", 22, identity.digest, identity.fields, identity.layout.to_plain()
    )
    (hello,) = node.message_received(PEER, encode(welcome), 0.0)
    assert isinstance(hello, Send)
    assert isinstance(hello.message, Hello)
    node.message_received(PEER, encode(replace(welcome, version=NEXT)), 0.0)
    (ended,) = node.consumer.load("ours", BLOCKS, 0.0)
    assert isinstance(ended, LoadEnded)
    assert f"it has version {NEXT}, our Hello had {PROTOCOL_VERSION}" in str(ended.error)


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
