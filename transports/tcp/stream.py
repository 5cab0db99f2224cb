"""One connection to a peer: frames both ways, and slices that go from pool to pool without a copy in this
process.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import ssl
import struct
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final, cast

import numpy as np

from ..errors import KVTransferError, PeerLostError, PeerRefusedError, ProtocolError
from ..streams import RECEIVE_BYTES, SIGN_OF_LIFE_BYTES, FrameSocket, open_frame, require_length
from .iovec import NO_WAIT, Iovec, Pieces, Wait, address_of
from .wire import ANSWER_BYTES, FRAME_LIMITS, Kind, Slice, decode

#: System calls and bytes of slices per `receive`, and steps per `flush`, so that one peer cannot keep the
#: loop to itself. A step sends at most one slice.
_MAX_CALLS: Final = 256
_MAX_BYTES: Final = 16 << 20
_MAX_STEPS: Final = 32

_HEAD = struct.Struct("<IB")
#: In Python 3.11, access to a member of an enum takes as long as a whole step here.
_SLICE_KIND: Final = int(Kind.SLICE)
#: How a slice frame begins: its length and its kind.
_SLICE_HEAD: Final = _HEAD.pack(ANSWER_BYTES - _HEAD.size, _SLICE_KIND)
_MSG_MORE: Final = int(socket.MSG_MORE)

#: What is received for reads that were stopped goes here.
_DISCARDED: Final = bytearray(256 << 10)


class QueuedSlice(ABC):
    """A slice that waits in the queue of a connection, or is being sent."""

    @abstractmethod
    def begin(self) -> tuple[bytes, Pieces] | None:
        """Return the frame before the bytes, and where the bytes lie; None if only the end is to be sent."""

    @abstractmethod
    def end(self) -> bytes:
        """Return the end frame. No socket reads the bytes any more."""

    @abstractmethod
    def drop(self) -> None:
        """The connection is gone, before the end."""


class TcpStream(FrameSocket):
    """One connection.

    It receives the bytes of slices straight to where they belong, and sends them from where they are.

    Attributes:
        sink: Called with each slice frame. It returns where the slice's bytes go, as `target` made it. If it
            raises, the peer is lost.
        expects_slices: Tells whether slices are on their way. If so, frames are received one by one, because
            what follows the frame of a slice must not end up in a buffer.
        wait: Tells how to wait for the rest of a slice.
        answers: The slices to send.
    """

    #: No handshake is left before frames can be sent.
    _is_ready = True

    def __init__(self, sock: socket.socket, max_queued_bytes: int) -> None:
        super().__init__(sock, FRAME_LIMITS, max_queued_bytes)
        self.sink: Callable[[Slice], Iovec] = _refuse
        self.expects_slices: Callable[[], bool] = bool
        self.wait: Callable[[], Wait] = lambda: NO_WAIT
        self.answers: deque[QueuedSlice] = deque()
        self._sending: tuple[QueuedSlice, Iovec] | None = None
        self._arrived = bytearray()  # the beginning of a frame
        self._filling: Iovec | None = None
        self._end = bytearray(ANSWER_BYTES)

    @property
    def num_unsent(self) -> int:
        """Bytes that `flush` will send when the socket is writable; those of slices count as one."""
        return len(self._unsent) + (self._sending is not None or bool(self.answers))

    @property
    def is_encrypted(self) -> bool:
        return False

    # -- sending ---------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Send as much as the socket takes. If the peer is lost, drop the rest."""
        if self._is_ready and not self.num_unsent:
            return
        try:
            self._advance()
            for _ in range(_MAX_STEPS):
                if not self._send_some():
                    return
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return
        except OSError:
            # What the peer sent before can still be received. `receive` reports the loss after that.
            self._is_writable = False
            self._drop_unsent()
        except Exception as error:  # noqa: BLE001 - only this peer is lost
            self.give_up(error)
            self._drop_unsent()

    def _send_some(self) -> bool:
        """Make one call; return whether there may be more to send."""
        if self._sending is not None:
            answer, pieces = self._sending
            self._send_pieces(pieces)
            self.last_said = time.monotonic()
            if not pieces.num_left:
                self._sending = None
                # The kernel, or TLS, has copied the last byte: only now the guard shows whether all of them
                # were valid. First in the queue, because the receiver expects the end right after the bytes.
                self._unsent[:0] = answer.end()
        elif self.answers and len(self._unsent) < RECEIVE_BYTES:
            answer = self.answers.popleft()
            begun = answer.begin()
            if begun is None:
                self._unsent += answer.end()
            else:
                head, found = begun
                # Frames go first, so that no message waits for more than one slice.
                self._sending = (answer, Iovec(found, before=self._unsent + head))
                self._unsent.clear()
        elif self._unsent:
            with memoryview(self._unsent) as waiting:
                sent = self._send_bytes(waiting)
            self.last_said = time.monotonic()
            del self._unsent[:sent]
        else:
            return False
        return True

    def _drop_unsent(self) -> None:
        self._unsent.clear()
        if self._sending is not None:
            self._sending[0].drop()
            self._sending = None
        while self.answers:
            self.answers.popleft().drop()

    # -- receiving -------------------------------------------------------------------------------------

    def receive(self) -> Iterator[tuple[int, bytes]]:
        """Return the frames that arrived, as (kind, body), except those of slices, whose bytes go to their
        sink.

        Raises:
            PeerLostError: the peer closed, and every complete frame was returned before.
            ProtocolError, ChecksumError: see `require_length` and `open_frame`.
        """
        total = 0
        with contextlib.suppress(BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            self._advance()
            for num_calls in range(1, 1 << 30):
                num_bytes, is_short = self._receive_once()
                total += num_bytes
                while (frame := self._next_frame()) is not None:
                    yield frame
                # A short one has emptied the socket; and what came in full may be all there is, unless a
                # slice is on its way. The poller reports what comes later, but it does not know what TLS has
                # decrypted.
                is_enough = is_short or num_calls >= _MAX_CALLS or total >= _MAX_BYTES
                if (is_enough or not self.expects_slices()) and not self._num_decrypted:
                    return

    def _receive_once(self) -> tuple[int, bool]:
        """Make one call; return how many bytes came, and whether they were fewer than wanted."""
        try:
            if self._filling is not None:
                num_wanted = self._filling.num_left
                num_bytes = self._receive_pieces(self._filling)
            else:
                num_wanted = self._num_wanted()
                data = self._receive_bytes(num_wanted)
                num_bytes = len(data)
                if num_bytes == ANSWER_BYTES and not self._arrived and data.startswith(_SLICE_HEAD):
                    self.last_heard = time.monotonic()
                    self._begin_slice(open_frame(data))
                    return num_bytes, False
                self._arrived += data
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError, KVTransferError):
            raise
        except OSError as error:
            raise PeerLostError(f"the connection broke: {error}") from error
        if not num_bytes:
            raise PeerLostError(self._reason)
        if num_bytes >= SIGN_OF_LIFE_BYTES:
            self.last_heard = time.monotonic()
        if self._filling is not None and not self._filling.num_left:
            self._filling = None
            self._arrived += self._end
        return num_bytes, num_bytes < num_wanted and not self.is_encrypted

    def _num_wanted(self) -> int:
        """The bytes to receive so that those of a slice are not among them."""
        if not self.expects_slices():
            return RECEIVE_BYTES
        if len(self._arrived) < _HEAD.size:
            return ANSWER_BYTES - len(self._arrived)
        num_bytes, _ = _HEAD.unpack_from(self._arrived)
        return min(RECEIVE_BYTES, int(_HEAD.size + num_bytes - len(self._arrived)))

    def _next_frame(self) -> tuple[int, bytes] | None:
        """Take the next complete frame. A slice's frame is handled here."""
        if len(self._arrived) < _HEAD.size:
            return None
        num_bytes, kind = _HEAD.unpack_from(self._arrived)
        require_length(FRAME_LIMITS, kind, num_bytes)
        end = _HEAD.size + num_bytes
        if len(self._arrived) < end:
            return None
        self.last_heard = time.monotonic()
        body = open_frame(bytes(self._arrived[:end]))
        del self._arrived[:end]
        if kind == _SLICE_KIND:
            self._begin_slice(body)
            return None
        return kind, body

    def _begin_slice(self, body: bytes) -> None:
        found = decode(Kind.SLICE, body)
        assert isinstance(found, Slice)
        self._filling = self.sink(found)
        if self._arrived:
            raise ProtocolError("the peer sent a slice before it was fetched")

    def target(self, pieces: Pieces) -> Iovec:
        """Return where to receive a slice. The end frame always follows, so one call receives it as well."""
        return Iovec(pieces, after=self._end)

    def discard(self) -> None:
        """Throw away what has not come of the slice that is arriving.

        Its target is not written to any more.
        """
        if self._filling is None or self._filling.num_left <= ANSWER_BYTES:
            return
        self._filling = self.target(discarded(self._filling.num_left - ANSWER_BYTES))

    def close(self) -> None:
        self._filling = None
        self._drop_unsent()
        super().close()

    # -- what differs with TLS -------------------------------------------------------------------------

    def _advance(self) -> None:
        """Go on with the handshake, if there is one.

        Raises what a socket raises; BlockingIOError until it is over.
        """

    @property
    def _num_decrypted(self) -> int:
        """Bytes that the poller does not know of."""
        return 0

    def _send_bytes(self, data: memoryview) -> int:
        return self._socket.send(data)

    def _send_pieces(self, pieces: Iovec) -> None:
        # The end frame follows at once, and shall share a segment with the last bytes.
        pieces.send(self._socket, _MSG_MORE)

    def _receive_bytes(self, num_bytes: int) -> bytes:
        return self._socket.recv(num_bytes)

    def _receive_pieces(self, pieces: Iovec) -> int:
        return pieces.receive(self._socket, self.wait())


class TlsStream(TcpStream):
    """A connection with TLS.

    Args:
        sock: May still be connecting.
        admit: Called with the verified connection. If it raises a `PeerRefusedError`, the peer is refused.
        host: Where we connect to; None if the connection was accepted. The context decides whether the peer's
            certificate must name it.
    """

    def __init__(
        self,
        sock: socket.socket,
        max_queued_bytes: int,
        context: ssl.SSLContext,
        admit: Callable[[ssl.SSLSocket], None],
        host: str | None,
    ) -> None:
        super().__init__(sock, max_queued_bytes)
        self._context = context
        self._admit = admit
        self._incoming = host is None
        self._host = host
        self._tls: ssl.SSLSocket | None = None
        self._is_ready = False
        self._awaits_room = not self._incoming  # a connection that is being established becomes writable
        self._failure: PeerLostError | PeerRefusedError | None = None

    @property
    def num_unsent(self) -> int:
        # Only what room would help: to watch for room during a handshake that waits for the peer would spin.
        return super().num_unsent if self._is_ready else int(self._awaits_room)

    @property
    def is_encrypted(self) -> bool:
        return True

    def _advance(self) -> None:
        if self._is_ready:
            return
        if self._failure is not None:
            raise self._failure
        try:
            self._shake_hands()
        except ssl.SSLWantReadError:
            self._awaits_room = False
            raise
        except ssl.SSLWantWriteError:
            self._awaits_room = True
            raise
        except BlockingIOError:
            raise
        except PeerRefusedError as error:
            self._failure = error
            raise
        except ssl.SSLError as error:
            self._failure = PeerRefusedError(f"TLS handshake failed: {_explain(error)}")
            raise self._failure from error
        except OSError as error:
            self._failure = PeerLostError(f"the connection broke during the TLS handshake: {error}")
            raise self._failure from error

    def _shake_hands(self) -> None:
        if self._tls is None:
            _require_established(self._socket, self._incoming)
            self._socket = self._tls = self._context.wrap_socket(
                self._socket,
                server_side=self._incoming,
                do_handshake_on_connect=False,
                server_hostname=self._host,
            )
        self._tls.do_handshake()
        self._admit(self._tls)
        self._is_ready = True

    @property
    def _num_decrypted(self) -> int:
        return self._tls.pending() if self._tls is not None else 0

    def _send_pieces(self, pieces: Iovec) -> None:
        assert self._tls is not None
        write = self._tls.write  # `send` calls it, by another Python function per record
        total = 0
        try:
            for piece in pieces.pieces():
                at, end = 0, len(piece)
                while at < end:  # each call encrypts one record of 16 KiB
                    num_bytes = write(piece[at:])
                    at += num_bytes
                    total += num_bytes
        finally:
            pieces.advance(total)

    def _receive_bytes(self, num_bytes: int) -> bytes:
        try:
            return super()._receive_bytes(num_bytes)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError as error:
            # With TLS 1.3 the listener checks our certificate after the handshake has ended on our side.
            raise PeerRefusedError(f"the peer ended TLS: {_explain(error)}") from error

    def _receive_pieces(self, pieces: Iovec) -> int:
        assert self._tls is not None
        # `recv_into` calls it, by another Python function per record. With a buffer it returns a number.
        read = cast(Callable[[int, memoryview], int], self._tls.read)
        total = 0
        try:
            for piece in pieces.pieces():
                at, end = 0, len(piece)
                while at < end:  # each call decrypts one record of 16 KiB
                    num_bytes = read(end - at, piece[at:])
                    if not num_bytes:
                        return total
                    at += num_bytes
                    total += num_bytes
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            if not total:
                raise
        finally:
            pieces.advance(total)
        return total


def discarded(num_bytes: int) -> Pieces:
    """Return where to receive bytes that are not wanted."""
    count = -(-num_bytes // len(_DISCARDED))
    lengths = np.full(count, len(_DISCARDED), dtype=np.int64)
    lengths[-1] = num_bytes - (count - 1) * len(_DISCARDED)
    return Pieces(np.full(count, address_of(_DISCARDED), dtype=np.uint64), lengths, num_bytes)


def _refuse(_: Slice) -> Iovec:
    raise ProtocolError("the peer sent a slice before the end of the handshake")


def _require_established(sock: socket.socket, incoming: bool) -> None:
    """Check that a connection is established, because a handshake can begin only then.

    Raises:
        OSError: it is not; BlockingIOError if it may be later.
    """
    try:
        sock.getpeername()
    except OSError as error:
        number = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if number:
            raise OSError(number, os.strerror(number)) from error
        if error.errno != errno.ENOTCONN or incoming:
            raise
        raise BlockingIOError(errno.EINPROGRESS, "the connection is being established") from error


def _explain(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return (
            f"the peer's certificate is not one that we admit: {error.verify_message}; is it signed by the CA in tls_ca, "
            "does it name the host that we connected to (tls_verify_host), and is the clock right?"
        )
    reason = (error.reason or str(error)).lower().replace("_", " ")
    if "alert" in reason:
        return (
            f"{reason}: the peer does not admit our certificate; is it signed by the CA in the peer's tls_ca, and not "
            "expired?"
        )
    if "certificate" in reason:
        return f"{reason}: the peer showed no certificate; set tls_cert, tls_key and tls_ca there"
    return f"{reason}; does the peer use TLS (option tls)?"
