"""Many connections at a time, slow name lookups, and addresses of another transport."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from typing import Any

import pytest

from kvferry.transports import Connected, PeerLost
from kvferry.transports.errors import BackpressureError, ConfigurationError, PeerLostError
from kvferry.transports.limited_log import LimitedLog
from kvferry.transports.network import Found, listen_on
from kvferry.transports.registry import BUILT_IN
from kvferry.transports.testing import World, built_in
from kvferry.transports.ucx.library import Worker
from tests.support.peers import dial

needs_ucxx = pytest.mark.skipif(find_spec("ucxx") is None, reason="ucxx is not installed")
UCX = pytest.param("ucx", marks=needs_ucxx)
ADDRESSES = {scheme: f"{scheme}://127.0.0.1:1" for scheme in BUILT_IN} | {
    "shm": "shm://@none",
    "auto": "auto://host;shm://@none;none",
    "inproc": "inproc://none",
}


def open_descriptors() -> set[str]:
    """Return this process's descriptors, without the one that is open while the folder is read."""
    folder = "/proc/self/fd"
    return {number for number in os.listdir(folder) if os.path.lexists(f"{folder}/{number}")}


# -- addresses of other transports -------------------------------------------------------------------


@pytest.mark.parametrize("scheme", built_in())
@pytest.mark.parametrize("other", ADDRESSES)
def test_an_address_of_another_scheme_is_refused_at_once(
    make_world: Callable[..., World], scheme: str, other: str
) -> None:
    if scheme == other:
        pytest.skip("its own")
    client = make_world(scheme).node(4096)
    before = open_descriptors()
    with pytest.raises(ConfigurationError, match=scheme) as caught:
        client.endpoint.start_connect(ADDRESSES[other], timeout_s=5)
    assert caught.value.value == ADDRESSES[other]
    assert open_descriptors() <= before


# -- names -------------------------------------------------------------------------------------------


@pytest.fixture
def slow_names(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The name service does not answer until the event is set. Numeric addresses do not need it."""
    answers = threading.Event()
    lookup = socket.getaddrinfo

    def slow(host: str, port: int, *args: Any, **kwargs: Any) -> Any:
        if host == "slow.example" and not kwargs.get("flags"):
            assert answers.wait(30)
            host = "127.0.0.1"
        return lookup(host, port, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    yield answers
    answers.set()


@pytest.mark.parametrize("scheme", ["zeromq", UCX])
def test_a_slow_name_lookup_delays_nothing_else(
    make_world: Callable[..., World], slow_names: threading.Event, scheme: str
) -> None:
    world = make_world(scheme, **({"curve": "off"} if scheme == "zeromq" else {}), allow_plaintext=True)
    server, client = world.node(4096), world.node(4096)
    port = int(server.endpoint.listen("").rpartition(":")[2])
    began = time.monotonic()
    # More connections than there are threads for lookups.
    given_up = [
        client.endpoint.start_connect(f"{scheme}://slow.example:{port}", timeout_s=1.0) for _ in range(9)
    ]
    link = world.link(server, client)
    link.consumer.endpoint.send(link.producer_id, b"meanwhile")
    world.serve(lambda: server.messages(link.consumer_id) == [b"meanwhile"])
    assert client.of_type(PeerLost) == []
    world.serve(lambda: len(client.of_type(PeerLost)) == len(given_up))
    assert time.monotonic() - began < 10
    for lost in client.of_type(PeerLost):
        assert isinstance(lost.error, PeerLostError)
        assert "slow.example" in str(lost.error)

    dropped = client.endpoint.start_connect(f"{scheme}://slow.example:{port}", timeout_s=20)
    awaited = client.endpoint.start_connect(f"{scheme}://slow.example:{port}", timeout_s=20)
    client.endpoint.disconnect(dropped)
    slow_names.set()
    world.serve(lambda: Connected(awaited, incoming=False) in client.history)
    assert not any(getattr(event, "peer_id", None) == dropped for event in client.history)


def congestion_control_of(sock: socket.socket) -> bytes:
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")


def test_the_kernel_does_not_pace_what_stays_on_loopback() -> None:
    with listen_on("127.0.0.1", range(1)) as listener:
        dialed = Found(listener.family, listener.getsockname()).dial()
        accepted, _ = listener.accept()
        with dialed, accepted:
            assert congestion_control_of(dialed) == congestion_control_of(accepted) == b"reno"


def test_the_system_chooses_the_congestion_control_of_other_connections() -> None:
    with listen_on("0.0.0.0", range(1)) as listener, socket.socket() as fresh:
        assert congestion_control_of(listener) == congestion_control_of(fresh)


@pytest.mark.parametrize("scheme", ["zeromq", UCX])
def test_an_unknown_name_is_reported(make_world: Callable[..., World], scheme: str) -> None:
    world = make_world(scheme, **({"curve": "off"} if scheme == "zeromq" else {}), allow_plaintext=True)
    client = world.node(4096)
    client.endpoint.start_connect(f"{scheme}://no-such-host.invalid:1", timeout_s=20)
    world.serve(lambda: bool(client.history))
    (lost,) = client.of_type(PeerLost)
    assert "no-such-host.invalid" in str(lost.error)


@pytest.mark.parametrize("scheme", ["zeromq", "tcp", UCX])
def test_of_a_name_with_both_families_the_one_is_taken_on_which_the_peer_listens(
    make_world: Callable[..., World], monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    lookup = socket.getaddrinfo

    def both(host: str, *args: Any, **kwargs: Any) -> Any:
        if host != "both.example":
            return lookup(host, *args, **kwargs)
        if kwargs.get("flags"):
            raise socket.gaierror(socket.EAI_NONAME, "not a number")
        return [*lookup("::1", *args, **kwargs), *lookup("127.0.0.1", *args, **kwargs)]

    monkeypatch.setattr(socket, "getaddrinfo", both)
    options = {"zeromq": {"curve": "off"}, "tcp": {"tls": "off"}}.get(scheme, {})
    world = make_world(scheme, **options, allow_plaintext=True)
    server, client = world.node(4096), world.node(4096)
    port = int(server.endpoint.listen("").rpartition(":")[2])  # of 127.0.0.1
    peer = client.endpoint.start_connect(f"{scheme}://both.example:{port}", timeout_s=20)
    world.serve(lambda: Connected(peer, incoming=False) in client.history)


# -- many at a time ----------------------------------------------------------------------------------


@needs_ucxx
def test_ucx_opens_nothing_for_addresses_without_a_node(
    make_world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither if nothing listens there, nor if another program does."""
    opened: list[Worker] = []
    original = Worker.__init__

    def counted(self: Worker, *args: Any) -> None:
        opened.append(self)
        original(self, *args)

    world = make_world("ucx")
    client = world.node(4096)
    monkeypatch.setattr(Worker, "__init__", counted)
    with socket.create_server(("127.0.0.1", 0), backlog=64) as mute, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        for port in (closed.getsockname()[1], mute.getsockname()[1]):
            for _ in range(60):
                client.endpoint.start_connect(f"ucx://127.0.0.1:{port}", timeout_s=0.5)
        world.serve(lambda: len(client.of_type(PeerLost)) == 120)
    assert opened == []


@pytest.mark.parametrize("scheme", built_in(without=("auto", "inproc")))
def test_too_many_connections_at_a_time_are_refused(make_world: Callable[..., World], scheme: str) -> None:
    world = make_world(scheme, max_connecting=3)
    server, client = world.node(4096), world.node(4096)
    address = server.endpoint.listen("")
    first = [client.endpoint.start_connect(address, timeout_s=20) for _ in range(3)]
    with pytest.raises(BackpressureError, match="max_connecting"):
        client.endpoint.start_connect(address, timeout_s=20)
    world.serve(lambda: all(Connected(peer_id, incoming=False) in client.history for peer_id in first))
    again = client.endpoint.start_connect(address, timeout_s=20)
    world.serve(lambda: Connected(again, incoming=False) in client.history)


@pytest.mark.parametrize("scheme", built_in(without=("auto", "inproc")))
def test_strangers_block_neither_a_listener_nor_its_log(
    make_world: Callable[..., World], scheme: str, caplog: pytest.LogCaptureFixture
) -> None:
    """If too many strangers connect and send nothing, the one that has been silent for the longest time is
    dropped.
    """
    world = make_world(scheme, max_connecting=4, handshake_timeout_s=30)
    server, client = world.node(4096), world.node(4096)
    address = server.endpoint.listen("")
    with ExitStack() as strangers, caplog.at_level(logging.WARNING):
        for _ in range(60):
            strangers.enter_context(dial(address))
            server.history += server.endpoint.wait_events(0)
        peer_id = client.endpoint.start_connect(address, timeout_s=20)
        world.serve(lambda: Connected(peer_id, incoming=False) in client.history)
        world.serve(lambda: bool(server.history))
    assert server.of_type(PeerLost) == []
    assert 1 <= len(caplog.records) <= 12


# -- the log -----------------------------------------------------------------------------------------


def test_a_limited_log_says_how_many_lines_it_suppressed(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    log = LimitedLog(logging.getLogger("kvferry.test"), max_lines=3, interval_s=10)
    with caplog.at_level(logging.WARNING):
        for count in range(1000):
            log.warning("line %d", count)
        assert caplog.messages == ["line 0", "line 1", "line 2"]
        now = 111.0
        log.warning("line %d", 1000)
        log.flush()
    assert caplog.messages[3].startswith("suppressed 997 more lines")
    assert caplog.messages[4:] == ["line 1000"]
