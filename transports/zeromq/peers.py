"""What a node keeps per peer: a `Lookup`, then a `Handshake`, then a `Link`."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import VersionMismatchError
from ..regions import Pool
from .channel import Channel
from .options import Address
from .reads import Reader
from .security import CurveKeys


@dataclass(eq=False)
class Lookup:
    """A peer to connect to, until the address of its host is known.

    Attributes:
        keys: None for plaintext, and until `connect` has chosen.
    """

    address: Address
    keys: CurveKeys | None = None


@dataclass(eq=False)
class Handshake:
    """A connection that is not a peer yet, and may never be one.

    Attributes:
        refusal: Why it never will be one. It stays open so that our hello, which names our version, can arrive.
    """

    channel: Channel
    refusal: VersionMismatchError | None = None


@dataclass(frozen=True, eq=False)
class Link:
    """The connection to a peer whose handshake is over.

    Attributes:
        num_guards: Of the peer's table.
        pool: The peer's run of offsets. Its addresses mean nothing here.
    """

    channel: Channel
    num_guards: int
    pool: Pool
    reader: Reader


Connection = Lookup | Handshake | Link
