"""Hand over between hosts: the consumer pulls the producer's blocks over TCP, checked and, beyond loopback, encrypted."""

from __future__ import annotations

from typing import ClassVar

from .p2p import PeerToPeerConnector


class ZeroMQConnector(PeerToPeerConnector):
    """Handoff over the `zeromq` transport. Its options, such as keys and addresses, stand under `transport`."""

    transport_scheme: ClassVar[str] = "zeromq"
