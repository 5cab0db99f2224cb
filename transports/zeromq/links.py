"""One connection each, and how connections are watched."""

from __future__ import annotations

import itertools
import struct
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import zmq

from ..base import MAX_MESSAGE_BYTES
from ..errors import (
    ConfigurationError,
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

__all__ = [
    "RECEIVE_BATCH",
    "Arrival",
    "Context",
    "DialedLink",
    "Link",
    "Loss",
    "Monitor",
    "Parts",
    "Port",
    "configure",
    "offer",
    "receive",
]

Context = zmq.Context[zmq.Socket[bytes]]
Socket = zmq.Socket[bytes]
Parts = Sequence[bytes | Frame]

_SEND_ERRORS: Final[Mapping[type[BaseException], type[KVTransferError]]] = {zmq.ZMQError: TransportError}
_CONNECT_ERRORS: Final[Mapping[type[BaseException], type[KVTransferError]]] = {
    zmq.ZMQError: ConfigurationError
}

#: Messages in each of libzmq's queues. Low: only the count is bounded there, and a message may have 4 MiB.
_QUEUE_LENGTH = 16

#: For how long libzmq tries to get rid of what was sent before a connection is closed.
_LINGER_MS = 100

#: Messages taken from one connection before the others get their turn.
RECEIVE_BATCH = 64

_EVENT = struct.Struct("=HI")
_WATCHED = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
)
_monitor_ids = itertools.count(1)


class Link(ABC):
    """A connection to one peer. What libzmq's queue has no room for waits here, in order."""

    def __init__(self, peer_id: int, *, incoming: bool, is_encrypted: bool) -> None:
        self.peer_id = peer_id
        self.incoming = incoming
        self.mechanism = "tcp+curve" if is_encrypted else "tcp"
        self.queued_bytes = 0
        self._queue: deque[Parts] = deque()

    def send(self, parts: Parts) -> None:
        """Send a message, or keep it for `flush`."""
        if self._queue or not self._offer(parts):
            self._queue.append(parts)
            self.queued_bytes += _num_bytes(parts)

    def flush(self) -> None:
        """Send what was kept, as far as there is room."""
        while self._queue and self._offer(self._queue[0]):
            self.queued_bytes -= _num_bytes(self._queue.popleft())

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
        watched.monitor(endpoint, _WATCHED)
        self._watched = watched
        self.socket = context.socket(zmq.PAIR)
        self.socket.linger = 0
        self.socket.connect(endpoint)

    def take(self) -> Iterator[tuple[int, int]]:
        while (frames := receive(self.socket)) is not None:
            event, value = _EVENT.unpack(bytes(frames[0]))
            yield event, value

    def close(self) -> None:
        self._watched.disable_monitor()
        self.socket.close()


class DialedLink(Link):
    """A connection that this side made. It connects once: a lost one does not come back as another."""

    def __init__(
        self,
        context: Context,
        peer_id: int,
        address: Address,
        keys: tuple[CurveKeys, ...],
        options: ZeroMQOptions,
    ) -> None:
        super().__init__(peer_id, incoming=False, is_encrypted=bool(keys))
        self._where = f"{address.host}:{address.port}"
        self._is_gone = False
        self._error: KVTransferError = PeerLostError(f"cannot connect to {self._where}")
        self._socket = context.socket(zmq.DEALER)
        configure(self._socket, options)
        self._socket.reconnect_ivl = -1
        for key in keys:
            key.protect_client(self._socket, address.server_key)
        self._monitor = Monitor(context, self._socket)
        self.sockets = (self._socket, self._monitor.socket)
        with mapped(_CONNECT_ERRORS, f"cannot connect to {self._where}"):
            self._socket.connect(address.endpoint)

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
            self._monitor.close()
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


def receive(socket: Socket) -> list[Frame] | None:
    """Take one message without copying it; None if there is none."""
    frame = Frame.received(socket)
    if frame is None:
        return None
    frames = [frame]
    while not frame.is_last and (frame := Frame.received(socket)) is not None:
        frames.append(frame)
    return frames


def offer(socket: Socket, parts: Parts) -> bool:
    """Give libzmq a message; False if its queue is full.

    Raises:
        TransportError: libzmq refuses it.
    """
    with mapped(_SEND_ERRORS, "cannot send"):
        try:
            for left, part in zip(range(len(parts) - 1, -1, -1), parts, strict=True):
                frame = part if isinstance(part, Frame) else Frame.copy_of(part)
                if not frame.send(socket, is_last=not left):
                    return False
        except zmq.ZMQError as error:
            # A peer that is gone takes everything: the monitor tells of its loss.
            if error.errno != zmq.EHOSTUNREACH:
                raise
    return True


def _num_bytes(parts: Parts) -> int:
    return sum(len(part) for part in parts)
