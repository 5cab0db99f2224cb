"""Endpoints of transports that do not use `transports.endpoint` yet: the transport does both."""

from __future__ import annotations

from typing import Any

from .base import Endpoint, Event, Route
from .regions import Guard, RegionPairs


class AdaptedEndpoint(Endpoint):
    """Passes every call on to a transport that has the methods of an endpoint."""

    def __init__(self, transport: Any) -> None:
        self.scheme = transport.scheme
        self._transport = transport

    def listen(self, address: str) -> str:
        listened: str = self._transport.listen(address)
        return listened

    def start_connect(self, address: str, *, timeout_s: float) -> int:
        peer_id: int = self._transport.start_connect(address, timeout_s=timeout_s)
        return peer_id

    def disconnect(self, peer_id: int) -> None:
        self._transport.disconnect(peer_id)

    def send(self, peer_id: int, message: bytes) -> None:
        self._transport.send(peer_id, message)

    def start_read(self, peer_id: int, pairs: RegionPairs, guard: Guard, *, timeout_s: float) -> int:
        transfer_id: int = self._transport.start_read(peer_id, pairs, guard, timeout_s=timeout_s)
        return transfer_id

    def route_of(self, peer_id: int) -> Route:
        return Route(self.scheme, "")

    def wait_events(self, timeout_s: float) -> list[Event]:
        events: list[Event] = self._transport.wait_events(timeout_s)
        return events

    def wake(self) -> None:
        self._transport.wake()

    def close(self) -> None:
        self._transport.close()
