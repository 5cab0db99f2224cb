"""`SharedMemoryTransport`: joins sockets, memory and copying threads to a backend of the peer table."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import ClassVar

from .._descriptors import warn_if_few
from .._memory import WordTable, require_guard
from ..base import Arena
from ..copying import IS_ORDERED
from ..endpoint import Peer, PeerTable, PeerTransport, Read
from ..errors import BackendUnavailableError, ConfigurationError, KVTransferError, TransferTimeoutError
from ..limited_log import LimitedLog
from ..options import parse_options
from ..outside import outside
from ..regions import Pool
from ..streams import FrameSocket, PollableEndpoint, StreamBackend
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


class SharedMemoryBackend(StreamBackend[Contact]):
    """Moves frames over Unix sockets, and bytes out of mapped memory. See `Backend`."""

    message_kind = FrameKind.MESSAGE

    def __init__(
        self, peers: PeerTable[Contact], options: SharedMemoryOptions, memory: LocalMemory, pool: Pool
    ) -> None:
        self._options = options
        self._guards = memory.guards
        with ExitStack() as opened:
            self._shared = memory.share(pool)
            opened.callback(self._shared.close)
            super().__init__(peers)
            opened.callback(self.poller.close)
            self._copier = Copier(options.copy_threads, options.inline_bytes, on_ended=self.poller.interrupt)
            opened.pop_all()
        self._jobs: dict[int, CopyJob] = {}  # by transfer id

    # -- peers -----------------------------------------------------------------------------------------

    def stream_of(self, connection: Contact) -> FrameSocket | None:
        return None if isinstance(connection, str) else connection.connection

    def listen(self, address: str) -> str:
        address = address or new_address(self._options.socket_dir)
        listener = Listener(address, is_shared=bool(self._options.allowed_uids))
        self.accept_from(listener, lambda sock: Handshake(self._connection(sock), True, address))
        return address

    def prepare(self, address: str) -> Contact:
        parse_address(address)
        return address

    def connect(self, peer: Peer[Contact]) -> None:
        address = peer.connection
        assert isinstance(address, str), "a peer is connected to once"
        peer.connection = Handshake(connect(address, self._connection), False, address)
        self.begin(peer)

    def _connection(self, sock: socket.socket) -> Connection:
        return Connection(sock, self._options.max_queued_bytes)

    def greet(self, peer: Peer[Contact]) -> None:
        handshake = peer.connection
        assert isinstance(handshake, Handshake)
        handshake.begin(frozenset({os.geteuid(), *self._options.allowed_uids}))

    def on_frame(self, peer: Peer[Contact], kind: int, body: bytes) -> None:
        contact = peer.connection
        if not isinstance(contact, Handshake):
            raise out_of_order(FrameKind(kind))
        memory = contact.on_frame(FrameKind(kind), body, self._shared)
        if memory is not None:
            peer.connection = Established(contact.connection, memory)
            self.peers.connected(peer)

    def lose(self, peer: Peer[Contact], error: Exception) -> None:
        # A read whose last byte was copied and vouched for before the connection ended is a good one.
        self._collect()
        super().lose(peer, error)

    def release(self, peer: Peer[Contact]) -> None:
        # Not in `hang_up`: until the last piece has been copied, a thread reads from this memory.
        if isinstance(peer.connection, Established):
            peer.connection.memory.close()

    def handshake_error(self, peer: Peer[Contact]) -> KVTransferError:
        return TransferTimeoutError("timed out waiting for the peer's hello")

    def describe(self, peer: Peer[Contact]) -> str:
        assert not isinstance(peer.connection, str), "a peer that connected to us has a socket"
        return f"process {peer.connection.connection.pid}"

    # -- reads -----------------------------------------------------------------------------------------

    def start_read(self, read: Read[Contact]) -> None:
        memory = _established(read.peer).memory
        require_guard(read.guard, memory.num_guards)
        pairs = read.pairs
        local = self._shared.pool.addresses(pairs.local_offsets, pairs.lengths)
        job = CopyJob(read.transfer_id, memory, memory.pieces(local, pairs), read.guard, read.deadline)
        read.mechanism = job.mechanism
        self._jobs[read.transfer_id] = job
        if self._copier.submit(job):
            self._collect()

    def stop_read(self, read: Read[Contact]) -> bool:
        job = self._jobs.get(read.transfer_id)
        if job is None:
            return True  # it failed before anything was copied
        assert read.error is not None, "the table says why"
        # The pieces in flight are copied to their end, and until then the local regions are written.
        # `_collect` reports the end, as of any other read; the copier interrupts the poller for it.
        self._copier.cancel(job, read.error)
        return False

    def _collect(self) -> None:
        """Report the reads that have ended."""
        for ended in self._copier.take_ended():
            del self._jobs[ended.transfer_id]
            read = self.peers.read(ended.transfer_id)
            if read is not None:
                self.peers.end_read(read, ended.error, ended_at=ended.ended_at)

    # -- the loop --------------------------------------------------------------------------------------

    def turn(self, timeout_s: float) -> None:
        super().turn(timeout_s)
        self._collect()

    # -- the end ---------------------------------------------------------------------------------------

    def stop_serving(self) -> None:
        # Threads before guards: when the guards are cleared, peers may still copy out of our pool, but
        # nothing writes into it any more.
        self._copier.close()
        self._guards.clear_all()

    def close(self) -> None:
        self._shared.close()
        super().close()


def _established(peer: Peer[Contact]) -> Established:
    assert isinstance(peer.connection, Established), "the table lets only connected peers through"
    return peer.connection


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

    def _open(self, pool: Pool) -> PollableEndpoint[Contact]:
        options, memory = self._options, self._memory
        table = PeerTable(
            lambda peers: SharedMemoryBackend(peers, options, memory, pool),
            options.limits(),
            log=LimitedLog(logger),
        )
        return PollableEndpoint(self.scheme, table)

    def _free(self) -> None:
        self._memory.close()
