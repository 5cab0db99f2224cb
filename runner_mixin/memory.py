"""Memory: how much the device has, how much of it the cache may take, and the pool itself."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

import torch

from ..transports.errors import ConfigurationError, KVTransferStateError
from . import state

if TYPE_CHECKING:
    from ..connector.config import CacheConfig

__all__ = ["MemorySnapshot", "allocate_pool", "request_memory"]

_GIB = 1 << 30
_CGROUP_ROOT = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class MemorySnapshot:
    """A device's memory at one moment.

    Attributes:
        device: Which.
        total_bytes: All of it; on the CPU no more than the control group may have.
        free_bytes: What can still be allocated.
    """

    device: torch.device
    total_bytes: int
    free_bytes: int

    @classmethod
    def take(cls, device: torch.device) -> Self:
        """Look at `device`.

        Raises:
            ConfigurationError: it is neither a CPU nor a CUDA device.
        """
        if device.type == "cuda":
            free, total = torch.cuda.mem_get_info(device)
            return cls(device, total, free)
        if device.type != "cpu":
            raise ConfigurationError(
                f"cannot measure the memory of {device}", key="device", value=str(device)
            )
        total, free = read_host_memory(Path("/proc/meminfo"))
        limit, used = read_cgroup_memory(_CGROUP_ROOT)
        return cls(device, min(total, limit), max(0, min(free, limit - used)))


def read_host_memory(meminfo: Path) -> tuple[int, int]:
    """Read total and available bytes from a `/proc/meminfo`."""
    sizes = {}
    for line in meminfo.read_text().splitlines():
        name, _, rest = line.partition(":")
        sizes[name] = int(rest.split()[0]) << 10
    return sizes["MemTotal"], sizes["MemAvailable"]


def read_cgroup_memory(root: Path) -> tuple[int, int]:
    """Read limit and use, in bytes, of the control group mounted at `root`, version 2 or 1.

    Page cache that the kernel can drop is not counted as used. Without a limit, `(sys.maxsize, 0)`.
    """
    for folder, limit_name, used_name in (
        (root, "memory.max", "memory.current"),
        (root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        try:
            limit = (folder / limit_name).read_text().strip()
            if limit == "max":
                continue
            used = int((folder / used_name).read_text())
            droppable = _stat(folder / "memory.stat", ("inactive_file", "total_inactive_file"))
            return int(limit), max(0, used - droppable)
        except OSError:
            continue
    return 1 << 62, 0


def _stat(path: Path, names: tuple[str, ...]) -> int:
    """The largest of the named counters: version 1 has one for the group alone and one for its whole tree."""
    found = [line.split() for line in path.read_text().splitlines()]
    return max((int(value) for name, value in found if name in names), default=0)


def request_memory(snapshot: MemorySnapshot, cache_config: CacheConfig) -> int:
    """Say how many bytes the node may use: `ceil(total * memory_utilization)`.

    Raises:
        ValueError: fewer are free.
    """
    requested = math.ceil(snapshot.total_bytes * cache_config.memory_utilization)
    if snapshot.free_bytes < requested:
        raise ConfigurationError(
            f"{snapshot.device} has {snapshot.free_bytes / _GIB:.2f} GiB free of "
            f"{snapshot.total_bytes / _GIB:.2f} GiB, less than memory_utilization="
            f"{cache_config.memory_utilization} asks for ({requested / _GIB:.2f} GiB): "
            "lower it, or free memory that other processes use",
            key="memory_utilization",
            value=cache_config.memory_utilization,
        )
    return requested


def allocate_pool(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Allocate the memory of the pool, where the process's connector wants it if there is one.

    Returns:
        `(num_bytes,)` int8, zeroed, contiguous.

    Raises:
        KVTransferStateError: the connector returned something else.
    """
    if not state.has_kv_transfer_group():
        return torch.zeros(num_bytes, dtype=torch.int8, device=device)
    connector = state.get_kv_transfer_group()
    memory = connector.allocate_kv_memory(num_bytes, device)
    if memory.shape != (num_bytes,) or memory.dtype != torch.int8 or not memory.is_contiguous():
        raise KVTransferStateError(
            f"{type(connector).__name__}.allocate_kv_memory must return ({num_bytes},) contiguous int8, "
            f"got {tuple(memory.shape)} {memory.dtype}"
        )
    return memory
