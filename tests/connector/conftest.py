"""Fixtures for the tests of several parts of the connector."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from kvferry.connector.p2p.options import ConnectorOptions
from tests.support.gpu_pools import GpuPools, pools_on_a_gpu


@pytest.fixture
def gpu_pools(monkeypatch: pytest.MonkeyPatch) -> Iterator[GpuPools]:
    """Have the nodes of a test keep their pools on a GPU. Nodes must be closed before this fixture ends."""
    with pools_on_a_gpu(monkeypatch) as pools:
        yield pools


@pytest.fixture
def short_backoffs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the nodes of a test soon try a lost peer again, because the test waits for that."""
    parse = ConnectorOptions.from_mapping

    def parse_and_tune(mapping: Mapping[str, Any], scheme: str = "") -> ConnectorOptions:
        options = parse(mapping, scheme)
        return replace(options, handoff=replace(options.handoff, backoff_s=0.02, max_backoff_s=0.1))

    monkeypatch.setattr(ConnectorOptions, "from_mapping", parse_and_tune)
