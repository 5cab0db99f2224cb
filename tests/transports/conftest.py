"""Fixtures for the tests of several transports."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import zmq

from kvferry.transports.testing import World
from kvferry.transports.zeromq import ZeroMQTransport
from kvferry.transports.zeromq.options import Address
from tests.support.gpu_pools import GpuPools, pools_on_a_gpu
from tests.support.promises import is_of_no_option


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "option: a transport's suite with an option; see `tests.support.promises`"
    )


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in filter(is_of_no_option, items):
        item.add_marker("full")


@pytest.fixture
def socket_dir() -> Iterator[Path]:
    """A folder with a short path, because socket paths have at most 107 bytes and `tmp_path` may be long."""
    with tempfile.TemporaryDirectory(prefix="kvferry-") as folder:
        yield Path(folder)


@pytest.fixture
def gpu_pools(monkeypatch: pytest.MonkeyPatch) -> Iterator[GpuPools]:
    """Have the transports of a test allocate memory of a GPU.

    They must be closed before this fixture ends.
    """
    with pools_on_a_gpu(monkeypatch) as pools:
        yield pools


class Raw:
    """ZeroMQ sockets through which a test sends arbitrary messages."""

    def __init__(self) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self._sockets: list[Any] = []

    def socket(self, kind: int) -> Any:
        self._sockets.append(self._context.socket(kind))
        self._sockets[-1].linger = 0
        return self._sockets[-1]

    def dial(self, address: str, **options: int) -> Any:
        client = self.socket(zmq.DEALER)
        for name, value in options.items():
            setattr(client, name, value)
        client.connect(Address.parse(address).endpoint)
        return client

    def close(self) -> None:
        for socket_ in self._sockets:
            socket_.close()
        self._context.term()

    def receive(self, world: World, socket: Any) -> list[bytes]:
        """Serve a world's nodes until a socket has a message."""
        world.serve(lambda: bool(socket.poll(0)))
        parts: list[bytes] = socket.recv_multipart()
        return parts


@pytest.fixture
def raw() -> Iterator[Raw]:
    raw = Raw()
    yield raw
    raw.close()


@pytest.fixture
def make_world(request: pytest.FixtureRequest) -> Iterator[Callable[..., World]]:
    """Make worlds of `zeromq` nodes with these options. They are closed after the test.

    Its parameter, if it has one, says where the pools are: `"main memory"` or `"GPU"`.
    """
    if getattr(request, "param", "") == "GPU":
        request.getfixturevalue("gpu_pools")
    with ExitStack() as stack:

        def make(**options: Any) -> World:
            world = World(lambda: ZeroMQTransport(options))
            stack.callback(world.close)
            return world

        yield make


@pytest.fixture
def world(make_world: Callable[..., World]) -> World:
    """A world of `zeromq` nodes with default options."""
    return make_world()
