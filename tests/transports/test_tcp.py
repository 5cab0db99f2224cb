"""The `tcp` transport keeps every promise of a transport: in plaintext, with TLS, and over several connections."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from kvferry.transports import Arena, Transport
from kvferry.transports.tcp import TcpTransport
from kvferry.transports.testing import TransportConformance, connect_tcp, read_without_checks
from kvferry.transports.testing.certificates import Authority
from kvferry.transports.testing.cuda_driver import CudaDriverStandIn

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


class TestTcpWithTls(TcpConformance):
    @pytest.fixture
    def create(self, certificate: dict[str, str]) -> Create:
        return lambda options: TcpTransport({"tls": "on", **certificate, **options})


class TestTcpWithSeveralConnections(TcpConformance):
    @pytest.fixture
    def create(self) -> Create:
        return lambda options: TcpTransport({"connections": 3, "slice_bytes": 256 << 10, **options})


# -- pools on a GPU ----------------------------------------------------------------------------------

#: Each ring has four buffers, so that slices wait for one.
SMALL_RINGS = {"slice_bytes": 128 << 10, "staging_bytes": 1 << 20}


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaDriverStandIn]:
    """A stand-in for the driver of a machine with GPUs. Everything that a test acquires from it must be released."""
    with CudaDriverStandIn() as stand_in:
        monkeypatch.setitem(sys.modules, "cuda.bindings.driver", stand_in)
        yield stand_in
    assert not +stand_in.held
    assert not stand_in.violations


class OnGpu(TcpTransport):
    """A transport whose arenas are memory of the stand-in's GPU, as if an engine's framework had allocated it."""

    def __init__(self, driver: CudaDriverStandIn, options: Mapping[str, object] = {}) -> None:
        super().__init__({**SMALL_RINGS, **options})
        self._driver = driver

    def allocate(self, num_bytes: int) -> Arena:
        self._require_open()
        return self._driver.allocate(num_bytes)


class TestTcpOnGpus(TcpConformance):
    @pytest.fixture
    def create(self, driver: CudaDriverStandIn) -> Create:
        return lambda options: OnGpu(driver, options)


class TestTcpWithTlsOnGpus(TcpConformance):
    @pytest.fixture
    def create(self, driver: CudaDriverStandIn, certificate: dict[str, str]) -> Create:
        return lambda options: OnGpu(driver, {"tls": "on", "connections": 2, **certificate, **options})


class TestTcpBetweenAGpuAndMainMemory(TcpConformance):
    @pytest.fixture
    def create(self, driver: CudaDriverStandIn) -> Create:
        sides = itertools.cycle([lambda options: OnGpu(driver, options), TcpTransport])
        return lambda options: next(sides)(options)
