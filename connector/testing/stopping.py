"""A connector whose process stops itself in the middle of a push."""

from __future__ import annotations

from typing import ClassVar

from ...transports.registry import register_transport
from ..p2p import PeerToPeerConnector

register_transport("stopping", "kvferry.transports.testing.stopping:StoppingTransport")


class StoppingConnector(PeerToPeerConnector):
    """Handoff by a process that stops while it writes: see `transports.testing.stopping`. Its peers are ordinary."""

    transport_scheme: ClassVar[str] = "stopping"
