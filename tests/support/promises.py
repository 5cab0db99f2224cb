"""Parts of the suite for transports, for options that touch no more than that part."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.transports.testing import TransportConformance, read_without_checks
from kvferry.transports.testing.peers import LoopPromises, MessagePromises, PeerPromises
from kvferry.transports.testing.reads import MemoryPromises, ReadPromises


class Reads(TransportConformance):
    """All that a transport promises about reads."""

    connect_raw: Any = None

    @pytest.fixture
    def read_unchecked(self) -> Any:
        return read_without_checks


class OwnershipAndGuards(TransportConformance):
    """Who may use memory when, and what a guard promises."""

    connect_raw: Any = None
    read_unchecked: Any = None


def _leave_out(suite: type[TransportConformance], *parts: type) -> None:
    for part in parts:
        for name in vars(part):
            if name.startswith("test_"):
                setattr(suite, name, None)


_leave_out(Reads, MemoryPromises, MessagePromises, PeerPromises, LoopPromises)
_leave_out(OwnershipAndGuards, MemoryPromises, ReadPromises, MessagePromises, PeerPromises, LoopPromises)
