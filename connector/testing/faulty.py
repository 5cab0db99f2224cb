"""A connector on which things go wrong as a script says."""

from __future__ import annotations

from typing import ClassVar

from ...transports.registry import register_transport
from ..p2p.connector import PeerToPeerConnector

register_transport("delayed", "kvferry.transports.testing.delays:DelayedTransport")
register_transport("faulty", "kvferry.transports.testing.faulty:FaultyTransport")


class FaultyConnector(PeerToPeerConnector):
    """Hand over through a transport that delays and fails as its options say; see `transports.testing`."""

    transport_scheme: ClassVar[str] = "faulty"
