"""How slices travel over TCP: the kernel, or TLS, copies them straight out of one pool and into the other."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import xxhash

from .. import sliced
from .._slices import SliceLimits
from ..endpoint import Read
from ..errors import ChecksumError, KVTransferError, ProtocolError
from ..movers import Mover, StagingBuffer
from ..regions import AddressArray, Int64Array
from ..serving import ServedPool, encode_rows
from ..sliced import SliceState, Transfer, Verdict
from .iovec import Iovec, Pieces
from .options import TcpOptions
from .stream import QueuedSlice, TcpStream, discarded
from .wire import MAX_ROWS, End, Fetch, Slice

#: Over TLS, regions smaller than this are gathered first: each call encrypts or decrypts at most one region.
_SMALL_BYTES: Final = 64 << 10

# In Python 3.11, access to a member of an enum takes as long as a whole step here.
_HELD, _STALE, _DIVERTED = Verdict.HELD, Verdict.STALE, SliceState.DIVERTED


def limits_of(options: TcpOptions) -> SliceLimits:
    """Return how reads are cut, from a peer that serves slices of any size."""
    return SliceLimits(options.slice_bytes, MAX_ROWS)


def _digest_of(rows: Int64Array) -> xxhash.xxh3_64:
    """Return the digest of a fetch, which takes the bytes that are fetched next.

    The rows are part of it, because a fetch that was changed on its way gets other bytes than were asked for.
    """
    return xxhash.xxh3_64(encode_rows(rows))


def _is_gathered(mover: Mover, stream: TcpStream, rows: Int64Array) -> bool:
    return mover.needs_staging or (stream.is_encrypted and bool(rows[:, 1].min() < _SMALL_BYTES))


def _pieces(
    buffer: StagingBuffer | None,
    addresses: AddressArray,
    rows: Int64Array,
    num_bytes: int,
    digest: xxhash.xxh3_64 | None,
) -> Pieces:
    """Return where the bytes of a slice lie or go: in the buffer, or in the pool."""
    if buffer is None:
        return Pieces(addresses, rows[:, 1], num_bytes, digest)
    address = np.array([buffer.address], dtype=np.uint64)
    return Pieces(address, np.array([num_bytes], dtype=np.int64), num_bytes, digest)


@dataclass(eq=False, slots=True)
class _Slice(sliced.Slice):
    """A slice that was fetched.

    Attributes:
        target: Where its bytes are received. It is made while the owner is busy with the fetch.
        is_arriving: Its first bytes have come.
        digest: Of what came so far; None if no checksum is wanted.
    """

    digest: xxhash.xxh3_64 | None
    target: Iovec | None = None
    is_arriving: bool = False


class Reader(sliced.Reader[_Slice]):
    """The reads from one peer.

    Args:
        stream: The connection to the peer.
        post: Sends a fetch.
    """

    def __init__(
        self,
        options: TcpOptions,
        mover: Mover,
        stream: TcpStream,
        post: Callable[[bytes], None],
        end_read: Callable[[Read[Any], KVTransferError | None], None],
        fail: Callable[[Exception], None],
    ) -> None:
        super().__init__(mover, options.window_slices, end_read, fail)
        self._stream = stream
        self._post = post
        # TLS verifies every record, so a second sum would find nothing.
        self._checksums = options.checksums and not stream.is_encrypted
        self._tags = itertools.count(1)

    def needs_buffer(self, rows: Int64Array, num_bytes: int) -> bool:
        return num_bytes > 0 and _is_gathered(self._mover, self._stream, rows)

    def make_slice(
        self, transfer: Transfer, index: int, rows: Int64Array, num_bytes: int, buffer: StagingBuffer | None
    ) -> _Slice:
        digest = _digest_of(rows) if self._checksums else None
        return _Slice(transfer, index, next(self._tags), rows, num_bytes, buffer, digest)

    def send_fetch(self, piece: _Slice) -> None:
        guard = piece.transfer.read.guard
        self._post(Fetch(piece.tag, self._checksums, guard, piece.rows).encode())
        # After the fetch has left, so that the owner need not wait for this.
        found = _pieces(piece.buffer, piece.targets, piece.rows, piece.num_bytes, piece.digest)
        piece.target = self._stream.target(found)

    def divert(self, piece: _Slice) -> bool:
        if piece.is_arriving:
            self._stream.discard()
        return True

    def sink(self, found: Slice) -> Iovec:
        """Return where the bytes of a slice go.

        Raises:
            ProtocolError: it was not fetched, has begun before, or has another size.
        """
        piece = self._slices.get(found.tag)
        if piece is None or piece.is_arriving:
            raise ProtocolError("the peer sent a slice that was not fetched")
        if found.num_bytes != piece.num_bytes:
            raise ProtocolError(f"the peer sent {found.num_bytes} bytes, but {piece.num_bytes} were fetched")
        piece.is_arriving = True
        if piece.state is _DIVERTED:  # its regions are no longer ours
            return self._stream.target(discarded(piece.num_bytes))
        assert piece.target is not None
        return piece.target

    def on_end(self, end: End) -> None:
        """A slice is here, and the owner has vouched for it; or its guard did not hold.

        Raises:
            ProtocolError: it was not fetched, or not sent.
        """
        piece = self.find(end.tag)
        has_come, piece.is_arriving = piece.is_arriving, False
        if end.is_valid and piece.num_bytes and not has_come and piece.state is not _DIVERTED:
            raise ProtocolError("the peer vouched for a slice that it did not send")
        error = None
        if has_come and piece.digest is not None and piece.digest.intdigest() != end.checksum:
            error = ChecksumError(f"slice {piece.index} was changed on its way: its checksum differs")
        # The verdict first: bytes that are stale are not copied.
        self.answered(piece, _HELD if end.is_valid else _STALE)
        self.arrived(piece, error)


@dataclass(eq=False, slots=True)
class _Answer(sliced.Answer[Fetch], QueuedSlice):
    """A slice in the queue of a connection, or being sent, and its end."""

    server: Server
    digest: xxhash.xxh3_64 | None = field(default=None, init=False)

    def begin(self) -> tuple[bytes, Pieces] | None:
        if not self.has_bytes:
            return None
        fetch = self.fetch
        if fetch.with_checksum:
            self.digest = _digest_of(fetch.rows)
        found = _pieces(self.buffer, self.addresses, fetch.rows, fetch.num_bytes, self.digest)
        return Slice(fetch.tag, fetch.num_bytes).encode(), found

    def end(self) -> bytes:
        checksum = self.digest.intdigest() if self.digest is not None else 0
        return End(self.fetch.tag, checksum, self.server.left(self)).encode()

    def drop(self) -> None:
        self.server.forget(self)


class Server(sliced.Server[Fetch, _Answer]):
    """Answers the fetches of one peer.

    Args:
        stream: The connection to the peer.
        flush: Sends what is queued on it, now or as soon as there is room.
    """

    def __init__(
        self,
        served: ServedPool,
        max_slice_bytes: int,
        stream: TcpStream,
        flush: Callable[[], None],
        fail: Callable[[Exception], None],
    ) -> None:
        super().__init__(served, max_slice_bytes, fail)
        self._stream = stream
        self._flush = flush

    def make_answer(self, fetch: Fetch, addresses: AddressArray) -> _Answer:
        return _Answer(fetch, addresses, self)

    def is_gathered(self, fetch: Fetch) -> bool:
        return _is_gathered(self._mover, self._stream, fetch.rows)

    def send(self, answer: _Answer) -> None:
        self._stream.answers.append(answer)
        self._flush()
