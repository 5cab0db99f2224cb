"""The two kinds of channels, one per peer: those that we dial here, those that we accept in `listener`."""

from __future__ import annotations

import itertools
import struct
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, Protocol

import zmq

from ..base import MAX_MESSAGE_BYTES
from ..errors import KVTransferError, PeerLostError, PeerRefusedError, TransportError, mapped
from ..network import Found
from .frames import Frame
from .options import Address, ZeroMQOptions
from .security import CurveKeys
from .wire import MAX_SLICE_BYTES

Context = zmq.Context[zmq.Socket[bytes]]
Socket = zmq.Socket[bytes]
Parts = Sequence[bytes | Frame]

_SEND_ERRORS: Final[Mapping[type[BaseException], type[KVTransferError]]] = {zmq.ZMQError: TransportError}

#: Messages in each of libzmq's queues. Low, because libzmq bounds only their number, and a message may have 4
#: MiB.
_QUEUE_LENGTH = 16

#: How long libzmq tries to send what is queued when a channel is closed.
_LINGER_MS = 100

#: Messages that are taken from one port before the others are looked at.
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


class Observer(Protocol):
    """What channels report to.

    None of these raises; each may hang up on any channel, also on the one that reports.
    """

    def on_accepted(self, channel: Channel) -> None:
        """A peer has connected."""

    def on_message(self, channel: Channel, frames: list[Frame]) -> None:
        """A message came."""

    def on_lost(self, channel: Channel, error: Exception) -> None:
        """The channel is of no more use. It may be reported more than once."""


class Port(ABC):
    """libzmq's sockets that messages come from: a listener's for many channels, or those of one dialled
    channel.

    The descriptor of a socket (`ZMQ_FD`) reports that *something* happened to it, once, and any call on the
    socket may take that report away. So after a call a port has to be pumped before its descriptor can be
    relied on again. See `Sockets.wait`.
    """

    #: What becomes ready when there is something to pump.
    sockets: tuple[Socket, ...]

    #: For the log, if `pump` fails.
    failure = "cannot receive"

    @abstractmethod
    def pump(self) -> bool:
        """Take what has arrived and report it; never blocks. Returns whether there may be more.

        When it returns False, the last call on each socket found nothing. From then on the descriptors
        report.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the sockets. What was sent still leaves within libzmq's linger period."""


class Channel(ABC):
    """A connection to one peer. Messages for which libzmq's queue has no room wait here, in order.

    Args:
        on_used: Called with this channel after each message that is sent or queued.
    """

    def __init__(self, observer: Observer, on_used: Callable[[Channel], None], *, is_encrypted: bool) -> None:
        self._observer = observer
        self._on_used = on_used
        self.mechanism = "tcp+curve" if is_encrypted else "tcp"
        self.queued_bytes = 0
        self._queue: deque[Parts] = deque()
        self._is_closed = False

    @property
    @abstractmethod
    def port(self) -> Port:
        """The port that it belongs to."""

    @property
    def is_congested(self) -> bool:
        """Whether messages wait for `flush`."""
        return bool(self._queue)

    def send(self, parts: Parts) -> None:
        """Send a message, or queue it for `flush`.

        A failure is reported to the observer and not raised: the call that sends is often about another peer.
        After a failure, and after `hang_up`, messages are dropped.
        """
        if self._queue or not self._is_taken(parts):
            self._queue.append(parts)
            self.queued_bytes += _num_bytes(parts)
        self._on_used(self)

    def flush(self) -> None:
        """Send what is queued, as far as there is room."""
        while self._queue and self._is_taken(self._queue[0]):
            if self._queue:  # a failure empties it
                self.queued_bytes -= _num_bytes(self._queue.popleft())
        self._on_used(self)

    def _is_taken(self, parts: Parts) -> bool:
        if self._is_closed:
            return True
        try:
            return self._offer(parts)
        except Exception as error:  # noqa: BLE001 - whatever it is, it ends this channel alone
            self._is_closed = True
            self._observer.on_lost(self, error)
            return True

    @abstractmethod
    def _offer(self, parts: Parts) -> bool:
        """Give a message to libzmq; False if its queue is full."""

    def hang_up(self) -> None:
        """Close the connection and drop what is queued."""
        self.forget()
        self._hang_up()

    def forget(self) -> None:
        """Drop what is queued, and whatever is sent from now on."""
        self._is_closed = True
        self._queue.clear()
        self.queued_bytes = 0

    @abstractmethod
    def _hang_up(self) -> None: ...


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
        while not self.socket.closed and (frames := receive(self.socket)) is not None:
            event, value = _EVENT.unpack(bytes(frames[0]))
            yield event, value

    def close(self) -> None:
        try:
            self._watched.disable_monitor()
        finally:
            self.socket.close()


class DialedChannel(Channel, Port):
    """A connection that this side made. It is made once: libzmq does not reconnect."""

    def __init__(
        self,
        context: Context,
        address: Address,
        found: Found,
        keys: CurveKeys | None,
        options: ZeroMQOptions,
        observer: Observer,
        on_used: Callable[[Channel], None],
    ) -> None:
        super().__init__(observer, on_used, is_encrypted=keys is not None)
        self._where = address.authority
        self._is_gone = False
        self._error: KVTransferError = PeerLostError(f"cannot connect to {self._where}")
        self._socket = context.socket(zmq.DEALER)
        try:
            configure(self._socket, options)
            self._socket.reconnect_ivl = -1
            if keys is not None:
                keys.protect_client(self._socket, address.server_key)
            self._monitor = Monitor(context, self._socket)
        except BaseException:
            self._socket.close(linger=0)
            raise
        self.sockets = (self._socket, self._monitor.socket)
        try:
            # An IP address. libzmq would look up a name in its I/O thread, which then moves no bytes for any
            # peer.
            self._socket.connect(Address(found.host, address.port).endpoint)
        except BaseException:
            self.close()
            raise

    @property
    def port(self) -> Port:
        return self

    def pump(self) -> bool:
        self._watch()
        for _ in range(RECEIVE_BATCH):
            if self._socket.closed:
                return False
            if (frames := receive(self._socket)) is None:
                break
            self._observer.on_message(self, frames)
        else:
            return True
        # Only when no message is left: what the peer sent before it went still counts.
        if self._is_gone:
            self._observer.on_lost(self, self._error)
        return False

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
        return offer(self._socket, parts)

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
        "hung up during the handshake: it is not a kvferry node, or it has other keys",
    ),
}


def configure(socket: Socket, options: ZeroMQOptions) -> None:
    """Set what both kinds of sockets have in common.

    libzmq's I/O threads answer heartbeats, so a peer whose own threads are busy is not lost. A peer that
    stopped is noticed within `peer_timeout_s`: half of it passes until the next heartbeat, and half without
    an answer. Heartbeats are nearly all that an idle peer costs, so they are as rare as this allows.
    """
    interval_ms = int(options.peer_timeout_s * 500)
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
    """Throw away the rest of a message, which would otherwise be taken for the beginning of another
    peer's.
    """
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
        # Copy everything before the first frame is sent: there may be no memory for the last one.
        frames = [part if isinstance(part, Frame) else Frame.copy_of(part) for part in parts]
        num_sent = 0
        try:
            for frame in frames:
                if not frame.send(socket, is_last=num_sent == len(frames) - 1):
                    return False
                num_sent += 1
        except zmq.ZMQError as error:
            # Messages to a peer that is gone are dropped; the monitor reports its loss.
            if error.errno != zmq.EHOSTUNREACH:
                _end_message(socket, num_sent)
                raise
        except BaseException:
            _end_message(socket, num_sent)
            raise
    return True


def _end_message(socket: Socket, num_sent: int) -> None:
    """End a message of which some frames were sent, because the next peer's message would continue it."""
    if num_sent:
        try:
            Frame.copy_of(b"").send(socket, is_last=True)
        except (zmq.ZMQError, MemoryError):
            pass


def _num_bytes(parts: Parts) -> int:
    return sum(len(part) for part in parts)
