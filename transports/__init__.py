"""Move regions of bytes between two processes, without knowing tokens, layers or requests.

The first group of names is for users of a transport. The second is for authors of one
(`docs/writing-a-transport.md`), and the built-in transports use the same. What only transports with sockets
need is in `streams` and `network`, which are imported with the first of them.
"""

from __future__ import annotations

if __name__ != "kvferry.transports":  # the same file under a second name would be a second set of classes
    raise ImportError("import kvferry.transports, not transports: `pip install -e .` first")

from ._memory import (
    FileMapping,
    MappedArena,
    WordTable,
    address_of,
    guard_holds,
    prefault,
    private_arena,
    require_available,
    require_guard,
    require_host,
)
from ._slices import SliceLimits, SlicePlan
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
from .options import parse_options, require_valid
from .outside import outside
from .regions import Guard, Pool, RegionPairs, Segment
from .serving import (
    MAX_SIZES_BYTES,
    ROW_BYTES,
    EndpointOptions,
    HandshakeOptions,
    HostTransport,
    PeerPool,
    RegisteredPool,
    ServedPool,
    decode_rows,
    decode_sizes,
    encode_rows,
    encode_sizes,
    stale,
)

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
    "Route",
    "Segment",
    "TransferEnded",
    "Transport",
    # for authors
    "MAX_SIZES_BYTES",
    "ROW_BYTES",
    "Backend",
    "EndpointOptions",
    "FileMapping",
    "HandshakeLimits",
    "HandshakeOptions",
    "HostTransport",
    "MappedArena",
    "Peer",
    "PeerEndpoint",
    "PeerPool",
    "PeerTable",
    "PeerTransport",
    "Read",
    "RegisteredPool",
    "ServedPool",
    "SliceLimits",
    "SlicePlan",
    "WordTable",
    "address_of",
    "decode_rows",
    "decode_sizes",
    "encode_rows",
    "encode_sizes",
    "guard_holds",
    "outside",
    "parse_options",
    "prefault",
    "private_arena",
    "require_available",
    "require_guard",
    "require_host",
    "require_valid",
    "stale",
]
