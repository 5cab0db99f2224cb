"""Fixtures for the tests of several transports."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvferry.transports.registry import create_transport
from kvferry.transports.testing import World
from tests.support.cuda_stand_in import BINDINGS, CudaDriverStandIn
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
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaDriverStandIn]:
    """A stand-in for the driver of a machine with GPUs.

    Everything that a test acquires from it must be released.
    """
    with CudaDriverStandIn(pinned_bytes=2 << 30) as stand_in:
        for name in BINDINGS:
            monkeypatch.setitem(sys.modules, name, stand_in)
        yield stand_in
    assert not +stand_in.held
    assert not stand_in.violations


@pytest.fixture
def gpu_pools(monkeypatch: pytest.MonkeyPatch) -> Iterator[GpuPools]:
    """Have the transports of a test allocate memory of a GPU.

    They must be closed before this fixture ends.
    """
    with pools_on_a_gpu(monkeypatch) as pools:
        yield pools


@pytest.fixture
def make_world() -> Iterator[Callable[..., World]]:
    """`(scheme, **options)` → a world of such nodes. It is closed after the test."""
    with ExitStack() as stack:

        def make(scheme: str, **options: Any) -> World:
            world = World(lambda: create_transport(scheme, options))
            stack.callback(world.close)
            return world

        yield make
