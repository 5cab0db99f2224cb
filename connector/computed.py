"""When what an engine computed is really there: a GPU runs behind the program that drives it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def at_once() -> bool:
    """Nothing has to be waited for."""
    return True


def mark_computed(device: torch.device) -> Callable[[], bool]:
    """Mark all that the calling thread has launched on its current stream of `device` until now.

    Returns:
        Says whether all of that has run. Any thread may ask. It raises RuntimeError if the GPU failed.
    """
    if device.type == "cpu":
        return at_once
    import torch

    is_over: Callable[[], bool] = torch.cuda.current_stream(device).record_event().query
    return is_over
