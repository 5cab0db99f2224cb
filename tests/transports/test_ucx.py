"""The `ucx` transport keeps every promise of a transport."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

import pytest

from kvferry.transports import Transport
from kvferry.transports.testing import TransportConformance, connect_tcp, read_without_checks
from kvferry.transports.ucx import UCXTransport

pytestmark = pytest.mark.skipif(find_spec("ucxx") is None, reason="ucxx is not installed")

Create = Callable[[Mapping[str, object]], Transport]


class TestUCX(TransportConformance):
    @pytest.fixture
    def create(self) -> Create:
        return UCXTransport

    @pytest.fixture
    def read_unchecked(self) -> Any:
        return read_without_checks

    @pytest.fixture
    def connect_raw(self) -> Any:
        return connect_tcp
