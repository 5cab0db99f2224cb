"""Options that all transports to other hosts have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from ._options import require_valid
from ._tcp import ports_of
from .base import MAX_MESSAGE_BYTES
from .checked import integer, seconds
from .errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class NetworkOptions:
    """Options that the network transports have in common.

    Attributes:
        bind_host: Host name or IP address to listen on.
        port: Port to listen on; 0 lets the system choose.
        port_range: `"low-high"`: listen on the first free port of these; instead of `port`.
        advertise_host: The host that peers connect to. It is required when `bind_host` is a wildcard, and chooses the NIC
            on a machine with several.
        slice_bytes: Maximum bytes of one region that travel as one message; at most `MAX_SLICE_BYTES`.
        window_slices: Maximum slices in flight from one peer.
        peer_timeout_s: A peer that is silent for longer is lost.
        handshake_timeout_s: Seconds an incoming connection has to complete the handshake.
        max_connecting: Maximum connections in progress at a time. `start_connect` refuses more. Of incoming connections
            that have not completed the handshake, the one that has been silent longest is dropped.
        max_queued_bytes: Maximum bytes of messages to one peer that wait here; `send` refuses more.
        num_guards: Words in the guard table.

    Raises:
        ConfigurationError: one of them is of another type or out of bounds.
    """

    MAX_SLICE_BYTES: ClassVar[int]
    MAX_WINDOW_BYTES: ClassVar[int]

    bind_host: str = "127.0.0.1"
    port: Annotated[int, integer(0, 65535)] = 0
    port_range: str = ""
    advertise_host: str = ""
    slice_bytes: Annotated[int, integer(64 << 10)] = 2 << 20
    window_slices: Annotated[int, integer(1, 64)] = 4
    peer_timeout_s: Annotated[float, seconds(0.4, 3600)] = 2.0
    handshake_timeout_s: Annotated[float, seconds(0.1, 3600)] = 5.0
    max_connecting: Annotated[int, integer(1, 65536)] = 128
    max_queued_bytes: Annotated[int, integer(MAX_MESSAGE_BYTES, 1 << 30)] = 8 << 20
    num_guards: Annotated[int, integer(1, 1 << 24)] = 65536

    def __post_init__(self) -> None:
        require_valid(self)
        if self.slice_bytes > self.MAX_SLICE_BYTES:
            raise ConfigurationError(
                f"slice_bytes must be at most {self.MAX_SLICE_BYTES}, got {self.slice_bytes}",
                key="slice_bytes",
                value=self.slice_bytes,
            )
        if self.slice_bytes * self.window_slices > self.MAX_WINDOW_BYTES:
            raise ConfigurationError(
                f"slice_bytes * window_slices must be at most {self.MAX_WINDOW_BYTES}, got "
                f"{self.slice_bytes} * {self.window_slices}; lower one of them",
                key="window_slices",
                value=self.window_slices,
            )
        self.ports()

    def ports(self) -> range:
        """Return the ports to try, in order. Raises ConfigurationError: see `ports_of`."""
        return ports_of(self.port, self.port_range)
