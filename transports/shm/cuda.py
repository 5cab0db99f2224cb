"""One GPU, through CUDA's driver: the calls that are needed to serve a pool there and to read a peer's. All are checked.

The driver is called through NVIDIA's own bindings (`cuda.bindings.driver`), which are imported when the first pool on a
GPU is registered. Source: the documentation of the CUDA Driver API; none of this has run on a GPU.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..errors import BackendUnavailableError, ConfigurationError, TransportError
from .copier import AddressArray, Int64Array

logger = logging.getLogger(__name__)

_HANDLE_BYTES = 64
_STREAM_NON_BLOCKING = 1
_EVENT_DISABLE_TIMING = 2
_IPC_LAZY_ENABLE_PEER_ACCESS = 1

_TWO_GPUS = "the pool is on several GPUs: keep all of it on one"
_NOT_EXPORTABLE = (
    "the pool's memory cannot be mapped by other processes; PyTorch's can where it comes from cudaMalloc: "
    "unset expandable_segments and backend:cudaMallocAsync in PYTORCH_ALLOC_CONF or PYTORCH_CUDA_ALLOC_CONF"
)

#: Pause between two checks whether copies have ended: the first one, and the longest.
_SHORTEST_REST_S = 20e-6
_LONGEST_REST_S = 1e-3


class _Driver:
    """NVIDIA's bindings, with exceptions instead of error codes."""

    def __init__(self) -> None:
        try:
            self.api: Any = importlib.import_module("cuda.bindings.driver")
            self.call("cuInit", 0)
        except (ImportError, RuntimeError, TransportError) as error:
            raise BackendUnavailableError(
                f"a pool on a GPU needs CUDA's driver and `pip install 'kvferry[cuda]'`: {error}"
            ) from error

    def call(self, name: str, *args: object) -> Any:
        """Call a function of the driver; return its result, or a tuple if there are several.

        Raises:
            TransportError: it failed.
        """
        status, *values = getattr(self.api, name)(*args)
        if status != self.api.CUresult.CUDA_SUCCESS:
            raise TransportError(f"{name}: {getattr(status, 'name', status)}")
        return values[0] if len(values) == 1 else tuple(values)

    def attribute(self, name: str, address: int) -> int:
        """Return a `CU_POINTER_ATTRIBUTE_` of an address. Raises TransportError: the driver does not know it."""
        attribute = getattr(self.api.CUpointer_attribute, f"CU_POINTER_ATTRIBUTE_{name}")
        return int(self.call("cuPointerGetAttribute", attribute, address))

    def has_ended(self, event: object) -> bool:
        """Return whether all that was launched before an event is over. Raises TransportError: it failed."""
        (status,) = self.api.cuEventQuery(event)
        if status == self.api.CUresult.CUDA_ERROR_NOT_READY:
            return False
        if status != self.api.CUresult.CUDA_SUCCESS:
            raise TransportError(f"cuEventQuery: {getattr(status, 'name', status)}")
        return True


class CudaDevice:
    """The GPU that holds a pool. Any thread may call it until `close`.

    It works in the GPU's primary context, which PyTorch uses too, and copies on a stream of its own.

    Attributes:
        gpu: The GPU's UUID, 16 bytes.
    """

    def __init__(self, address: int) -> None:
        """Find the GPU that has the memory at `address`.

        Raises:
            BackendUnavailableError: there are no bindings, no driver or no GPU.
            ConfigurationError: the address is not in memory of a GPU.
        """
        self._driver = _Driver()
        call = self._driver.call
        try:
            self._ordinal = self._driver.attribute("DEVICE_ORDINAL", address)
            self._device = call("cuDeviceGet", self._ordinal)
            self.gpu = bytes(call("cuDeviceGetUuid", self._device).bytes)
            self._context = call("cuDevicePrimaryCtxRetain", self._device)
        except TransportError as error:
            raise ConfigurationError(
                f"the pool is not on a GPU that CUDA can use: {error}", key="device"
            ) from error
        try:
            with self._current():
                self._stream = call("cuStreamCreate", _STREAM_NON_BLOCKING)
        except TransportError as error:
            self._release("cuDevicePrimaryCtxRelease", self._device)
            raise BackendUnavailableError(f"the GPU gives no stream: {error}") from error

    @contextmanager
    def _current(self) -> Iterator[None]:
        self._driver.call("cuCtxPushCurrent", self._context)
        try:
            yield
        finally:
            self._driver.call("cuCtxPopCurrent")

    def export(self, address: int) -> tuple[int, bytes]:
        """Let other processes of this host map the allocation that contains `address`.

        Returns:
            Where it begins, and the handle for the others.

        Raises:
            ConfigurationError: it is on another GPU, or other processes cannot map it.
        """
        try:
            with self._current():
                is_here = self._driver.attribute("DEVICE_ORDINAL", address) == self._ordinal
                if not is_here or not self._driver.attribute("IS_LEGACY_CUDA_IPC_CAPABLE", address):
                    raise ConfigurationError(_NOT_EXPORTABLE if is_here else _TWO_GPUS, key="device")
                base, _ = self._driver.call("cuMemGetAddressRange", address)
                handle = self._driver.call("cuIpcGetMemHandle", base)
        except TransportError as error:
            raise ConfigurationError(f"{_NOT_EXPORTABLE}: {error}", key="device") from error
        return int(base), ctypes.string_at(handle.getPtr(), _HANDLE_BYTES)

    def open(self, handle: bytes) -> int:
        """Map another process's allocation, also of another GPU; returns where. `unmap` must follow.

        Raises:
            TransportError: the driver refuses.
        """
        theirs = self._driver.api.CUipcMemHandle()
        ctypes.memmove(theirs.getPtr(), handle, _HANDLE_BYTES)
        with self._current():
            return int(self._driver.call("cuIpcOpenMemHandle", theirs, _IPC_LAZY_ENABLE_PEER_ACCESS))

    def unmap(self, address: int) -> None:
        """Undo one `open`. No copy from there is in flight."""
        with self._current():
            self._release("cuIpcCloseMemHandle", address)

    def copy(self, dst_addresses: AddressArray, src_addresses: AddressArray, lengths: Int64Array) -> None:
        """Copy regions, each array `(num_regions,)`. After it has returned or raised, nothing is written any more.

        A copy that was launched cannot be cancelled. So the wait for its end has no deadline; only an error of the GPU
        ends it early.

        Raises:
            TransportError: the driver or the GPU failed. Some bytes may have been written.
        """
        rows = zip(dst_addresses.tolist(), src_addresses.tolist(), lengths.tolist(), strict=True)
        with self._current(), self._awaited():
            for dst, src, num_bytes in rows:
                self._driver.call("cuMemcpyAsync", dst, src, num_bytes, self._stream)

    @contextmanager
    def _awaited(self) -> Iterator[None]:
        """Wait for the end of what the body launched, also if it fails half-way."""
        event = self._driver.call("cuEventCreate", _EVENT_DISABLE_TIMING)
        try:
            try:
                yield
            finally:
                self._driver.call("cuEventRecord", event, self._stream)
                rest_s = _SHORTEST_REST_S
                while not self._driver.has_ended(event):
                    time.sleep(rest_s)
                    rest_s = min(2 * rest_s, _LONGEST_REST_S)
        finally:
            self._release("cuEventDestroy", event)

    def close(self) -> None:
        """Give back the stream and the context. The memory still belongs to its owner."""
        self._release("cuStreamDestroy", self._stream)
        self._release("cuDevicePrimaryCtxRelease", self._device)

    def _release(self, name: str, what: object) -> None:
        try:
            self._driver.call(name, what)
        except TransportError as error:  # the GPU failed before, and nothing can be done about it
            logger.warning("a resource of the GPU was not given back: %s", error)


def gpu_name(gpu: bytes) -> str:
    """Write a GPU's UUID as `nvidia-smi -L` does."""
    return f"GPU-{uuid.UUID(bytes=gpu)}"
