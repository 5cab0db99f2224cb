"""`shm` keeps every promise of a transport, whatever its options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from kvferry.transports.base import Transport
from kvferry.transports.shm import SharedMemoryTransport
from kvferry.transports.testing import TransportConformance


class TestSharedMemory(TransportConformance):
    @pytest.fixture
    def create(self) -> type[SharedMemoryTransport]:
        return SharedMemoryTransport


class TestSharedMemoryWithSocketFilesAndTwoCopiers(TransportConformance):
    @pytest.fixture
    def create(self, socket_dir: Path) -> Callable[[Mapping[str, object]], Transport]:
        return lambda options: SharedMemoryTransport(
            {"socket_dir": str(socket_dir), "copy_threads": 2, "num_guards": 64, **options}
        )
