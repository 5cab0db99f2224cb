"""The two ends of shared memory: what this process shows to its peers, and what one peer has shown to it."""

from __future__ import annotations

import errno
import logging
import mmap
import os
from dataclasses import dataclass

import numpy as np

from .._memory import MappedArena, WordTable, address_of
from ..copying import copy_regions, read_regions_of
from ..cuda_driver import gpu_name
from ..errors import (
    ConfigurationError,
    IncompatiblePeerError,
    KVTransferError,
    PeerLostError,
    PeerRefusedError,
    ProtocolError,
    RegionError,
)
from ..regions import Guard, Pool, RegionPairs, Segment
from .arena import SharedFile, map_received
from .copier import MAPPED, AddressArray, Piece, cut
from .cuda import CudaDevice
from .cuda_pools import RemoteCudaMemory, describe_cuda_pool
from .guards import PeerGuards
from .hello import FOREIGN, MAX_FILES, MAX_SEGMENTS, Hello, SharedSegment
from .process import has_ended

logger = logging.getLogger(__name__)

_FOREIGN_MECHANISM = "process_vm_readv"


class LocalMemory:
    """The guard table and the arenas of this process.

    They exist before there is a pool, and outlive the endpoint.
    """

    def __init__(self, num_guards: int) -> None:
        self._guard_file = SharedFile("kvferry-guards", WordTable.bytes_for(num_guards))
        self.guards = WordTable(self._guard_file.mapping, num_guards)
        self._files: list[SharedFile] = []

    def allocate(self, num_bytes: int) -> MappedArena:
        """Allocate an arena. Raises as `SharedFile` does, or `ConfigurationError` if there are too many."""
        if len(self._files) == MAX_FILES:
            raise ConfigurationError(f"a transport has at most {MAX_FILES} arenas", key="num_arenas")
        file = SharedFile("kvferry-arena", num_bytes)
        self._files.append(file)
        return MappedArena(file.mapping, num_bytes)

    def share(self, pool: Pool) -> SharedPool:
        """Say how peers map a pool. The caller closes the result; this object must outlive it.

        Raises:
            ConfigurationError: peers cannot map it.
            BackendUnavailableError: it is on a GPU, and CUDA's driver or its bindings are missing.
        """
        if len(pool.segments) > MAX_SEGMENTS:
            raise ConfigurationError(f"a pool has at most {MAX_SEGMENTS} segments", key="pool")
        num_guards = self.guards.num_guards
        if pool.kind == "host":
            segments = tuple(self._describe(segment) for segment in pool.segments)
            descriptors = [self._guard_file.descriptor, *(file.descriptor for file in self._files)]
            return SharedPool(pool, Hello(num_guards, len(self._files), segments), descriptors, None)
        device = CudaDevice(pool.segments[0].address)
        try:
            hello = describe_cuda_pool(device, pool, num_guards)
        except BaseException:
            device.close()
            raise
        return SharedPool(pool, hello, [self._guard_file.descriptor], device)

    def _describe(self, segment: Segment) -> SharedSegment:
        for index, file in enumerate(self._files):
            offset = segment.address - address_of(file.mapping)
            if offset >= 0 and offset + segment.num_bytes <= len(file.mapping):
                return SharedSegment(index, offset, segment.num_bytes)
        return SharedSegment(FOREIGN, segment.address, segment.num_bytes)

    def close(self) -> None:
        """Make every guard fail for good, and close the descriptors: after this the owner may reuse its
        memory.
        """
        self.guards.clear_all()
        self._guard_file.close()
        for file in self._files:
            file.close()


@dataclass(frozen=True)
class SharedPool:
    """The registered pool, and what peers need to map it.

    Attributes:
        descriptors: What goes with the hello: the guard table, then the files that existed at the
            registration.
        device: The GPU that holds the pool; None if it is in main memory.
    """

    pool: Pool
    hello: Hello
    descriptors: list[int]
    device: CudaDevice | None

    def open_peer(self, hello: Hello, descriptors: list[int], pid: int) -> PeerMemory:
        """Map what came with a peer's hello. The caller still closes the descriptors.

        Args:
            pid: The peer, as the kernel names it; 0 if it cannot be seen from here.

        Raises:
            ProtocolError: hello and descriptors do not fit together. Nothing stays mapped.
            IncompatiblePeerError: one pool is on a GPU, and the other is not or cannot be reached from there.
        """
        if self.device is not None and hello.allocations:
            return RemoteCudaMemory(hello, descriptors, pid, self.device)
        if self.device is None and not hello.allocations:
            return RemoteMemory(hello, descriptors, pid)
        theirs = gpu_name(hello.allocations[0].gpu) if hello.allocations else "main memory"
        raise IncompatiblePeerError(
            field="memory of the pool",
            local="main memory" if self.device is None else gpu_name(self.device.gpu),
            remote=f"{theirs}; a GPU and main memory can pair over auto, tcp, zeromq and ucx",
        )

    def close(self) -> None:
        """Give back the GPU, if there is one. No peer's memory is mapped any more."""
        if self.device is not None:
            self.device.close()


class RemoteMemory:
    """A peer's guard table and pool, mapped here for reading. Any thread may copy from it until `close`."""

    def __init__(self, hello: Hello, descriptors: list[int], pid: int) -> None:
        """Map what came with a hello. The caller still closes the descriptors.

        Args:
            pid: The peer, as the kernel names it; 0 if it cannot be seen from here.

        Raises:
            ProtocolError: hello and descriptors do not fit together. Nothing stays mapped.
        """
        if len(descriptors) != 1 + hello.num_files:
            raise ProtocolError(
                f"malformed hello: {len(descriptors)} descriptors came with one of {hello.num_files} files"
            )
        self.num_guards = hello.num_guards
        sizes = [_needed_bytes(hello, index) for index in range(hello.num_files)]
        self._guards = PeerGuards(descriptors[0], hello.num_guards)
        self._mappings = [map_received(fd, size) for fd, size in zip(descriptors[1:], sizes, strict=True)]
        bases = [address_of(mapping.memory) for mapping in self._mappings]
        self.pool = Pool(
            Segment(s.start if s.file == FOREIGN else bases[s.file] + s.start, s.num_bytes)
            for s in hello.segments
        )
        self._is_foreign = np.array([s.file == FOREIGN for s in hello.segments])
        self._process = _ForeignProcess(pid) if self._is_foreign.any() else None

    def pieces(self, dst_addresses: AddressArray, pairs: RegionPairs) -> list[Piece]:
        """Cut a read from the pairs' remote regions into pieces.

        Args:
            dst_addresses: Where the local regions are, shape `(num_regions,)`.

        Raises:
            RegionError: a remote region is outside the pool.
        """
        src, lengths = self.pool.addresses(pairs.remote_offsets, pairs.lengths), pairs.lengths
        if self._process is None:
            return cut(dst_addresses, src, lengths, MAPPED)
        foreign = self._is_foreign[self.pool.segment_indices(pairs.remote_offsets)]
        mapped = ~foreign
        if foreign.any():
            self._process.warn_once()
        return [
            *cut(dst_addresses[mapped], src[mapped], lengths[mapped], MAPPED),
            *cut(dst_addresses[foreign], src[foreign], lengths[foreign], _FOREIGN_MECHANISM),
        ]

    def copy(self, piece: Piece) -> None:
        """Copy a piece of a read, by the mechanism that it names.

        Raises:
            KVTransferError: the peer's memory cannot be read. Some bytes may have been written.
        """
        if piece.mechanism == _FOREIGN_MECHANISM and self._process is not None:
            self._process.read(piece)
        else:
            copy_regions(piece.dst_addresses, piece.src_addresses, piece.lengths)

    def check(self, guard: Guard) -> None:
        """Check that what was copied until now is what `guard` promised.

        Raises:
            StaleRegionError: it is not.
        """
        self._guards.check(guard)

    def close(self) -> None:
        """Unmap. The last read from this peer has ended: a copy that still ran would crash the process."""
        self._guards.close()
        for mapping in self._mappings:
            mapping.close()
        if self._process is not None:
            self._process.close()


#: What one peer has shown to us.
PeerMemory = RemoteMemory | RemoteCudaMemory


def _needed_bytes(hello: Hello, file: int) -> int:
    ends = [segment.start + segment.num_bytes for segment in hello.segments if segment.file == file]
    return max(ends, default=mmap.PAGESIZE)


class _ForeignProcess:
    """The ordinary memory of a peer, which the kernel reads for us."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._has_warned = False
        try:
            self._descriptor = os.pidfd_open(pid)
        except OSError:  # gone, or in another pid namespace: that matters only to a read
            self._descriptor = -1

    def read(self, piece: Piece) -> None:
        if self._descriptor < 0:
            raise PeerRefusedError(
                f"memory of process {self._pid} that is in no arena cannot be read from here: the process has ended, "
                "or runs in another pid namespace; let the transport allocate its pool"
            )
        try:
            read_regions_of(self._pid, piece.dst_addresses, piece.src_addresses, piece.lengths)
        except OSError as error:
            raise self._translated(error) from error
        if has_ended(self._descriptor):
            # After the copy: the pid may belong to another process by now, and then these are that one's
            # bytes.
            raise PeerLostError(f"process {self._pid} ended while its memory was read")

    def warn_once(self) -> None:
        """Say how slow this is. The owner's thread calls it: of several that copy, two could warn at once."""
        if self._descriptor >= 0 and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "the pool of process %d is not in an arena: it is read with process_vm_readv, at a fraction of the speed; "
                "let the transport allocate it",
                self._pid,
            )

    def _translated(self, error: OSError) -> KVTransferError:
        what = f"process_vm_readv of process {self._pid}: {error}"
        if error.errno == errno.EPERM:
            return PeerRefusedError(
                f"{what}; it must run as the same user and allow tracing (kernel.yama.ptrace_scope = 0, "
                "or CAP_SYS_PTRACE here), or let the transport allocate its pool"
            )
        return PeerLostError(what) if error.errno == errno.ESRCH else RegionError(what)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
