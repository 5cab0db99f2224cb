"""The `zeromq` transport keeps every promise of a transport, on plaintext and encrypted connections."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvferry.transports import Transport
from kvferry.transports.testing import TransportConformance, World, connect_tcp, pairs_of, read_without_checks
from kvferry.transports.testing.harness import HELD
from kvferry.transports.zeromq import ZeroMQTransport

Create = Callable[[Mapping[str, object]], Transport]


class _Conformance(TransportConformance):
    @pytest.fixture
    def read_unchecked(self) -> Any:
        return read_without_checks

    @pytest.fixture
    def connect_raw(self) -> Any:
        return connect_tcp


class TestZeroMQ(_Conformance):
    @pytest.fixture
    def create(self) -> Create:
        return ZeroMQTransport


@pytest.mark.option
class TestEncryptedZeroMQ(_Conformance):
    @pytest.fixture
    def create(self, tmp_path: Path) -> Create:
        secret = tmp_path / "secret"
        secret.write_text("a secret of more than sixteen bytes")
        secret.chmod(0o600)
        common = {"curve": "on", "shared_secret_file": str(secret)}
        return lambda options: ZeroMQTransport({**common, **options})


def test_regions_by_reference_share_a_slice() -> None:
    """A read of several slices with several large regions each puts every region into its place."""
    num_bytes, half = 4 << 20, 512 << 10
    world = World(lambda: ZeroMQTransport({"slice_bytes": 1 << 20}))
    try:
        link = world.pair(num_bytes)
        link.producer.transport.guards.set(HELD.index, HELD.value)
        pairs = pairs_of(*((at, num_bytes - half - at, half) for at in range(0, num_bytes, half)))
        assert world.read(link, pairs, HELD).error is None
        expected = link.producer.memory().reshape(-1, half)[::-1].ravel()
        assert np.array_equal(link.consumer.memory(), expected)
    finally:
        world.close()
