"""All promises in one class: `TransportConformance`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import pytest

from ..base import Transport
from .harness import HELD, POOL_BYTES, Link, World
from .peers import LoopPromises, MessagePromises, PeerPromises
from .reads import GuardPromises, MemoryPromises, ReadPromises

Create = Callable[[Mapping[str, object]], Transport]


class TransportConformance(
    MemoryPromises, ReadPromises, GuardPromises, MessagePromises, PeerPromises, LoopPromises
):
    """All promises. A backend's test overrides the fixture `create`."""

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
