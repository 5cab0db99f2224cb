"""A process without free descriptors does not spin on pending connections, and accepts them once it has some
again.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import pytest

from kvferry.transports import Connected
from kvferry.transports.registry import create_transport
from kvferry.transports.testing import World

SCHEMES = [
    "shm",
    pytest.param("ucx", marks=pytest.mark.skipif(find_spec("ucxx") is None, reason="ucxx is not installed")),
]


@pytest.fixture(params=SCHEMES)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    world = World(lambda: create_transport(request.param, {}))
    yield world
    world.close()


@contextmanager
def no_descriptors() -> Iterator[None]:
    """Take all free descriptors of this process inside the block."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 16, before[1]))
    try:
        while True:
            try:
                taken.append(os.dup(1))
            except OSError:
                break
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for descriptor in taken:
            os.close(descriptor)


def test_a_pending_connection_costs_no_processor_time_and_is_accepted_later(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    server, client = world.node(4096), world.node(4096)
    peer_id = client.endpoint.start_connect(server.endpoint.listen(""), timeout_s=20)
    with no_descriptors():
        began = time.process_time()
        assert server.endpoint.wait_events(1.0) == []
        spent_s = time.process_time() - began
    assert spent_s < 0.25
    assert 1 <= caplog.text.count("cannot accept a peer") <= 5
    world.serve(lambda: Connected(peer_id, incoming=False) in client.history and bool(server.history))
