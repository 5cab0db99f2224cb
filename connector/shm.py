"""Hand over between processes of one host: the consumer maps the producer's pool and copies out of it."""

from __future__ import annotations

from typing import ClassVar

from .p2p import PeerToPeerConnector


class SharedMemoryConnector(PeerToPeerConnector):
    """Handoff over the `shm` transport."""

    transport_scheme: ClassVar[str] = "shm"
