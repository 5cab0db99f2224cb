"""Bring one consumer with one offer to each state of its table, and read what a protocol answers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvferry.connector.handoff.consumer import ConsumerProtocol
from kvferry.connector.handoff.events import (
    Action,
    Connect,
    GroupBlocks,
    LoadEnded,
    OfferEnded,
    RemoteOffer,
    Send,
    StartRead,
)
from kvferry.connector.handoff.messages import Claim, Deny, Grant, Hello, Message, Welcome
from kvferry.transports.regions import Guard, RegionPairs

#: The producer, as the consumer knows it.
PEER = 7
ADDRESS = "sim://there"
OFFER = RemoteOffer("there", 22, "theirs", 3, (ADDRESS,), 12, ((4, 5, 6),))
GRANT = Grant("theirs", 3, guard_index=1, num_tokens=12, num_ready=12, block_ids=((14, 15, 16),))
BLOCKS = (GroupBlocks(1, (31, 32)),)
#: The read of BLOCKS under GRANT: one run of two blocks of two 8-byte pages.
PAIRS = RegionPairs(np.array([[31 * 16, 15 * 16, 32]]))
READ = StartRead("ours", 0, PEER, PAIRS, Guard(index=1, value=3), 20.0, 2)

#: Brings a consumer to a state, from nothing.
Reach = Callable[[ConsumerProtocol, Welcome], None]


def only_message(actions: list[Action]) -> Message:
    (action,) = actions
    assert isinstance(action, Send)
    assert action.peer_id == PEER
    return action.message


def only_end(actions: list[Action]) -> LoadEnded:
    (ended,) = [action for action in actions if isinstance(action, LoadEnded)]
    return ended


def denial(actions: list[Action]) -> str:
    """Return the reason of the only action, which denies a claim."""
    (action,) = actions
    assert isinstance(action, Send)
    assert isinstance(action.message, Deny)
    return action.message.reason


def outcome(actions: list[Action]) -> str:
    """Return how the only offer ended that did."""
    (ended,) = [action for action in actions if isinstance(action, OfferEnded)]
    return ended.outcome


def connecting(consumer: ConsumerProtocol, welcome: Welcome) -> None:
    assert consumer.claim("ours", OFFER, 0.0) == [Connect(ADDRESS, 4.0)]
    assert consumer.connecting(ADDRESS, PEER, 0.0) == []


def claiming(consumer: ConsumerProtocol, welcome: Welcome) -> None:
    connecting(consumer, welcome)
    assert isinstance(only_message(consumer.peer_connected(PEER, 0.0)), Hello)
    assert only_message(consumer.receive(PEER, welcome, 0.0)) == Claim("theirs", 3, rank=0, num_ranks=1)


def granted(consumer: ConsumerProtocol, welcome: Welcome) -> None:
    claiming(consumer, welcome)
    assert consumer.receive(PEER, GRANT, 0.0) == []


def reading(consumer: ConsumerProtocol, welcome: Welcome) -> None:
    granted(consumer, welcome)
    (read,) = consumer.load("ours", BLOCKS, 0.0)
    assert isinstance(read, StartRead)


def draining(consumer: ConsumerProtocol, welcome: Welcome) -> None:
    reading(consumer, welcome)
    assert consumer.drop("ours", 0.0) == []
