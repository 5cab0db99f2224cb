"""The `zeromq` transport reports at once what arrived while its sockets were used for something else.

The descriptor of a ZeroMQ socket signals an arrival once, and any call on the socket may take that signal
away.
"""

from __future__ import annotations

import select
import time
from collections.abc import Iterator

import pytest

from kvferry.transports import Connected, PeerLost
from kvferry.transports.testing import Node, World
from kvferry.transports.zeromq import ZeroMQTransport
from kvferry.transports.zeromq.channel import _QUEUE_LENGTH
from kvferry.transports.zeromq.transport import ZeroMQBackend

#: A wait that lasts this long has missed the arrival; one that reports it takes milliseconds.
WAIT_S = 10.0


@pytest.fixture
def world() -> Iterator[World]:
    # A machine that pauses for some seconds must not lose the peer: these tests are not about that.
    world = World(lambda: ZeroMQTransport({"peer_timeout_s": 60.0}))
    yield world
    world.close()


def signalled(node: Node) -> None:
    """Wait until a socket of a node has signalled something that the node has not looked at yet.

    A socket that the node still has to look at need not signal again.
    """
    endpoint = node.transport._endpoint  # type: ignore[attr-defined]
    backend = endpoint._backend
    assert isinstance(backend, ZeroMQBackend)
    assert backend._sockets._active or select.select([backend._poller], [], [], WAIT_S)[0]


def test_a_message_that_arrived_before_the_wait(world: World) -> None:
    link = world.pair(4096)
    world.serve_quietly()
    # With the handshake fewer than libzmq's queue holds. A message for which there is no room waits until its
    # sender is served.
    for number in range(_QUEUE_LENGTH - 4):
        link.producer.endpoint.send(link.consumer_id, b"%d" % number)
        signalled(link.consumer)
        # A socket that was just used is looked at before the wait, so the message is found there.
        link.consumer.endpoint.send(link.producer_id, b"answer")
        began = time.monotonic()
        link.consumer.history += link.consumer.endpoint.wait_events(WAIT_S)
        assert link.consumer.messages(link.producer_id)[-1] == b"%d" % number
        assert time.monotonic() - began < WAIT_S / 2


def test_a_peer_that_left_before_another_one_was_dropped(world: World) -> None:
    producer, leaves, stays = world.node(4096), world.node(4096), world.node(4096)
    address = producer.endpoint.listen("")
    ids = []
    for node in (leaves, stays):
        node.endpoint.start_connect(address, timeout_s=WAIT_S)
        world.serve(lambda: len(producer.of_type(Connected)) > len(ids))
        ids.append(producer.of_type(Connected)[-1].peer_id)
    world.serve_quietly()
    world.forget(leaves)
    signalled(producer)
    # To drop the other peer, the node reads the monitor, which may report the loss of either peer.
    producer.endpoint.disconnect(ids[1])
    began = time.monotonic()
    (lost,) = producer.endpoint.wait_events(WAIT_S)
    assert isinstance(lost, PeerLost)
    assert lost.peer_id == ids[0]
    assert time.monotonic() - began < WAIT_S / 2
