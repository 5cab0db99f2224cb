"""The `ucx` transport keeps every promise of a transport."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec

import pytest

from kvferry.transports import Transport
from kvferry.transports.testing import TransportConformance
from kvferry.transports.ucx import UCXTransport

pytestmark = pytest.mark.skipif(find_spec("ucxx") is None, reason="ucxx is not installed")

Create = Callable[[Mapping[str, object]], Transport]


class TestUCX(TransportConformance):
    @pytest.fixture
    def create(self) -> Create:
        return UCXTransport
