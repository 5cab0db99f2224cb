"""One connection each, and how connections are watched."""

from __future__ import annotations

import itertools
import struct
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import zmq

from .._lookups import Found
from .._tcp import authority
from ..base import MAX_MESSAGE_BYTES
from ..errors import (
    KVTransferError,
    PeerLostError,
    PeerRefusedError,
    TransportError,
    mapped,
)
from .frames import Frame
from .options import Address, ZeroMQOptions
from .security import CurveKeys
from .wire import MAX_SLICE_BYTES

Context = zmq.Context[zmq.Socket[bytes]]
Socket = zmq.Socket[bytes]
Parts = Sequence[bytes | Frame]

_SEND_ERRORS: Final[Mapping[type[BaseException], type[KVTransferError]]] = {zmq.ZMQError: TransportError}

#: Messages in each of libzmq's queues. Low: only the count is bounded there, and a message may have 4 MiB.
_QUEUE_LENGTH = 16

#: For how long libzmq tries to get rid of what was sent before a connection is closed.
_LINGER_MS = 100

#: Messages taken from one connection before the others get their turn.
RECEIVE_BATCH = 64

_EVENT = struct.Struct("=HI")
_WATCHED = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_ACCEPT_FAILED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
)
_monitor_ids = itertools.count(1)


class Link(ABC):
    """A connection to one peer. What libzmq's queue has no room for waits here, in order.

    Args:
        on_broken: Told once if libzmq does not take a message. A link then takes everything and sends nothing: the loss
            is reported by the owner's loop, and not raised where a message of this peer's happened to be sent.
    """

    def __init__(self, peer_id: int, on_broken: Broken, *, incoming: bool, is_encrypted: bool) -> None:
        self.peer_id = peer_id
        self._on_broken = on_broken
        self._is_broken = False
        self.incoming = incoming
        self.mechanism = "tcp+curve" if is_encrypted else "tcp"
        self.queued_bytes = 0
        self._queue: deque[Parts] = deque()

    def send(self, parts: Parts) -> None:
        """Send a message, or keep it for `flush`."""
        if self._queue or not self._is_taken(parts):
            self._queue.append(parts)
            self.queued_bytes += _num_bytes(parts)

    def flush(self) -> None:
        """Send what was kept, as far as there is room."""
        while self._queue and self._is_taken(self._queue[0]):
            self.queued_bytes -= _num_bytes(self._queue.popleft())

    def _is_taken(self, parts: Parts) -> bool:
        if self._is_broken:
            return True
        try:
            return self._offer(parts)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is over for this link alone
            self._is_broken = True
            self._on_broken(self, error)
            return True

    @abstractmethod
    def _offer(self, parts: Parts) -> bool:
        """Give a message to libzmq; False if its queue is full."""

    def drop(self) -> None:
        """Close the connection and forget what was kept."""
        self.forget()
        self._hang_up()

    def forget(self) -> None:
        """Let go of what was kept."""
        self._queue.clear()
        self.queued_bytes = 0

    @abstractmethod
    def _hang_up(self) -> None: ...


#: How a link says that it cannot send, and why.
Broken = Callable[[Link, Exception], None]


@dataclass(frozen=True)
class Arrival:
    """A message came."""

    link: Link
    frames: list[Frame]


@dataclass(frozen=True)
class Loss:
    """A connection is gone, and every message that came over it has been seen."""

    link: Link
    error: KVTransferError


class Port(Protocol):
    """Where connections come from: a listener has many, a dialled link is its own."""

    @property
    def sockets(self) -> tuple[Socket, ...]:
        """What becomes readable when `pump` has something to do."""

    def pump(self) -> Iterator[Arrival | Loss]:
        """Take what happened; never blocks."""

    def close(self) -> None: ...


class Monitor:
    """libzmq's own account of a socket's connections, as a stream of (event, value)."""

    def __init__(self, context: Context, watched: Socket) -> None:
        endpoint = f"inproc://kvferry-monitor-{next(_monitor_ids)}"
        self._watched = watched
        self.socket = context.socket(zmq.PAIR)
        try:
            self.socket.linger = 0
            watched.monitor(endpoint, _WATCHED)
            self.socket.connect(endpoint)
        except BaseException:
            # A socket that stays open would keep the context from ever terminating.
            self.socket.close()
            raise

    def take(self) -> Iterator[tuple[int, int]]:
        while (frames := receive(self.socket)) is not None:
            event, value = _EVENT.unpack(bytes(frames[0]))
            yield event, value

    def close(self) -> None:
        try:
            self._watched.disable_monitor()
        finally:
            self.socket.close()


class DialedLink(Link):
    """A connection that this side made. It connects once: a lost one does not come back as another."""

    def __init__(
        self,
        context: Context,
        peer_id: int,
        address: Address,
        found: Found,
        keys: tuple[CurveKeys, ...],
        options: ZeroMQOptions,
        on_broken: Broken,
    ) -> None:
        super().__init__(peer_id, on_broken, incoming=False, is_encrypted=bool(keys))
        self._where = f"{address.host}:{address.port}"
        self._is_gone = False
        self._error: KVTransferError = PeerLostError(f"cannot connect to {self._where}")
        self._socket = context.socket(zmq.DEALER)
        try:
            configure(self._socket, options)
            self._socket.reconnect_ivl = -1
            for key in keys:
                key.protect_client(self._socket, address.server_key)
            self._monitor = Monitor(context, self._socket)
        except BaseException:
            self._socket.close(linger=0)
            raise
        self.sockets = (self._socket, self._monitor.socket)
        try:
            # An IP address: a name would be looked up by libzmq's I/O thread, which then moves nothing for any peer.
            self._socket.connect(f"tcp://{authority(found.host, address.port)}")
        except BaseException:
            self.close()
            raise

    def pump(self) -> Iterator[Arrival | Loss]:
        self._watch()
        for _ in range(RECEIVE_BATCH):
            if self._socket.closed:
                return
            if (frames := receive(self._socket)) is None:
                break
            yield Arrival(self, frames)
        else:
            return  # a loss is told after the last message
        if self._is_gone:
            yield Loss(self, self._error)

    def _watch(self) -> None:
        for event, _ in self._monitor.take():
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._error = PeerLostError(f"the connection to {self._where} is gone")
            elif event in _REFUSALS:
                refusal, reason = _REFUSALS[event]
                self._error = refusal(f"{self._where} {reason}")
            elif event in (zmq.EVENT_DISCONNECTED, zmq.EVENT_CLOSED):
                self._is_gone = True

    def _offer(self, parts: Parts) -> bool:
        return self._socket.closed or offer(self._socket, parts)

    def _hang_up(self) -> None:
        self.close()

    def close(self) -> None:
        if not self._socket.closed:
            try:
                self._monitor.close()
            finally:
                self._socket.close()


_REFUSALS: Final[dict[int, tuple[type[TransportError], str]]] = {
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: (PeerRefusedError, "does not allow this node's CURVE key"),
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: (
        PeerRefusedError,
        "does not speak ZeroMQ with the same security",
    ),
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: (
        PeerRefusedError,
        "hung up during the handshake: it is none of ours, or has other keys",
    ),
}


def configure(socket: Socket, options: ZeroMQOptions) -> None:
    """Set what both kinds of sockets have in common.

    libzmq's I/O threads answer its heartbeats, so a peer whose own threads are busy is not taken for lost. A
    stopped one is noticed within `peer_timeout_s`: a quarter of it until the next heartbeat leaves, the rest until
    nothing has come back.
    """
    interval_ms = int(options.peer_timeout_s * 250)
    socket.linger = _LINGER_MS
    socket.sndhwm = socket.rcvhwm = _QUEUE_LENGTH
    socket.maxmsgsize = max(MAX_SLICE_BYTES, MAX_MESSAGE_BYTES)
    socket.heartbeat_ivl = interval_ms
    socket.heartbeat_timeout = int(options.peer_timeout_s * 1000) - interval_ms
    socket.heartbeat_ttl = int(options.peer_timeout_s * 1000)
    socket.handshake_ivl = int(options.handshake_timeout_s * 1000)
    socket.ipv6 = True


class Torn(Exception):
    """A message whose rest could not be received.

    Attributes:
        frames: What came of it. Its rest was thrown away, so the next frame is the first of another message.
    """

    def __init__(self, frames: list[Frame], error: Exception) -> None:
        super().__init__(f"the rest of a message was lost: {error!r}")
        self.frames = frames


def receive(socket: Socket) -> list[Frame] | None:
    """Take one message without copying it; None if there is none.

    Raises:
        Torn: only a part of it could be taken.
        Exception: none could; no message was lost.
    """
    frame = Frame.received(socket)
    if frame is None:
        return None
    frames = [frame]
    try:
        while not frame.is_last and (frame := Frame.received(socket)) is not None:
            frames.append(frame)
    except Exception as error:
        _skip_rest(socket)
        raise Torn(frames, error) from error
    return frames


def _skip_rest(socket: Socket) -> None:
    """Or the rest would be taken for the beginning of another peer's message."""
    try:
        while socket.getsockopt(zmq.RCVMORE) and Frame.received(socket) is not None:
            pass
    except zmq.ZMQError:
        pass


def offer(socket: Socket, parts: Parts) -> bool:
    """Give libzmq a message; False if its queue is full.

    Raises:
        TransportError: libzmq refuses it.
    """
    with mapped(_SEND_ERRORS, "cannot send"):
        # All copies before the first frame leaves: there may be no memory for the last one.
        frames = [part if isinstance(part, Frame) else Frame.copy_of(part) for part in parts]
        num_sent = 0
        try:
            for frame in frames:
                if not frame.send(socket, is_last=num_sent == len(frames) - 1):
                    return False
                num_sent += 1
        except zmq.ZMQError as error:
            # A peer that is gone takes everything: the monitor tells of its loss.
            if error.errno != zmq.EHOSTUNREACH:
                _end_message(socket, num_sent)
                raise
        except BaseException:
            _end_message(socket, num_sent)
            raise
    return True


def _end_message(socket: Socket, num_sent: int) -> None:
    """End a message of which some frames have left, or the next peer's would continue it."""
    if num_sent:
        try:
            Frame.copy_of(b"").send(socket, is_last=True)
        except (zmq.ZMQError, MemoryError):
            pass


def _num_bytes(parts: Parts) -> int:
    return sum(len(part) for part in parts)
