"""What a user may set, and the addresses of the transport."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self, get_type_hints
from urllib.parse import parse_qsl, urlsplit

from .._options import require_int
from .._tcp import authority, ports_of, require_seconds, require_type
from ..base import MAX_MESSAGE_BYTES
from ..errors import ConfigurationError

__all__ = ["SCHEME", "Address", "ZeroMQOptions"]

SCHEME = "zeromq"

_MAX_WINDOW_BYTES = 64 << 20
_CURVE_CHOICES = ("auto", "on", "off")


@dataclass(frozen=True)
class ZeroMQOptions:
    """Options of the transport.

    Attributes:
        bind_host: Host name or IP address to listen on.
        port: Port to listen on; 0 lets the system choose.
        port_range: `"low-high"`: listen on the first free port of these; instead of `port`.
        advertise_host: What peers connect to; needed when `bind_host` is a wildcard, of use with several NICs.
        curve: Encrypt and authenticate: `"on"`, `"off"`, or `"auto"`, which is on but for loopback.
        allow_plaintext: Accept `curve="off"` beyond loopback. Whoever reaches the port can then read the pool.
        curve_secret_key_file: This node's CURVE secret key, 40 characters of Z85.
        curve_allowed_keys_file: The public keys of the nodes to talk to, one a line, Z85; `# ` begins a comment.
        shared_secret_file: At least 16 bytes that all nodes share, instead of the two files above.
        checksums: Have the owner hash each slice (xxh3), and verify it before it is accepted.
        slice_bytes: Most bytes of one region that travel as one frame.
        window_slices: Slices that may be on their way from one peer; more are asked for when half of them are here.
            Half should be what a long fast link carries in a round trip; fewer stay in the processor's cache.
        peer_timeout_s: A peer that is silent for longer is lost.
        handshake_timeout_s: Who connects must have said who he is after this time.
        max_queued_bytes: Bytes of messages to one peer that may wait here, beside those ZeroMQ holds.
        num_guards: Words in the guard table.
        io_threads: Threads in which ZeroMQ moves bytes.
        congestion_control: TCP congestion control for accepted connections; empty keeps the system's.
    """

    bind_host: str = "127.0.0.1"
    port: int = 0
    port_range: str = ""
    advertise_host: str = ""
    curve: str = "auto"
    allow_plaintext: bool = False
    curve_secret_key_file: str = ""
    curve_allowed_keys_file: str = ""
    shared_secret_file: str = ""
    checksums: bool = True
    slice_bytes: int = 2 << 20
    window_slices: int = 8
    peer_timeout_s: float = 2.0
    handshake_timeout_s: float = 5.0
    max_queued_bytes: int = 8 << 20
    num_guards: int = 65536
    io_threads: int = 1
    congestion_control: str = ""

    def __post_init__(self) -> None:
        for key, kind in get_type_hints(type(self)).items():
            if kind in (bool, str):
                require_type(key, getattr(self, key), kind)
        if self.curve not in _CURVE_CHOICES:
            known = ", ".join(_CURVE_CHOICES)
            raise ConfigurationError(f"curve={self.curve!r}; allowed: {known}", key="curve", value=self.curve)
        require_int("port", self.port, 0, 65535)
        require_int("slice_bytes", self.slice_bytes, 64 << 10, 4 << 20)
        require_int("window_slices", self.window_slices, 1, 64)
        require_int("max_queued_bytes", self.max_queued_bytes, MAX_MESSAGE_BYTES, 1 << 30)
        require_int("num_guards", self.num_guards, 1, 1 << 24)
        require_int("io_threads", self.io_threads, 1, 16)
        require_seconds("peer_timeout_s", self.peer_timeout_s, 0.4, 3600)
        require_seconds("handshake_timeout_s", self.handshake_timeout_s, 0.1, 3600)
        if self.slice_bytes * self.window_slices > _MAX_WINDOW_BYTES:
            raise ConfigurationError(
                f"slice_bytes * window_slices is at most {_MAX_WINDOW_BYTES}",
                key="window_slices",
                value=self.window_slices,
            )
        self.ports()

    def ports(self) -> range:
        """The ports to try, in order. Raises ConfigurationError: see `ports_of`."""
        return ports_of(self.port, self.port_range)


@dataclass(frozen=True)
class Address:
    """`zeromq://host:port`, and `?curve=` the listener's public key in hex when it wants CURVE.

    The key is no secret, and nothing is trusted because an address says so: see `security`.
    """

    host: str
    port: int
    server_key: bytes = b""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read an address.

        Raises:
            ConfigurationError: it is malformed, or of another scheme.
        """
        try:
            parts = urlsplit(text)
            query = dict(parse_qsl(parts.query, strict_parsing=True)) if parts.query else {}
            key = bytes.fromhex(query.pop("curve", ""))
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise _malformed(text) from error
        is_plain = not (parts.path or parts.fragment or "@" in parts.netloc or query)
        if parts.scheme != SCHEME or not host or port is None or not is_plain or len(key) not in (0, 32):
            raise _malformed(text)
        if not all(c.isascii() and (c.isalnum() or c in ".:-_") for c in host):
            raise _malformed(text)
        return cls(host, port, key)

    def __str__(self) -> str:
        query = f"?curve={self.server_key.hex()}" if self.server_key else ""
        return f"{SCHEME}://{self._authority}{query}"

    @property
    def endpoint(self) -> str:
        """The same, as libzmq writes it."""
        return f"tcp://{self._authority}"

    @property
    def _authority(self) -> str:
        return authority(self.host, self.port)


def _malformed(text: str) -> ConfigurationError:
    return ConfigurationError(f"not a {SCHEME}://host:port address: {text!r}", key="address", value=text)
