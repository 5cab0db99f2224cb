"""What tests of several transports need."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def socket_dir() -> Iterator[Path]:
    """A folder with a short path, which `tmp_path` has not always: the path of a socket file has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="kvferry-") as folder:
        yield Path(folder)
