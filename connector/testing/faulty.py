"""A connector on which things go wrong by a script."""

from __future__ import annotations

from typing import ClassVar

from ...transports.registry import register_transport
from ..p2p import PeerToPeerConnector

register_transport("delayed", "kvferry.transports.testing.delays:DelayedTransport")
register_transport("faulty", "kvferry.transports.testing.faulty:FaultyTransport")


class FaultyConnector(PeerToPeerConnector):
    """Handoff over a transport that is late and goes wrong as its options say: see `transports.testing`."""

    transport_scheme: ClassVar[str] = "faulty"
