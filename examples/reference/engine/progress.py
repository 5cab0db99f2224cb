"""The progress bars of the libraries below, kept out of the way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tqdm import tqdm

# tqdm watches over slow bars with a thread that never ends; ours move often enough.
tqdm.monitor_interval = 0


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Without the bars that transformers draws for each file."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]
