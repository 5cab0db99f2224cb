"""What a process serves to its peers, and what it knows of what they serve: checks, encodings, and
`HostTransport`.

The owner of memory checks each request with `ServedPool.locate`, and the reader each read with
`RegisteredPool.require_read`. The two checks are the same, but only the first one protects the owner: a peer
that does not check sends what it likes.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Self, cast

import numpy as np

from ._memory import WordTable, private_arena, require_guard, require_host
from ._slices import SliceLimits
from .base import MAX_MESSAGE_BYTES, Arena, Endpoint
from .checked import integer, seconds
from .copying import sum_lengths
from .endpoint import Backend, C, HandshakeLimits, PeerEndpoint, PeerTable, PeerTransport, Read
from .errors import ConfigurationError, ProtocolError, RegionError, StaleRegionError
from .limited_log import LimitedLog
from .movers import HostMover, Mover
from .options import parse_options, require_valid
from .outside import outside
from .regions import AddressArray, Guard, Int64Array, Pool, Segment

_MAX_SEGMENTS: Final = 65536
_MAX_POOL_BYTES: Final = 1 << 60

#: What every node serves in one slice: twice the lowest `slice_bytes`. A peer that states less would make us
#: cut a read into millions of slices.
_MIN_SLICE_BYTES: Final = 128 << 10

#: The most bytes of encoded segment sizes, for limits of frames.
MAX_SIZES_BYTES: Final = 8 * _MAX_SEGMENTS

_LITTLE_ENDIAN: Final = np.dtype("<i8")

#: Bytes of one encoded region: its offset and its size.
ROW_BYTES: Final = 16


@dataclass(frozen=True)
class PeerPool:
    """The pool of a peer, for checks of bounds: the addresses in it mean nothing in this process.

    Attributes:
        num_guards: Words in the peer's guard table.
    """

    pool: Pool
    num_guards: int

    @classmethod
    def of(cls, num_guards: int, sizes: tuple[int, ...]) -> Self:
        """Make it from the sizes of the peer's segments, which `decode_sizes` has checked."""
        return cls(Pool(Segment(0, num_bytes) for num_bytes in sizes), num_guards)


@dataclass(frozen=True)
class RegisteredPool:
    """The pool that this process registered, and the guards under which peers may read it."""

    pool: Pool
    guards: WordTable

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of the segments, in bytes."""
        return tuple(segment.num_bytes for segment in self.pool.segments)

    def require_read(self, remote: PeerPool, read: Read[C]) -> AddressArray:
        """Check everything about a read of ours that can be checked before it starts.

        Returns:
            Addresses of the local regions, shape `(num_regions,)`.

        Raises:
            RegionError: a region is outside its pool, or the guard outside the peer's table.
        """
        pairs = read.pairs
        addresses = self.pool.addresses(pairs.local_offsets, pairs.lengths)
        remote.pool.addresses(pairs.remote_offsets, pairs.lengths)
        require_guard(read.guard, remote.num_guards)
        return addresses


@dataclass(frozen=True)
class ServedPool(RegisteredPool):
    """A pool whose bytes this process sends to its peers, and receives from them.

    Attributes:
        mover: What copies the pool's bytes. Nothing else touches them.
    """

    mover: Mover

    def max_slice_bytes(self, limits: SliceLimits, most: int) -> int:
        """Return the most bytes that are served per slice; our hello states it, and the peer's slices keep to
        it.

        A staging buffer holds one slice of ours, and those of a peer may be larger.

        Args:
            limits: How reads of ours are cut.
            most: The most bytes that the protocol allows.
        """
        return limits.max_bytes if self.mover.needs_staging else most

    def locate(self, rows: Int64Array, guard: Guard) -> AddressArray:
        """Check what a peer asks for, and return the addresses of the regions, shape `(num_rows,)`.

        Args:
            rows: `(num_rows, 2)`: offset, number of bytes.

        Raises:
            ProtocolError: a region is outside the pool, or the guard outside the table; or the guard holds,
                and the region is not what it was set for.
        """
        try:
            require_guard(guard, self.guards.num_guards)
            addresses = self.pool.addresses(rows[:, 0], rows[:, 1])
        except RegionError as error:
            raise ProtocolError(f"the peer asks for what does not exist: {error}") from error
        if not self.guards.may_read(guard, rows[:, 0], rows[:, 1]):
            raise ProtocolError(f"the peer asks for bytes that it was not granted with guard {guard.index}")
        return addresses

    def read(self, sources: AddressArray, lengths: Int64Array) -> bytes:
        """Return the bytes of regions of a pool in main memory, end to end."""
        data = np.empty(int(lengths.sum()), dtype=np.uint8)
        self.mover.start_gather(data.ctypes.data, sources, lengths)
        return data.tobytes()

    def write(self, targets: AddressArray, lengths: Int64Array, data: bytes) -> None:
        """Copy bytes that lie end to end into regions of a pool in main memory.

        Raises:
            ProtocolError: there are more or fewer bytes than the regions have. Nothing was written.
        """
        if len(data) != lengths.sum():
            raise ProtocolError(f"the peer sent {len(data)} bytes for regions of {lengths.sum()}")
        if data:
            self.mover.start_scatter(targets, np.frombuffer(data, dtype=np.uint8).ctypes.data, lengths)


def mover_for(pool: Pool, buffer_bytes: int, staging_bytes: int) -> Mover:
    """Make the mover of a pool.

    Args:
        buffer_bytes: Size of the buffers: the largest slice.
        staging_bytes: Pinned memory per direction, for a pool on a GPU.

    Raises:
        ConfigurationError, BackendUnavailableError: see `CudaMover`.
    """
    if pool.kind == "host":
        return HostMover(buffer_bytes)
    from .cuda_mover import CudaMover  # a process without a GPU never needs it

    return CudaMover(pool, buffer_bytes, staging_bytes)


def require_slice(num_bytes: int, max_slice_bytes: int) -> None:
    """Check the size of a slice that a peer fetches.

    Raises:
        ProtocolError: it is larger than our hello allows.
    """
    if num_bytes > max_slice_bytes:
        raise ProtocolError(
            f"the peer fetches a slice of {num_bytes} bytes, and our hello allows {max_slice_bytes}"
        )


def decode_max_slice_bytes(max_slice_bytes: int, most: int) -> int:
    """Check the most bytes per slice that a peer's hello states, and return them.

    Raises:
        ProtocolError: the protocol has a lower limit, or reads would be cut into more slices than any node
            needs.
    """
    if not _MIN_SLICE_BYTES <= max_slice_bytes <= most:
        raise ProtocolError(
            f"malformed hello: max_slice_bytes is {_MIN_SLICE_BYTES} to {most}, got {max_slice_bytes}"
        )
    return max_slice_bytes


def stale(guard: Guard) -> StaleRegionError:
    """Make the error of a read whose guard did not hold after the copy."""
    return StaleRegionError(f"guard {guard.index} no longer holds {guard.value}")


# -- encodings: little-endian int64 --------------------------------------------------------------------


def encode_sizes(sizes: tuple[int, ...]) -> bytes:
    """Encode the sizes of a pool's segments."""
    return np.array(sizes, dtype="<i8").tobytes()


def decode_sizes(data: bytes) -> tuple[int, ...]:
    """Decode the sizes of a peer's segments.

    Raises:
        ProtocolError: no pool has such sizes.
    """
    if len(data) % 8 or not 8 <= len(data) <= MAX_SIZES_BYTES:
        raise ProtocolError(f"malformed hello: it lists 1 to {_MAX_SEGMENTS} segments, got {len(data)} bytes")
    sizes = tuple(np.frombuffer(data, dtype="<i8").tolist())
    if min(sizes) <= 0 or sum(sizes) > _MAX_POOL_BYTES:
        raise ProtocolError("malformed hello: a segment has at least 1 byte, and a pool at most 2**60")
    return sizes


def encode_rows(rows: Int64Array) -> bytes:
    """Encode regions, shape `(num_rows, 2)`: offset, number of bytes."""
    return rows.astype(_LITTLE_ENDIAN, copy=False).tobytes()


def decode_rows(data: bytes, *, max_rows: int, max_bytes: int) -> Int64Array:
    """Decode the regions that a peer asks for, shape `(num_rows, 2)`.

    Their offsets are not checked: see `locate`.

    Raises:
        ProtocolError: there are more than `max_rows`, or one has no bytes, or all together more than
            `max_bytes`.
    """
    if len(data) % ROW_BYTES or len(data) > ROW_BYTES * max_rows:
        raise ProtocolError(
            f"malformed fetch: it has at most {max_rows} rows of {ROW_BYTES} bytes, got {len(data)} bytes"
        )
    rows = np.frombuffer(data, dtype=_LITTLE_ENDIAN).reshape(-1, 2).astype(np.int64, copy=False)
    if sum_lengths(rows[:, 1], max_bytes) < 0:
        raise ProtocolError(
            f"malformed fetch: a row has at least 1 byte, and all rows together at most {max_bytes}"
        )
    return rows


# -- options and transport ----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class EndpointOptions:
    """Options that all transports have. A transport's own options derive from them.

    Attributes:
        num_guards: Words in the guard table.
        max_queued_bytes: Maximum bytes of messages to one peer that wait to be sent, or taken; `send` refuses
            more.

    Raises:
        ConfigurationError: an option is of another type or out of bounds.
    """

    num_guards: Annotated[int, integer(1, 1 << 24)] = 65536
    max_queued_bytes: Annotated[int, integer(MAX_MESSAGE_BYTES, 1 << 30)] = 8 << 20

    def __post_init__(self) -> None:
        require_valid(self)


@dataclass(frozen=True, kw_only=True)
class HandshakeOptions(EndpointOptions):
    """Options of transports whose connections have a handshake.

    Attributes:
        handshake_timeout_s: Seconds an incoming connection has to complete the handshake.
        max_connecting: Maximum handshakes at a time, in each direction. `start_connect` refuses more. Of
            incoming connections, the one that has been silent longest is dropped.
    """

    handshake_timeout_s: Annotated[float, seconds(0.1, 3600)] = 5.0
    max_connecting: Annotated[int, integer(1, 65536)] = 128

    def limits(self) -> HandshakeLimits:
        """Return these options for `PeerTable`."""
        return HandshakeLimits(self.handshake_timeout_s, self.max_connecting)


class HostTransport(PeerTransport):
    """A transport whose bytes and guards pass through this process's main memory.

    A subclass sets `scheme` and `options_type`, a kind of `EndpointOptions`, and makes a backend. It serves
    main memory, and GPUs too if it overrides `make_mover`. A transport that maps or registers memory
    allocates its own instead, and derives from `PeerTransport`.

    Args:
        options: The options of `options_type`.

    Raises:
        ConfigurationError: an option is unknown or wrong. Nothing was opened.
    """

    guards: WordTable
    options: Any

    def __init__(self, options: Mapping[str, object] = {}) -> None:
        super().__init__()
        assert self.options_type is not None, "the subclass sets it"
        self.options = cast(Any, parse_options(self.options_type, options, self.scheme))
        with outside(f"cannot open transport {self.scheme!r}", ConfigurationError):
            self.guards = WordTable.anonymous(self.options.num_guards, checks_reads=True)

    @abstractmethod
    def make_backend(self, peers: PeerTable[Any], served: ServedPool) -> Backend[Any]:
        """Make the backend of the endpoint."""

    def limits(self) -> HandshakeLimits:
        """Return the bounds of handshakes: those of the options, or none."""
        return self.options.limits() if isinstance(self.options, HandshakeOptions) else HandshakeLimits()

    def make_mover(self, pool: Pool) -> Mover:
        """Make what copies the bytes of the pool.

        Raises:
            ConfigurationError: the transport cannot serve the pool's kind of memory.
        """
        require_host(pool, self.scheme)
        return HostMover(0)

    def _allocate(self, num_bytes: int) -> Arena:
        return private_arena(num_bytes)

    def _open(self, pool: Pool) -> Endpoint:
        mover = self.make_mover(pool)
        served = ServedPool(pool, self.guards, mover)
        log = LimitedLog(logging.getLogger(type(self).__module__))
        try:
            table: PeerTable[Any] = PeerTable(
                lambda peers: self.make_backend(peers, served), self.limits(), log=log
            )
        except BaseException:
            mover.close()
            raise
        return PeerEndpoint(self.scheme, table)
