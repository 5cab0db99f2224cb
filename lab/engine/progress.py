"""Show how long something takes, and keep the progress bars of other libraries out of the output."""

from __future__ import annotations

import contextlib
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from typing import Self, TextIO

from tqdm import tqdm

# tqdm starts a thread that watches for slow bars and never ends. No bar here needs it.
tqdm.monitor_interval = 0

#: A line on a terminal is rewritten this often.
REDRAW_INTERVAL_S = 0.2
#: In a file or a pipe every update is a new line, so they are rarer.
LINE_INTERVAL_S = 5.0
_ERASE_LINE = "\r\x1b[K"


@contextlib.contextmanager
def quiet_loading() -> Iterator[None]:
    """Suppress the bars that transformers draws per file."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


class Elapsed:
    """Show what the program waits for and for how long: `with Elapsed("starting the nodes"): ...`.

    On a terminal this is one line, rewritten in place and erased at the end. Elsewhere it is one plain line
    every few seconds, and nothing if the wait is shorter. A thread writes, so the wait may block the
    interpreter's main thread.

    Args:
        what: What the program waits for.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._stream: TextIO = sys.stderr
        self._is_terminal = self._stream.isatty()
        self._started = time.monotonic()
        # One lock for all that is written meanwhile: a message must not land in the middle of the line.
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="elapsed", daemon=True)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def start(self) -> None:
        """Begin to show the time. Call this once."""
        self._started = time.monotonic()
        if self._is_terminal:
            self._show()
        self._thread.start()

    def stop(self) -> None:
        """Stop, and erase the line on a terminal. Idempotent."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        self._thread.join()
        self._erase()

    def update(self, what: str) -> None:
        """Change what the program waits for. The time goes on."""
        self._what = what

    def say(self, line: str, stream: TextIO | None = None) -> None:
        """Print a line, by default to standard error, without mixing it with the line that shows the time."""
        with self._lock:
            self._erase()
            print(line, file=self._stream if stream is None else stream, flush=True)

    def _run(self) -> None:
        while not self._stopped.wait(REDRAW_INTERVAL_S if self._is_terminal else LINE_INTERVAL_S):
            self._show()

    def _show(self) -> None:
        text = f"  {self._what}: {time.monotonic() - self._started:.0f} s"
        if self._is_terminal:
            # A line that wraps could not be erased.
            text = _ERASE_LINE + text[: shutil.get_terminal_size().columns - 1]
        else:
            text += "\n"
        with self._lock:
            self._write(text)

    def _erase(self) -> None:
        if self._is_terminal:
            self._write(_ERASE_LINE)

    def _write(self, text: str) -> None:
        # A closed pipe must not end the work that the program waits for.
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)
            self._stream.flush()
