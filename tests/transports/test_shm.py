"""`shm` keeps every promise of a transport, whatever its options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvferry.transports.base import Transport
from kvferry.transports.regions import Guard
from kvferry.transports.shm import SharedMemoryTransport
from kvferry.transports.shm.options import SharedMemoryOptions
from kvferry.transports.testing import TransportConformance, World, pairs_of
from tests.support.peers import dial


class _Conformance(TransportConformance):
    read_unchecked = None  # the reader copies, so it is the reader that checks

    @pytest.fixture
    def connect_raw(self) -> Any:
        return dial


class TestSharedMemory(_Conformance):
    @pytest.fixture
    def create(self) -> type[SharedMemoryTransport]:
        return SharedMemoryTransport


@pytest.mark.option
class TestSharedMemoryWithSocketFilesAndTwoCopiers(_Conformance):
    @pytest.fixture
    def create(self, socket_dir: Path) -> Callable[[Mapping[str, object]], Transport]:
        def make(options: Mapping[str, object]) -> Transport:
            fixed = {"socket_dir": str(socket_dir), "copy_threads": 2, "num_guards": 64}
            transport = SharedMemoryTransport({**fixed, **options})
            # The copiers are to copy everything.
            transport._options = replace(transport._options, inline_bytes=0)
            return transport

        return make


def test_a_small_read_ends_at_once() -> None:
    """No thread has to wake up: the bytes are in place when `start_read` returns, and the end is in the next
    events.
    """
    world = World(SharedMemoryTransport)
    try:
        link = world.pair(SharedMemoryOptions().inline_bytes)
        link.producer.transport.guards.set(1, 7)
        endpoint = link.consumer.endpoint
        everything = pairs_of((0, 0, SharedMemoryOptions().inline_bytes))
        transfer_id = endpoint.start_read(link.producer_id, everything, Guard(1, 7), timeout_s=60)
        assert np.array_equal(link.consumer.memory(), link.producer.memory())
        assert [event.transfer_id for event in endpoint.wait_events(0)] == [transfer_id]
    finally:
        world.close()
