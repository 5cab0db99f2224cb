"""Hand over between two engines in one process: for tests, and for trying a scheduler without a second node."""

from __future__ import annotations

from typing import ClassVar

from .p2p import PeerToPeerConnector


class InProcConnector(PeerToPeerConnector):
    """Handoff over the `inproc` transport."""

    transport_scheme: ClassVar[str] = "inproc"
