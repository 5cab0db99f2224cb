"""`auto://host;shm://…;nixl://…;zeromq://…`: the addresses of a process, one per transport, and its host."""

from __future__ import annotations

import hashlib
import string
from dataclasses import dataclass
from pathlib import Path
from typing import Self
from urllib.parse import quote, unquote

from ..errors import ConfigurationError

SCHEME = "auto"

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_KEPT = "".join(set(string.punctuation) - set(";%"))


def this_host() -> str:
    """Name the running kernel: the same for all its processes and containers, and different on every other
    host.
    """
    return hashlib.sha256(_BOOT_ID.read_bytes()).hexdigest()[:16]


@dataclass(frozen=True)
class AutoAddress:
    """An address of the `auto` transport.

    Attributes:
        host: See `this_host`.
        local: The process's address in shared memory; empty if other processes cannot map its pool.
        networks: Its addresses for other hosts, one per network transport.
    """

    host: str
    local: str
    networks: tuple[str, ...]

    def __str__(self) -> str:
        quoted = (quote(address, safe=_KEPT) for address in (self.local, *self.networks))
        return f"{SCHEME}://{';'.join((self.host, *quoted))}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse what `str` wrote.

        Raises:
            ConfigurationError: it is malformed.
        """
        scheme, _, rest = text.partition("://")
        parts = [unquote(part) for part in rest.split(";")]
        if scheme != SCHEME or len(parts) < 3 or not all((parts[0], *parts[2:])):
            raise ConfigurationError(
                f"not an auto address: {text!r}; they look like auto://host;shm://…;zeromq://…",
                key="address",
                value=text,
            )
        return cls(parts[0], parts[1], tuple(parts[2:]))
