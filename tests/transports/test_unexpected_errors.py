"""An exception of an unexpected type, from any call to the outside, costs one peer at most, never the owner's
loop.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import pytest
import zmq

from kvferry.transports import Connected, PeerLost
from kvferry.transports.errors import KVTransferError
from kvferry.transports.nixl.library import Agent, Transfer
from kvferry.transports.registry import BUILT_IN
from kvferry.transports.shm.guards import PeerGuards
from kvferry.transports.shm.pools import RemoteMemory, SharedPool
from kvferry.transports.streams import Poller
from kvferry.transports.testing.harness import HELD, PAGE, Link, Node, World, pairs_of
from kvferry.transports.ucx.library import Operation, Worker
from kvferry.transports.zeromq.channel import Monitor
from kvferry.transports.zeromq.frames import Frame

#: Calls to the outside, by scheme. Every exchange makes each of them, or every connection does.
CALLS: dict[str, list[tuple[Any, str]]] = {
    "shm": [
        *((socket.socket, name) for name in ("send", "recv", "sendmsg", "recvmsg", "connect", "getsockopt")),
        *((Poller, name) for name in ("watch", "unwatch")),
        *((RemoteMemory, name) for name in ("copy", "check", "close")),
        (PeerGuards, "__init__"),
        (SharedPool, "open_peer"),
    ],
    "zeromq": [
        *((Frame, name) for name in ("send", "received", "copy_of", "allocated")),
        *((zmq.Socket, name) for name in ("connect", "monitor", "close", "disable_monitor")),
        *((zmq.Context, name) for name in ("socket",)),
        *((Poller, name) for name in ("poll", "watch", "unwatch")),
        (Monitor, "take"),
    ],
    "nixl": [
        *((socket.socket, name) for name in ("send", "recv", "connect", "setsockopt")),
        *((Poller, name) for name in ("watch", "unwatch")),
        *((Agent, name) for name in ("read", "progress", "add", "take_word", "close", "__init__")),
        (Transfer, "is_done"),
    ],
    "ucx": [
        *((socket.socket, name) for name in ("send", "recv", "connect", "setsockopt")),
        *((Poller, name) for name in ("watch", "unwatch")),
        *((Worker, name) for name in ("progress", "arm", "send", "receive", "connect", "__init__")),
        (Operation, "check"),
    ],
}
CASES = [
    pytest.param(
        *(scheme, owner, name),
        id=f"{scheme}-{owner.__name__}.{name}",
        marks=pytest.mark.skipif(
            bool(BUILT_IN[scheme].package) and find_spec(BUILT_IN[scheme].package) is None,
            reason=f"{BUILT_IN[scheme].package} is not installed",
        ),
    )
    for scheme, calls in CALLS.items()
    for owner, name in calls
]


class SurpriseError(Exception):
    """Neither one of the project's errors, nor one that any library documents."""


@dataclass
class Fault:
    """Raises once, when armed."""

    is_armed: bool = False
    num_raised: int = 0

    def strike(self) -> None:
        if self.is_armed:
            self.is_armed = False
            self.num_raised += 1
            raise SurpriseError("injected by a test")


@contextmanager
def faulty(owner: Any, name: str) -> Iterator[Fault]:
    """Patch a method so that its next call raises if the fault is armed."""
    fault = Fault()
    original = getattr(owner, name)

    def method(*args: Any, **kwargs: Any) -> Any:
        fault.strike()
        return original(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        is_bound = hasattr(original, "__self__")
        patch.setattr(owner, name, staticmethod(method) if is_bound else method)
        yield fault


def works(world: World, link: Link) -> bool:
    """Whether a message and a read succeed.

    Check that each succeeds or ends with one of the project's errors.
    """
    message = b"%d" % len(link.producer.history)
    try:
        link.consumer.endpoint.send(link.producer_id, message)
        read = link.consumer.endpoint.start_read(
            link.producer_id, pairs_of((0, 0, 2 * PAGE)), HELD, timeout_s=3
        )
    except KVTransferError:
        return False
    world.serve(lambda: bool(link.consumer.ends_of(read)))
    world.serve(lambda: message in link.producer.messages(link.consumer_id) or is_lost(link))
    (ended,) = link.consumer.ends_of(read)
    assert ended.error is None or isinstance(ended.error, KVTransferError)
    return ended.error is None and not is_lost(link)


def is_lost(link: Link) -> bool:
    ends = ((link.consumer, link.producer_id), (link.producer, link.consumer_id))
    return any(lost.peer_id == peer_id for node, peer_id in ends for lost in node.of_type(PeerLost))


def connects(world: World, server: Node, address: str, node: Node) -> Link | None:
    """Connect a node. Returns None if that ends with one of the project's errors."""
    known = len(server.of_type(Connected))
    try:
        peer_id = node.endpoint.start_connect(address, timeout_s=3)
    except KVTransferError:
        return None
    world.serve(lambda: any(isinstance(e, Connected | PeerLost) for e in node.history))
    # The listener may still fail after this side is connected.
    world.serve(lambda: len(server.of_type(Connected)) > known or bool(node.of_type(PeerLost)))
    if node.of_type(PeerLost):
        return None
    return Link(server, node, peer_id, server.of_type(Connected)[-1].peer_id)


@pytest.mark.parametrize(("scheme", "owner", "name"), CASES)
def test_it_costs_one_peer(make_world: Callable[[str], World], scheme: str, owner: Any, name: str) -> None:
    world = make_world(scheme)
    server = world.node(4 * PAGE)
    server.transport.guards.set(HELD.index, HELD.value)
    address = server.endpoint.listen("")
    with faulty(owner, name) as fault:
        links = [connects(world, server, address, world.node(4 * PAGE)) for _ in range(3)]
        late = world.node(4 * PAGE)
        fault.is_armed = True
        results = [link is not None and works(world, link) for link in links]
        newcomer = connects(world, server, address, late)
        leaver = links.pop()
        assert leaver is not None
        leaver.consumer.endpoint.disconnect(leaver.producer_id)
        world.serve(lambda: is_lost(leaver))
        fault.is_armed = False
    assert fault.num_raised == 1
    assert [*results, newcomer is not None].count(False) <= 1
    for link, worked in zip(links, results, strict=False):
        if link is not None and worked and not is_lost(link):
            assert works(world, link)
    again = connects(world, server, address, world.node(4 * PAGE))
    assert again is not None
    assert works(world, again)
