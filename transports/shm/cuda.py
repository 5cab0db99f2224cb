"""One GPU as `shm` uses it: it exports a pool to other processes, maps theirs, and copies between the two."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

from ..cuda_copies import RegionCopies
from ..cuda_driver import EVENT_BLOCKING_SYNC, EVENT_DISABLE_TIMING, Gpu
from ..errors import ConfigurationError, TransportError
from .copier import AddressArray, Int64Array

_HANDLE_BYTES = 64
_IPC_LAZY_ENABLE_PEER_ACCESS = 1

_TWO_GPUS = "the pool is on several GPUs: keep all of it on one"
_NOT_EXPORTABLE = (
    "the pool's memory cannot be mapped by other processes; PyTorch's can where it comes from cudaMalloc: "
    "unset expandable_segments and backend:cudaMallocAsync in PYTORCH_ALLOC_CONF or PYTORCH_CUDA_ALLOC_CONF"
)


class NotExportableError(ConfigurationError):
    """Other processes cannot map a pool on a GPU. Transports that stage it can serve it."""


class CudaDevice:
    """The GPU that holds a pool. Any thread may call it until `close`. It copies on a stream of its own.

    Attributes:
        gpu: The GPU's UUID, 16 bytes.
    """

    def __init__(self, address: int) -> None:
        """Find the GPU that has the memory at `address`. Raises as `Gpu` and `Gpu.make_stream` do."""
        self._gpu = Gpu(address)
        self._driver = self._gpu.driver
        self.gpu = self._gpu.uuid
        self._copies = RegionCopies(self._gpu)
        try:
            self._stream = self._gpu.make_stream()
        except BaseException:
            self._copies.close()
            self._gpu.close()
            raise

    def export(self, address: int) -> tuple[int, bytes]:
        """Let other processes of this host map the allocation that contains `address`.

        Returns:
            Where it begins, and the handle for the others.

        Raises:
            ConfigurationError: it is on another GPU.
            NotExportableError: other processes cannot map it.
        """
        try:
            with self._gpu.current():
                if self._driver.attribute("DEVICE_ORDINAL", address) != self._gpu.ordinal:
                    raise ConfigurationError(_TWO_GPUS, key="device")
                if not self._driver.attribute("IS_LEGACY_CUDA_IPC_CAPABLE", address):
                    raise NotExportableError(_NOT_EXPORTABLE, key="device")
                base, _ = self._driver.call("cuMemGetAddressRange", address)
                handle = self._driver.call("cuIpcGetMemHandle", base)
        except TransportError as error:
            raise NotExportableError(f"{_NOT_EXPORTABLE}: {error}", key="device") from error
        return int(base), ctypes.string_at(handle.getPtr(), _HANDLE_BYTES)

    def open(self, handle: bytes) -> int:
        """Map another process's allocation, also of another GPU; returns where. `unmap` must follow.

        Raises:
            TransportError: the driver refuses.
        """
        theirs = self._driver.api.CUipcMemHandle()
        ctypes.memmove(theirs.getPtr(), handle, _HANDLE_BYTES)
        with self._gpu.current():
            return int(self._driver.call("cuIpcOpenMemHandle", theirs, _IPC_LAZY_ENABLE_PEER_ACCESS))

    def unmap(self, address: int) -> None:
        """Undo one `open`. No copy from there is in flight."""
        self._gpu.release("cuIpcCloseMemHandle", address)

    def copy(self, dst_addresses: AddressArray, src_addresses: AddressArray, lengths: Int64Array) -> None:
        """Copy regions, each array `(num_regions,)`.

        After it has returned or raised, nothing is written any more.

        A copy that was launched cannot be cancelled. So the wait for its end has no deadline; only an error
        of the GPU ends it early.

        Raises:
            TransportError: the driver or the GPU failed. Some bytes may have been written.
        """
        with self._gpu.current(), self._awaited():
            self._copies.launch(self._stream, dst_addresses, src_addresses, lengths)

    @contextmanager
    def _awaited(self) -> Iterator[None]:
        """Wait for the end of what the body launched, also if it fails half-way."""
        event = self._driver.call("cuEventCreate", EVENT_DISABLE_TIMING | EVENT_BLOCKING_SYNC)
        try:
            try:
                yield
            finally:
                try:
                    self._driver.call("cuEventRecord", event, self._stream)
                except TransportError:
                    # Without the event only the whole stream says when the copies are over.
                    self._driver.call("cuStreamSynchronize", self._stream)
                    raise
                self._driver.wait_for(event)
        finally:
            self._gpu.release("cuEventDestroy", event)

    def close(self) -> None:
        """Give back the stream and the context. The memory still belongs to its owner."""
        self._gpu.release("cuStreamDestroy", self._stream)
        self._copies.close()  # after the stream, which may still run the kernel
        self._gpu.close()
