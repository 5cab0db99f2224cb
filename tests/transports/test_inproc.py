"""`inproc` keeps every promise of a transport."""

from __future__ import annotations

import pytest

from kvferry.transports.inproc import InProcTransport
from kvferry.transports.testing import TransportConformance


class TestInProc(TransportConformance):
    @pytest.fixture
    def create(self) -> type[InProcTransport]:
        return InProcTransport
