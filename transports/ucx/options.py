"""What a user may set, and the addresses of the transport."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Self
from urllib.parse import urlsplit

from .._network_options import NetworkOptions
from .._tcp import authority, is_loopback
from ..checked import integer
from ..errors import ConfigurationError, PeerRefusedError

SCHEME = "ucx"

#: For who finds no way to a peer.
WAY_OUT = "join the nodes by a network that both may use, or change refuse_tcp, tls or net_devices of either"


@dataclass(frozen=True, kw_only=True)
class UCXOptions(NetworkOptions):
    """Options of the transport, beside those of `NetworkOptions`.

    Attributes:
        allow_plaintext: Talk to other machines. UCX neither encrypts nor authenticates: whoever reaches the port
            can read the pool, so the network must be one where only nodes are.
        tls: UCX transports to choose from, as in `UCX_TLS`; empty means all. Shared memory is never used: UCX
            cannot survive a peer's death over it.
        net_devices: Network devices to choose from, as in `UCX_NET_DEVICES`. Empty means all, or `lo` alone unless
            `allow_plaintext`.
        refuse_tcp: Rather fail than move bytes over TCP.
        rndv_threshold: Where UCX changes from sending at once to rendezvous, as in `UCX_RNDV_THRESH`. `"auto"` leaves
            it to UCX, but where there is nothing but TCP, all is sent at once.
        rndv_scheme: How UCX does a rendezvous, as in `UCX_RNDV_SCHEME`.
        tcp_segment_bytes: UCX's send and receive buffers on TCP.
        spin_us: For how many microseconds after a step of a read a node looks for the next one before it sleeps, if
            no more than a slice is under way; twice as long after it began a read. 0: it sleeps at once.
    """

    MAX_SLICE_BYTES: ClassVar[int] = 64 << 20
    MAX_WINDOW_BYTES: ClassVar[int] = 256 << 20

    allow_plaintext: bool = False
    tls: str = ""
    net_devices: str = ""
    refuse_tcp: bool = False
    rndv_threshold: str = "auto"
    rndv_scheme: str = "auto"
    tcp_segment_bytes: Annotated[int, integer(8 << 10, 16 << 20)] = 256 << 10
    spin_us: Annotated[int, integer(0, 10_000)] = 200

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.refuse_tcp and "tcp" in self.tls.lstrip("^").split(",") and not self.tls.startswith("^"):
            raise ConfigurationError(
                f"refuse_tcp=true, and tls={self.tls!r} asks for tcp", key="refuse_tcp", value=True
            )

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

    def require_allowed(self, mechanism: str) -> None:
        """Check that bytes may move by what UCX chose, e.g. `"ucx:rc_mlx5+tcp"`.

        Raises:
            PeerRefusedError: there is TCP in it, which is refused.
        """
        if self.refuse_tcp and "tcp" in mechanism.removeprefix(f"{SCHEME}:").split("+"):
            raise PeerRefusedError(f"refuse_tcp=true, and UCX chose {mechanism}: {WAY_OUT}")

    def tuned_for(self, mechanism: str) -> Self:
        """These options, where a rendezvous, which is a round trip more, cannot be worth it.

        UCX is then held to TCP by name: without a rendezvous it takes reading another process's memory (`cma`) for a
        way as well.

        Args:
            mechanism: The best that there is on this node, e.g. `"ucx:tcp"`.
        """
        if mechanism == f"{SCHEME}:tcp" and self.rndv_threshold == "auto":
            return replace(self, rndv_threshold="inf", tls="tcp")
        return self

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
