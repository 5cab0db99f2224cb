"""The `nixl` transport keeps every promise of a transport, over shared memory and over TCP."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

import pytest

from kvferry.transports import Transport
from kvferry.transports.nixl import NIXLTransport
from kvferry.transports.testing import TransportConformance

pytestmark = pytest.mark.skipif(
    find_spec("nixl_cu12") is None and find_spec("nixl_cu13") is None, reason="NIXL is not installed"
)

Create = Callable[[Mapping[str, object]], Transport]

TCP = {"refuse_tcp": False, "tls": "tcp"}


def with_options(**options: Any) -> Create:
    """Return a function that makes transports with these options, and with those that a test wants."""
    return lambda more={}: NIXLTransport({**options, **more})


class TestOnOneHost(TransportConformance):
    @pytest.fixture
    def create(self) -> Create:
        return NIXLTransport


class TestOverTCP(TransportConformance):
    @pytest.fixture
    def create(self) -> Create:
        return with_options(**TCP)


class TestWithASharedAgent(TransportConformance):
    @pytest.fixture
    def create(self) -> Create:
        return with_options(agents="shared")


class TestWithASharedAgentOverTCP(TransportConformance):
    @pytest.fixture
    def create(self) -> Create:
        return with_options(agents="shared", **TCP)
