"""`auto` keeps every promise of a transport, whichever transport it chooses, and reports its choice and the
reason.

The tests with `nixl` are skipped where it is not installed.
"""

from __future__ import annotations

import itertools
import logging
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest

from kvferry.transports import auto
from kvferry.transports.auto.address import AutoAddress
from kvferry.transports.base import Connected, Endpoint, Event, Route, Transport
from kvferry.transports.errors import ConfigurationError
from kvferry.transports.nixl import library
from kvferry.transports.regions import Pool
from kvferry.transports.testing import TransportConformance

Create = Callable[[Mapping[str, object]], Transport]
Start = Callable[..., Endpoint]

needs_nixl = pytest.mark.skipif(
    find_spec("nixl_cu12") is None and find_spec("nixl_cu13") is None, reason="NIXL is not installed"
)

# TCP is a network that every machine has. With the default options only RDMA counts.
WITH_NIXL: Mapping[str, object] = {
    "network": "nixl,zeromq",
    "network_options": {"nixl": {"tls": "tcp", "refuse_tcp": False}},
}


def create_auto(options: Mapping[str, object] = {}) -> auto.AutoTransport:
    return auto.AutoTransport({"network": "zeromq", **options})


class _OnItsOwnHost(auto.AutoTransport):
    """A node on its own host, so that it reaches all other nodes only over the network."""

    _numbers = itertools.count()

    def __init__(self, options: Mapping[str, object] = {}) -> None:
        super().__init__({"network": "zeromq", **options})

    def register(self, pool: Pool) -> Endpoint:
        endpoint: Any = super().register(pool)
        endpoint._host = f"host-{next(self._numbers)}"
        return endpoint


class TestOnOneHost(TransportConformance):
    read_unchecked = connect_raw = None  # the transports that it chooses from have these tests

    @pytest.fixture
    def create(self) -> Create:
        return create_auto


@pytest.mark.option
class TestBetweenHosts(TransportConformance):
    read_unchecked = connect_raw = None

    @pytest.fixture
    def create(self) -> Create:
        return _OnItsOwnHost


@pytest.mark.slow
@needs_nixl
class TestOverNIXL(TransportConformance):
    read_unchecked = connect_raw = None

    @pytest.fixture
    def create(self) -> Create:
        return lambda options: _OnItsOwnHost({**WITH_NIXL, **options})


@pytest.fixture
def start() -> Iterator[Start]:
    """Start nodes: on this host, or each on one of its own."""
    with ExitStack() as stack:

        def start(options: Mapping[str, object] = {}, *, is_apart: bool = False) -> Endpoint:
            kind = _OnItsOwnHost if is_apart else auto.AutoTransport
            transport = stack.enter_context(closing(kind({"network": "zeromq", **options})))
            return transport.register(Pool([transport.allocate(4096).segment]))

        yield start


def route(dialer: Endpoint, listener: Endpoint, address: str) -> Route:
    """Connect and return the way that was chosen."""
    peer_id = dialer.start_connect(address, timeout_s=10)
    events: list[Event] = []
    while not events:
        listener.wait_events(0.001)
        events += dialer.wait_events(0.001)
    assert events == [Connected(peer_id, incoming=False)]
    return dialer.route_of(peer_id)


class TestTheChoice:
    @pytest.fixture
    def dialer(self, start: Start) -> Endpoint:
        return start()

    @pytest.fixture
    def listener(self, start: Start) -> Endpoint:
        return start()

    def test_is_shared_memory_on_one_host(
        self, dialer: Endpoint, listener: Endpoint, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO)
        assert route(dialer, listener, listener.listen("")) == Route("shm", "on this host")
        assert "is reached by shm: on this host" in caplog.text

    def test_is_the_network_between_hosts(self, dialer: Endpoint, listener: Endpoint) -> None:
        elsewhere = replace(AutoAddress.parse(listener.listen("")), host="0123456789abcdef")
        assert route(dialer, listener, str(elsewhere)) == Route("zeromq", "on another host", sums="xxh3")

    def test_is_the_network_where_shared_memory_does_not_connect(
        self, dialer: Endpoint, listener: Endpoint
    ) -> None:
        # As in another container with the same kernel and another network namespace.
        walled = replace(AutoAddress.parse(listener.listen("")), local="shm://@kvferry-absent")
        found = route(dialer, listener, str(walled))
        assert found.scheme == "zeromq"
        assert "shared memory does not connect" in found.reason

    def test_is_the_network_where_shared_memory_never_answers(
        self, dialer: Endpoint, listener: Endpoint
    ) -> None:
        with socket.socket(socket.AF_UNIX) as mute:
            mute.bind("\0kvferry-mute")
            mute.listen()
            walled = replace(AutoAddress.parse(listener.listen("")), local="shm://@kvferry-mute")
            found = route(dialer, listener, str(walled))
        assert "timed out waiting for the peer's hello" in found.reason


class TestAddresses:
    def test_survive_formatting_and_parsing(self) -> None:
        address = AutoAddress(
            "0123", "shm:///a folder;with%signs/x.sock", ("nixl://h:1", "zeromq://[fd00::7]:5600?key=a&b#c")
        )
        assert AutoAddress.parse(str(address)) == address

    @pytest.mark.parametrize(
        "text", ["", "shm://@x", "auto://host", "auto://host;shm://@x;", "auto://;b;c", "auto://a;b;c;"]
    )
    def test_malformed_ones_are_refused(self, text: str) -> None:
        with pytest.raises(ConfigurationError, match="not an auto address"):
            AutoAddress.parse(text)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"wings": 2}, "wings"),
        ({"network": 7}, "network"),
        ({"network": "auto"}, "network"),
        ({"network": "pigeon"}, "pigeon"),
        ({"network": "", "network_options": {"port": 1}}, "network"),
        ({"network": "zeromq,nixl"}, "network"),
        ({"network": "nixl,zeromq,tcp"}, "network"),
        ({"network": "nixl,"}, "network"),
        ({"network": "nixl,zeromq", "network_options": {"port": 1}}, "must map 'nixl' and 'zeromq'"),
        ({"network": "nixl,zeromq", "network_options": {"nixl": {"wings": 2}}}, "wings"),
        ({"local_options": 1}, "local_options"),
        ({"local_options": {"wings": 2}}, "wings"),
        ({"network_options": {"wings": 2}}, "wings"),
    ],
)
def test_options_that_cannot_work_are_named(options: Mapping[str, object], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):  # the leak checks detect anything that stays open
        create_auto(options)


def test_a_node_without_nixl_says_so_and_uses_the_other_network(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(library, "_PACKAGES", ())
    monkeypatch.setattr(library, "_library", library._package)  # an earlier test may have imported NIXL
    with closing(create_auto({"network": "nixl,zeromq"})) as transport:
        endpoint = transport.register(Pool([transport.allocate(4096).segment]))
        (network,) = AutoAddress.parse(endpoint.listen("")).networks
    assert network.startswith("zeromq://")
    assert "nixl is not offered to peers: transport 'nixl' needs NIXL, which is not installed" in caplog.text


# -- with nixl ---------------------------------------------------------------------------------------


@needs_nixl
def test_nixl_is_used_between_hosts_that_both_have_it(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    dialer, listener = start(WITH_NIXL, is_apart=True), start(WITH_NIXL, is_apart=True)
    assert route(dialer, listener, listener.listen("")) == Route("nixl", "on another host", "nixl:UCX:tcp")
    assert "is reached by nixl: on another host" in caplog.text


@needs_nixl
@pytest.mark.parametrize("unreachable", ["nixl://127.0.0.1:1", "nixl://192.0.2.1:1"])
def test_the_other_network_is_used_if_nixl_does_not_connect(start: Start, unreachable: str) -> None:
    """No node listens at the first address, and the options do not allow the second one."""
    dialer, listener = start(WITH_NIXL, is_apart=True), start(WITH_NIXL, is_apart=True)
    address = AutoAddress.parse(listener.listen(""))
    walled = replace(address, networks=(unreachable, *address.networks[1:]))
    found = route(dialer, listener, str(walled))
    assert found.scheme == "zeromq"
    assert "on another host, but nixl does not connect: " in found.reason


@needs_nixl
def test_a_node_without_nixl_is_reached_by_the_other_network(start: Start) -> None:
    with_nixl, without = start(WITH_NIXL, is_apart=True), start(is_apart=True)
    found = route(with_nixl, without, without.listen(""))
    assert (found.scheme, found.reason) == ("zeromq", "on another host, and the peer does not offer nixl")
    found = route(without, with_nixl, with_nixl.listen(""))
    assert (found.scheme, found.reason) == ("zeromq", "on another host")


@needs_nixl
def test_nixl_is_not_offered_without_a_network_that_it_may_use(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    # NIXL works over shared memory, which reaches no other host, and refuses TCP.
    node = start({**WITH_NIXL, "network_options": {"nixl": {"tls": "sm,self"}}})
    assert [address.partition(":")[0] for address in AutoAddress.parse(node.listen("")).networks] == [
        "zeromq"
    ]
    assert "nixl is not offered to peers: NIXL finds no network here that may be used with" in caplog.text


@needs_nixl
def test_nixl_is_not_imported_unless_the_options_name_it(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    def imported() -> None:
        raise AssertionError("NIXL was imported")

    monkeypatch.setattr("kvferry.transports.nixl.library._library", imported)
    start()
    start({"network": ""})
