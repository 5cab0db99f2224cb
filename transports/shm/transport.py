"""`SharedMemoryTransport`: joins sockets, memory and copying threads to a backend of the peer table."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from .._accepting import Acceptor
from .._copy import IS_ORDERED
from .._descriptors import warn_if_few
from .._frames import encode_frame
from .._limited_log import LimitedLog
from .._memory import WordTable, require_guard
from .._options import parse_options
from .._outside import outside, survived
from .._poller import Poller
from ..base import Arena
from ..endpoint import Backend, HandshakeLimits, Peer, PeerEndpoint, PeerTable, PeerTransport, Read
from ..errors import BackendUnavailableError, ConfigurationError, KVTransferError, TransferTimeoutError
from ..regions import Pool
from .copier import Copier, CopyJob
from .handshake import Handshake, out_of_order
from .hello import FrameKind
from .options import SharedMemoryOptions
from .pools import LocalMemory, PeerMemory
from .sockets import Connection, Listener, connect, new_address, parse_address

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Established:
    """A connection after its handshake, and the memory that the peer has shown to us."""

    connection: Connection
    memory: PeerMemory


#: What the backend keeps per peer: first the address to connect to, then the handshake, then the connection.
Contact = str | Handshake | Established


class SharedMemoryBackend(Backend[Contact]):
    """Moves frames over Unix sockets, and bytes out of mapped memory. See `Backend`."""

    def __init__(
        self, peers: PeerTable[Contact], options: SharedMemoryOptions, memory: LocalMemory, pool: Pool
    ) -> None:
        self._peers = peers
        self._options = options
        self._guards = memory.guards
        with ExitStack() as opened:
            self._shared = memory.share(pool)
            opened.callback(self._shared.close)
            self._poller = Poller()
            opened.callback(self._poller.close)
            self._copier = Copier(options.copy_threads, options.inline_bytes, on_ended=self._poller.interrupt)
            opened.pop_all()
        self._acceptors: list[Acceptor[Connection]] = []
        self._jobs: dict[int, CopyJob] = {}  # by transfer id

    # -- peers -----------------------------------------------------------------------------------------

    def listen(self, address: str) -> str:
        options = self._options
        address = address or new_address(options.socket_dir)
        listener = Listener(address, options.max_queued_bytes, is_shared=bool(options.allowed_uids))
        acceptor = Acceptor(listener, self._poller, partial(self._accept, address), self._peers.call_at)
        self._acceptors.append(acceptor)
        return address

    def _accept(self, address: str, connection: Connection) -> None:
        peer = self._peers.add_incoming(Handshake(connection, True, address))
        try:
            self._begin(peer)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is over for this peer alone
            self._peers.lose(peer, error)

    def prepare(self, address: str) -> Contact:
        parse_address(address)
        return address

    def connect(self, peer: Peer[Contact]) -> None:
        address = peer.connection
        assert isinstance(address, str), "a peer is connected to once"
        connection = connect(address, self._options.max_queued_bytes)
        peer.connection = Handshake(connection, False, address)
        self._begin(peer)

    def _begin(self, peer: Peer[Contact]) -> None:
        handshake = peer.connection
        assert isinstance(handshake, Handshake)
        handshake.begin(frozenset({os.geteuid(), *self._options.allowed_uids}))
        self._watch(peer, handshake.connection)

    def _watch(self, peer: Peer[Contact], connection: Connection) -> None:
        self._poller.watch(connection, partial(self._serve, peer), writes=connection.num_unsent > 0)

    def _serve(self, peer: Peer[Contact]) -> None:
        """A socket is ready: take what came, send what waits."""
        assert not isinstance(peer.connection, str)
        connection = peer.connection.connection
        try:
            for kind, body in connection.receive():
                self._handle(peer, FrameKind(kind), body)
            connection.flush()
            self._watch(peer, connection)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is over for this peer alone
            # A read whose last byte was copied and vouched for before the connection ended is a good one.
            self._collect()
            self._peers.lose(peer, error)

    def _handle(self, peer: Peer[Contact], kind: FrameKind, body: bytes) -> None:
        contact = peer.connection
        if isinstance(contact, Handshake):
            memory = contact.on_frame(kind, body, self._shared)
            if memory is not None:
                peer.connection = Established(contact.connection, memory)
                self._peers.connected(peer)
        elif kind is FrameKind.MESSAGE:
            self._peers.message(peer, body)
        else:
            raise out_of_order(kind)

    def hang_up(self, peer: Peer[Contact], error: KVTransferError) -> None:
        if isinstance(peer.connection, str):
            return  # connecting failed before there was a socket
        connection = peer.connection.connection
        with survived("cannot stop polling a connection", self._peers.log), suppress(KeyError):
            self._poller.unwatch(connection)  # a KeyError: it failed before it was watched
        connection.close()

    def release(self, peer: Peer[Contact]) -> None:
        # Not in `hang_up`: until the last piece has been copied, a thread reads from this memory.
        if isinstance(peer.connection, Established):
            peer.connection.memory.close()

    def send(self, peer: Peer[Contact], message: bytes) -> None:
        connection = _established(peer).connection
        connection.send_message(encode_frame(FrameKind.MESSAGE, message))
        try:
            self._watch(peer, connection)
        except Exception as error:  # noqa: BLE001 - the message may have left, so the call has not failed
            self._peers.lose(peer, error)

    def handshake_error(self, peer: Peer[Contact]) -> KVTransferError:
        return TransferTimeoutError("timed out waiting for the peer's hello")

    def describe(self, peer: Peer[Contact]) -> str:
        assert not isinstance(peer.connection, str), "a peer that connected to us has a socket"
        return f"process {peer.connection.connection.pid}"

    # -- reads -----------------------------------------------------------------------------------------

    def start_read(self, read: Read[Contact]) -> None:
        memory = _established(read.peer).memory
        require_guard(read.guard, memory.num_guards)
        local = self._shared.pool.addresses(read.pairs.local_offsets, read.pairs.lengths)
        pieces = memory.pieces(local, read.pairs)
        job = CopyJob(read.transfer_id, memory, pieces, read.guard, read.deadline)
        read.mechanism = job.mechanism
        self._jobs[read.transfer_id] = job
        if self._copier.submit(job):
            self._collect()

    def stop_read(self, read: Read[Contact]) -> bool:
        job = self._jobs.get(read.transfer_id)
        if job is None:
            return True  # it failed before anything was copied
        assert read.error is not None, "the table says why"
        # The pieces in flight are copied to their end, and until then the local regions are written. `_collect` reports
        # the end, as of any other read; the copier interrupts the poller for it.
        self._copier.cancel(job, read.error)
        return False

    def _collect(self) -> None:
        """Report the reads that have ended."""
        for ended in self._copier.take_ended():
            del self._jobs[ended.transfer_id]
            read = self._peers.read(ended.transfer_id)
            if read is not None:
                self._peers.end_read(read, ended.error, ended_at=ended.ended_at)

    # -- the loop --------------------------------------------------------------------------------------

    def turn(self, timeout_s: float) -> None:
        # Also if there are events: a stream of small reads, which end within `start_read`, must not starve the sockets.
        self._poller.poll(0.0 if self._peers.has_events else timeout_s)
        self._collect()

    def interrupt(self) -> None:
        self._poller.interrupt()

    def fileno(self) -> int:
        """A descriptor that is readable while `turn` has something to do about sockets and copies."""
        return self._poller.fileno()

    # -- the end ---------------------------------------------------------------------------------------

    def stop_serving(self) -> None:
        # Threads before guards: when the guards are cleared, peers may still copy out of our pool, but nothing writes
        # into it any more.
        self._copier.close()
        self._guards.clear_all()

    def close(self) -> None:
        for acceptor in self._acceptors:
            with survived("cannot stop listening", self._peers.log):
                acceptor.close()
        self._shared.close()
        self._poller.close()


def _established(peer: Peer[Contact]) -> Established:
    assert isinstance(peer.connection, Established), "the table lets only connected peers through"
    return peer.connection


class SharedMemoryEndpoint(PeerEndpoint[Contact]):
    """A `PeerEndpoint` that another loop can wait for."""

    _backend: SharedMemoryBackend

    def fileno(self) -> int:
        """A descriptor that is readable while `wait_events` has something to do about sockets and copies.

        It says nothing about deadlines: see `next_deadline`.
        """
        return self._backend.fileno()


class SharedMemoryTransport(PeerTransport):
    """Peers on this host. See the package."""

    scheme: ClassVar[str] = "shm"
    options_type = SharedMemoryOptions
    guards: WordTable

    def __init__(self, options: Mapping[str, object] = {}) -> None:
        """Allocate the guard table.

        Raises:
            ConfigurationError: an option is unknown or wrong.
            BackendUnavailableError: this system cannot do it.
        """
        super().__init__()
        self._options = parse_options(SharedMemoryOptions, options, self.scheme)
        if not IS_ORDERED:
            raise BackendUnavailableError(
                "this processor needs kvferry's compiled part: install a C compiler"
            )
        warn_if_few(self.scheme, 0, self._options.max_connecting, 1)
        with outside(f"cannot open transport {self.scheme!r}", ConfigurationError):
            self._memory = LocalMemory(self._options.num_guards)
        self.guards = self._memory.guards

    def _allocate(self, num_bytes: int) -> Arena:
        return self._memory.allocate(num_bytes)

    def _open(self, pool: Pool) -> SharedMemoryEndpoint:
        options, memory = self._options, self._memory
        limits = HandshakeLimits(options.handshake_timeout_s, options.max_connecting)
        table = PeerTable(
            lambda peers: SharedMemoryBackend(peers, options, memory, pool), limits, log=LimitedLog(logger)
        )
        return SharedMemoryEndpoint(self.scheme, table)

    def _free(self) -> None:
        self._memory.close()
