"""CUDA's driver: one GPU, and the calls on which the parts for GPUs are built. All are checked.

The driver is called through NVIDIA's own bindings (`cuda.bindings.driver`), which are imported when the first
pool on a GPU is registered. Source: the documentation of the CUDA Driver API.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from .errors import BackendUnavailableError, ConfigurationError, TransportError

logger = logging.getLogger(__name__)

#: The driver's flags that we use, by its names for them.
STREAM_NON_BLOCKING = 1
EVENT_BLOCKING_SYNC = 1
EVENT_DISABLE_TIMING = 2
MEMHOSTALLOC_PORTABLE = 1

#: Stream, function and argument → a CUresult. ctypes releases the GIL during the call.
_LAUNCH_HOST_FUNC = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
#: Event → a CUresult.
_EVENT_SYNCHRONIZE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
#: The release of CUDA whose signatures these are.
_VERSION: Final = 10000


class Driver:
    """NVIDIA's bindings, with exceptions instead of error codes.

    Attributes:
        memcpy: The address of `cuMemcpyAsync`, for compiled code.
    """

    def __init__(self) -> None:
        try:
            self.api: Any = importlib.import_module("cuda.bindings.driver")
            self.call("cuInit", 0)
            self._launch_host_func = _LAUNCH_HOST_FUNC(self._address(b"cuLaunchHostFunc", _VERSION))
            self._synchronize = _EVENT_SYNCHRONIZE(self._address(b"cuEventSynchronize", _VERSION))
            self.memcpy = self._address(b"cuMemcpyAsync", _VERSION)
        except (ImportError, RuntimeError, TransportError) as error:
            raise BackendUnavailableError(
                f"a pool on a GPU needs CUDA's driver and its bindings for Python (run `pip install '.[cuda]'` in the clone "
                f"of kvferry): {error}"
            ) from error

    def _address(self, name: bytes, version: int) -> int:
        address, _ = self.call("cuGetProcAddress", name, version, 0)
        if not int(address):
            raise TransportError(f"CUDA's driver has no {name.decode()}")
        return int(address)

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
        """Return a `CU_POINTER_ATTRIBUTE_` of an address.

        Raises TransportError: the driver does not know it.
        """
        attribute = getattr(self.api.CUpointer_attribute, f"CU_POINTER_ATTRIBUTE_{name}")
        return int(self.call("cuPointerGetAttribute", attribute, address))

    def launch_host_function(self, stream: Any, function: int, argument: int) -> None:
        """Have a thread of the driver call a compiled function when everything before it on the stream has
        run.

        The driver is called directly. The bindings would wrap the function in one that takes the GIL, and a
        stream does nothing else until its host function has returned. So the next copies would wait until
        Python lets go of the GIL.

        Raises:
            TransportError: it failed.
        """
        self.require("cuLaunchHostFunc", self._launch_host_func(int(stream), function, argument))

    def wait_for(self, event: Any) -> None:
        """Return as soon as all that was launched before an event is over, without the GIL meanwhile.

        The event has `EVENT_BLOCKING_SYNC`; otherwise this would keep a core busy.

        Raises:
            TransportError: the GPU failed.
        """
        self.require("cuEventSynchronize", self._synchronize(int(event)))

    def require(self, name: str, status: int) -> None:
        """Raise TransportError if a call by its address failed."""
        if status != self.api.CUresult.CUDA_SUCCESS:
            raise TransportError(f"{name}: {self.api.CUresult(status).name}")

    def has_ended(self, event: object) -> bool:
        """Return whether all that was launched before an event is over. Raises TransportError: it failed."""
        (status,) = self.api.cuEventQuery(event)
        if status == self.api.CUresult.CUDA_ERROR_NOT_READY:
            return False
        if status != self.api.CUresult.CUDA_SUCCESS:
            raise TransportError(f"cuEventQuery: {getattr(status, 'name', status)}")
        return True


class Gpu:
    """The GPU that holds a pool. Any thread may call it until `close`.

    It works in the GPU's primary context, which PyTorch uses too.

    Attributes:
        driver: The driver. Most of its functions need `current`.
        ordinal: The GPU's number in this process.
        uuid: The GPU's UUID, 16 bytes.
    """

    def __init__(self, address: int) -> None:
        """Find the GPU that has the memory at `address`.

        Raises:
            BackendUnavailableError: there are no bindings, no driver or no GPU.
            ConfigurationError: the address is not in memory of a GPU.
        """
        self.driver = Driver()
        call = self.driver.call
        try:
            self.ordinal = self.driver.attribute("DEVICE_ORDINAL", address)
            self._device = call("cuDeviceGet", self.ordinal)
            self.uuid = bytes(call("cuDeviceGetUuid", self._device).bytes)
            self._context = call("cuDevicePrimaryCtxRetain", self._device)
        except TransportError as error:
            raise ConfigurationError(
                f"the pool is not on a GPU that CUDA can use: {error}", key="device"
            ) from error

    def architecture(self) -> int:
        """Return what compilers name the GPU's architecture by, for example 90 for an H100."""
        attributes = self.driver.api.CUdevice_attribute
        names = ("COMPUTE_CAPABILITY_MAJOR", "COMPUTE_CAPABILITY_MINOR")
        wanted = [getattr(attributes, f"CU_DEVICE_ATTRIBUTE_{name}") for name in names]
        major, minor = (self.driver.call("cuDeviceGetAttribute", each, self._device) for each in wanted)
        return 10 * int(major) + int(minor)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make the GPU's context the current one of this thread."""
        self.driver.call("cuCtxPushCurrent", self._context)
        try:
            yield
        finally:
            self.driver.call("cuCtxPopCurrent")

    def make_stream(self) -> Any:
        """Return a new stream, independent of the default one.

        `release("cuStreamDestroy", stream)` must follow.

        Raises:
            BackendUnavailableError: the GPU has none left.
        """
        try:
            with self.current():
                return self.driver.call("cuStreamCreate", STREAM_NON_BLOCKING)
        except TransportError as error:
            raise BackendUnavailableError(f"the GPU gives no stream: {error}") from error

    def release(self, name: str, what: object) -> None:
        """Call a function that gives something back. If it fails, log that: the GPU failed before."""
        try:
            with self.current():
                self.driver.call(name, what)
        except TransportError as error:
            logger.warning("a resource of the GPU was not given back: %s", error)

    def close(self) -> None:
        """Give back the context. The memory still belongs to its owner."""
        try:
            self.driver.call("cuDevicePrimaryCtxRelease", self._device)
        except TransportError as error:
            logger.warning("a resource of the GPU was not given back: %s", error)


def gpu_name(gpu: bytes) -> str:
    """Write a GPU's UUID as `nvidia-smi -L` does."""
    return f"GPU-{uuid.UUID(bytes=gpu)}"
