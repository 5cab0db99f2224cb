"""A peer's messages reach the protocol that they concern, and a peer that misbehaves is dropped by both
protocols.
"""

from __future__ import annotations

from dataclasses import replace

import msgpack
import pytest

from kvferry.connector.handoff.config import HandoffConfig
from kvferry.connector.handoff.consumer import ConsumerProtocol
from kvferry.connector.handoff.events import (
    ClearGuard,
    Connect,
    Disconnect,
    GroupBlocks,
    Identity,
    LoadEnded,
    OfferEnded,
    RemoteOffer,
    Send,
)
from kvferry.connector.handoff.messages import PROTOCOL_VERSION, Claim, Grant, Hello, Welcome, decode, encode
from kvferry.connector.handoff.node import NodeProtocol
from kvferry.connector.handoff.producer import ProducerProtocol
from kvferry.transports.errors import BackpressureError, IncompatiblePeerError, VersionMismatchError
from tests.support.ranks import ONLY_RANK

CONSUMER, PRODUCER = 1, 2
OFFER = RemoteOffer("there", 22, "theirs", 3, ("sim://there",), 12, ((4, 5, 6),))
HELLO = Hello(PROTOCOL_VERSION, "there", 22, "d")


@pytest.fixture
def node(identity: Identity, config: HandoffConfig) -> NodeProtocol:
    """A node that is connected to one consumer, and connects to one producer."""
    node = NodeProtocol(ProducerProtocol(identity, config, 4), ConsumerProtocol(identity, config))
    node.peer_connected(CONSUMER, incoming=True, now=0.0)
    assert isinstance(node.message_received(CONSUMER, encode(HELLO), 0.0)[0].message, Welcome)
    assert isinstance(node.consumer.claim("ours", OFFER, 0.0)[0], Connect)
    node.consumer.connecting("sim://there", PRODUCER, 0.0)
    assert isinstance(node.peer_connected(PRODUCER, incoming=False, now=0.0)[0].message, Hello)
    return node


def test_messages_survive_the_wire_between_two_roles(node: NodeProtocol) -> None:
    node.producer.offer("r", 1, ((1,),), 4, 0.0)
    (answer,) = node.message_received(CONSUMER, encode(Claim("r", 1, **ONLY_RANK)), 0.0)
    assert isinstance(answer, Send)
    assert isinstance(decode(encode(answer.message)), Grant)


@pytest.mark.parametrize("data", [b"", b"garbage", msgpack.packb(["Claim", {"lease": True}])])
def test_a_consumer_that_sends_garbage_loses_its_claims(node: NodeProtocol, data: bytes) -> None:
    node.producer.offer("r", 1, ((1,),), 4, 0.0)
    node.message_received(CONSUMER, encode(Claim("r", 1, **ONLY_RANK)), 0.0)
    actions = node.message_received(CONSUMER, data, 0.0)
    assert [type(action) for action in actions] == [Disconnect, ClearGuard, OfferEnded]


def test_a_consumer_of_another_version_is_sent_our_version(node: NodeProtocol) -> None:
    node.peer_connected(5, incoming=True, now=0.0)
    (answer,) = node.message_received(5, msgpack.packb(["Hello", {"version": PROTOCOL_VERSION + 1}]), 0.0)
    assert isinstance(answer, Send)
    assert isinstance(answer.message, Welcome)
    assert node.advance(4.0)[0] == Disconnect(5)


def test_a_producer_of_another_version_fails_the_load(node: NodeProtocol) -> None:
    actions = node.message_received(
        PRODUCER, msgpack.packb(["Welcome", {"version": PROTOCOL_VERSION + 1}]), 0.0
    )
    assert actions == [Disconnect(PRODUCER)]
    (ended,) = node.consumer.load("ours", (GroupBlocks(0, (1,)),), 0.0)
    assert isinstance(ended, LoadEnded)
    assert isinstance(ended.error, VersionMismatchError)


def test_messages_of_the_other_role_are_ignored(node: NodeProtocol) -> None:
    assert node.message_received(PRODUCER, encode(Claim("r", 1, **ONLY_RANK)), 0.0) == []
    assert (
        node.message_received(
            CONSUMER,
            encode(Grant("theirs", 3, guard_index=0, num_tokens=12, num_ready=12, block_ids=((1,),))),
            0.0,
        )
        == []
    )


def test_a_peer_to_which_sending_fails_is_dropped(node: NodeProtocol) -> None:
    assert Disconnect(PRODUCER) in node.peer_failed(PRODUCER, BackpressureError("full"), 0.0)
    (ended,) = node.consumer.load("ours", (GroupBlocks(0, (1,)),), 0.0)
    assert isinstance(ended, LoadEnded)
    assert isinstance(ended.error, BackpressureError)


def test_shutdown_ends_both_roles(node: NodeProtocol) -> None:
    node.producer.offer("r", 1, ((1,),), 4, 0.0)
    actions = node.shutdown(0.0)
    assert {action.peer_id for action in actions if isinstance(action, Disconnect)} == {CONSUMER, PRODUCER}
    assert any(isinstance(action, OfferEnded) for action in actions)
    assert node.next_deadline() == float("inf")


def test_a_changed_node_ends_everything_and_tells_its_new_digest(
    node: NodeProtocol, identity: Identity, welcome: Welcome
) -> None:
    node.producer.offer("r", 1, ((1,),), 4, 0.0)
    node.message_received(CONSUMER, encode(Claim("r", 1, **ONLY_RANK)), 0.0)
    changed = replace(identity, digest="another")
    actions = node.begin_anew(changed, "the weights changed")
    assert {action.peer_id for action in actions if isinstance(action, Disconnect)} == {CONSUMER, PRODUCER}
    ends = [type(action) for action in actions if isinstance(action, ClearGuard | OfferEnded)]
    assert ends == [ClearGuard, OfferEnded]
    (ended,) = node.consumer.load("ours", (GroupBlocks(0, (1,)),), 0.0)
    assert isinstance(ended, LoadEnded)
    assert "the weights changed" in str(ended.error)
    assert (node.producer.num_offers, node.consumer.num_loads) == (0, 0)

    node.peer_connected(5, incoming=True, now=1.0)
    (answer,) = node.message_received(5, encode(HELLO), 1.0)
    assert isinstance(answer, Send)
    assert isinstance(answer.message, Welcome)
    assert answer.message.digest == "another"
    assert isinstance(node.consumer.claim("next", OFFER, 1.0)[0], Connect)
    node.consumer.connecting("sim://there", 6, 1.0)
    (hello,) = node.peer_connected(6, incoming=False, now=1.0)
    assert isinstance(hello, Send)
    assert isinstance(hello.message, Hello)
    assert hello.message.digest == "another"
    assert Disconnect(6) in node.message_received(6, encode(welcome), 1.0)
    (refused,) = node.consumer.load("next", (GroupBlocks(0, (1,)),), 1.0)
    assert isinstance(refused, LoadEnded)
    assert isinstance(refused.error, IncompatiblePeerError)
