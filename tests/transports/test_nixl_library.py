"""What `nixl` needs, which errors it reports, and what it changes in its process: nothing."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest

from kvferry.transports import Transport
from kvferry.transports.errors import BackendUnavailableError, ConfigurationError, PeerRefusedError
from kvferry.transports.nixl import NIXLOptions, NIXLTransport, library
from kvferry.transports.registry import create_transport
from kvferry.transports.testing.harness import HELD, PAGE, World, pairs_of

if find_spec("nixl_cu12") is None and find_spec("nixl_cu13") is None:
    pytest.skip("NIXL is not installed", allow_module_level=True)

needs_ucxx = pytest.mark.skipif(find_spec("ucxx") is None, reason="ucxx is not installed")

TCP: dict[str, Any] = {"refuse_tcp": False, "tls": "tcp"}


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("UCX_TLS", "UCX_NET_DEVICES"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def make_world() -> Iterator[Callable[..., World]]:
    """Make worlds of nodes. They are closed after the test."""
    worlds: list[World] = []

    def make(create: Callable[[], Transport]) -> World:
        worlds.append(World(create))
        return worlds[-1]

    yield make
    for world in worlds:
        world.close()


def test_a_missing_backend_is_named_with_those_that_exist() -> None:
    with pytest.raises(BackendUnavailableError, match="NIXL has no backend 'UCCL' here; it has .*UCX"):
        create_transport("nixl", {"backends": "UCCL", "refuse_tcp": False})


def test_settings_that_leave_nothing_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="NIXL has nothing here that can be used"):
        create_transport("nixl", {"tls": "rc"})


def test_no_route_is_an_error_when_connecting(make_world: Callable[..., World]) -> None:
    """One node may use TCP only, the other anything but TCP."""
    world = make_world(lambda: NIXLTransport(TCP))
    owner = world.node(PAGE)
    other = NIXLTransport()
    reader = world.add(other, [other.allocate(PAGE)])
    reader.endpoint.start_connect(owner.endpoint.listen(""), timeout_s=20)
    world.serve(lambda: bool(reader.history))
    (lost,) = reader.history
    assert isinstance(lost.error, PeerRefusedError)  # type: ignore[union-attr]
    assert "no route" in str(lost.error)  # type: ignore[union-attr]
    assert "refuse_tcp" in str(lost.error)  # type: ignore[union-attr]


def test_the_environment_and_the_logging_are_as_before(make_world: Callable[..., World]) -> None:
    before, raises = dict(os.environ), logging.raiseExceptions
    world = make_world(NIXLTransport)
    world.pair(PAGE)
    assert dict(os.environ) == before
    assert logging.raiseExceptions == raises


@needs_ucxx
def test_it_shares_a_process_with_ucx(make_world: Callable[..., World]) -> None:
    """Each has a UCX of its own, with settings of its own."""
    links = []
    for scheme, options in (("nixl", {}), ("ucx", {}), ("nixl", TCP)):
        world = make_world(lambda scheme=scheme, options=options: create_transport(scheme, options))
        link = world.pair(4 * PAGE)
        link.producer.transport.guards.set(HELD.index, HELD.value)
        links.append((world, link))
    mechanisms = []
    for world, link in (*links, *links):
        ended = world.read(link, pairs_of((0, 0, 4 * PAGE)), HELD)
        assert ended.error is None
        mechanisms.append(ended.mechanism)
    assert mechanisms[:3] == ["nixl:UCX:^tcp", "ucx:tcp", "nixl:UCX:tcp"]


def test_an_agent_that_something_refers_to_is_not_called_destroyed() -> None:
    nixl = library.NIXL(NIXLOptions())
    agent = library.Agent(nixl, ())
    held = agent._agent
    with pytest.raises(Exception, match="something still refers to it"):
        agent.close()
    assert not agent.is_destroyed
    del held
    gc.collect()
    assert agent.is_destroyed
    nixl.close()
