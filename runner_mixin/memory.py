"""Memory: how much the device has, how much of it the node may use, and the pool itself."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch

from ..transports.errors import ConfigurationError, KVTransferStateError
from ..transports.machine import memory_of_this_process
from . import state

if TYPE_CHECKING:
    from ..connector.config import CacheConfig

_GIB = 1 << 30


@dataclass(frozen=True)
class MemorySnapshot:
    """A device's memory at one moment.

    Attributes:
        device: The device.
        total_bytes: All its memory; on the CPU no more than the limit of the process's control groups.
        free_bytes: Bytes that can still be allocated.
    """

    device: torch.device
    total_bytes: int
    free_bytes: int

    @classmethod
    def take(cls, device: torch.device) -> Self:
        """Measure the memory of `device` now.

        Raises:
            ConfigurationError: it is neither a CPU nor a CUDA device.
        """
        if device.type == "cuda":
            free, total = torch.cuda.mem_get_info(device)
            return cls(device, total, free)
        if device.type != "cpu":
            raise ConfigurationError(
                f"cannot measure the memory of {device}: it is neither the CPU nor a CUDA device",
                key="device",
                value=str(device),
            )
        return cls(device, *memory_of_this_process())


def request_memory(snapshot: MemorySnapshot, cache_config: CacheConfig) -> int:
    """Return how many bytes the node may use: `ceil(total * memory_utilization)`.

    Raises:
        ConfigurationError: fewer bytes are free.
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
    """Allocate the memory of the pool, by the process's connector if there is one.

    Returns:
        `(num_bytes,)` int8, zeroed, contiguous.

    Raises:
        KVTransferStateError: the connector returned another shape or type.
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
