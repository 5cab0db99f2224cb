"""The suite that every transport passes, ours and yours.

    class TestMine(TransportConformance):
        @pytest.fixture
        def create(self):
            return MyTransport  # or any callable that takes the options

Each test states a promise of `transports/base.py`. The suite looks into the memory itself and never asks the
transport what it did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import pytest

from ._harness import HELD, POOL_BYTES, Link, Node, World, pairs_of
from ._peer_promises import LoopPromises, MessagePromises, PeerPromises
from ._read_promises import GuardPromises, MemoryPromises, ReadPromises
from .base import Transport

__all__ = ["Link", "Node", "TransportConformance", "World", "pairs_of"]

Create = Callable[[Mapping[str, object]], Transport]


class TransportConformance(
    MemoryPromises, ReadPromises, GuardPromises, MessagePromises, PeerPromises, LoopPromises
):
    """All promises. A backend overrides `create`."""

    @pytest.fixture
    def create(self) -> Create:
        """What makes a transport from its options."""
        raise NotImplementedError("override the fixture `create`")

    @pytest.fixture
    def world(self, create: Create) -> Iterator[World]:
        world = World(lambda: create({}))
        yield world
        world.close()

    @pytest.fixture
    def link(self, world: World) -> Link:
        """Two connected nodes with pools of `POOL_BYTES`; the producer's guard `HELD` holds."""
        link = world.pair(POOL_BYTES)
        link.producer.transport.guards.set(HELD.index, HELD.value)
        return link
