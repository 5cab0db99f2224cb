"""A pool on the first GPU, for the path `shm-gpu`: allocated by CUDA's driver, without PyTorch.

Source: the documentation of the CUDA Driver API.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import numpy as np
import numpy.typing as npt

from kvferry.transports import Segment
from kvferry.transports.cuda_driver import Driver


class GpuMemory:
    """Memory of the first GPU, which the CPU sees as a copy. The thread that made it uses and closes it.

    Attributes:
        segment: The memory, for a pool.
        words: A copy of the memory as 8-byte words.
    """

    def __init__(self, num_bytes: int) -> None:
        """Allocate it.

        Raises:
            BackendUnavailableError: there are no bindings, no driver or no GPU.
            TransportError: the GPU refuses, for example because so much memory is not free.
        """
        call = Driver().call
        with ExitStack() as opened:
            device = call("cuDeviceGet", 0)
            context = call("cuDevicePrimaryCtxRetain", device)
            opened.callback(call, "cuDevicePrimaryCtxRelease", device)
            call("cuCtxPushCurrent", context)
            opened.callback(call, "cuCtxPopCurrent")
            address = call("cuMemAlloc", num_bytes)
            opened.callback(call, "cuMemFree", address)
            self._opened = opened.pop_all()
        self._call: Any = call
        self._address = address
        self.words: npt.NDArray[np.int64] = np.zeros(num_bytes // 8, dtype=np.int64)
        self.segment = Segment(int(address), num_bytes, "cuda")

    def load(self) -> None:
        """Copy the memory into `words`."""
        self._call("cuMemcpyDtoH", self.words.ctypes.data, self._address, self.words.nbytes)

    def store(self) -> None:
        """Copy `words` into the memory."""
        self._call("cuMemcpyHtoD", self._address, self.words.ctypes.data, self.words.nbytes)

    def close(self) -> None:
        """Free the memory. No transport may have it registered any more."""
        self._opened.close()
