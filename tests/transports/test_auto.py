"""`auto` keeps every promise of a transport, whichever transport it chooses, and reports its choice and the
reason.
"""

from __future__ import annotations

import itertools
import logging
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from typing import Any

import pytest

from kvferry.transports import auto
from kvferry.transports.auto.address import AutoAddress
from kvferry.transports.base import Connected, Endpoint, Event, Transport
from kvferry.transports.errors import ConfigurationError
from kvferry.transports.nixl import library
from kvferry.transports.regions import Pool
from kvferry.transports.testing import TransportConformance

Create = Callable[[Mapping[str, object]], Transport]


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


class TestTheChoice:
    @pytest.fixture
    def listener(self) -> Iterator[Endpoint]:
        yield from _started()

    @pytest.fixture
    def dialer(self) -> Iterator[Endpoint]:
        yield from _started()

    def connect(self, dialer: Endpoint, listener: Endpoint, address: str) -> int:
        peer_id = dialer.start_connect(address, timeout_s=5)
        events: list[Event] = []
        for _ in range(100):
            listener.wait_events(0.01)
            events += dialer.wait_events(0.05)
            if events:
                break
        assert events == [Connected(peer_id, incoming=False)]
        return peer_id

    def test_is_shared_memory_on_one_host(
        self,
        dialer: Endpoint,
        listener: Endpoint,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        caplog.set_level(logging.INFO)
        route = dialer.route_of(self.connect(dialer, listener, listener.listen("")))
        assert (route.scheme, route.reason) == ("shm", "on this host")
        assert "is reached by shm: on this host" in caplog.text

    def test_is_the_network_between_hosts(self, dialer: Endpoint, listener: Endpoint) -> None:
        address = AutoAddress.parse(listener.listen(""))
        elsewhere = AutoAddress("0123456789abcdef", address.local, address.networks)
        route = dialer.route_of(self.connect(dialer, listener, str(elsewhere)))
        assert (route.scheme, route.reason) == ("zeromq", "on another host")

    def test_is_the_network_where_shared_memory_does_not_connect(
        self, dialer: Endpoint, listener: Endpoint
    ) -> None:
        # As in another container with the same kernel and another network namespace.
        address = AutoAddress.parse(listener.listen(""))
        walled = AutoAddress(address.host, "shm://@kvferry-nobody", address.networks)
        route = dialer.route_of(self.connect(dialer, listener, str(walled)))
        assert route.scheme == "zeromq"
        assert "shared memory does not connect" in route.reason

    def test_is_the_network_where_shared_memory_never_answers(
        self, dialer: Endpoint, listener: Endpoint
    ) -> None:
        with socket.socket(socket.AF_UNIX) as mute:
            mute.bind("\0kvferry-mute")
            mute.listen()
            address = AutoAddress.parse(listener.listen(""))
            walled = AutoAddress(address.host, "shm://@kvferry-mute", address.networks)
            route = dialer.route_of(self.connect(dialer, listener, str(walled)))
        assert "timed out waiting for the peer's hello" in route.reason


def _started() -> Iterator[Endpoint]:
    transport = create_auto()
    arena = transport.allocate(4096)
    yield transport.register(Pool([arena.segment]))
    transport.close()


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
