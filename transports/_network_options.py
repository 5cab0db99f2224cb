"""What a user may set of every transport to other hosts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, get_type_hints

from ._options import require_int
from ._tcp import ports_of, require_seconds, require_type
from .base import MAX_MESSAGE_BYTES
from .errors import BackpressureError, ConfigurationError


def require_room(num_connecting: int, max_connecting: int) -> None:
    """Check that one more connection may be made.

    Raises:
        BackpressureError: too many are in the making.
    """
    if num_connecting >= max_connecting:
        raise BackpressureError(
            f"cannot connect: {num_connecting} connections are being made already, as many as max_connecting allows; try "
            "again when some of them stand or have failed, or raise max_connecting"
        )


@dataclass(frozen=True, kw_only=True)
class NetworkOptions:
    """Options that the network transports have in common.

    Attributes:
        bind_host: Host name or IP address to listen on.
        port: Port to listen on; 0 lets the system choose.
        port_range: `"low-high"`: listen on the first free port of these; instead of `port`.
        advertise_host: What peers connect to; needed when `bind_host` is a wildcard, of use with several NICs.
        slice_bytes: Most bytes of one region that travel as one message.
        window_slices: Slices that may be on their way from one peer.
        peer_timeout_s: A peer that is silent for longer is lost.
        handshake_timeout_s: Who connects must have said who he is after this time.
        max_connecting: Connections that may be in the making at a time. `start_connect` refuses more, and of those that
            others make, the one that has said nothing for the longest time is dropped.
        max_queued_bytes: Bytes of messages to one peer that may wait here.
        num_guards: Words in the guard table.

    Raises:
        ConfigurationError: one of them is of another type or out of bounds.
    """

    MAX_SLICE_BYTES: ClassVar[int]
    MAX_WINDOW_BYTES: ClassVar[int]

    bind_host: str = "127.0.0.1"
    port: int = 0
    port_range: str = ""
    advertise_host: str = ""
    slice_bytes: int = 2 << 20
    window_slices: int = 4
    peer_timeout_s: float = 2.0
    handshake_timeout_s: float = 5.0
    max_connecting: int = 128
    max_queued_bytes: int = 8 << 20
    num_guards: int = 65536

    def __post_init__(self) -> None:
        for key, kind in get_type_hints(type(self)).items():
            if kind in (bool, str):
                require_type(key, getattr(self, key), kind)
        require_int("port", self.port, 0, 65535)
        require_int("slice_bytes", self.slice_bytes, 64 << 10, self.MAX_SLICE_BYTES)
        require_int("window_slices", self.window_slices, 1, 64)
        require_int("max_connecting", self.max_connecting, 1, 65536)
        require_int("max_queued_bytes", self.max_queued_bytes, MAX_MESSAGE_BYTES, 1 << 30)
        require_int("num_guards", self.num_guards, 1, 1 << 24)
        require_seconds("peer_timeout_s", self.peer_timeout_s, 0.4, 3600)
        require_seconds("handshake_timeout_s", self.handshake_timeout_s, 0.1, 3600)
        if self.slice_bytes * self.window_slices > self.MAX_WINDOW_BYTES:
            raise ConfigurationError(
                f"slice_bytes * window_slices is at most {self.MAX_WINDOW_BYTES}",
                key="window_slices",
                value=self.window_slices,
            )
        self.ports()

    def ports(self) -> range:
        """The ports to try, in order. Raises ConfigurationError: see `ports_of`."""
        return ports_of(self.port, self.port_range)
