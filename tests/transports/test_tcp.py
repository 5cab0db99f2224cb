"""The `tcp` transport keeps every promise of a transport: in plaintext and with TLS."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from kvferry.transports import Transport
from kvferry.transports.tcp import TcpTransport
from kvferry.transports.testing import TransportConformance, connect_tcp, read_without_checks
from kvferry.transports.testing.certificates import Authority

Create = Callable[[Mapping[str, object]], Transport]


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The options of a node that has a certificate."""
    return Authority.make(tmp_path_factory.mktemp("certificates")).issue("node")


class TcpConformance(TransportConformance):
    """What all of them have."""

    @pytest.fixture
    def read_unchecked(self) -> Any:
        return read_without_checks

    @pytest.fixture
    def connect_raw(self) -> Any:
        return connect_tcp


class TestTcp(TcpConformance):
    @pytest.fixture
    def create(self) -> Create:
        return TcpTransport


@pytest.mark.option
class TestTcpWithTls(TcpConformance):
    @pytest.fixture
    def create(self, certificate: dict[str, str]) -> Create:
        return lambda options: TcpTransport({"tls": "on", **certificate, **options})
