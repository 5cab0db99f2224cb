"""When an engine's results are in memory: a GPU runs later than the program that launches its work."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def at_once() -> bool:
    """Return True: there is nothing to wait for."""
    return True


def mark_computed(device: torch.device) -> Callable[[], bool]:
    """Mark all that the calling thread has launched on its current stream of `device` until now.

    Returns:
        A function that says whether all of that has run. Any thread may call it. It raises RuntimeError if the GPU failed.
    """
    if device.type == "cpu":
        return at_once
    import torch

    is_over: Callable[[], bool] = torch.cuda.current_stream(device).record_event().query
    return is_over
