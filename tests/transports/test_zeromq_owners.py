"""An owner that answers a fetch of the `zeromq` transport wrongly causes a typed error, and no wrong byte."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import zmq

from kvferry.transports import Connected, Guard, PeerLost, TransferEnded
from kvferry.transports.errors import (
    ChecksumError,
    PeerLostError,
    ProtocolError,
    StaleRegionError,
    TransferTimeoutError,
)
from kvferry.transports.testing import FlippingProxy, Link, World, pairs_of
from kvferry.transports.zeromq.frames import Frame
from kvferry.transports.zeromq.options import Address
from kvferry.transports.zeromq.slices import checksum_of
from kvferry.transports.zeromq.wire import Fetch, Hello, Slice, Stale, decode

pytestmark = pytest.mark.parametrize("make_world", ["main memory", "GPU"], indirect=True)

POOL_BYTES = 4 << 20
HELD = Guard(5, 77)
HELLO = Hello(64, (POOL_BYTES,))

MakeWorld = Callable[..., World]


class Owner:
    """An owner of a pool of zeros that answers as the test wants."""

    def __init__(self, raw: Any, world: World) -> None:
        self._raw, self._world = raw, world
        self._router = raw.socket(zmq.ROUTER)
        port = self._router.bind_to_random_port("tcp://127.0.0.1")
        self.node = world.node(POOL_BYTES)
        self.peer_id = self.node.endpoint.start_connect(f"zeromq://127.0.0.1:{port}", timeout_s=20)
        self._routing_id, *_ = raw.receive(world, self._router)
        self.say(HELLO.head(), HELLO.body())
        world.serve(lambda: bool(self.node.of_type(Connected)))

    def start_read(self, timeout_s: float = 20.0) -> None:
        self.node.endpoint.start_read(self.peer_id, pairs_of((0, 0, POOL_BYTES)), HELD, timeout_s=timeout_s)

    def say(self, head: bytes, *frames: bytes) -> None:
        self._router.send_multipart([self._routing_id, head, *frames])

    def hear(self) -> Fetch:
        _, *parts = self._raw.receive(self._world, self._router)
        fetch = decode([Frame.copy_of(part) for part in parts])
        assert isinstance(fetch, Fetch)
        return fetch

    def give(self, fetch: Fetch, *, checksum: int | None = None, missing: int = 0) -> None:
        body = bytes(int(fetch.rows[:, 1].sum()) - missing)
        checksum = checksum_of([body]) if checksum is None else checksum
        self.say(Slice(fetch.transfer_id, fetch.index, False, checksum, ()).head(), body)

    def outcome(self) -> TransferEnded:
        self._world.serve(lambda: bool(self.node.of_type(TransferEnded)))
        (ended,) = self.node.of_type(TransferEnded)
        return ended


@pytest.fixture
def owner(raw: Any, world: World) -> Owner:
    return Owner(raw, world)


def test_one_that_stalls_ends_the_read_at_its_deadline(owner: Owner) -> None:
    owner.start_read(timeout_s=0.3)
    owner.give(owner.hear())
    assert isinstance(owner.outcome().error, TransferTimeoutError)


def test_what_comes_after_the_deadline_is_thrown_away(owner: Owner, world: World) -> None:
    owner.start_read(timeout_s=0.2)
    late = owner.hear()
    owner.outcome()
    memory = owner.node.memory()
    memory[:] = 1
    owner.give(late)
    world.serve_quietly()
    assert np.all(memory == 1)
    assert not owner.node.of_type(PeerLost)


def test_no_more_is_fetched_than_the_window_holds(raw: Any, make_world: MakeWorld) -> None:
    world = make_world(window_slices=2, slice_bytes=1 << 20)
    owner = Owner(raw, world)
    owner.start_read()
    first, second = owner.hear(), owner.hear()
    world.serve_quietly()
    assert not owner._router.poll(0)
    owner.give(first)
    assert owner.hear().index == 2
    assert second.index == 1


def test_a_wrong_checksum(owner: Owner, world: World) -> None:
    owner.start_read()
    owner.give(owner.hear(), checksum=1)
    while (fetch := owner.hear()).rows.size:
        owner.give(fetch)
    owner.give(fetch)
    assert isinstance(owner.outcome().error, ChecksumError)


def test_a_wrong_checksum_of_a_stale_offer_is_stale(owner: Owner) -> None:
    """The owner cleared the guard and wrote to the memory: the read is stale, whatever the checksum says."""
    owner.start_read()
    owner.give(owner.hear(), checksum=1)
    while (fetch := owner.hear()).rows.size:
        pass
    owner.say(Stale(fetch.transfer_id, fetch.index).head(), b"")
    assert isinstance(owner.outcome().error, StaleRegionError)


@pytest.mark.parametrize("missing", [1, -1])
def test_a_slice_of_another_size(owner: Owner, world: World, missing: int) -> None:
    owner.start_read()
    owner.give(owner.hear(), missing=missing)
    assert isinstance(owner.outcome().error, PeerLostError)
    assert isinstance(owner.node.of_type(PeerLost)[0].error, ProtocolError)


def test_a_slice_twice(owner: Owner) -> None:
    owner.start_read()
    fetch = owner.hear()
    owner.give(fetch)
    owner.give(fetch)
    assert isinstance(owner.outcome().error, PeerLostError)
    assert isinstance(owner.node.of_type(PeerLost)[0].error, ProtocolError)


@pytest.mark.parametrize("checksums", [True, False])
def test_a_flipped_bit_is_found_by_its_checksum(checksums: bool, make_world: MakeWorld) -> None:
    world = make_world(checksums=checksums)
    server, node = world.node(POOL_BYTES), world.node(POOL_BYTES)
    server.fill(1)
    server.transport.guards.set(HELD.index, HELD.value)
    with FlippingProxy(Address.parse(server.endpoint.listen("")).port, at=POOL_BYTES // 2) as proxy:
        peer_id = node.endpoint.start_connect(f"zeromq://127.0.0.1:{proxy.port}", timeout_s=20)
        world.serve(lambda: bool(node.of_type(Connected)))
        ended = world.read(Link(server, node, peer_id, 0), pairs_of((0, 0, POOL_BYTES)), HELD)
    num_wrong = int(np.count_nonzero(node.memory() != server.memory()))
    if checksums:
        assert isinstance(ended.error, ChecksumError)
    else:  # the test flips what it says it flips
        assert (ended.error, num_wrong) == (None, 1)


@pytest.mark.parametrize(
    ("sizes", "is_right"),
    [([2], True), ([1, 1], True), ([2, 0], False), ([1, 1, 0], False), ([0.5, 1.5], False), ([1], False)],
)
def test_a_slice_comes_whole_or_by_regions(
    raw: Any, world: World, sizes: list[float], is_right: bool
) -> None:
    """A slice with another number of frames, or with frames of other sizes, is refused."""
    owner = Owner(raw, world)
    rows = pairs_of((0, POOL_BYTES // 2, 1 << 20), (3 << 20, 0, 1 << 20))
    owner.node.endpoint.start_read(owner.peer_id, rows, HELD, timeout_s=20)
    fetch = owner.hear()
    frames = [bytes([1 + index]) * int(size * (1 << 20)) for index, size in enumerate(sizes)]
    owner.say(Slice(fetch.transfer_id, fetch.index, True, checksum_of(frames), ()).head(), *frames)
    ended = owner.outcome()
    if is_right:
        assert ended.error is None
        assert (owner.node.memory()[[0, 3 << 20]] == [1, len(sizes)]).all()
    else:
        assert isinstance(ended.error, PeerLostError)
        assert not owner.node.memory().any()


def test_regions_by_reference_share_a_slice(make_world: MakeWorld) -> None:
    """A read of several slices with several large regions each puts every region into its place."""
    world = make_world(slice_bytes=1 << 20)
    link = world.link(world.node(POOL_BYTES), world.node(POOL_BYTES))
    link.producer.fill(1)
    link.producer.transport.guards.set(HELD.index, HELD.value)
    half, last = 512 << 10, POOL_BYTES - (512 << 10)
    pairs = pairs_of(*((at, last - at, half) for at in range(0, POOL_BYTES, half)))
    assert world.read(link, pairs, HELD).error is None
    expected = link.producer.memory().reshape(-1, half)[::-1].ravel()
    assert np.array_equal(link.consumer.memory(), expected)
