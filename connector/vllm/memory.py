"""Have vLLM allocate its KV cache in memory that a transport can serve without a staging copy."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ...transports.errors import KVTransferError

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


class PoolPlacement:
    """Gives vLLM a buffer of ours when it allocates the one buffer that holds all its caches.

    vLLM lets a connector wrap that allocation in a context, but not return the memory: on the CPU the
    allocation is a call of `torch.zeros`. Inside the context the first such call for a buffer of the right
    size and type returns our buffer. Whether that worked is checked afterwards. Only speed depends on it.

    Args:
        allocate: `num_bytes` → an int8 tensor of that many zeroed bytes.
    """

    def __init__(self, allocate: Callable[[int], torch.Tensor]) -> None:
        self._allocate = allocate
        self._pools: list[torch.Tensor] = []

    @contextmanager
    def answering(self, num_bytes: int) -> Iterator[None]:
        """Answer the allocation of `num_bytes` bytes while the context is open."""
        import torch

        ordinary = torch.zeros

        def zeros(*args: Any, **kwargs: Any) -> Any:
            if not self._pools and _asks_for_bytes(num_bytes, args, kwargs) and self._place(num_bytes):
                return self._pools[0]
            return ordinary(*args, **kwargs)

        torch.zeros = zeros
        try:
            yield
        finally:
            torch.zeros = ordinary

    def holds(self, cache: torch.Tensor) -> bool:
        """Say whether a cache lies in our buffer."""
        return any(
            cache.untyped_storage().data_ptr() == pool.untyped_storage().data_ptr() for pool in self._pools
        )

    def _place(self, num_bytes: int) -> bool:
        try:
            self._pools.append(self._allocate(num_bytes))
        except KVTransferError as error:
            logger.warning("the KV cache stays in vLLM's own memory: %s", error)
            return False
        return True


def _asks_for_bytes(num_bytes: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    import torch

    device = kwargs.get("device")
    return (
        args in ((num_bytes,), ((num_bytes,),))
        and kwargs.get("dtype") is torch.int8
        and (device is None or torch.device(device).type == "cpu")
    )
