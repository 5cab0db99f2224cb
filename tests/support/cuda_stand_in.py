"""A stand-in for CUDA's driver and its compiler on machines without a GPU, stricter than the real ones.

Device memory is *poisoned*: an address of it lies in a range that is mapped without any permission, and its
bytes are in a second mapping that only the driver's copies use. So code that touches device memory with the
CPU crashes. The second mapping is a file in memory, so other processes with a stand-in of their own can open
it by an IPC handle.

A thread does the copies, some time after they were launched, in the order of each stream but in any order
between streams. So code that does not wait for the end of a copy sees old bytes. Pinned memory is limited,
and copies to and from main memory work with pinned memory only. What the documentation leaves undefined, or
calls an error, returns an error code here, or is kept in `violations` if there is no call to return it from.

    with CudaDriverStandIn() as stand_in:
        for name in BINDINGS:
            monkeypatch.setitem(sys.modules, name, stand_in)
"""

from __future__ import annotations

import ctypes
import enum
import mmap
import os
import random
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, cast

from kvferry.transports._memory import FileMapping, address_of, require_available
from kvferry.transports.base import Arena
from kvferry.transports.regions import Segment

#: The modules for which the stand-in stands.
BINDINGS = ("cuda.bindings.driver", "cuda.bindings.nvrtc")

_PROT_NONE = 0
_HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_size_t)
_LAUNCH_HOST_FUNC = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_size_t)
_EVENT_SYNCHRONIZE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_size_t)
_MEMCPY = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_size_t)

#: The regions that one launch of the kernel takes.
_MAX_REGIONS = 168
#: What the stand-in of the compiler puts before the source, which is its code.
_CODE_FOR = b"code for sm_90\n"

_HANDLE = struct.Struct("<qqqq")  # process, descriptor, bytes, GPU


class CUresult(enum.IntEnum):
    """The codes that the stand-in returns."""

    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NOT_INITIALIZED = 3
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_MAP_FAILED = 205
    CUDA_ERROR_PEER_ACCESS_UNSUPPORTED = 217
    CUDA_ERROR_INVALID_HANDLE = 400
    CUDA_ERROR_NOT_FOUND = 500
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


class CUdevice_attribute(enum.IntEnum):
    """Attributes of a GPU that the stand-in knows."""

    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76


@dataclass(frozen=True)
class CUuuid:
    bytes: bytes


class GpuArena(Arena):
    """Memory of a stand-in's GPU. Unlike that of a real GPU, tests can see its bytes, in `buffer`."""

    def __init__(self, memory: _DeviceMemory) -> None:
        self._memory = memory

    @property
    def segment(self) -> Segment:
        return Segment(self._memory.base, self._memory.num_bytes, "cuda")

    @property
    def buffer(self) -> memoryview:
        return memoryview(self._memory.bytes.memory).cast("B")[: self._memory.num_bytes]


class _DeviceMemory:
    """An allocation on a GPU, or a mapping of one.

    Attributes:
        base: Its address, in a range that no CPU may touch.
        bytes: What is there, for the driver's copies.
        num_opens: How many times a mapping is open; 0 for an allocation.
    """

    def __init__(
        self, descriptor: int, num_bytes: int, gpu: int, *, is_exportable: bool, is_ours: bool
    ) -> None:
        self.descriptor = descriptor
        self.num_bytes = num_bytes
        self.gpu = gpu
        self.is_exportable = is_exportable
        self.num_opens = 0
        protection = mmap.PROT_READ | mmap.PROT_WRITE if is_ours else mmap.PROT_READ
        self.bytes = FileMapping(descriptor, num_bytes, protection)
        try:
            self._range = FileMapping(descriptor, num_bytes, _PROT_NONE)
        except BaseException:
            self.bytes.close()
            raise
        self.base = ctypes.addressof(cast("ctypes.Array[ctypes.c_ubyte]", self._range.memory))

    @property
    def shadow(self) -> int:
        """Where the bytes of `base` are."""
        return address_of(self.bytes.memory)

    def close(self) -> None:
        self._range.close()
        self.bytes.close()


class _PinnedMemory:
    """Page-locked main memory: CPU and GPUs reach it at the same address."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._mapping = mmap.mmap(-1, num_bytes)
        self.base = self.shadow = address_of(self._mapping)


_Memory = _DeviceMemory | _PinnedMemory


@dataclass(frozen=True)
class _Work:
    """Copies, as (target, source, number of bytes), and then a host function."""

    copies: Sequence[tuple[int, int, int]] = ()
    call: Callable[[], None] | None = None


@dataclass
class _Stream:
    """Work that was launched.

    Attributes:
        num_done: Launched work that is done; `work` is the rest.
    """

    work: deque[_Work] = field(default_factory=deque)
    num_launched: int = 0
    num_done: int = 0

    def __int__(self) -> int:
        """Return the stream's handle, as the real bindings do."""
        return id(self)


@dataclass
class _Event:
    """The work that was launched on a stream before the event was recorded: its first `until` pieces."""

    stream: _Stream
    until: int
    is_blocking: bool = False

    def __int__(self) -> int:
        """Return the event's handle."""
        return id(self)


class CudaDriverStandIn:
    """The driver of a machine with any number of GPUs. A context manager that closes.

    Args:
        delay_s: How long a piece of work waits at least after it was launched, in seconds.
        pinned_bytes: How much memory can be pinned.
        seed: Chooses the stream that goes next, if several have work.

    Attributes:
        has_peer_access: Whether one GPU can reach another's memory.
        failures: By function name, the code that its next call returns without doing anything.
        on_copied: Called after each copy was done, in the thread that copies.
        is_paused: No work is done while this is set.
        version: As `cuDriverGetVersion` returns it.
        calls: How often each function was called.
        violations: What code did that has no defined result on a GPU. A test requires it to be empty.
        held: Objects that were created and not released yet, by kind: contexts, streams, events, mappings,
            pinned.
    """

    CUresult = CUresult
    CUpointer_attribute = CUpointer_attribute
    CUipcMemHandle = CUipcMemHandle
    CUdevice_attribute = CUdevice_attribute

    def __init__(self, *, delay_s: float = 0.0005, pinned_bytes: int = 256 << 20, seed: int = 0) -> None:
        self.has_peer_access = True
        self.failures: dict[str, CUresult] = {}
        self.on_copied: Callable[[], None] = lambda: None
        self.version = 12080
        self.calls: Counter[str] = Counter()
        self.violations: list[str] = []
        self.held: Counter[str] = Counter()
        self._delay_s = delay_s
        self._pinned_left = pinned_bytes
        self._random = random.Random(seed)
        self._is_initialized = False
        self._is_paused = False
        self._is_closing = False
        self._thread = threading.local()
        self._changed = threading.Condition(threading.RLock())
        self._allocations: list[_DeviceMemory] = []
        self._mappings: dict[bytes, _DeviceMemory] = {}  # by handle
        self._pinned: dict[int, _PinnedMemory] = {}  # by address
        self._streams: list[_Stream] = []
        self._worker: threading.Thread | None = None
        self._events: dict[int, _Event] = {}  # by handle
        # By name: the release that first had it with this signature, and the function.
        self._functions: dict[bytes, list[tuple[int, Any]]] = {
            b"cuLaunchHostFunc": [(10000, _LAUNCH_HOST_FUNC(self._launch_host_func))],
            b"cuEventSynchronize": [(2000, _EVENT_SYNCHRONIZE(self._synchronize))],
            b"cuMemcpyAsync": [(4000, _MEMCPY(self._memcpy))],
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __getattribute__(self, name: str) -> Any:
        """Return a function of the driver. Calls run one at a time and fail as `failures` says."""
        found = super().__getattribute__(name)
        if not name.startswith("cu") or not callable(found):
            return found

        def call(*args: Any) -> tuple[Any, ...]:
            with self._changed:
                self.calls[name] += 1
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
        memory = _DeviceMemory(descriptor, num_bytes, gpu, is_exportable=is_exportable, is_ours=True)
        self._allocations.append(memory)
        return GpuArena(memory)

    @property
    def is_paused(self) -> bool:
        return self._is_paused

    @is_paused.setter
    def is_paused(self, value: bool) -> None:
        with self._changed:
            self._is_paused = value
            self._changed.notify_all()

    def close(self) -> None:
        """Finish what was launched, and close the descriptors of all memory. Existing mappings stay valid."""
        with self._changed:
            self._is_closing, self._is_paused = True, False
            self._changed.notify_all()
        if self._worker is not None:
            self._worker.join()
        for memory in self._allocations:
            os.close(memory.descriptor)
        self._allocations.clear()

    def _find(self, address: int, num_bytes: int = 1) -> _Memory | None:
        memories: list[_Memory] = [*self._allocations, *self._mappings.values(), *self._pinned.values()]
        for memory in memories:
            if memory.base <= address and address + num_bytes <= memory.base + memory.num_bytes:
                return memory
        return None

    def _find_device(self, address: int) -> _DeviceMemory | None:
        memory = self._find(address)
        return memory if isinstance(memory, _DeviceMemory) else None

    # -- the thread that works -------------------------------------------------------------------------

    def _launch(self, stream: _Stream, work: _Work) -> None:
        stream.num_launched += 1
        stream.work.append(work)
        if self._worker is None:
            self._worker = threading.Thread(target=self._work, name="stand-in-gpu", daemon=True)
            self._worker.start()
        self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closing or (not self._is_paused and self._has_work()))
                if not self._has_work():
                    return  # it is closing
            time.sleep(self._delay_s)
            with self._changed:
                busy = [stream for stream in self._streams if stream.work]
                if self._is_paused or not busy:
                    continue
                stream = self._random.choice(busy)
                work = stream.work[0]
            for copy in work.copies:
                self._copy(*copy)
            if work.call is not None:
                work.call()
            with self._changed:
                stream.work.popleft()
                stream.num_done += 1
                self._changed.notify_all()

    def _has_work(self) -> bool:
        return any(stream.work for stream in self._streams)

    def _addresses_in_use(self) -> Iterator[int]:
        for stream in self._streams:
            for work in stream.work:
                for target, source, _ in work.copies:
                    yield from (target, source)

    def _violated(self, what: str) -> None:
        self.violations.append(what)

    @property
    def _contexts(self) -> list[int]:
        """The calling thread's stack of contexts, each a GPU."""
        stack: list[int] = self._thread.__dict__.setdefault("contexts", [])
        return stack

    # -- the compiler --------------------------------------------------------------------------------

    def nvrtcCreateProgram(
        self, source: bytes, name: bytes, num_headers: int, headers: list[bytes], names: list[bytes]
    ) -> tuple[Any, ...]:
        return 0, source

    def nvrtcCompileProgram(self, source: bytes, num_options: int, options: list[bytes]) -> tuple[Any, ...]:
        return (0 if options == [b"--gpu-architecture=sm_90"] and num_options == 1 else 6,)

    def nvrtcGetCUBINSize(self, source: bytes) -> tuple[Any, ...]:
        return 0, len(_CODE_FOR + source)

    def nvrtcGetCUBIN(self, source: bytes, code: bytearray) -> tuple[Any, ...]:
        code[:] = _CODE_FOR + source
        return (0,)

    def nvrtcDestroyProgram(self, source: bytes) -> tuple[Any, ...]:
        return (0,)

    # -- devices and contexts ------------------------------------------------------------------------

    def cuInit(self, flags: int) -> tuple[Any, ...]:
        self._is_initialized = True
        return (CUresult.CUDA_SUCCESS,)

    def cuDriverGetVersion(self) -> tuple[Any, ...]:
        return CUresult.CUDA_SUCCESS, self.version

    def cuDeviceGet(self, ordinal: int) -> tuple[Any, ...]:
        return CUresult.CUDA_SUCCESS, ordinal

    def cuDeviceGetUuid(self, device: int) -> tuple[Any, ...]:
        return CUresult.CUDA_SUCCESS, CUuuid(bytes([device]) * 16)

    def cuDeviceGetAttribute(self, attribute: enum.IntEnum, device: int) -> tuple[Any, ...]:
        return CUresult.CUDA_SUCCESS, 9 if attribute.name.endswith("MAJOR") else 0

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
        memory = self._find_device(address)
        if memory is None:
            return (CUresult.CUDA_ERROR_INVALID_VALUE,)
        if attribute == CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
            return CUresult.CUDA_SUCCESS, memory.gpu
        return CUresult.CUDA_SUCCESS, memory.is_exportable

    def cuMemGetAddressRange(self, address: int) -> tuple[Any, ...]:
        memory = self._find_device(address)
        if not self._contexts or memory is None:
            return (CUresult.CUDA_ERROR_INVALID_CONTEXT,)
        return CUresult.CUDA_SUCCESS, memory.base, memory.num_bytes

    def cuIpcGetMemHandle(self, address: int) -> tuple[Any, ...]:
        memory = self._find_device(address)
        if not self._contexts or memory is None or memory.base != address or not memory.is_exportable:
            return (CUresult.CUDA_ERROR_INVALID_VALUE,)
        handle = CUipcMemHandle()
        described = _HANDLE.pack(os.getpid(), memory.descriptor, memory.num_bytes, memory.gpu)
        ctypes.memmove(handle.getPtr(), described, len(described))
        return CUresult.CUDA_SUCCESS, handle

    def cuIpcOpenMemHandle(self, handle: Any, flags: int) -> tuple[Any, ...]:
        """Open a handle as documented, except that a process may open its own, so that tests need only one
        process.
        """
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
                opened = _DeviceMemory(descriptor, num_bytes, gpu, is_exportable=False, is_ours=False)
            except OSError:
                return (CUresult.CUDA_ERROR_MAP_FAILED,)
            finally:
                os.close(descriptor)
            self._mappings[name] = opened
        self._mappings[name].num_opens += 1
        self.held["mappings"] += 1
        return CUresult.CUDA_SUCCESS, self._mappings[name].base

    def cuIpcCloseMemHandle(self, address: int) -> tuple[Any, ...]:
        for name, memory in self._mappings.items():
            if memory.base == address:
                self.held["mappings"] -= 1
                memory.num_opens -= 1
                if not memory.num_opens:
                    self._mappings.pop(name).close()
                return (CUresult.CUDA_SUCCESS,)
        return (CUresult.CUDA_ERROR_INVALID_VALUE,)

    def cuMemHostAlloc(self, num_bytes: int, flags: int) -> tuple[Any, ...]:
        if not self._contexts:
            return (CUresult.CUDA_ERROR_INVALID_CONTEXT,)
        if num_bytes > self._pinned_left:
            return (CUresult.CUDA_ERROR_OUT_OF_MEMORY,)
        self._pinned_left -= num_bytes
        self.held["pinned"] += 1
        memory = _PinnedMemory(num_bytes)
        self._pinned[memory.base] = memory
        return CUresult.CUDA_SUCCESS, memory.base

    def cuMemFreeHost(self, address: int) -> tuple[Any, ...]:
        memory = self._pinned.get(address)
        if memory is None:
            return (CUresult.CUDA_ERROR_INVALID_VALUE,)
        if any(self._find(at) is memory for at in self._addresses_in_use()):
            self._violated("pinned memory was freed while a copy used it")
        del self._pinned[address]
        self._pinned_left += memory.num_bytes
        self.held["pinned"] -= 1
        return (CUresult.CUDA_SUCCESS,)

    # -- streams -------------------------------------------------------------------------------------

    def cuStreamCreate(self, flags: int) -> tuple[Any, ...]:
        if not self._contexts:
            return (CUresult.CUDA_ERROR_INVALID_CONTEXT,)
        self.held["streams"] += 1
        self._streams.append(stream := _Stream())
        return CUresult.CUDA_SUCCESS, stream

    def cuStreamDestroy(self, stream: _Stream) -> tuple[Any, ...]:
        self.held["streams"] -= 1
        if stream.work:
            self._violated("a stream was destroyed while copies were under way")
        return (CUresult.CUDA_SUCCESS,)

    def cuStreamSynchronize(self, stream: _Stream) -> tuple[Any, ...]:
        until = stream.num_launched
        self._changed.wait_for(lambda: stream.num_done >= until)
        return (CUresult.CUDA_SUCCESS,)

    def cuMemcpyAsync(self, dst: int, src: int, num_bytes: int, stream: _Stream) -> tuple[Any, ...]:
        if not self._contexts:
            return (CUresult.CUDA_ERROR_INVALID_CONTEXT,)
        if self._find(dst, num_bytes) is None or self._find(src, num_bytes) is None:
            return (CUresult.CUDA_ERROR_INVALID_VALUE,)
        self._launch(stream, _Work([(dst, src, num_bytes)]))
        return (CUresult.CUDA_SUCCESS,)

    def cuModuleLoadData(self, code: bytes) -> tuple[Any, ...]:
        if not self._contexts:
            return (CUresult.CUDA_ERROR_INVALID_CONTEXT,)
        if not code.startswith(_CODE_FOR):
            return (CUresult.CUDA_ERROR_INVALID_VALUE,)
        self.held["modules"] += 1
        return CUresult.CUDA_SUCCESS, code

    def cuModuleGetFunction(self, module: bytes, name: bytes) -> tuple[Any, ...]:
        if b'extern "C" __global__ void ' + name + b"(" not in module:
            return (CUresult.CUDA_ERROR_NOT_FOUND,)
        return CUresult.CUDA_SUCCESS, name

    def cuModuleUnload(self, module: bytes) -> tuple[Any, ...]:
        self.held["modules"] -= 1
        return (CUresult.CUDA_SUCCESS,)

    def cuLaunchKernel(self, kernel: bytes, *arguments: Any) -> tuple[Any, ...]:
        """Launch copies as one piece of work, which does them in any order.

        There is one kernel, `copy_regions`.
        """
        *grid_and_block, shared_bytes, stream, parameters, extra = arguments
        if not self._contexts:
            return (CUresult.CUDA_ERROR_INVALID_CONTEXT,)
        if kernel != b"copy_regions" or extra or min(grid_and_block) < 1 or shared_bytes:
            return (CUresult.CUDA_ERROR_INVALID_VALUE,)
        regions, count = (ctypes.c_uint64 * 2).from_address(parameters)
        # The driver reads as much as the kernel's parameter has, which is no less than the regions of this
        # launch.
        columns = (ctypes.c_uint64 * (3 * _MAX_REGIONS)).from_address(regions)
        num_regions = ctypes.c_int32.from_address(count).value
        rows = [(columns[3 * at], columns[3 * at + 1], columns[3 * at + 2]) for at in range(num_regions)]
        for dst, src, size in rows:
            if self._find(dst, size) is None or self._find(src, size) is None:
                self._violated("a kernel was given an address that it cannot reach")  # it ends the context
                return (CUresult.CUDA_ERROR_ILLEGAL_ADDRESS,)
        self._random.shuffle(rows)
        self._launch(stream, _Work(rows))
        return (CUresult.CUDA_SUCCESS,)

    def _copy(self, dst: int, src: int, num_bytes: int) -> None:
        target, source = self._find(dst, num_bytes), self._find(src, num_bytes)
        if target is None or source is None:
            self._violated("memory was unmapped or freed during a copy")
            return
        ctypes.memmove(dst - target.base + target.shadow, src - source.base + source.shadow, num_bytes)
        self.on_copied()

    def cuGetProcAddress(self, symbol: bytes, version: int, flags: int) -> tuple[Any, ...]:
        """Return the newest function that a release `version` had, as far as this driver has it."""
        known = self._functions.get(symbol, [])
        found = [function for since, function in known if since <= min(version, self.version)]
        if not found:
            return CUresult.CUDA_ERROR_NOT_FOUND, 0, 1
        return CUresult.CUDA_SUCCESS, ctypes.cast(found[-1], ctypes.c_void_p).value, 0

    # Pointers of `cuGetProcAddress`. C code passes handles and addresses.

    def _launch_host_func(self, handle: int, function: int, argument: int) -> int:
        return int(self.cuLaunchHostFunc(self._stream_of(handle), function, argument)[0])

    def _synchronize(self, handle: int) -> int:
        return int(self.cuEventSynchronize(self._events[handle])[0])

    def _memcpy(self, dst: int, src: int, num_bytes: int, handle: int) -> int:
        return int(self.cuMemcpyAsync(dst, src, num_bytes, self._stream_of(handle))[0])

    def _stream_of(self, handle: int) -> _Stream:
        return next(stream for stream in self._streams if int(stream) == handle)

    def cuLaunchHostFunc(self, stream: _Stream, function: int, argument: int) -> tuple[Any, ...]:
        call = _HOST_FUNCTION(function)
        self._launch(stream, _Work(call=lambda: call(argument)))
        return (CUresult.CUDA_SUCCESS,)

    def cuEventCreate(self, flags: int) -> tuple[Any, ...]:
        if not self._contexts:
            return (CUresult.CUDA_ERROR_INVALID_CONTEXT,)
        self.held["events"] += 1
        event = _Event(_Stream(), 0, is_blocking=bool(flags & 1))
        self._events[int(event)] = event
        return CUresult.CUDA_SUCCESS, event

    def cuEventRecord(self, event: _Event, stream: _Stream) -> tuple[Any, ...]:
        event.stream, event.until = stream, stream.num_launched
        return (CUresult.CUDA_SUCCESS,)

    def cuEventQuery(self, event: _Event) -> tuple[Any, ...]:
        is_over = event.stream.num_done >= event.until
        return (CUresult.CUDA_SUCCESS if is_over else CUresult.CUDA_ERROR_NOT_READY,)

    def cuEventSynchronize(self, event: _Event) -> tuple[Any, ...]:
        if not event.is_blocking:
            self._violated("a thread waits for an event that keeps a core busy meanwhile")
        self._changed.wait_for(lambda: event.stream.num_done >= event.until)
        return (CUresult.CUDA_SUCCESS,)

    def cuEventDestroy(self, event: _Event) -> tuple[Any, ...]:
        self.held["events"] -= 1
        del self._events[int(event)]
        return (CUresult.CUDA_SUCCESS,)
