"""`NIXLTransport`, and its backend: connections, handshakes, agents, and the loop over what is in flight.

NIXL offers nothing to sleep on, so the loop polls while something is in flight, with pauses that grow with
the time that it takes. While nothing is, it sleeps on its sockets. An owner polls its agent only while its
peer says that it reads.

Sockets always come before agents. A peer that died in the middle of a read over TCP leaves the owner's agent
with work that makes UCX abort the process. The end of the peer's control connection is there as early as that
work; and an agent that is destroyed first never does it.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from .._descriptors import warn_if_few
from .._memory import WordTable, private_arena
from .._slices import SliceLimits, SlicePlan
from ..base import Arena, Endpoint
from ..cuda_driver import Gpu
from ..endpoint import Peer, PeerTable, PeerTransport, Read
from ..errors import (
    ConfigurationError,
    KVTransferError,
    PeerLostError,
    PeerRefusedError,
    ProtocolError,
    TransferTimeoutError,
    TransportError,
)
from ..limited_log import LimitedLog
from ..network import PlainStreamBackend
from ..options import parse_options
from ..outside import outside
from ..regions import Pool, Segment
from ..serving import PeerPool, RegisteredPool
from ..streams import FrameSocket, KeepAlive, PollableEndpoint
from .library import NIXL, NUM_HELD, PER_CONNECTION, Agent, Memory, Transfer, descriptors
from .options import REMEDY, SCHEME, Address, NIXLOptions
from .reads import Reader, Remote
from .wire import FRAME_LIMITS, Hello, Incoming, Kind, Preface, Reading, Ready, decode

logger = logging.getLogger(__name__)

#: How long the loop only yields its core after something has begun or ended, before it sleeps between two
#: looks.
_YIELD_S = 100e-6

#: A pause is this part of the time that passed since something began or ended, so it delays the end by no
#: more than that.
_PAUSE_PART = 1 / 16

_MIN_PAUSE_S = 50e-6
_MAX_PAUSE_S = 5e-3

#: Pauses below this are slept, because the poller counts in milliseconds.
_SLEPT_S = 1e-3

#: How often sockets are looked at before agents, so that one busy peer cannot keep the loop to itself.
_MAX_POLLS = 16

#: How long an owner polls its agent after each frame *reading*, and how often a reader sends one.
_READING_S = 0.05

#: Rows per READ. NIXL takes more, and its time per row is the same; this bounds the time of one call.
_MAX_ROWS = 65536

#: Seconds that a read which timed out may take to end by itself. After that the peer's agent is destroyed.
DRAIN_S = 2.0
_READING = Reading().encode()


# == what is kept per peer =========================================================================


@dataclass(eq=False)
class Handshake:
    """A connection that is not a peer yet, and may never be one.

    Attributes:
        is_prefaced: The other side's preface came: it is a node, of our version.
        agent: Ours for this peer, as soon as the peer needs to know its metadata.
        remote: The other side's memory, as soon as its hello came.
        probe, word: The first read, which shows that there is a route, and where it arrives.
        is_probed: The first read has succeeded.
    """

    channel: FrameSocket
    is_prefaced: bool = False
    agent: Agent | None = None
    remote: Remote | None = None
    probe: Transfer | None = None
    word: int = 0
    is_probed: bool = False


@dataclass(eq=False)
class Link:
    """The connection to a peer whose handshake is over.

    Attributes:
        serves_until: The peer reads from us at least until then, by the table's clock.
        said_reading: When we last told the peer that we read.
    """

    channel: FrameSocket
    agent: Agent
    remote: Remote
    reader: Reader
    serves_until: float = -math.inf
    said_reading: float = -math.inf


Connection = Address | Handshake | Link


# == the agents of this process ====================================================================


class Agents:
    """Makes the NIXL agents through which peers are read and read from us.

    Each peer has one of its own. Only the end of an agent ends a read with certainty, and it must not cost
    other peers.

    Attributes:
        device: The number of the GPU that holds our pool; 0 for main memory.
    """

    def __init__(self, nixl: NIXL, served: RegisteredPool, device: int) -> None:
        self._nixl = nixl
        self.device = device
        pool = served.pool
        self.addresses = np.array([segment.address for segment in pool.segments], dtype=np.uint64)
        sizes = np.array(served.sizes, dtype=np.int64)
        self._memory = (
            Memory(pool.kind, descriptors(self.addresses, sizes, device)),
            Memory(
                "host",
                np.array(
                    [(served.guards.address, WordTable.bytes_for(served.guards.num_guards), 0)],
                    dtype=np.uint64,
                ),
            ),
        )

    def make(self) -> Agent:
        """Make the agent of a new peer. Raises: see `Agent`."""
        return Agent(self._nixl, self._memory)


# == the backend ===================================================================================


class NIXLBackend(PlainStreamBackend[Connection]):
    """One process among its peers. One thread calls it, and all its work is done there."""

    message_kind, ping_kind, refused_kind = Kind.MESSAGE, Kind.PING, Kind.REFUSED
    address_type = Address
    preface = Preface().encode()

    def __init__(
        self,
        peers: PeerTable[Connection],
        options: NIXLOptions,
        nixl: NIXL,
        served: RegisteredPool,
        device: int,
    ) -> None:
        super().__init__(peers, options)
        self._options = options
        self._nixl = nixl
        self._served = served
        self._limits = SliceLimits(options.slice_bytes, _MAX_ROWS)
        self._agents = Agents(nixl, served, device)
        self._links: dict[Peer[Connection], Link] = {}
        self._active: dict[Peer[Connection], None] = {}  # those whose agents the loop asks
        self._last_change = -math.inf
        self._keep_alive = KeepAlive(self, self._links, options.peer_timeout_s)

    # -- connections -----------------------------------------------------------------------------------

    def wrap(self, sock: socket.socket) -> Handshake:
        return Handshake(FrameSocket(sock, FRAME_LIMITS, self._options.max_queued_bytes))

    def hang_up(self, peer: Peer[Connection], error: KVTransferError) -> None:
        connection = peer.connection
        if isinstance(connection, Address):
            super().hang_up(peer, error)
            return
        self._active.pop(peer, None)
        self._links.pop(peer, None)
        if isinstance(connection, Handshake):
            self.refuse(connection.channel, error)
        try:
            # Before the agent: so the peer sees the end of the connection no later than that of the agent.
            super().hang_up(peer, error)
        finally:
            if connection.agent is not None:
                connection.agent.close()

    def lose(self, peer: Peer[Connection], error: Exception) -> None:
        if type(error) is TransportError:
            error = PeerLostError(f"NIXL lost the peer: {error}")
        super().lose(peer, error)

    # -- what arrives on a control connection ----------------------------------------------------------

    def on_frame(self, peer: Peer[Connection], kind: int, body: bytes) -> None:
        connection, incoming = peer.connection, decode(kind, body)
        if isinstance(connection, Link):
            self._on_link_frame(peer, connection, incoming)
        elif isinstance(connection, Handshake):
            self._on_handshake(peer, connection, incoming)

    def _on_handshake(self, peer: Peer[Connection], handshake: Handshake, incoming: Incoming) -> None:
        match incoming:
            case Preface() if not handshake.is_prefaced:
                handshake.is_prefaced = True
                if not peer.incoming:
                    handshake.agent = self._agents.make()
                    handshake.channel.send(self._hello(handshake.agent))
            case Hello() if handshake.is_prefaced and handshake.remote is None:
                self._on_hello(peer, handshake, incoming)
            case Ready() if peer.incoming and handshake.remote is not None and handshake.probe is None:
                self._probe(handshake)
            case Ready() if not peer.incoming and handshake.is_probed:
                self._link(peer, handshake)
            case _:
                raise ProtocolError("a connection begins with a preface, a hello and a ready each way")

    def _on_hello(self, peer: Peer[Connection], handshake: Handshake, hello: Hello) -> None:
        """Connect our agent to the peer's."""
        if handshake.agent is None:
            handshake.agent = self._agents.make()
        segments = (
            Segment(address, num_bytes, hello.kind)
            for address, num_bytes in zip(hello.addresses.tolist(), hello.num_bytes, strict=True)
        )
        name = handshake.agent.add(hello.metadata)
        memory = PeerPool(Pool(segments), hello.num_guards)
        handshake.remote = Remote(name, memory, hello.device, hello.guard_table)
        # From now on, because the first read from us may need our agent to answer.
        self._active[peer] = None
        self._touched()
        if peer.incoming:
            handshake.channel.send(self._hello(handshake.agent))
        else:
            self._probe(handshake)

    def _hello(self, agent: Agent) -> bytes:
        """Return our hello, as a frame."""
        served, agents = self._served, self._agents
        guards = served.guards
        return Hello(
            guards.num_guards,
            guards.address,
            served.pool.kind,
            agents.device,
            agents.addresses,
            served.sizes,
            agent.metadata,
        ).encode()

    def _probe(self, handshake: Handshake) -> None:
        """Read a guard word of the peer, whose value does not matter, to see that there is a route."""
        assert handshake.agent is not None
        assert handshake.remote is not None
        handshake.word = handshake.agent.take_word()
        local, remote = Memory.word(handshake.word), handshake.remote.guard(0)
        try:
            handshake.probe = handshake.agent.read(handshake.remote.agent, local, remote)
        except TransportError as error:
            raise PeerRefusedError(f"NIXL cannot read from the peer: {error}; {REMEDY}") from None

    def _settle_handshake(self, peer: Peer[Connection], handshake: Handshake) -> bool:
        """Let the agent of a handshake work. Returns whether the first read has just succeeded."""
        assert handshake.agent is not None
        if handshake.probe is None or handshake.is_probed:
            handshake.agent.progress()
            return False
        if not handshake.probe.is_done():
            return False
        handshake.is_probed = True
        handshake.probe.release()
        handshake.agent.give_back_word(handshake.word)
        handshake.channel.send(Ready().encode())
        if peer.incoming:
            self._link(peer, handshake)
        else:
            self.watch_room(peer, handshake.channel)
        return True

    def _link(self, peer: Peer[Connection], handshake: Handshake) -> None:
        """The handshake is over: the peer can be used."""
        agent, remote = handshake.agent, handshake.remote
        assert agent is not None
        assert remote is not None
        reader = Reader(
            agent,
            remote,
            self._served.pool.kind,
            self._agents.device,
            self._options.window_slices,
            self.peers.clock,
            self.peers.end_read,
        )
        link = Link(handshake.channel, agent, remote, reader)
        # The other side's first read may still wait for an answer of our agent.
        link.serves_until = self.peers.clock() + _READING_S
        peer.connection = self._links[peer] = link
        self._active[peer] = None
        logger.info("connected to a peer that is read by %s", self._nixl.mechanism)
        self.peers.connected(peer)

    def _on_link_frame(self, peer: Peer[Connection], link: Link, incoming: Incoming) -> None:
        match incoming:
            case Reading():
                link.serves_until = self.peers.clock() + 2 * _READING_S
                self._active[peer] = None
                self._touched()
            case _:
                raise ProtocolError("the handshake is over")

    # -- reads -----------------------------------------------------------------------------------------

    def mechanism_of(self, peer: Peer[Connection]) -> str:
        return self._nixl.mechanism

    def start_read(self, read: Read[Connection]) -> None:
        peer = read.peer
        link = self._links[peer]
        targets = self._served.require_read(link.remote.memory, read)
        read.mechanism = self._nixl.mechanism
        link.reader.start(read, SlicePlan.of(read.pairs, targets, self._limits))
        if link.reader.num_in_flight:
            self._active[peer] = None
            self._touched()

    def stop_read(self, read: Read[Connection]) -> bool:
        link = self._links.get(read.peer)
        if link is None:
            # The connection is closed. If its agent is not destroyed, NIXL may still write.
            connection = read.peer.connection
            return isinstance(connection, Link) and connection.agent.is_destroyed
        if link.reader.stop(read):
            return True
        # Only destroying the agent ends a read with certainty, and that costs the peer. So give it some time
        # to finish.
        self._call_after(DRAIN_S, lambda: self._give_up(read))
        return False

    def _give_up(self, read: Read[Connection]) -> None:
        if self.peers.read(read.transfer_id) is read:
            error = "a read timed out, and NIXL did not end it; its agent was destroyed"
            self.peers.lose(read.peer, TransferTimeoutError(error))

    # -- the loop --------------------------------------------------------------------------------------

    def turn(self, timeout_s: float) -> None:
        until = self.peers.clock() + timeout_s
        pause_s = 0.0  # the first look at what is in flight is at once
        while True:
            wait_s = 0.0 if self.peers.has_events else max(0.0, until - self.peers.clock())
            # Sockets first; see the module.
            has_heard = self._wait(min(wait_s, pause_s) if self._active else wait_s)
            has_worked = self._settle()
            if has_heard or has_worked or self.peers.has_events or wait_s == 0.0:
                return
            pause_s = self._pause()
            if pause_s == 0.0:
                os.sched_yield()

    def _wait(self, seconds: float) -> bool:
        if 0.0 < seconds < _SLEPT_S:
            time.sleep(seconds)
            seconds = 0.0
        has_heard = self.poller.poll(seconds)
        if has_heard and self._active:
            # A peer's last frames hide the end of its connection until they have been taken.
            for _ in range(_MAX_POLLS):
                if not self.poller.poll(0.0):
                    break
        return has_heard

    def _pause(self) -> float:
        """Return how long to wait before the next look at what is in flight."""
        passed = self.peers.clock() - self._last_change
        if passed < _YIELD_S:
            return 0.0
        return max(_MIN_PAUSE_S, min(passed * _PAUSE_PART, _MAX_PAUSE_S))

    def next_look(self) -> float:
        return self.peers.clock() + self._pause() if self._active else math.inf

    def _touched(self) -> None:
        """Something has begun or ended: look often again."""
        self._last_change = self.peers.clock()

    def _settle(self) -> bool:
        """Look at everything that is in flight; returns whether something has begun or ended."""
        if not self._active:
            return False
        has_worked = False
        now = self.peers.clock()
        for peer in list(self._active):
            if peer not in self._active:
                continue  # an earlier one ended it
            connection = peer.connection
            try:
                if isinstance(connection, Handshake):
                    has_worked |= self._settle_handshake(peer, connection)
                elif isinstance(connection, Link):
                    has_worked |= self._settle_link(peer, connection, now)
            except Exception as error:  # noqa: BLE001 - whatever it is, it ends this peer alone
                self.lose(peer, error)
        if has_worked:
            self._touched()
        return has_worked

    def _settle_link(self, peer: Peer[Connection], link: Link, now: float) -> bool:
        has_worked = link.reader.settle()
        if link.reader.num_in_flight:
            if now - link.said_reading > _READING_S:
                link.said_reading = now
                link.channel.send(_READING)
                self.watch_room(peer, link.channel)
        elif now >= link.serves_until:
            self._active.pop(peer, None)
        else:
            link.agent.progress()
        return has_worked

    def _call_after(self, seconds: float, callback: Callable[[], None]) -> None:
        self.peers.call_at(self.peers.clock() + seconds, callback)

    def on_tick(self, peer: Peer[Connection], missed_s: float) -> None:
        self._links[peer].agent.progress()

    # -- the end ---------------------------------------------------------------------------------------

    def stop_serving(self) -> None:
        # Peers may read until our agents are destroyed, but they find their guards cleared.
        self._served.guards.clear_all()


class NIXLTransport(PeerTransport):
    """Peers whose memory NIXL reads: over RDMA, or what else its backends have.

    See the package for how a read works.

    Pools in main memory and on GPUs are registered with NIXL. The owner's thread does all work, also that of
    NIXL. If the owner does not call `wait_events` for `peer_timeout_s`, its peers lose it.

    Args:
        options: See `NIXLOptions`.

    Raises:
        ConfigurationError: an option is unknown or wrong, or no backend has anything here that fits them.
        BackendUnavailableError: NIXL is not installed, or lacks a backend; the message says what to do.
    """

    scheme: ClassVar[str] = SCHEME
    options_type = NIXLOptions
    guards: WordTable

    def __init__(self, options: Mapping[str, object] = {}) -> None:
        super().__init__()
        self.options = parse_options(NIXLOptions, options, SCHEME)
        with outside(f"cannot open transport {SCHEME!r}", ConfigurationError):
            self.guards = WordTable.anonymous(self.options.num_guards)
        self._nixl = NIXL(self.options)

    def _allocate(self, num_bytes: int) -> Arena:
        return private_arena(num_bytes)

    def _open(self, pool: Pool) -> Endpoint:
        warn_if_few(SCHEME, NUM_HELD, self.options.max_connecting, PER_CONNECTION)
        device = 0
        if pool.kind == "cuda":
            gpu = Gpu(pool.segments[0].address)
            device = gpu.ordinal
            gpu.close()
        # Without a mover: NIXL moves the bytes of every kind of pool.
        served = RegisteredPool(pool, self.guards)
        table: PeerTable[Connection] = PeerTable(
            lambda peers: NIXLBackend(peers, self.options, self._nixl, served, device),
            self.options.limits(),
            log=LimitedLog(logger),
        )
        return PollableEndpoint(SCHEME, table)

    def require_network(self) -> None:
        self._nixl.require_network()

    def _free(self) -> None:
        self._nixl.close()
