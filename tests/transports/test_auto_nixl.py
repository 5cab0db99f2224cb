"""`auto` uses `nixl` between hosts that both have it, and its other network transport where nixl does not
connect.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from importlib.util import find_spec
from typing import Any

import pytest

from kvferry.transports.auto import AutoTransport
from kvferry.transports.auto.address import AutoAddress
from kvferry.transports.base import Connected, Endpoint, Event, Route, Transport
from kvferry.transports.regions import Pool
from kvferry.transports.testing import TransportConformance

if find_spec("nixl_cu12") is None and find_spec("nixl_cu13") is None:
    pytest.skip("NIXL is not installed", allow_module_level=True)

# TCP is a network that every machine has. With the default options only RDMA counts.
OPTIONS: Mapping[str, object] = {
    "network": "nixl,zeromq",
    "network_options": {"nixl": {"tls": "tcp", "refuse_tcp": False}},
}

Create = Callable[[Mapping[str, object]], Transport]
Start = Callable[[Mapping[str, object]], Endpoint]


class _OnItsOwnHost(AutoTransport):
    """A node on its own host, so that it reaches all other nodes only over the network."""

    _numbers = itertools.count()

    def __init__(self, options: Mapping[str, object] = {}) -> None:
        super().__init__({**OPTIONS, **options})

    def register(self, pool: Pool) -> Endpoint:
        endpoint: Any = super().register(pool)
        endpoint._host = f"host-{next(self._numbers)}"
        return endpoint


@pytest.mark.slow
class TestBetweenHosts(TransportConformance):
    read_unchecked = connect_raw = None

    @pytest.fixture
    def create(self) -> Create:
        return _OnItsOwnHost


@pytest.fixture
def start() -> Iterator[Start]:
    with ExitStack() as stack:

        def start(options: Mapping[str, object]) -> Endpoint:
            transport = stack.enter_context(closing(_OnItsOwnHost(options)))
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


def test_nixl_is_used_between_hosts_that_both_have_it(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    dialer, listener = start({}), start({})
    found = route(dialer, listener, listener.listen(""))
    assert (found.scheme, found.reason) == ("nixl", "on another host")
    assert "is reached by nixl: on another host" in caplog.text


@pytest.mark.parametrize("unreachable", ["nixl://127.0.0.1:1", "nixl://192.0.2.1:1"])
def test_the_other_network_is_used_if_nixl_does_not_connect(start: Start, unreachable: str) -> None:
    """No node listens at the first address, and the options do not allow the second one."""
    dialer, listener = start({}), start({})
    address = AutoAddress.parse(listener.listen(""))
    walled = AutoAddress(address.host, address.local, (unreachable, *address.networks[1:]))
    found = route(dialer, listener, str(walled))
    assert found.scheme == "zeromq"
    assert "on another host, but nixl does not connect: " in found.reason


def test_a_node_without_nixl_is_reached_by_the_other_network(start: Start) -> None:
    with_nixl, without = start({}), start({"network": "zeromq", "network_options": {}})
    found = route(with_nixl, without, without.listen(""))
    assert (found.scheme, found.reason) == ("zeromq", "on another host, and the peer does not offer nixl")
    found = route(without, with_nixl, with_nixl.listen(""))
    assert (found.scheme, found.reason) == ("zeromq", "on another host")


def test_nixl_is_not_offered_without_a_network_that_it_may_use(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    # NIXL works over shared memory, which reaches no other host, and refuses TCP.
    node = start({"network_options": {"nixl": {"tls": "sm,self"}}})
    assert [address.partition(":")[0] for address in AutoAddress.parse(node.listen("")).networks] == [
        "zeromq"
    ]
    assert "nixl is not offered to peers: NIXL finds no network here that may be used with" in caplog.text


def test_nixl_is_not_imported_unless_the_options_name_it(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    def imported() -> None:
        raise AssertionError("NIXL was imported")

    monkeypatch.setattr("kvferry.transports.nixl.library._library", imported)
    start({"network": "zeromq", "network_options": {}})
    start({"network": "", "network_options": {}})
