"""`ucx`: two hosts, over what UCX finds between them: RDMA, or TCP.

Control messages go over one TCP connection per peer, bytes over UCX. The reader cuts a read into slices and
*fetches* a few of them at a time. For each it posts a receive under a random tag: straight into the pool if
the slice is one large region, otherwise into a staging buffer. The owner sends the slice from its pool under
that tag. When UCX says that the bytes have left, the owner checks the guard once more and answers whether it
vouches for them. The reader accepts a slice only when both the bytes and the answer are there.

The separate control connection is what makes the loss of a peer certain: its end, or two seconds without a
sign of life, ends the peer's UCX worker, and with it whatever could still write into the pool. UCX's
endpoints have error handling on, so a dead peer costs a read, and never the process.

    options    options and addresses
    library    all calls of `ucxx`
    wire       frames ↔ dataclasses
    staging    memory in which small regions travel together
    serving    answers fetches
    reads      makes fetches
    transport  `UCXTransport` and its backend: connections and handshakes
"""

from __future__ import annotations

from .options import UCXOptions
from .transport import UCXTransport

__all__ = ["UCXOptions", "UCXTransport"]
