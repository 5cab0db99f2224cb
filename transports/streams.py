"""Peers that are non-blocking stream sockets, over which frames go both ways.

`StreamBackend` is a `Backend` for them: it accepts, waits, receives and sends. A subclass connects, handles
frames and moves the bytes of reads. `FrameSocket` is one connection, and `Poller` waits for all of them.

A frame is `length: u32, kind: u8`, then `length` bytes; little-endian. The last eight of these are the sum of
all bytes before them (`sums`), except over connections within one machine.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import select
import socket
import struct
import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import ClassVar, Generic, Protocol, TypeVar

from .checked import printable
from .endpoint import Backend, C, Peer, PeerEndpoint, PeerState, PeerTable
from .errors import (
    BackpressureError,
    KVTransferError,
    PeerLostError,
    PeerRefusedError,
    ProtocolError,
    TransportClosedError,
    VersionMismatchError,
)
from .limited_log import LimitedLog
from .outside import survived, typed
from .sums import SUM_BYTES, require_sum, sum_of

logger = logging.getLogger(__name__)

#: What one call of `recv` takes. Python allocates it in full before each call, even for a frame of five
#: bytes, and the C library maps anything larger than 128 KiB anew each time, which takes longer than the call
#: itself.
RECEIVE_BYTES = 64 << 10

#: Bytes which show that the peer lives although they complete no frame: less than one packet of a large
#: frame, and more than a ping. If a length was damaged on its way, the frame swallows all that follows. Its
#: pings must not keep such a connection, over which nothing else would ever arrive.
SIGN_OF_LIFE_BYTES = 512

#: System calls per `receive`, so that one peer cannot keep the loop to itself.
_MAX_RECEIVES = 64

#: How long no connection is accepted after descriptors, or memory for sockets, ran out.
_REST_S = 0.25

#: Connections accepted in one go, so that a flood of them cannot keep the loop from its other sockets.
_MAX_ACCEPTED = 64

_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

#: How often per timeout a node pings its quiet peers. Idle peers cost nothing else, so this is what they
#: cost.
_TICKS = 3

#: The most bytes of a refusal, for limits of frames.
MAX_REASON_BYTES = 1 << 10

_HEAD = struct.Struct("<IB")
_VERSION = struct.Struct("<I")

T = TypeVar("T")


# == waiting =======================================================================================


class HasFileno(Protocol):
    def fileno(self) -> int: ...


class Poller:
    """Calls a handler for each socket that is ready. One thread owns it.

    Any thread may call `interrupt` and `call_soon`, also after `close`.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._watched: dict[int, tuple[int, Callable[[], None]]] = {}  # by descriptor: events, handler
        self._signal = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._watch(self._signal, select.EPOLLIN, self._on_signal)
        self._lock = threading.Lock()  # the signal must not go to a file that reuses the closed descriptor
        self._calls: deque[Callable[[], None]] = deque()
        self._is_closed = False

    def fileno(self) -> int:
        """Return a descriptor that is readable while `poll` has something to do. It is an epoll set."""
        return self._epoll.fileno()

    def watch(self, sock: HasFileno, handler: Callable[[], None], *, writes: bool = False) -> None:
        """Call `handler` when the socket is readable and, with `writes`, when it is writable."""
        self._watch(sock.fileno(), select.EPOLLIN | (select.EPOLLOUT if writes else 0), handler)

    def _watch(self, descriptor: int, events: int, handler: Callable[[], None]) -> None:
        watched = self._watched.get(descriptor)
        if watched is None:
            self._epoll.register(descriptor, events)
        elif watched[0] != events:
            self._epoll.modify(descriptor, events)
        else:
            return
        self._watched[descriptor] = events, handler

    def unwatch(self, sock: HasFileno) -> None:
        del self._watched[sock.fileno()]
        with contextlib.suppress(OSError):  # the descriptor may be closed already
            self._epoll.unregister(sock.fileno())

    def poll(self, timeout_s: float) -> bool:
        """Wait until a socket is ready, `interrupt` is called, or the timeout has passed; call the handlers.

        Returns:
            False if the timeout passed.
        """
        # Rounded up, because epoll's unit is a millisecond: rounded down, the last one would be a busy loop.
        timeout_s = math.ceil(timeout_s * 1e3) * 1e-3 if timeout_s > 0 else 0.0
        ready = self._epoll.poll(timeout_s)
        for descriptor, _ in ready:
            watched = self._watched.get(descriptor)
            if watched is not None:  # an earlier handler may have dropped it
                watched[1]()
        return bool(ready)

    def interrupt(self) -> None:
        """End the current call of `poll`, or the next one."""
        with self._lock:
            if not self._is_closed:
                os.eventfd_write(self._signal, 1)

    def call_soon(self, callback: Callable[[], None]) -> None:
        """Have `poll` call `callback`, which raises nothing."""
        self._calls.append(callback)
        self.interrupt()

    def _on_signal(self) -> None:
        os.eventfd_read(self._signal)
        while self._calls:
            self._calls.popleft()()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._epoll.close()
            os.close(self._signal)


# == frames ========================================================================================


def encode_frame(kind: int, body: bytes, *, has_sum: bool = True) -> bytes:
    """Return one frame. The caller has checked the length."""
    if not has_sum:
        return _HEAD.pack(len(body), kind) + body
    frame = _HEAD.pack(len(body) + SUM_BYTES, kind) + body
    return frame + sum_of(frame)


def require_length(limits: Mapping[int, int], kind: int, num_bytes: int, *, has_sum: bool = True) -> None:
    """Check the head of a frame, before its body is awaited: a peer must not be able to make us buffer any
    number of bytes.

    Raises:
        ProtocolError: it is of an unknown kind, or longer than its kind allows. The stream cannot be used any
            more.
    """
    if kind not in limits or num_bytes > limits[kind] + (SUM_BYTES if has_sum else 0):
        raise ProtocolError(f"malformed frame from the peer: kind {kind} with {num_bytes} bytes")


def open_frame(frame: bytes) -> bytes:
    """Return the body of a whole frame with a sum.

    Raises:
        ChecksumError: it was changed on its way.
    """
    require_sum(frame[:-SUM_BYTES], frame[-SUM_BYTES:])
    return frame[_HEAD.size : -SUM_BYTES]


def decode_frame(decoders: Mapping[int, Callable[[bytes], T]], kind: int, body: bytes) -> T:
    """Decode a frame from a peer, by the decoder of its kind.

    Raises:
        ProtocolError: it is malformed or out of place. Nothing that the same peer sends after it can be
            trusted.
        VersionMismatchError: it is the hello of another version of the protocol.
    """
    if kind not in decoders:
        raise ProtocolError(f"unexpected frame from the peer: kind {kind} is out of place here")
    try:
        return decoders[kind](body)
    except (struct.error, UnicodeDecodeError) as error:
        raise ProtocolError(f"malformed frame of kind {kind}: {error}") from None


def encode_preface(magic: bytes, version: int) -> bytes:
    """Return how a hello begins: the magic, and the version as u32.

    Every version can read as much of every other, so the frame of a hello, and its sum, are the same in all
    of them.
    """
    return magic + _VERSION.pack(version)


def require_preface(body: bytes, magic: bytes, version: int, scheme: str) -> int:
    """Check how a hello begins; return how many bytes that is.

    Raises:
        ProtocolError: it is not the hello of a node with this transport.
        VersionMismatchError: the node has another version of the protocol.
    """
    num_bytes = len(magic) + _VERSION.size
    if not body.startswith(magic) or len(body) < num_bytes:
        raise ProtocolError(f"malformed hello: the peer is not a kvferry node with transport {scheme!r}")
    (remote,) = _VERSION.unpack_from(body, len(magic))
    if remote != version:
        raise VersionMismatchError(local=version, remote=remote)
    return num_bytes


class FrameReader:
    """Cuts a stream of bytes into frames, and buffers at most one incomplete frame.

    Args:
        limits: Largest body in bytes, by kind of frame. Other kinds are refused.
        has_sums: Whether the frames have sums.
    """

    def __init__(self, limits: Mapping[int, int], *, has_sums: bool = True) -> None:
        self._limits = limits
        self._has_sums = has_sums
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        """Add bytes and return the frames that they complete, as (kind, body).

        Raises:
            ProtocolError: see `require_length`.
            ChecksumError: see `open_frame`.
        """
        self._buffer += data
        frames = []
        at = 0
        while len(self._buffer) - at >= _HEAD.size:
            num_bytes, kind = _HEAD.unpack_from(self._buffer, at)
            require_length(self._limits, kind, num_bytes, has_sum=self._has_sums)
            end = at + _HEAD.size + num_bytes
            if len(self._buffer) < end:
                break
            frame = bytes(self._buffer[at:end])
            frames.append((kind, open_frame(frame) if self._has_sums else frame[_HEAD.size :]))
            at = end
        del self._buffer[:at]
        return frames

    @property
    def num_missing(self) -> int:
        """Bytes until the next frame is complete, or until its length is known."""
        if len(self._buffer) < _HEAD.size:
            return _HEAD.size - len(self._buffer)
        num_bytes, _ = _HEAD.unpack_from(self._buffer)
        return int(_HEAD.size + num_bytes - len(self._buffer))


class FrameSocket:
    """One connection to a peer, over which frames go both ways.

    Args:
        limits, has_sums: See `FrameReader`.
        max_queued_bytes: Unsent bytes above which messages are refused.

    Attributes:
        last_heard: When a frame was last complete, or at least `SIGN_OF_LIFE_BYTES` arrived at once, in
            `time.monotonic` seconds.
        last_said: When bytes were last sent.
        awaits_room: The poller was asked to report room to send; None while it does not know this socket.
    """

    def __init__(
        self,
        sock: socket.socket,
        limits: Mapping[int, int],
        max_queued_bytes: int,
        *,
        has_sums: bool = True,
    ) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._max_queued_bytes = max_queued_bytes
        self._has_sums = has_sums
        self._reader = FrameReader(limits, has_sums=has_sums)
        self._unsent = bytearray()
        self._is_writable = True
        self._reason = "the peer closed the connection"
        self.last_heard = self.last_said = time.monotonic()
        self.awaits_room: bool | None = None

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def num_unsent(self) -> int:
        """Bytes that `flush` will send when the socket is writable."""
        return len(self._unsent)

    def frame(self, kind: int, body: bytes = b"") -> bytes:
        """Return one frame for this connection. The caller has checked the length."""
        return encode_frame(kind, body, has_sum=self._has_sums)

    def send_message(self, frame: bytes) -> None:
        """Send or queue a frame that holds a control message.

        Raises:
            PeerLostError: the peer is gone.
            BackpressureError: too many bytes are unsent. Nothing was sent.
        """
        self._require_writable()
        if self._unsent and len(self._unsent) + len(frame) > self._max_queued_bytes:
            raise BackpressureError(f"the peer does not read: {len(self._unsent)} bytes to it are unsent")
        self.send(frame)
        self._require_writable()

    def _require_writable(self) -> None:
        if not self._is_writable:
            raise PeerLostError(self._reason)

    def send(self, frame: bytes) -> None:
        """Send or queue a frame; drop it if the peer is lost."""
        self._unsent += frame
        self.flush()

    def flush(self) -> None:
        """Send as many unsent bytes as the socket takes. If the peer is lost, drop them."""
        while self._unsent:
            try:
                with memoryview(self._unsent) as waiting:
                    sent = self._socket.send(waiting)
            except BlockingIOError:
                return
            except OSError:
                # What the peer sent before can still be received. `receive` reports the loss after that.
                self._is_writable = False
                sent = len(self._unsent)
            except Exception as error:  # noqa: BLE001 - only this peer is lost
                self.give_up(error)
                return
            self.last_said = time.monotonic()
            del self._unsent[:sent]

    def give_up(self, error: Exception) -> None:
        """Make the next `receive` report that the peer is lost; at this point the caller cannot
        handle that.
        """
        self._is_writable = False
        self._reason = f"cannot send to the peer: {error!r}"
        self._unsent.clear()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # so that the poller reports it

    def receive(self) -> Iterable[tuple[int, bytes]]:
        """Return the frames that arrived, as (kind, body).

        Raises:
            PeerLostError: the peer closed, and every complete frame was returned before.
            ProtocolError, ChecksumError, VersionMismatchError: see `FrameReader.feed`.
        """
        frames: list[tuple[int, bytes]] = []
        for _ in range(_MAX_RECEIVES):
            try:
                data = self._receive_some()
            except BlockingIOError:
                break
            except OSError as error:
                if frames:
                    break
                raise PeerLostError(f"the connection broke: {error}") from error
            if not data:
                if frames:
                    break
                raise PeerLostError(self._reason)
            arrived = self._reader.feed(data)
            if arrived or len(data) >= SIGN_OF_LIFE_BYTES:
                self.last_heard = time.monotonic()
            frames += arrived
            if len(data) < RECEIVE_BYTES:
                break  # the socket is empty; the poller reports what comes later
        return frames

    def _receive_some(self) -> bytes:
        return self._socket.recv(RECEIVE_BYTES)

    def close(self) -> None:
        self._socket.close()


# == accepting =====================================================================================


class Acceptor:
    """Passes every connection to a listening socket to `take`.

    When we are out of file descriptors the kernel keeps reporting the pending connection. Stop polling the
    listener for a while; the peer stays in the backlog.

    Args:
        listener: It is closed by `close`.
        take: Whatever it raises costs this connection, which is then closed.
        call_at: `PeerTable.call_at`, which ends such a pause.
    """

    def __init__(
        self,
        listener: socket.socket,
        poller: Poller,
        take: Callable[[socket.socket], None],
        call_at: Callable[[float, Callable[[], None]], int],
    ) -> None:
        self._listener = listener
        self._poller = poller
        self._take = take
        self._call_at = call_at
        self._log = LimitedLog(logger)
        listener.setblocking(False)
        self._resume()

    def _accept_all(self) -> None:
        for _ in range(_MAX_ACCEPTED):
            try:
                sock, _address = self._listener.accept()
            except OSError as error:
                if error.errno in _EXHAUSTED:
                    self._rest(error)
                return  # no connection waits; or one hung up, and the next one is reported again
            try:
                self._take(sock)
            except Exception as error:  # noqa: BLE001 - only this connection is lost
                self._log.warning("cannot accept a connection: %r", error, exc_info=error)
                sock.close()

    def _rest(self, error: OSError) -> None:
        self._log.warning("%s", typed(error, f"cannot accept a peer (next try in {_REST_S} s)"))
        self._poller.unwatch(self._listener)
        self._call_at(time.monotonic() + _REST_S, self._resume)

    def _resume(self) -> None:
        self._poller.watch(self._listener, self._accept_all)

    def close(self) -> None:
        """Stop listening."""
        self._log.flush()
        self._listener.close()


# == the backend ===================================================================================


class StreamBackend(Backend[C]):
    """A backend whose peers are stream sockets that carry frames.

    A subclass calls `accept_from` in `listen`, and `begin` when it has connected. It implements `stream_of`,
    `on_frame` and what `Backend` requires about connecting, reads and `stop_serving`.

    The subclass sets the kinds of the frames that mean the same in every protocol. If it has no pings or no
    refusals, it leaves those.

    Attributes:
        message_kind: Holds a control message.
        ping_kind: Only shows that the sender is alive. See `KeepAlive`.
        refused_kind: The sender does not become a peer; the body is the reason, as text.
    """

    message_kind: ClassVar[int]
    ping_kind: ClassVar[int | None] = None
    refused_kind: ClassVar[int | None] = None

    def __init__(self, peers: PeerTable[C]) -> None:
        self.peers = peers
        self.poller = Poller()
        self._acceptors: list[Acceptor] = []

    # -- required --------------------------------------------------------------------------------------

    @abstractmethod
    def stream_of(self, connection: C) -> FrameSocket | None:
        """Return the socket of a connection; None if it has none yet."""

    @abstractmethod
    def on_frame(self, peer: Peer[C], kind: int, body: bytes) -> None:
        """Handle a frame that is no control message. Whatever it raises ends the peer, and the peer alone."""

    # -- optional --------------------------------------------------------------------------------------

    def greet(self, peer: Peer[C]) -> None:
        """Send the first frames of a new connection. Whatever it raises ends the peer."""

    def streams_of(self, connection: C) -> Iterable[FrameSocket]:
        """Return all sockets of a connected peer. None of them may be silent for long."""
        stream = self.stream_of(connection)
        return () if stream is None else (stream,)

    def on_tick(self, peer: Peer[C], missed_s: float) -> None:
        """Do something more for a connected peer when `KeepAlive` looks at it.

        Whatever it raises ends the peer.

        Args:
            missed_s: For this long the node itself did not look, so no peer was silent.
        """

    # -- for the subclass ------------------------------------------------------------------------------

    def accept_from(self, listener: socket.socket, wrap: Callable[[socket.socket], C]) -> None:
        """Accept the peers that connect to a listening socket, which is closed with the backend.

        Args:
            wrap: Makes a connection with a `FrameSocket` of an accepted socket.
        """
        take = partial(self._accept, wrap)
        self._acceptors.append(Acceptor(listener, self.poller, take, self.peers.call_at))

    def _accept(self, wrap: Callable[[socket.socket], C], sock: socket.socket) -> None:
        peer = self.peers.add_incoming(wrap(sock))
        try:
            self.begin(peer)
        except Exception as error:  # noqa: BLE001 - whatever it is, it ends this peer alone
            self.lose(peer, error)

    def begin(self, peer: Peer[C]) -> None:
        """Greet a peer whose connection has a socket, and handle what comes from it."""
        self.greet(peer)
        self.watch(peer, self.stream(peer))

    def watch(self, peer: Peer[C], stream: FrameSocket) -> None:
        """Handle what comes from a socket of a peer; for a second one, because `begin` does so for
        the first.
        """
        awaits_room = stream.num_unsent > 0
        self.poller.watch(stream, partial(self._serve, peer, stream), writes=awaits_room)
        stream.awaits_room = awaits_room

    def post(self, peer: Peer[C], kind: int, *parts: bytes) -> None:
        """Send or queue a frame of our own."""
        stream = self.stream(peer)
        stream.send(stream.frame(kind, b"".join(parts)))
        self.watch_room(peer, stream)

    def refuse(self, stream: FrameSocket, error: KVTransferError) -> None:
        """Say why the other side does not become a peer, unless it cannot hear that or knows it already.

        A peer of another version learns that from our preface or hello.
        """
        if not isinstance(error, PeerLostError | VersionMismatchError | TransportClosedError):
            assert self.refused_kind is not None, "the subclass sets it"
            stream.send(stream.frame(self.refused_kind, str(error).encode()[:MAX_REASON_BYTES]))

    def watch_room(self, peer: Peer[C], stream: FrameSocket) -> None:
        """Have the poller report room to send for as long as something waits for it.

        If it reported room always, the loop would spin.
        """
        if stream.awaits_room is not None and stream.awaits_room != (stream.num_unsent > 0):
            self.watch(peer, stream)

    def unwatch(self, stream: FrameSocket) -> None:
        """Handle nothing more that comes from a socket."""
        if stream.awaits_room is not None:
            stream.awaits_room = None
            self.poller.unwatch(stream)

    def drop(self, stream: FrameSocket) -> None:
        """Close a socket."""
        with survived("cannot stop polling a connection", self.peers.log):
            self.unwatch(stream)
        stream.close()

    def lose(self, peer: Peer[C], error: Exception) -> None:
        """Report that a peer is gone, because of something that it sent or that its socket reported."""
        if isinstance(error, struct.error):
            error = ProtocolError(f"malformed frame from the peer: {error}")
        self.peers.lose(peer, error)

    def stream(self, peer: Peer[C]) -> FrameSocket:
        stream = self.stream_of(peer.connection)
        assert stream is not None, "only a connection with a socket sends and receives"
        return stream

    def _serve(self, peer: Peer[C], stream: FrameSocket) -> None:
        """A socket is ready: handle what came, send what waits."""
        try:
            for kind, body in stream.receive():
                if peer.state is PeerState.LEAVING:
                    return  # a frame before this one ended the peer
                if kind == self.message_kind:
                    self.peers.message(peer, body)
                elif kind == self.refused_kind and peer.state is PeerState.HANDSHAKING:
                    raise PeerRefusedError(f"the peer refused: {printable(body.decode(errors='replace'))}")
                elif kind != self.ping_kind or peer.state is PeerState.HANDSHAKING:
                    self.on_frame(peer, kind, body)
            if peer.state is PeerState.LEAVING:
                return
            stream.flush()
            self.watch_room(peer, stream)
        except Exception as error:  # noqa: BLE001 - whatever it is, it ends this peer alone
            self.lose(peer, error)

    # -- the methods of a backend ----------------------------------------------------------------------

    def send(self, peer: Peer[C], message: bytes) -> None:
        stream = self.stream(peer)
        stream.send_message(stream.frame(self.message_kind, message))
        try:
            self.watch_room(peer, stream)
        except Exception as error:  # noqa: BLE001 - the message may have left, so the call has not failed
            self.lose(peer, error)

    def hang_up(self, peer: Peer[C], error: KVTransferError) -> None:
        stream = self.stream_of(peer.connection)
        if stream is not None:
            self.drop(stream)

    def turn(self, timeout_s: float) -> None:
        # Also if there are events: a stream of reads that end at once must not starve the sockets.
        self.poller.poll(0.0 if self.peers.has_events else timeout_s)

    def interrupt(self) -> None:
        self.poller.interrupt()

    def fileno(self) -> int:
        """Return a descriptor that is readable while `turn` has something to do about sockets."""
        return self.poller.fileno()

    def next_look(self) -> float:
        """Return when `turn` has something to do that no descriptor reports, by the table's clock."""
        return math.inf

    def close(self) -> None:
        for acceptor in self._acceptors:
            with survived("cannot stop listening", self.peers.log):
                acceptor.close()
        self.poller.close()


class PollableEndpoint(PeerEndpoint[C]):
    """A `PeerEndpoint` that another loop can wait for, until it is readable or its next deadline has come."""

    _backend: StreamBackend[C]

    def fileno(self) -> int:
        """Return a descriptor that is readable while `wait_events` has something to do about sockets and
        copies.
        """
        return self._backend.fileno()

    def next_deadline(self) -> float:
        return min(super().next_deadline(), self._backend.next_look())


class KeepAlive(Generic[C]):
    """Pings the peers to which nothing was sent for a while, and loses those that were silent for too long.

    One timer for all peers, so that an idle node wakes up once per interval and not once per peer.

    Args:
        links: The connected peers. The backend changes it.
        timeout_s: A peer that is silent for longer is lost.
    """

    def __init__(self, backend: StreamBackend[C], links: Mapping[Peer[C], object], timeout_s: float) -> None:
        assert backend.ping_kind is not None, "the subclass sets it"
        self._backend = backend
        self._links = links
        self._timeout_s = timeout_s
        self._interval_s = timeout_s / _TICKS
        self._ping_kind = backend.ping_kind
        self._last = backend.peers.clock()
        backend.peers.call_at(self._last + self._interval_s, self._tick)

    def _tick(self) -> None:
        backend, now = self._backend, self._backend.peers.clock()
        backend.peers.call_at(now + self._interval_s, self._tick)
        # While this node itself did not look, no peer was silent.
        missed_s = max(0.0, now - self._last - 2 * self._interval_s)
        self._last = now
        for peer in list(self._links):
            try:
                for stream in backend.streams_of(peer.connection):
                    stream.last_heard += missed_s
                    self._look_at(peer, stream, now)
                backend.on_tick(peer, missed_s)
            except Exception as error:  # noqa: BLE001 - whatever it is, it ends this peer alone
                backend.lose(peer, error)

    def _look_at(self, peer: Peer[C], stream: FrameSocket, now: float) -> None:
        if now - stream.last_heard > self._timeout_s:
            raise PeerLostError(f"the peer was silent for {self._timeout_s:g} s")
        # After half an interval, because the next chance is a whole one later: so a peer never hears nothing
        # for longer than half of the timeout.
        if now - stream.last_said >= self._interval_s / 2 and not stream.num_unsent:
            stream.send(stream.frame(self._ping_kind))
            self._backend.watch_room(peer, stream)
