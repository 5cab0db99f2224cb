"""Hand over between hosts by UCX: RDMA where there is some, TCP where not."""

from __future__ import annotations

from typing import ClassVar

from .p2p import PeerToPeerConnector


class UCXConnector(PeerToPeerConnector):
    """Handoff over the `ucx` transport. Its options, such as `tls` and addresses, stand under `transport`."""

    transport_scheme: ClassVar[str] = "ucx"
