"""`TransportConformance`: all promises of a transport in one test class."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import pytest

from ..base import Transport
from .harness import HELD, POOL_BYTES, Link, World
from .leaks import LeavesNothingBehind
from .peers import LoopPromises, MessagePromises, PeerPromises
from .reads import GuardPromises, MemoryPromises, ReadPromises

Create = Callable[[Mapping[str, object]], Transport]


class TransportConformance(
    MemoryPromises,
    ReadPromises,
    GuardPromises,
    MessagePromises,
    PeerPromises,
    LoopPromises,
    LeavesNothingBehind,
):
    """All promises of a transport. Derive from it, and override the fixture `create`."""

    @pytest.fixture
    def create(self) -> Create:
        """Return what makes a transport from its options: its class, or a function."""
        raise NotImplementedError(
            "cannot run TransportConformance: it has no transport; override the fixture `create`"
        )

    @pytest.fixture
    def world(self, create: Create) -> Iterator[World]:
        """Return a world without nodes; it closes its nodes after the test."""
        world = World(lambda: create({}))
        yield world
        world.close()

    @pytest.fixture
    def link(self, world: World) -> Link:
        """Return two connected nodes with pools of `POOL_BYTES` bytes. The producer's guard `HELD` holds."""
        link = world.pair(POOL_BYTES)
        link.producer.transport.guards.set(HELD.index, HELD.value)
        return link
