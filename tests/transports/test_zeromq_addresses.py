"""Where the `zeromq` transport listens, which address it advertises, and which settings it refuses."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from kvferry.transports import Connected, Endpoint, Pool
from kvferry.transports.errors import ConfigurationError
from kvferry.transports.zeromq import ZeroMQOptions, ZeroMQTransport
from kvferry.transports.zeromq.options import Address

Make = Callable[..., Endpoint]


@pytest.fixture
def make() -> Iterator[Make]:
    """A function that opens endpoints; all of them are closed at the end."""
    with ExitStack() as stack:

        def make_one(**options: Any) -> Endpoint:
            transport = ZeroMQTransport(options)
            stack.callback(transport.close)
            arena = transport.allocate(4096)
            stack.callback(lambda: arena)  # the memory outlives the transport
            return transport.register(Pool([arena.segment]))

        yield make_one


@pytest.fixture
def taken() -> Iterator[int]:
    """A port on which another socket listens."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]


def meet(server: Endpoint, client: Endpoint, address: str) -> bool:
    peer_id = client.start_connect(address, timeout_s=5)
    while not (events := client.wait_events(0.02)):
        server.wait_events(0.02)
    return events == [Connected(peer_id, incoming=False)]


@pytest.mark.parametrize(
    "text", ["zeromq://10.0.0.1:5555", "zeromq://[fe80::1]:1", f"zeromq://node-3:65535?curve={'ab' * 32}"]
)
def test_an_address_reads_as_it_is_written(text: str) -> None:
    assert str(Address.parse(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "zeromq://",
        "zeromq://host",
        "zeromq://:5555",
        "zeromq://host:65536",
        "zeromq://host:x",
        "zeromq://host:1/path",
        "zeromq://user@host:1",
        "zeromq://ho st:1",
        "zeromq://host;ipc:1",
        "zeromq://host:1?curve=abcd",
        "zeromq://host:1?curve=zz",
        "zeromq://host:1?colour=red",
        "zeromq://[::1:1",
        "tcp://host:1",
    ],
)
def test_a_malformed_address_is_named(text: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Address.parse(text)
    assert caught.value.value == text


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("port", -1),
        ("port", "5555"),
        ("port_range", "9-5"),
        ("port_range", "0-5"),
        ("port_range", "5"),
        ("port_range", "1-65536"),
        ("curve", "maybe"),
        ("checksums", "yes"),
        ("bind_host", 7),
        ("slice_bytes", 1),
        ("window_slices", 0),
        ("peer_timeout_s", 0),
        ("peer_timeout_s", float("nan")),
    ],
)
def test_a_bad_option_is_named(key: str, value: object) -> None:
    with pytest.raises(ConfigurationError) as caught:
        ZeroMQTransport({key: value})
    assert caught.value.key == key


def test_a_window_that_would_not_be_bounded_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="window_slices"):
        ZeroMQOptions(slice_bytes=4 << 20, window_slices=64)


def test_a_taken_port_is_an_error_that_names_it(make: Make, taken: int) -> None:
    with pytest.raises(ConfigurationError, match=f"{taken}.*in use"):
        make(port=taken).listen("")


def test_the_first_free_port_of_a_range_is_used(make: Make, taken: int) -> None:
    last = min(taken + 20, 65535)
    address = Address.parse(make(port_range=f"{taken}-{last}").listen(""))
    assert taken < address.port <= last


def test_a_range_without_a_free_port_is_an_error(make: Make, taken: int) -> None:
    with pytest.raises(ConfigurationError, match="in use"):
        make(port_range=f"{taken}-{taken}").listen("")


def test_a_host_that_is_not_ours_is_an_error(make: Make) -> None:
    transport = make(bind_host="192.0.2.1", curve="off", allow_plaintext=True)
    with pytest.raises(ConfigurationError, match=r"192\.0\.2\.1"):
        transport.listen("")


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_a_wildcard_needs_an_advertised_host(make: Make, host: str) -> None:
    with pytest.raises(ConfigurationError, match="advertise_host"):
        make(bind_host=host, curve="off", allow_plaintext=True).listen("")


def test_the_advertised_host_is_what_peers_get(make: Make) -> None:
    server = make(bind_host="0.0.0.0", advertise_host="127.0.0.1", curve="off", allow_plaintext=True)
    address = server.listen("")
    assert Address.parse(address).host == "127.0.0.1"
    assert meet(server, make(), address)


@pytest.mark.skipif(not socket.has_ipv6, reason="Python was built without IPv6")
def test_ipv6(make: Make) -> None:
    server = make(bind_host="::1")
    try:
        address = server.listen("")
    except ConfigurationError as error:
        pytest.skip(f"no IPv6 loopback here: {error}")
    assert address.startswith("zeromq://[::1]:")
    assert meet(server, make(), address)


def test_one_node_listens_on_several_addresses(make: Make) -> None:
    server = make()
    addresses = [server.listen("zeromq://127.0.0.1:0"), server.listen("zeromq://127.0.0.2:0")]
    assert all(meet(server, make(), address) for address in addresses)
