"""The options and the addresses of the transport."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self
from urllib.parse import parse_qsl

from ..network import HostPort, NetworkOptions, malformed_address

SCHEME = "zeromq"


@dataclass(frozen=True, kw_only=True)
class ZeroMQOptions(NetworkOptions):
    """Options of the transport, in addition to those of `NetworkOptions`.

    Attributes:
        curve: Encrypt and authenticate: `"on"`, `"off"`, or `"auto"`, which means on except for loopback.
        curve_secret_key_file: This node's CURVE secret key, 40 characters of Z85.
        curve_allowed_keys_file: The public keys of the nodes to talk to, one per line, Z85; `# ` begins a
            comment.
        shared_secret_file: At least 16 bytes that all nodes share, instead of the two files above.
        checksums: Have the owner hash each slice (xxh3), and verify it before it is accepted.
    """

    MAX_SLICE_BYTES: ClassVar[int] = 4 << 20
    MAX_WINDOW_BYTES: ClassVar[int] = 64 << 20

    curve: Literal["auto", "on", "off"] = "auto"
    curve_secret_key_file: str = ""
    curve_allowed_keys_file: str = ""
    shared_secret_file: str = ""
    checksums: bool = True


@dataclass(frozen=True)
class Address(HostPort):
    """`zeromq://host:port`, and `?curve=` with the listener's public key in hex if it requires CURVE.

    The key is not secret, and nothing is trusted because an address contains it: see `security`.
    """

    server_key: bytes = b""

    @classmethod
    def parse(cls, text: str, scheme: str = SCHEME) -> Self:
        """Read an address.

        Raises:
            ConfigurationError: it is malformed, or of another scheme.
        """
        found, query = cls._parse_with_query(text, scheme)
        try:
            fields = dict(parse_qsl(query, strict_parsing=True)) if query else {}
            key = bytes.fromhex(fields.pop("curve", ""))
        except ValueError as error:
            raise malformed_address(text, scheme) from error
        if fields or len(key) not in (0, 32):
            raise malformed_address(text, scheme)
        return replace(found, server_key=key)

    def __str__(self) -> str:
        query = f"?curve={self.server_key.hex()}" if self.server_key else ""
        return f"{SCHEME}://{self.authority}{query}"

    @property
    def endpoint(self) -> str:
        """The address in libzmq's notation, without the key."""
        return f"tcp://{self.authority}"
