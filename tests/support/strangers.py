"""Strangers that speak to a node over a socket, for the transports whose nodes greet each other over TCP."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Protocol

from kvferry.transports import Connected, Endpoint, Pool, Transport


class Address(Protocol):
    """Where a node listens."""

    @property
    def host(self) -> str: ...

    @property
    def port(self) -> int: ...


def hangs_up(node: Endpoint, address: Address, said: bytes) -> bytes:
    """Send bytes to a node. Returns what it sends before it hangs up."""
    heard = b""
    with socket.create_connection((address.host, address.port)) as stranger:
        stranger.sendall(said)
        stranger.settimeout(0.01)
        for _ in range(2000):
            assert node.wait_events(0.01) == []
            try:
                data = stranger.recv(65536)
            except TimeoutError:
                continue
            except ConnectionResetError:
                return heard
            if not data:
                return heard
            heard += data
    raise AssertionError("the node did not hang up")


def assert_serves(node: Endpoint, create: Callable[[], Transport]) -> None:
    """Check that another node, with a transport that `create` makes, can still connect."""
    transport = create()
    try:
        arena = transport.allocate(4096)
        other = transport.register(Pool([arena.segment]))
        other.start_connect(node.listen(""), timeout_s=20)
        seen: list[object] = []
        while not seen:
            node.wait_events(0.01)
            seen += other.wait_events(0.01)
        assert isinstance(seen[0], Connected)
    finally:
        transport.close()
