"""The options of the transport, its addresses, and what they mean for UCX's environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

from ..checked import integer
from ..errors import ConfigurationError
from ..network import PlainAddress, PlaintextOptions

SCHEME = "nixl"

#: What to do if NIXL finds no route to a peer.
REMEDY = (
    "give both nodes an RDMA device or one host, or change tls, net_devices or backends of either; "
    "refuse_tcp=false allows TCP, whose risk docs/transports.md describes"
)


@dataclass(frozen=True, kw_only=True)
class NIXLOptions(PlaintextOptions):
    """Options of the transport, in addition to those of `PlaintextOptions`.

    Attributes:
        backends: NIXL's plug-ins that may move bytes, separated by commas, best first.
        refuse_tcp: Fail instead of moving bytes over TCP, where a reader that dies can abort its owner's
            process.
    """

    scheme: ClassVar[str] = SCHEME
    MAX_SLICE_BYTES: ClassVar[int] = 1 << 30
    MAX_WINDOW_BYTES: ClassVar[int] = 16 << 30

    backends: str = "UCX"
    refuse_tcp: bool = True
    slice_bytes: Annotated[int, integer(64 << 10)] = 16 << 20

    def __post_init__(self) -> None:
        super().__post_init__()
        names = self.backend_names
        if not all(names) or len(set(names)) < len(names):
            raise ConfigurationError(
                f"backends must name NIXL plug-ins, separated by commas, each once; got {self.backends!r}",
                key="backends",
                value=self.backends,
            )
        if self.refuse_tcp and names != ("UCX",):
            raise ConfigurationError(
                f"refuse_tcp=true can be kept by backend 'UCX' only, got backends={self.backends!r}: set "
                "refuse_tcp=false if the other backends may use TCP",
                key="refuse_tcp",
                value=True,
            )
        if self.refuse_tcp and "tcp" in self.tls.split(","):
            raise ConfigurationError(
                f"refuse_tcp=true, and tls={self.tls!r} asks for tcp: remove one of them",
                key="refuse_tcp",
                value=True,
            )

    @property
    def backend_names(self) -> tuple[str, ...]:
        """`backends` as names."""
        return tuple(name.strip() for name in self.backends.split(","))

    def environment(self, inherited: Mapping[str, str] = os.environ) -> dict[str, str]:
        """Return the variables that UCX must see while an agent is made. UCX has no other way to be told.

        Raises:
            ConfigurationError: TCP is refused, and `UCX_TLS` asks for it.
        """
        found = {}
        tls = self.tls or inherited.get("UCX_TLS", "")
        if self.refuse_tcp:
            if tls in ("", "all"):
                tls = "^tcp"
            elif tls.startswith("^"):
                tls = tls if "tcp" in tls[1:].split(",") else f"{tls},tcp"
            elif "tcp" in tls.split(","):
                raise ConfigurationError(
                    f"refuse_tcp=true, and UCX_TLS={tls!r} in the environment asks for tcp: set tls, or change the variable",
                    key="refuse_tcp",
                    value=True,
                )
        if tls:
            found["UCX_TLS"] = tls
        devices = self.net_devices or inherited.get("UCX_NET_DEVICES", "")
        if devices or not self.allow_plaintext:
            found["UCX_NET_DEVICES"] = devices or "lo"
        return found


@dataclass(frozen=True)
class Address(PlainAddress):
    """`nixl://host:port`."""

    scheme: ClassVar[str] = SCHEME
