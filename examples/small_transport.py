"""`small`: a correct transport within one process, for tests of the conformance kit.

Bugs are planted by subclasses.

Like a network transport it is served: the owner of memory copies the bytes of a read, one slice at a time, in
its own loop. Its frames are tuples that are put into the other side's inbox.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from kvferry.transports import WordTable, private_arena
from kvferry.transports.base import Arena, Endpoint
from kvferry.transports.endpoint import Backend, Peer, PeerEndpoint, PeerTable, PeerTransport, Read
from kvferry.transports.errors import (
    BackpressureError,
    ConfigurationError,
    KVTransferError,
    PeerLostError,
    ProtocolError,
    RegionError,
    StaleRegionError,
)
from kvferry.transports.regions import Guard, Int64Array, Pool

SLICE_BYTES = 1 << 20
MAX_QUEUED_BYTES = 8 << 20
MAX_UNTAKEN_BYTES = 32 << 20
NUM_GUARDS = 64

#: The backends that listen, by address.
LISTENERS: dict[str, SmallBackend] = {}
_numbers = itertools.count(1)


@dataclass(eq=False)
class Wire:
    """One side's end of a connection.

    Attributes:
        far: The other end, None before it is connected.
        queued_bytes: Bytes of messages to this end that it has not taken.
        untaken_bytes: Bytes of reads that were sent to the other end, and that it has not taken.
        pending: The reads that this end has started, each with the slices that are missing.
    """

    backend: SmallBackend
    address: str
    far: Wire | None = None
    is_cut: bool = False
    queued_bytes: int = 0
    untaken_bytes: int = 0
    pending: dict[int, tuple[Read[Wire], deque[Int64Array]]] = field(default_factory=dict)


class SmallBackend(Backend[Wire]):
    """Moves frames between inboxes."""

    def __init__(self, peers: PeerTable[Wire], pool: Pool, guards: WordTable) -> None:
        self.peers = peers
        self.pool = pool
        self.guards = guards
        self.changed = threading.Condition()
        self.inbox: deque[tuple[Wire, tuple[Any, ...]]] = deque()
        self.is_woken = False
        self.known: dict[Wire, Peer[Wire]] = {}

    def post(self, to: Wire | None, *frame: Any) -> None:
        assert to is not None
        with to.backend.changed:
            to.backend.inbox.append((to, frame))
            to.backend.changed.notify_all()

    # -- peers -----------------------------------------------------------------------------------------

    def listen(self, address: str) -> str:
        address = address or f"small:{next(_numbers)}"
        if address in LISTENERS:
            raise ConfigurationError(f"cannot listen at {address!r}: the address is in use", key="address")
        LISTENERS[address] = self
        return address

    def prepare(self, address: str) -> Wire:
        if not address.startswith("small:"):
            raise ConfigurationError(f"malformed address {address!r}: expected 'small:NUMBER'", key="address")
        return Wire(self, address)

    def connect(self, peer: Peer[Wire]) -> None:
        near = peer.connection
        there = LISTENERS.get(near.address)
        if there is None:
            raise PeerLostError(f"nothing listens at {near.address!r}")
        self.known[near] = peer
        near.far = Wire(there, near.address, near)
        self.post(near.far, "hello")

    def hang_up(self, peer: Peer[Wire], error: KVTransferError) -> None:
        near = peer.connection
        if near.far is not None and not near.is_cut:
            near.is_cut = near.far.is_cut = True
            self.post(near.far, "bye")

    def release(self, peer: Peer[Wire]) -> None:
        self.known.pop(peer.connection, None)

    def send(self, peer: Peer[Wire], message: bytes) -> None:
        far = peer.connection.far
        assert far is not None
        if far.queued_bytes + len(message) > MAX_QUEUED_BYTES:
            raise BackpressureError(f"cannot send: {far.queued_bytes} bytes wait for the peer")
        far.queued_bytes += len(message)
        self.post(far, "message", message)

    # -- reads -----------------------------------------------------------------------------------------

    def start_read(self, read: Read[Wire]) -> None:
        wire = read.peer.connection
        assert wire.far is not None
        self.check(read, wire.far.backend)
        read.mechanism = "small"
        wire.pending[read.transfer_id] = (read, self.slices(read.pairs.table))
        self.ask(wire, read)

    def check(self, read: Read[Wire], there: SmallBackend) -> None:
        self.pool.addresses(read.pairs.local_offsets, read.pairs.lengths)
        there.pool.addresses(read.pairs.remote_offsets, read.pairs.lengths)
        if not (0 <= read.guard.index < NUM_GUARDS and 0 < read.guard.value < 2**63):
            raise RegionError(f"there is no {read.guard}")

    def slices(self, table: Int64Array) -> deque[Int64Array]:
        """Cut region pairs into slices of at most `SLICE_BYTES`."""
        found: deque[list[tuple[int, int, int]]] = deque([[]])
        room = SLICE_BYTES
        for local, remote, left in table.tolist():
            while left:
                if not room:
                    found.append([])
                    room = SLICE_BYTES
                size = min(left, room)
                found[-1].append((local, remote, size))
                local, remote, left, room = local + size, remote + size, left - size, room - size
        return deque(np.array(rows, dtype=np.int64).reshape(-1, 3) for rows in found)

    def ask(self, wire: Wire, read: Read[Wire]) -> None:
        slices = wire.pending[read.transfer_id][1]
        self.post(wire.far, "read", read.transfer_id, slices[0][:, 1:], read.guard)

    def serve(self, wire: Wire, transfer_id: int, rows: Int64Array, guard: Guard) -> None:
        if not 0 <= guard.index < NUM_GUARDS:
            raise ProtocolError(f"the peer asked for {guard}")
        self.require_taken(wire)
        data = self.gather(rows)
        wire.untaken_bytes += len(data)
        self.post(wire.far, "data", transfer_id, self.guards.holds(guard), data)

    def require_taken(self, wire: Wire) -> None:
        if wire.untaken_bytes > MAX_UNTAKEN_BYTES:
            raise ProtocolError("the peer asks for more and more, and takes nothing")

    def gather(self, rows: Int64Array) -> bytes:
        addresses = self.pool.addresses(rows[:, 0], rows[:, 1])
        return b"".join(map(ctypes.string_at, addresses.tolist(), rows[:, 1].tolist()))

    def take(self, wire: Wire, transfer_id: int, is_held: bool, data: bytes) -> None:
        assert wire.far is not None
        wire.far.untaken_bytes -= len(data)
        if transfer_id not in wire.pending:
            return
        read, slices = wire.pending[transfer_id]
        if is_held:
            self.place(slices.popleft(), data)
            if slices:
                return self.ask(wire, read)
        del wire.pending[transfer_id]
        self.peers.end_read(read, None if is_held else StaleRegionError(f"{read.guard} does not hold"))

    def place(self, rows: Int64Array, data: bytes) -> None:
        at = 0
        addresses = self.pool.addresses(rows[:, 0], rows[:, 2])
        for address, size in zip(addresses.tolist(), rows[:, 2].tolist(), strict=True):
            ctypes.memmove(address, data[at : at + size], size)
            at += size

    def stop_read(self, read: Read[Wire]) -> bool:
        read.peer.connection.pending.pop(read.transfer_id, None)
        return True

    # -- the loop --------------------------------------------------------------------------------------

    def turn(self, timeout_s: float) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self.is_woken or self.inbox, timeout_s)
            self.is_woken = False
            frames = list(self.inbox)
            self.inbox.clear()
        for wire, frame in frames:
            self.handle(wire, frame)

    def handle(self, wire: Wire, frame: tuple[Any, ...]) -> None:
        if frame == ("hello",):
            self.known[wire] = self.peers.add_incoming(wire)
            self.peers.connected(self.known[wire])
            return self.post(wire.far, "welcome")
        if (peer := self.known.get(wire)) is None:
            return
        try:
            match frame:
                case ("welcome",):
                    self.peers.connected(peer)
                case ("message", message):
                    wire.queued_bytes -= len(message)
                    self.peers.message(peer, message)
                case ("bye",):
                    self.peers.lose(peer, PeerLostError("the peer closed the connection"))
                case ("read", *rest):
                    self.serve(wire, *rest)
                case ("data", *rest):
                    self.take(wire, *rest)
        except RegionError as error:
            self.peers.lose(peer, ProtocolError(f"the peer asked for memory that it may not read: {error}"))
        except Exception as error:  # noqa: BLE001 - it ends this peer alone
            self.peers.lose(peer, error)

    def interrupt(self) -> None:
        with self.changed:
            self.is_woken = True
            self.changed.notify_all()

    # -- the end ---------------------------------------------------------------------------------------

    def stop_serving(self) -> None:
        self.guards.clear_all()
        for address in [address for address, backend in LISTENERS.items() if backend is self]:
            del LISTENERS[address]
        for wire, frame in self.inbox:
            if frame == ("hello",):  # it would wait for a welcome
                self.post(wire.far, "bye")

    def close(self) -> None:
        self.inbox.clear()


class SmallTransport(PeerTransport):
    """Peers in this process."""

    scheme = "small"
    backend: ClassVar[type[SmallBackend]] = SmallBackend
    guards: WordTable

    def __init__(self, options: Mapping[str, object] = {}) -> None:
        super().__init__()
        for key in options:
            raise ConfigurationError(f"unknown option {key!r}: there are none", key=key)
        self.guards = WordTable.anonymous(NUM_GUARDS)

    def _allocate(self, num_bytes: int) -> Arena:
        return private_arena(num_bytes)

    def _open(self, pool: Pool) -> Endpoint:
        return PeerEndpoint(self.scheme, PeerTable(lambda peers: self.backend(peers, pool, self.guards)))
