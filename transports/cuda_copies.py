"""Copies of many small regions by a kernel of the GPU.

A copy engine takes a few microseconds per region, and a model's layout with a page per layer has tens of
thousands of regions per read. The kernel takes no longer for them than the memory does. It reads and writes
any memory that the GPU can reach: its own, another process's that is mapped here, and pinned main memory.
Regions of a mebibyte or more go to the copy engines, which keep the GPU's multiprocessors free.

The kernel is compiled when the first pool is registered, in a tenth of a second, by NVIDIA's compiler library
(NVRTC), which comes with PyTorch for CUDA. Where it is missing all regions go to the copy engines.

Sources: the documentation of the CUDA Driver API and of NVRTC.
"""

from __future__ import annotations

import functools
import importlib
import logging
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from .copying import copy_on_stream
from .cuda_driver import Gpu
from .errors import TransportError
from .regions import AddressArray, Int64Array

logger = logging.getLogger(__name__)

#: Regions of fewer bytes are copied by the kernel.
_SMALL_BYTES: Final = 1 << 20
#: Regions that one launch takes. They are its parameters, which may have 4,096 bytes: so nothing must outlive
#: the launch.
_MAX_REGIONS: Final = 168
#: A megabyte is under way at a time, as much as the memory of an H100 needs, on less than half of its
#: multiprocessors.
_NUM_BLOCKS: Final = 64
_NUM_THREADS: Final = 256

_NAME: Final = b"copy_regions"
_SOURCE: Final = f"""
struct Region {{ unsigned long long target, source, num_bytes; }};
struct Regions {{ Region at[{_MAX_REGIONS}]; }};

// A thread loads four elements before it stores the first: a load takes longer than anything else here.
template <typename T>
__device__ void copy(T *__restrict__ target, const T *__restrict__ source, unsigned long long count) {{
    unsigned long long at = threadIdx.x, step = blockDim.x;
    for (; at + 3 * step < count; at += 4 * step) {{
        T a = source[at], b = source[at + step], c = source[at + 2 * step], d = source[at + 3 * step];
        target[at] = a;
        target[at + step] = b;
        target[at + 2 * step] = c;
        target[at + 3 * step] = d;
    }}
    for (; at < count; at += step) target[at] = source[at];
}}

extern "C" __global__ void {_NAME.decode()}(const __grid_constant__ Regions regions, int count) {{
    for (int i = blockIdx.x; i < count; i += gridDim.x) {{
        Region r = regions.at[i];
        if (((r.target | r.source | r.num_bytes) & 15) == 0)
            copy((uint4 *)r.target, (const uint4 *)r.source, r.num_bytes / 16);
        else
            copy((char *)r.target, (const char *)r.source, r.num_bytes);
    }}
}}
"""


class RegionCopies:
    """Launches copies of regions on streams of one GPU, in whose context every method but `close` is
    called.
    """

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._driver = gpu.driver
        self._module: Any = None
        self._kernel: Any = (
            None  # without it, also if the module was loaded, every region goes to the copy engines
        )
        try:
            with gpu.current():
                self._module = self._driver.call("cuModuleLoadData", _compiled(gpu.architecture()))
                self._kernel = self._driver.call("cuModuleGetFunction", self._module, _NAME)
        except (ImportError, RuntimeError, TransportError) as error:
            logger.warning("small regions are copied one by one, which is slower: %s", str(error))

    def launch(self, stream: Any, targets: AddressArray, sources: AddressArray, lengths: Int64Array) -> None:
        """Launch copies of regions, each array `(num_regions,)`.

        Raises:
            TransportError: it failed. Some copies may have been launched.
        """
        is_small = lengths < _SMALL_BYTES
        if self._kernel is None or np.count_nonzero(is_small) < 2:
            self._copy_each(stream, targets, sources, lengths)
            return
        # The order of the two does not matter: regions of one read do not overlap, and the caller waits for
        # the stream.
        if not is_small.all():
            self._copy_each(stream, targets[~is_small], sources[~is_small], lengths[~is_small])
        self._copy_small(stream, targets[is_small], sources[is_small], lengths[is_small])

    def _copy_each(self, stream: Any, *regions: Any) -> None:
        # In C and without the GIL, which the thread that launches the model's kernels needs.
        self._driver.require("cuMemcpyAsync", copy_on_stream(self._driver.memcpy, int(stream), *regions))

    def _copy_small(self, stream: Any, *columns: NDArray[Any]) -> None:
        num_regions = len(columns[0])
        # Whole launches, because each reads as many regions as it could take.
        rows = np.zeros((-(-num_regions // _MAX_REGIONS) * _MAX_REGIONS, 3), dtype=np.uint64)
        for at, column in enumerate(columns):
            rows[:num_regions, at] = column
        count = np.empty(1, dtype=np.int32)
        # The parameters are addresses of addresses, so `rows` and `count` must live until the launch has
        # returned.
        for first in range(0, num_regions, _MAX_REGIONS):
            count[0] = min(num_regions - first, _MAX_REGIONS)
            parameters = np.array([rows[first:].ctypes.data, count.ctypes.data], dtype=np.uint64)
            grid, block = (min(int(count[0]), _NUM_BLOCKS), 1, 1), (_NUM_THREADS, 1, 1)
            # The driver has copied the parameters when this returns, so the next round may change them.
            self._driver.call(
                "cuLaunchKernel", self._kernel, *grid, *block, 0, stream, parameters.ctypes.data, 0
            )

    def close(self) -> None:
        """Unload the kernel. All that was launched has ended."""
        if self._module is not None:
            self._gpu.release("cuModuleUnload", self._module)


@functools.cache
def _compiled(architecture: int) -> bytes:
    """Compile the kernel for GPUs of one architecture, for example 90 for an H100.

    Raises:
        ImportError, RuntimeError: NVRTC is missing, or cannot compile it.
    """
    nvrtc = importlib.import_module("cuda.bindings.nvrtc")

    def call(name: str, *args: object) -> Any:
        status, *values = getattr(nvrtc, name)(*args)
        if int(status):
            raise RuntimeError(f"{name}: {getattr(status, 'name', status)}")
        return values[0] if values else None

    program = call("nvrtcCreateProgram", _SOURCE.encode(), b"", 0, [], [])
    try:
        call("nvrtcCompileProgram", program, 1, [f"--gpu-architecture=sm_{architecture}".encode()])
        code = bytearray(call("nvrtcGetCUBINSize", program))
        call("nvrtcGetCUBIN", program, code)
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return bytes(code)
