"""Pools on a GPU, at both ends of a read: what the driver lets peers map, and what one peer lets us map."""

from __future__ import annotations

import os
from pathlib import Path

from ..cuda_driver import gpu_name
from ..errors import (
    ConfigurationError,
    IncompatiblePeerError,
    PeerLostError,
    ProtocolError,
    TransportError,
)
from ..regions import Guard, Pool, RegionPairs, Segment
from .copier import AddressArray, Piece, cut
from .cuda import CudaDevice
from .guards import PeerGuards
from .hello import MAX_ALLOCATIONS, Allocation, Hello, SharedSegment
from .process import has_ended

#: Milliseconds of copying over PCIe.
_PIECE_BYTES = 256 << 20

#: The index of `vsize` among the fields of `/proc/PID/stat` that follow the program's name.
_VSIZE_FIELD = 20


def describe_cuda_pool(device: CudaDevice, pool: Pool, num_guards: int) -> Hello:
    """Say how peers map a pool.

    Raises:
        ConfigurationError: they cannot, or it lies in too many allocations.
    """
    allocations: dict[int, Allocation] = {}  # by where they begin
    segments = []
    for segment in pool.segments:
        base, handle = device.export(segment.address)
        allocations.setdefault(base, Allocation(device.gpu, handle))
        place = list(allocations).index(base)
        segments.append(SharedSegment(place, segment.address - base, segment.num_bytes))
    if len(allocations) > MAX_ALLOCATIONS:
        raise ConfigurationError(f"a pool lies in at most {MAX_ALLOCATIONS} allocations", key="pool")
    return Hello(num_guards, 0, tuple(segments), tuple(allocations.values()))


class RemoteCudaMemory:
    """A peer's guard table and its pool on a GPU, mapped here. Any thread may copy from it until `close`.

    Whether a segment ends inside its allocation cannot be checked: the driver does not report how large a
    mapping is.
    """

    def __init__(self, hello: Hello, descriptors: list[int], pid: int, device: CudaDevice) -> None:
        """Map what came with a hello. The caller still closes the descriptors.

        Args:
            pid: The peer, as the kernel names it; 0 if it cannot be seen from here.
            device: The GPU that copies.

        Raises:
            ProtocolError: hello and descriptors do not fit together. Nothing stays mapped.
            IncompatiblePeerError: the peer's GPU, or its process, cannot be reached from here. Nothing stays
                mapped.
        """
        if len(descriptors) != 1:
            raise ProtocolError(f"{len(descriptors)} descriptors came with a hello of a pool on a GPU")
        self._device = device
        self._process = _Process(pid)
        self._bases: list[int] = []
        try:
            self._guards = PeerGuards(descriptors[0], hello.num_guards)
            for allocation in hello.allocations:
                self._bases.append(_open(device, allocation))
        except Exception:
            self._unmap()
            raise
        self.num_guards = hello.num_guards
        self.pool = Pool(
            Segment(self._bases[segment.file] + segment.start, segment.num_bytes, "cuda")
            for segment in hello.segments
        )

    def pieces(self, dst_addresses: AddressArray, pairs: RegionPairs) -> list[Piece]:
        """See `RemoteMemory.pieces`."""
        src = self.pool.addresses(pairs.remote_offsets, pairs.lengths)
        return cut(dst_addresses, src, pairs.lengths, "cuda_ipc", _PIECE_BYTES)

    def copy(self, piece: Piece) -> None:
        """Copy a piece of a read. After it has returned or raised, nothing is written any more.

        Raises:
            TransportError: the GPU failed. Some bytes may have been written.
        """
        self._device.copy(piece.dst_addresses, piece.src_addresses, piece.lengths)

    def check(self, guard: Guard) -> None:
        """Check that a guard holds. Call it after the copy: then what was copied is what the guard promised.

        Raises:
            PeerLostError: the peer ended meanwhile, and with it perhaps its memory.
            StaleRegionError: it does not hold.
        """
        # The guard is in a memory file, which outlives the peer; the GPU's memory does not. So the guard
        # proves nothing unless the peer was alive after the copy.
        self._process.require_alive()
        self._guards.check(guard)

    def close(self) -> None:
        """Unmap. The last read from this peer has ended."""
        self._guards.close()
        self._unmap()

    def _unmap(self) -> None:
        for base in self._bases:
            self._device.unmap(base)
        self._process.close()


def _open(device: CudaDevice, allocation: Allocation) -> int:
    try:
        return device.open(allocation.handle)
    except TransportError as error:
        raise IncompatiblePeerError(
            field="the pool's GPU",
            local=gpu_name(device.gpu),
            remote=f"{gpu_name(allocation.gpu)}, which cannot be mapped here ({error}): this needs two processes, and two "
            "GPUs with peer access (`nvidia-smi topo -p2p r`), or one GPU for both",
        ) from error


class _Process:
    """The process that owns a mapped allocation.

    A memory file outlives the process that created it. For a GPU's memory the driver promises nothing once
    its owner has ended, whatever the guard holds.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        try:
            self._descriptor = os.pidfd_open(pid)
        except (OSError, ValueError) as error:
            raise IncompatiblePeerError(
                field="process namespace",
                local="this one",
                remote="another one: CUDA maps memory between processes that see each other (`docker run --pid`)",
            ) from error

    def require_alive(self) -> None:
        """Raises PeerLostError: the process ended, or is about to."""
        # A process that ends gives up its address space first, then its files, among them the GPU's, and is
        # reported as ended last. As long as it is not reported, the pid is still its own, so `/proc` shows
        # the right process.
        if not self._has_memory() or has_ended(self._descriptor):
            raise PeerLostError(f"process {self._pid} ended while its memory was read")

    def _has_memory(self) -> bool:
        try:
            stat = Path(f"/proc/{self._pid}/stat").read_text()
        except OSError:
            return False
        return int(stat.rpartition(")")[2].split()[_VSIZE_FIELD]) > 0

    def close(self) -> None:
        os.close(self._descriptor)
