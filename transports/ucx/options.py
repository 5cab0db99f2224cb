"""What a user may set, and the addresses of the transport."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self, get_type_hints
from urllib.parse import urlsplit

from .._options import require_int
from .._tcp import authority, is_loopback, ports_of, require_seconds, require_type
from ..base import MAX_MESSAGE_BYTES
from ..errors import ConfigurationError

__all__ = ["SCHEME", "Address", "UCXOptions"]

SCHEME = "ucx"

_MAX_WINDOW_BYTES = 256 << 20


@dataclass(frozen=True)
class UCXOptions:
    """Options of the transport.

    Attributes:
        bind_host: Host name or IP address to listen on.
        port: Port to listen on; 0 lets the system choose.
        port_range: `"low-high"`: listen on the first free port of these; instead of `port`.
        advertise_host: What peers connect to; needed when `bind_host` is a wildcard, of use with several NICs.
        allow_plaintext: Talk to other machines. UCX neither encrypts nor authenticates: whoever reaches the port
            can read the pool, so the network must be one where only nodes are.
        tls: UCX transports to choose from, as in `UCX_TLS`; empty means all. Shared memory is never used: UCX
            cannot survive a peer's death over it.
        net_devices: Network devices to choose from, as in `UCX_NET_DEVICES`. Empty means all, or `lo` alone unless
            `allow_plaintext`.
        refuse_tcp: Rather fail than move bytes over TCP.
        rndv_threshold: Where UCX changes from sending at once to rendezvous, as in `UCX_RNDV_THRESH`.
        rndv_scheme: How UCX does a rendezvous, as in `UCX_RNDV_SCHEME`.
        tcp_segment_bytes: UCX's send and receive buffers on TCP.
        slice_bytes: Most bytes of one region that travel as one UCX message.
        window_slices: Slices that may be on their way from one peer.
        peer_timeout_s: A peer that is silent for longer is lost.
        handshake_timeout_s: Who connects must have said who he is after this time.
        max_queued_bytes: Bytes of messages to one peer that may wait here.
        num_guards: Words in the guard table.
    """

    bind_host: str = "127.0.0.1"
    port: int = 0
    port_range: str = ""
    advertise_host: str = ""
    allow_plaintext: bool = False
    tls: str = ""
    net_devices: str = ""
    refuse_tcp: bool = False
    rndv_threshold: str = "auto"
    rndv_scheme: str = "auto"
    tcp_segment_bytes: int = 256 << 10
    slice_bytes: int = 2 << 20
    window_slices: int = 4
    peer_timeout_s: float = 2.0
    handshake_timeout_s: float = 5.0
    max_queued_bytes: int = 8 << 20
    num_guards: int = 65536

    def __post_init__(self) -> None:
        for key, kind in get_type_hints(type(self)).items():
            if kind in (bool, str):
                require_type(key, getattr(self, key), kind)
        require_int("port", self.port, 0, 65535)
        require_int("tcp_segment_bytes", self.tcp_segment_bytes, 8 << 10, 16 << 20)
        require_int("slice_bytes", self.slice_bytes, 64 << 10, 64 << 20)
        require_int("window_slices", self.window_slices, 1, 64)
        require_int("max_queued_bytes", self.max_queued_bytes, MAX_MESSAGE_BYTES, 1 << 30)
        require_int("num_guards", self.num_guards, 1, 1 << 24)
        require_seconds("peer_timeout_s", self.peer_timeout_s, 0.4, 3600)
        require_seconds("handshake_timeout_s", self.handshake_timeout_s, 0.1, 3600)
        if self.slice_bytes * self.window_slices > _MAX_WINDOW_BYTES:
            raise ConfigurationError(
                f"slice_bytes * window_slices is at most {_MAX_WINDOW_BYTES}",
                key="window_slices",
                value=self.window_slices,
            )
        if self.refuse_tcp and "tcp" in self.tls.lstrip("^").split(",") and not self.tls.startswith("^"):
            raise ConfigurationError(
                f"refuse_tcp=true, and tls={self.tls!r} asks for tcp", key="refuse_tcp", value=True
            )
        self.ports()

    def ports(self) -> range:
        """The ports to try, in order. Raises ConfigurationError: see `ports_of`."""
        return ports_of(self.port, self.port_range)

    def require_reachable_by(self, host: str) -> None:
        """Check that we may talk over `host`.

        Raises:
            ConfigurationError: it is beyond this machine, and `allow_plaintext` is not set.
        """
        if not self.allow_plaintext and not is_loopback(host):
            raise ConfigurationError(
                f"{host} is beyond this machine, and ucx neither encrypts nor authenticates: set "
                "allow_plaintext=true if only nodes are on that network, or use zeromq",
                key="allow_plaintext",
                value=False,
            )

    def settings(self) -> dict[str, str]:
        """The same, as UCX's own settings, without their prefix `UCX_`."""
        settings = {
            "TCP_TX_SEG_SIZE": str(self.tcp_segment_bytes),
            "TCP_RX_SEG_SIZE": str(self.tcp_segment_bytes),
            "RNDV_THRESH": self.rndv_threshold,
            "RNDV_SCHEME": self.rndv_scheme,
        }
        if self.tls or self.refuse_tcp:
            settings["TLS"] = self.tls or "^tcp"
        if self.net_devices or not self.allow_plaintext:
            settings["NET_DEVICES"] = self.net_devices or "lo"
        return settings


@dataclass(frozen=True)
class Address:
    """`ucx://host:port`."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read an address.

        Raises:
            ConfigurationError: it is malformed, or of another scheme.
        """
        error = ConfigurationError(f"not a {SCHEME}://host:port address: {text!r}", key="address", value=text)
        try:
            parts = urlsplit(text)
            host, port = parts.hostname, parts.port
        except ValueError:
            raise error from None
        if parts.scheme != SCHEME or not host or port is None or text.lower() != str(cls(host, port)):
            raise error
        return cls(host, port)

    def __str__(self) -> str:
        return f"{SCHEME}://{authority(self.host, self.port)}"
