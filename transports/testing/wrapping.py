"""A transport around another transport. It passes every call on; a subclass overrides what it changes."""

from __future__ import annotations

from typing import ClassVar

from ..base import Arena, Endpoint, Event, Route, Transport
from ..endpoint import PeerTransport
from ..errors import ConfigurationError
from ..regions import Guard, Pool, RegionPairs


class WrappedEndpoint(Endpoint):
    """An endpoint that passes every call on to another, with the same addresses."""

    def __init__(self, inner: Endpoint) -> None:
        self.scheme = inner.scheme
        self._inner = inner

    def __repr__(self) -> str:
        return f"<{type(self).__name__} around {self._inner!r}>"

    def listen(self, address: str) -> str:
        return self._inner.listen(address)

    def start_connect(self, address: str, *, timeout_s: float) -> int:
        return self._inner.start_connect(address, timeout_s=timeout_s)

    def disconnect(self, peer_id: int) -> None:
        self._inner.disconnect(peer_id)

    def send(self, peer_id: int, message: bytes) -> None:
        self._inner.send(peer_id, message)

    def start_read(self, peer_id: int, pairs: RegionPairs, guard: Guard, *, timeout_s: float) -> int:
        return self._inner.start_read(peer_id, pairs, guard, timeout_s=timeout_s)

    def route_of(self, peer_id: int) -> Route:
        return self._inner.route_of(peer_id)

    def wait_events(self, timeout_s: float) -> list[Event]:
        return self._inner.wait_events(timeout_s)

    def wake(self) -> None:
        self._inner.wake()

    def close(self) -> None:
        self._inner.close()


class RenamedEndpoint(WrappedEndpoint):
    """An endpoint with a scheme of its own.

    Its addresses are `SCHEME:` and then those of the inner endpoint.
    """

    def __init__(self, scheme: str, inner: Endpoint) -> None:
        super().__init__(inner)
        self.scheme = scheme

    def listen(self, address: str) -> str:
        return f"{self.scheme}:{super().listen(self._inner_address(address) if address else '')}"

    def start_connect(self, address: str, *, timeout_s: float) -> int:
        return super().start_connect(self._inner_address(address), timeout_s=timeout_s)

    def _inner_address(self, address: str) -> str:
        scheme, _, inner = address.partition(":")
        if scheme != self.scheme:
            raise ConfigurationError(
                f"malformed address {address!r}: expected '{self.scheme}:' and an address of {self._inner.scheme!r}",
                key="address",
                value=address,
            )
        return inner


class WrappedTransport(PeerTransport):
    """A transport that passes every call on to `inner` and owns it.

    Override `_wrap` to change its endpoint.
    """

    scheme: ClassVar[str]

    def __init__(self, inner: Transport) -> None:
        super().__init__()
        self._inner = inner
        self.guards = inner.guards

    def __repr__(self) -> str:
        return f"<{type(self).__name__} around {self._inner!r}>"

    def _allocate(self, num_bytes: int) -> Arena:
        return self._inner.allocate(num_bytes)

    def _open(self, pool: Pool) -> Endpoint:
        return self._wrap(self._inner.register(pool), pool)

    def _wrap(self, inner: Endpoint, pool: Pool) -> Endpoint:
        """Return an endpoint around the inner transport's."""
        return RenamedEndpoint(self.scheme, inner)

    def _free(self) -> None:
        self._inner.close()
