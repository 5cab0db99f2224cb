"""A stand-in for `cuda.bindings.driver` on machines without a GPU. It does what the driver's documentation promises.

The memory of its GPUs is shared host memory, so other processes with a stand-in of their own can map it. A copy is made
only after its event was queried a few times. So code that reports a copy without asking finds the bytes missing. What
the documentation leaves undefined, or calls an error, returns an error code here.

    stand_in = CudaDriverStandIn()
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", stand_in)
"""

from __future__ import annotations

import ctypes
import enum
import mmap
import os
import struct
import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .._memory import FileMapping, MappedArena, address_of, require_available
from ..base import Arena
from ..regions import Segment

_HANDLE = struct.Struct("<qqqq")  # process, descriptor, bytes, GPU


class CUresult(enum.IntEnum):
    """The codes that the stand-in returns."""

    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_NOT_INITIALIZED = 3
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_MAP_FAILED = 205
    CUDA_ERROR_PEER_ACCESS_UNSUPPORTED = 217
    CUDA_ERROR_INVALID_HANDLE = 400
    CUDA_ERROR_NOT_READY = 600
    CUDA_ERROR_ILLEGAL_ADDRESS = 700


class CUpointer_attribute(enum.IntEnum):
    """Attributes of an address that the stand-in knows."""

    CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL = 9
    CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE = 10


class CUipcMemHandle:
    """64 bytes that are accessible only by their address, as in the real bindings."""

    def __init__(self) -> None:
        self._bytes = ctypes.create_string_buffer(64)

    def getPtr(self) -> int:
        return ctypes.addressof(self._bytes)


@dataclass(frozen=True)
class CUuuid:
    bytes: bytes


class GpuArena(MappedArena):
    """Memory of a stand-in's GPU. Unlike that of a real GPU, tests can see its bytes."""

    @property
    def segment(self) -> Segment:
        host = super().segment
        return Segment(host.address, host.num_bytes, "cuda")


@dataclass
class _Memory:
    """An allocation, or a mapping of one.

    Attributes:
        num_opens: How many times a mapping is open; 0 for an allocation.
    """

    mapping: FileMapping
    descriptor: int
    num_bytes: int
    gpu: int
    is_exportable: bool = True
    num_opens: int = 0
    base: int = field(init=False)

    def __post_init__(self) -> None:
        self.base = address_of(self.mapping.memory)


@dataclass
class _Stream:
    """Work that was launched and is not done yet.

    Attributes:
        num_done: Launched work that is done.
    """

    work: deque[Callable[[], None]] = field(default_factory=deque)
    num_launched: int = 0
    num_done: int = 0


@dataclass
class _Event:
    """The work that was launched on a stream before the event was recorded.

    Attributes:
        until: Number of launches before it.
        queries_left: Queries that still answer "not ready".
    """

    stream: _Stream
    until: int
    queries_left: int


class CudaDriverStandIn:
    """The driver of a machine with any number of GPUs.

    Attributes:
        queries_until_done: How many queries of an event answer "not ready" before its copies are done.
        has_peer_access: Whether one GPU can reach another's memory.
        failures: By function name, the code that its next call returns without doing anything.
        on_copied: Called after each copy was done.
        held: Objects that were created and not released yet, by kind: contexts, streams, events, mappings.
    """

    CUresult = CUresult
    CUpointer_attribute = CUpointer_attribute
    CUipcMemHandle = CUipcMemHandle

    def __init__(self) -> None:
        self.queries_until_done = 3
        self.has_peer_access = True
        self.failures: dict[str, CUresult] = {}
        self.on_copied: Callable[[], None] = lambda: None
        self.held: Counter[str] = Counter()
        self._is_initialized = False
        self._thread = threading.local()
        self._lock = threading.RLock()
        self._memories: list[_Memory] = []
        self._mappings: dict[bytes, _Memory] = {}  # by handle

    def __getattribute__(self, name: str) -> Any:
        """Return a function of the driver. Calls run one at a time and fail as `failures` says."""
        found = super().__getattribute__(name)
        if not name.startswith("cu") or not callable(found):
            return found

        def call(*args: Any) -> tuple[Any, ...]:
            with self._lock:
                if (code := self.failures.pop(name, None)) is not None:
                    return (code,)
                if name != "cuInit" and not self._is_initialized:
                    return (CUresult.CUDA_ERROR_NOT_INITIALIZED,)
                result: tuple[Any, ...] = found(*args)
                return result

        return call

    # -- for tests -----------------------------------------------------------------------------------

    def allocate(self, num_bytes: int, gpu: int = 0, *, is_exportable: bool = True) -> Arena:
        """Allocate memory of a GPU, as an engine's framework would. It lives as long as the stand-in.

        Raises:
            ConfigurationError: less memory is free.
        """
        require_available(num_bytes)
        descriptor = os.memfd_create("stand-in", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, num_bytes)
        mapping = FileMapping(descriptor, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE)
        self._memories.append(_Memory(mapping, descriptor, num_bytes, gpu, is_exportable))
        return GpuArena(mapping.memory, num_bytes)

    def close(self) -> None:
        """Close the descriptors of all memory. Existing mappings stay valid."""
        for memory in self._memories:
            os.close(memory.descriptor)
        self._memories.clear()

    def _find(self, address: int, num_bytes: int = 1) -> _Memory | None:
        for memory in [*self._memories, *self._mappings.values()]:
            if memory.base <= address and address + num_bytes <= memory.base + memory.num_bytes:
                return memory
        return None

    @property
    def _contexts(self) -> list[int]:
        """The calling thread's stack of contexts, each a GPU."""
        stack: list[int] = self._thread.__dict__.setdefault("contexts", [])
        return stack

    # -- devices and contexts ------------------------------------------------------------------------

    def cuInit(self, flags: int) -> tuple[Any, ...]:
        self._is_initialized = True
        return (CUresult.CUDA_SUCCESS,)

    def cuDeviceGet(self, ordinal: int) -> tuple[Any, ...]:
        return CUresult.CUDA_SUCCESS, ordinal

    def cuDeviceGetUuid(self, device: int) -> tuple[Any, ...]:
        return CUresult.CUDA_SUCCESS, CUuuid(bytes([device]) * 16)

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[Any, ...]:
        self.held["contexts"] += 1
        return CUresult.CUDA_SUCCESS, device

    def cuDevicePrimaryCtxRelease(self, device: int) -> tuple[Any, ...]:
        self.held["contexts"] -= 1
        return (CUresult.CUDA_SUCCESS,)

    def cuCtxPushCurrent(self, context: int) -> tuple[Any, ...]:
        if not self.held["contexts"]:
            return (CUresult.CUDA_ERROR_INVALID_CONTEXT,)
        self._contexts.append(context)
        return (CUresult.CUDA_SUCCESS,)

    def cuCtxPopCurrent(self) -> tuple[Any, ...]:
        if not self._contexts:
            return (CUresult.CUDA_ERROR_INVALID_CONTEXT,)
        return CUresult.CUDA_SUCCESS, self._contexts.pop()

    # -- memory --------------------------------------------------------------------------------------

    def cuPointerGetAttribute(self, attribute: int, address: int) -> tuple[Any, ...]:
        memory = self._find(address)
        if memory is None:
            return (CUresult.CUDA_ERROR_INVALID_VALUE,)
        if attribute == CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
            return CUresult.CUDA_SUCCESS, memory.gpu
        return CUresult.CUDA_SUCCESS, memory.is_exportable

    def cuMemGetAddressRange(self, address: int) -> tuple[Any, ...]:
        memory = self._find(address)
        if not self._contexts or memory is None:
            return (CUresult.CUDA_ERROR_INVALID_CONTEXT,)
        return CUresult.CUDA_SUCCESS, memory.base, memory.num_bytes

    def cuIpcGetMemHandle(self, address: int) -> tuple[Any, ...]:
        memory = self._find(address)
        if not self._contexts or memory is None or memory.base != address or not memory.is_exportable:
            return (CUresult.CUDA_ERROR_INVALID_VALUE,)
        handle = CUipcMemHandle()
        described = _HANDLE.pack(os.getpid(), memory.descriptor, memory.num_bytes, memory.gpu)
        ctypes.memmove(handle.getPtr(), described, len(described))
        return CUresult.CUDA_SUCCESS, handle

    def cuIpcOpenMemHandle(self, handle: Any, flags: int) -> tuple[Any, ...]:
        """Open a handle as documented, except that a process may open its own, so that tests need only one process."""
        name = ctypes.string_at(handle.getPtr(), 64)
        pid, number, num_bytes, gpu = _HANDLE.unpack_from(name)
        if not self._contexts:
            return (CUresult.CUDA_ERROR_INVALID_CONTEXT,)
        if gpu != self._contexts[-1] and not (flags and self.has_peer_access):
            return (CUresult.CUDA_ERROR_PEER_ACCESS_UNSUPPORTED,)
        if name not in self._mappings:
            try:
                descriptor = os.open(f"/proc/{pid}/fd/{number}", os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                return (CUresult.CUDA_ERROR_INVALID_HANDLE,)
            try:
                mapping = FileMapping(descriptor, num_bytes, mmap.PROT_READ)
            except OSError:
                return (CUresult.CUDA_ERROR_MAP_FAILED,)
            finally:
                os.close(descriptor)
            self._mappings[name] = _Memory(mapping, -1, num_bytes, gpu, is_exportable=False)
        self._mappings[name].num_opens += 1
        self.held["mappings"] += 1
        return CUresult.CUDA_SUCCESS, self._mappings[name].base

    def cuIpcCloseMemHandle(self, address: int) -> tuple[Any, ...]:
        for name, memory in self._mappings.items():
            if memory.base == address:
                self.held["mappings"] -= 1
                memory.num_opens -= 1
                if not memory.num_opens:
                    self._mappings.pop(name).mapping.close()
                return (CUresult.CUDA_SUCCESS,)
        return (CUresult.CUDA_ERROR_INVALID_VALUE,)

    # -- streams -------------------------------------------------------------------------------------

    def cuStreamCreate(self, flags: int) -> tuple[Any, ...]:
        if not self._contexts:
            return (CUresult.CUDA_ERROR_INVALID_CONTEXT,)
        self.held["streams"] += 1
        return CUresult.CUDA_SUCCESS, _Stream()

    def cuStreamDestroy(self, stream: _Stream) -> tuple[Any, ...]:
        self.held["streams"] -= 1
        return (CUresult.CUDA_SUCCESS,)

    def cuMemcpyAsync(self, dst: int, src: int, num_bytes: int, stream: _Stream) -> tuple[Any, ...]:
        if not self._contexts:
            return (CUresult.CUDA_ERROR_INVALID_CONTEXT,)
        if self._find(dst, num_bytes) is None or self._find(src, num_bytes) is None:
            return (CUresult.CUDA_ERROR_INVALID_VALUE,)
        stream.num_launched += 1
        stream.work.append(lambda: self._copy(dst, src, num_bytes))
        return (CUresult.CUDA_SUCCESS,)

    def _copy(self, dst: int, src: int, num_bytes: int) -> None:
        assert self._find(src, num_bytes) is not None, "the source was unmapped during a copy"
        ctypes.memmove(dst, src, num_bytes)
        self.on_copied()

    def cuEventCreate(self, flags: int) -> tuple[Any, ...]:
        self.held["events"] += 1
        return CUresult.CUDA_SUCCESS, _Event(_Stream(), 0, 0)

    def cuEventRecord(self, event: _Event, stream: _Stream) -> tuple[Any, ...]:
        event.stream, event.until, event.queries_left = stream, stream.num_launched, self.queries_until_done
        return (CUresult.CUDA_SUCCESS,)

    def cuEventQuery(self, event: _Event) -> tuple[Any, ...]:
        if event.queries_left:
            event.queries_left -= 1
            return (CUresult.CUDA_ERROR_NOT_READY,)
        while event.stream.num_done < event.until:
            event.stream.work.popleft()()
            event.stream.num_done += 1
        return (CUresult.CUDA_SUCCESS,)

    def cuEventDestroy(self, event: _Event) -> tuple[Any, ...]:
        self.held["events"] -= 1
        return (CUresult.CUDA_SUCCESS,)
