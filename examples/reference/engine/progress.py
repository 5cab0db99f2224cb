"""Keep the progress bars of other libraries out of the output."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tqdm import tqdm

# tqdm starts a thread that watches for slow bars and never ends. Our bars move often enough to do without it.
tqdm.monitor_interval = 0


@contextmanager
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
