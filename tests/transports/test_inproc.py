"""`inproc` keeps every promise of a transport."""

from __future__ import annotations

import pytest

from kvferry.transports.inproc import InProcTransport
from kvferry.transports.testing import TransportConformance


class TestInProc(TransportConformance):
    read_unchecked = None  # the reader copies, so it is the reader that checks
    connect_raw = None

    @pytest.fixture
    def create(self) -> type[InProcTransport]:
        return InProcTransport
