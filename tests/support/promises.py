"""A part of the suite for transports, for pools whose kind of memory concerns no more than that part."""

from __future__ import annotations

from typing import Any

from kvferry.transports.testing import TransportConformance
from kvferry.transports.testing.peers import LoopPromises, MessagePromises, PeerPromises
from kvferry.transports.testing.reads import MemoryPromises, ReadPromises


class OwnershipAndGuards(TransportConformance):
    """Who may use memory when, and what a guard promises. `test_sliced` proves the rest about reads."""

    connect_raw: Any = None
    read_unchecked: Any = None


for _part in (MemoryPromises, ReadPromises, MessagePromises, PeerPromises, LoopPromises):
    for _name in vars(_part):
        if _name.startswith("test_"):
            setattr(OwnershipAndGuards, _name, None)
