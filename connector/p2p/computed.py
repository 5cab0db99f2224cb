"""When an engine's results are in memory: a GPU runs later than the program that launches its work."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Mark:
    """All that was launched until a moment. Any thread may call either function.

    Attributes:
        is_over: Returns whether all of it has run. Raises RuntimeError if the GPU failed.
        wait: Returns as soon as all of it has run, without the interpreter's lock meanwhile. Raises as
            `is_over` does.
    """

    is_over: Callable[[], bool]
    wait: Callable[[], object]


#: There is nothing to wait for.
AT_ONCE: Final = Mark(lambda: True, lambda: None)


def mark_computed(device: torch.device) -> Mark:
    """Mark all that the calling thread has launched on its current stream of `device` until now."""
    if device.type == "cpu":
        return AT_ONCE
    import torch

    # Blocking: a thread that waits for an ordinary event keeps a core busy until the GPU is done.
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return Mark(event.query, event.synchronize)


class Watch:
    """A thread that waits for marks, so that the thread that needs them can sleep on something else.

    It begins with the first mark, so a node without a GPU has none.

    Args:
        on_over: Called after each mark, by the thread: all of it has run, or the GPU failed.
    """

    def __init__(self, on_over: Callable[[], None]) -> None:
        self._on_over = on_over
        self._marks: queue.SimpleQueue[Mark | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def add(self, mark: Mark) -> None:
        """Wait for a mark after those that were added before."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvferry-computed")
            self._thread.start()
        self._marks.put(mark)

    def close(self) -> None:
        """End the thread after the mark that it waits for.

        Nothing can end that wait, and this does not wait for it.
        """
        self._marks.put(None)

    def _run(self) -> None:
        while (mark := self._marks.get()) is not None:
            with suppress(Exception):  # `is_over` raises the same to the thread that asks next
                mark.wait()
            self._on_over()
