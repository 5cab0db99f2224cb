"""The options of the transport, and its addresses."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Self

from ..checked import integer
from ..network import PlainAddress, PlaintextOptions
from ..options import INTERNAL

SCHEME = "ucx"

#: UCX's send and receive buffers on TCP.
_TCP_SEGMENT_BYTES = 256 << 10

#: What to do if UCX finds no transport that leads to a peer.
REMEDY = "join the nodes by a network that both may use, or change tls or net_devices of either"


@dataclass(frozen=True, kw_only=True)
class UCXOptions(PlaintextOptions):
    """Options of the transport, in addition to those of `PlaintextOptions`.

    Attributes:
        rndv_threshold: Size from which UCX uses a rendezvous instead of sending at once, as in
            `UCX_RNDV_THRESH`. `"auto"` leaves it to UCX; but if there is nothing but TCP, everything is sent
            at once.
        spin_us: How long a node polls for the next step of a read before it blocks, in microseconds, while at
            most one slice is in flight; twice as long after it starts a read. 0: it blocks at once.
    """

    scheme: ClassVar[str] = SCHEME
    MAX_SLICE_BYTES: ClassVar[int] = 64 << 20
    MAX_WINDOW_BYTES: ClassVar[int] = 256 << 20

    rndv_threshold: str = field(default="auto", metadata=INTERNAL)
    spin_us: Annotated[int, integer(0, 10_000)] = field(default=200, metadata=INTERNAL)

    def tuned_for(self, mechanism: str) -> Self:
        """Return these options without rendezvous if there is nothing but TCP, where the extra round trip
        never pays.

        `tls` then names TCP: without a rendezvous UCX would also consider reading another process's memory
        (`cma`).

        Args:
            mechanism: The best one on this node, e.g. `"ucx:tcp"`.
        """
        if mechanism == f"{SCHEME}:tcp" and self.rndv_threshold == "auto":
            return replace(self, rndv_threshold="inf", tls="tcp")
        return self

    def settings(self) -> dict[str, str]:
        """These options as UCX's own settings, without their prefix `UCX_`."""
        settings = {
            "TCP_TX_SEG_SIZE": str(_TCP_SEGMENT_BYTES),
            "TCP_RX_SEG_SIZE": str(_TCP_SEGMENT_BYTES),
            "RNDV_THRESH": self.rndv_threshold,
        }
        if self.tls:
            settings["TLS"] = self.tls
        if self.net_devices or not self.allow_plaintext:
            settings["NET_DEVICES"] = self.net_devices or "lo"
        return settings


@dataclass(frozen=True)
class Address(PlainAddress):
    """`ucx://host:port`."""

    scheme: ClassVar[str] = SCHEME
