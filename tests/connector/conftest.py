"""Fixtures for the tests of several parts of the connector."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.gpu_pools import GpuPools, pools_on_a_gpu


@pytest.fixture
def gpu_pools(monkeypatch: pytest.MonkeyPatch) -> Iterator[GpuPools]:
    """Have the nodes of a test keep their pools on a GPU. Nodes must be closed before this fixture ends."""
    with pools_on_a_gpu(monkeypatch) as pools:
        yield pools
