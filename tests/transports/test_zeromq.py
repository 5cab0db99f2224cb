"""The `zeromq` transport keeps every promise of a transport, on plaintext and encrypted connections."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from kvferry.transports import Transport
from kvferry.transports.testing import TransportConformance, connect_tcp, read_without_checks
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
