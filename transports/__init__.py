"""Move regions of bytes between two processes, without knowing tokens, layers or requests.

The first group of names is for users of a transport. The second is for authors of one (`docs/writing-a-transport.md`).
"""

from __future__ import annotations

if __name__ != "kvferry.transports":  # the same file under a second name would be a second set of classes
    raise ImportError("import kvferry.transports, not transports: `pip install -e .` first")

from ._memory import WordTable, private_arena, require_host, require_transfer
from ._options import parse_options, require_valid
from ._outside import outside
from .base import (
    MAX_MESSAGE_BYTES,
    Arena,
    Connected,
    Endpoint,
    Event,
    GuardTable,
    MessageReceived,
    PeerLost,
    Route,
    TransferEnded,
    Transport,
)
from .endpoint import Backend, HandshakeLimits, Peer, PeerEndpoint, PeerTable, PeerTransport, Read
from .regions import Guard, Pool, RegionPairs, Regions, Segment

__all__ = [  # noqa: RUF022 - two groups
    # for users
    "MAX_MESSAGE_BYTES",
    "Arena",
    "Connected",
    "Endpoint",
    "Event",
    "Guard",
    "GuardTable",
    "MessageReceived",
    "PeerLost",
    "Pool",
    "RegionPairs",
    "Regions",
    "Route",
    "Segment",
    "TransferEnded",
    "Transport",
    # for authors
    "Backend",
    "HandshakeLimits",
    "Peer",
    "PeerEndpoint",
    "PeerTable",
    "PeerTransport",
    "Read",
    "WordTable",
    "outside",
    "parse_options",
    "private_arena",
    "require_host",
    "require_transfer",
    "require_valid",
]
