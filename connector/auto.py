"""Hand over by whatever suits each peer: shared memory on one host, a network transport between hosts."""

from __future__ import annotations

from typing import ClassVar

from .p2p import PeerToPeerConnector


class AutoConnector(PeerToPeerConnector):
    """Handoff over the `auto` transport. The options of the transports it chooses from stand under `transport`."""

    transport_scheme: ClassVar[str] = "auto"
