"""The options of `nixl`, what it needs, and what it changes in its process: nothing."""

from __future__ import annotations

import gc
import importlib.util
import logging
import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest

from kvferry.transports import Transport
from kvferry.transports.errors import BackendUnavailableError, ConfigurationError, PeerRefusedError
from kvferry.transports.nixl import NIXLOptions, NIXLTransport, library
from kvferry.transports.nixl.options import Address
from kvferry.transports.registry import create_transport, load_transport
from kvferry.transports.testing.harness import HELD, PAGE, World, pairs_of

needs_nixl = pytest.mark.skipif(
    find_spec("nixl_cu12") is None and find_spec("nixl_cu13") is None, reason="NIXL is not installed"
)
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


# -- options ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"backends": ""}, "backends"),
        ({"backends": "UCX,UCX", "refuse_tcp": False}, "backends"),
        ({"backends": "LIBFABRIC"}, "refuse_tcp"),
        ({"tls": "rc,tcp"}, "refuse_tcp"),
        ({"agents": "none"}, "agents"),
        ({"drain_s": -1}, "drain_s"),
        ({"poll_us": 0}, "poll_us"),
        ({"tsl": "rc"}, "tsl"),
    ],
)
def test_a_wrong_option_is_refused_by_name(options: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigurationError, match=key) as caught:
        NIXLTransport(options)
    assert caught.value.key == key


@pytest.mark.parametrize(
    ("options", "inherited", "tls"),
    [
        ({}, "", "^tcp"),
        ({}, "all", "^tcp"),
        ({}, "^ib", "^ib,tcp"),
        ({}, "^tcp,ib", "^tcp,ib"),
        ({}, "rc,sm", "rc,sm"),
        ({"tls": "sm"}, "rc,tcp", "sm"),
        ({"refuse_tcp": False}, "rc,tcp", "rc,tcp"),
        ({"refuse_tcp": False}, "", None),
    ],
)
def test_tcp_is_left_out_of_what_ucx_may_use(
    options: dict[str, Any], inherited: str, tls: str | None
) -> None:
    assert NIXLOptions(**options).environment({"UCX_TLS": inherited}).get("UCX_TLS") == tls


def test_tcp_in_the_environment_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="UCX_TLS='rc,tcp' in the environment"):
        NIXLOptions().environment({"UCX_TLS": "rc,tcp"})


@pytest.mark.parametrize(
    ("options", "devices"),
    [({}, "lo"), ({"allow_plaintext": True}, None), ({"net_devices": "mlx5_0:1"}, "mlx5_0:1")],
)
def test_only_loopback_is_used_unless_allowed(options: dict[str, Any], devices: str | None) -> None:
    assert NIXLOptions(**options).environment({}).get("UCX_NET_DEVICES") == devices


def test_another_machine_is_refused_unless_plaintext_is_allowed() -> None:
    with pytest.raises(ConfigurationError, match="allow_plaintext=true"):
        NIXLOptions().require_reachable_by("192.0.2.1")
    NIXLOptions(allow_plaintext=True).require_reachable_by("192.0.2.1")


def test_an_address_survives_being_written() -> None:
    assert str(Address.parse("nixl://[::1]:70")) == "nixl://[::1]:70"


# -- what it needs ------------------------------------------------------------------------------------


def test_a_missing_package_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(library, "find_spec", lambda name: None if "nixl" in name else real(name))
    library._library.cache_clear()
    try:
        with pytest.raises(BackendUnavailableError, match="pip install nixl-cu12"):
            NIXLTransport()
    finally:
        library._library.cache_clear()


@needs_nixl
def test_a_missing_backend_is_named_with_those_that_exist() -> None:
    with pytest.raises(BackendUnavailableError, match="NIXL has no backend 'UCCL' here; it has .*UCX"):
        create_transport("nixl", {"backends": "UCCL", "refuse_tcp": False})


@needs_nixl
def test_settings_that_leave_nothing_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="NIXL has nothing here that can be used"):
        create_transport("nixl", {"tls": "rc"})


def test_it_is_a_built_in_transport() -> None:
    assert load_transport("nixl") is NIXLTransport


# -- no route -----------------------------------------------------------------------------------------


@needs_nixl
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


# -- what it leaves alone -----------------------------------------------------------------------------


@needs_nixl
def test_the_environment_and_the_logging_are_as_before(make_world: Callable[..., World]) -> None:
    before, raises = dict(os.environ), logging.raiseExceptions
    world = make_world(NIXLTransport)
    world.pair(PAGE)
    assert dict(os.environ) == before
    assert logging.raiseExceptions == raises


@needs_nixl
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


@needs_nixl
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
