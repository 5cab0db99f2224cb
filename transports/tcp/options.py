"""The options and the addresses of the transport."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Final, Literal, Self

from ..checked import integer
from ..errors import ConfigurationError
from ..network import HostPort, NetworkOptions, malformed_address
from ..options import INTERNAL

SCHEME = "tcp"

_PEER_NAME: Final = re.compile(r"(\*\.)?[\w-]+(\.[\w-]+)*")

#: What an address ends with if its listener requires TLS.
_TLS_QUERY = "tls=on"


@dataclass(frozen=True, kw_only=True)
class TcpOptions(NetworkOptions):
    """Options of the transport, in addition to those of `NetworkOptions`.

    Attributes:
        tls: Encrypt and authenticate: `"on"`, `"off"`, or `"auto"`, which means on except for loopback.
        tls_cert: File with this node's certificate, PEM, followed by intermediate certificates if there are
            any.
        tls_key: File with the certificate's private key, PEM, not encrypted.
        tls_ca: File with the certificates of the CA that signs the certificates of all nodes, PEM. Any node
            that has a certificate of this CA may read the pool, so do not use a public CA.
        tls_verify_host: Have a node that connects check that the listener's certificate names the host of the
            address (an IP address or a DNS name).
        tls_peer_names: DNS names, separated by commas: a peer's certificate must contain one of them,
            whichever side connects. `*.example` stands for one label. Empty admits all certificates of the
            CA.
        checksums: Have the owner hash each slice (xxh3), and verify it before the read succeeds. TLS always
            verifies.
        spin_us: How long a node polls for the next step of a read before it blocks, in microseconds, while at
            most one slice is in flight; twice as long after it starts a read. 0: it blocks at once.
    """

    MAX_SLICE_BYTES: ClassVar[int] = 4 << 20
    MAX_WINDOW_BYTES: ClassVar[int] = 128 << 20

    tls: Literal["auto", "on", "off"] = "auto"
    tls_cert: str = ""
    tls_key: str = ""
    tls_ca: str = ""
    tls_verify_host: bool = True
    tls_peer_names: str = ""
    checksums: bool = True
    spin_us: Annotated[int, integer(0, 10_000)] = field(default=200, metadata=INTERNAL)

    @property
    def peer_names(self) -> tuple[str, ...]:
        """The names in `tls_peer_names`."""
        return tuple(name.strip() for name in self.tls_peer_names.split(",") if name.strip())

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.peer_names:
            if not _PEER_NAME.fullmatch(name):
                raise ConfigurationError(
                    f"tls_peer_names has {name!r}, which is no DNS name; set names such as 'node7.example' or "
                    "'*.nodes.example', separated by commas",
                    key="tls_peer_names",
                    value=self.tls_peer_names,
                )
        files = {key: getattr(self, key) for key in ("tls_cert", "tls_key", "tls_ca")}
        missing = [key for key, value in files.items() if not value]
        if missing and len(missing) < len(files):
            raise ConfigurationError(
                f"tls_cert, tls_key and tls_ca go together, and {missing[0]} is missing; set it, or none of them",
                key=missing[0],
                value="",
            )
        if self.tls == "on" and missing:
            raise ConfigurationError(
                "tls='on' needs tls_cert, tls_key and tls_ca; set them to this node's certificate, its key and the CA",
                key="tls_cert",
                value="",
            )


@dataclass(frozen=True)
class Address(HostPort):
    """`tcp://host:port`, and `?tls=on` if the listener requires TLS.

    The query is only a hint for the error message: a node decides by its own options whether it talks in
    plaintext.
    """

    needs_tls: bool = False

    @classmethod
    def parse(cls, text: str, scheme: str = SCHEME) -> Self:
        """Read an address.

        Raises:
            ConfigurationError: it is malformed, or of another scheme.
        """
        found, query = cls._parse_with_query(text, scheme)
        if query not in ("", _TLS_QUERY):
            raise malformed_address(text, scheme)
        return replace(found, needs_tls=bool(query))

    def __str__(self) -> str:
        return f"{SCHEME}://{self.authority}{f'?{_TLS_QUERY}' if self.needs_tls else ''}"
