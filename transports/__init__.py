"""HOW: regions of bytes between two processes. Knows no token, layer or request."""

from __future__ import annotations

if __name__ != "kvferry.transports":  # the same file under a second name would be a second set of classes
    raise ImportError("import kvferry.transports, not transports: `pip install -e .` first")

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
from .regions import Guard, Pool, RegionPairs, Regions, Segment

__all__ = [
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
]
