"""`ucx`: two hosts, over what UCX finds between them: RDMA, or TCP.

Control messages go over one TCP connection a peer, bytes over UCX. The reader pulls: it cuts a read into slices, gives
UCX the place of each, straight in the pool if it is large, under a tag that it draws by lot, and *fetches* the slices a
few at a time. The owner sends each from its pool under that tag and, when UCX says that the bytes have left, looks at
the guard once more before it vouches for them. Nothing is accepted before both are there.

The connection of its own is what makes a lost peer certain: its end, or two seconds without a sign of life, ends the
peer's UCX worker, and with it whatever could still write into the pool. UCX's endpoints have error handling on, so a
dead peer costs a read, and never the process.

    options    what a user may set; addresses
    library    all that is asked of `ucxx`
    wire       frames ↔ dataclasses
    channel    the control connection
    stages     memory in which small regions travel together
    serving    answers fetches
    reads      makes fetches
    peers      one peer, and its handshake
    vigil      looking for a moment before sleeping
    node       everything between `register` and `close`
    transport  `UCXTransport`
"""

from __future__ import annotations

from .options import UCXOptions
from .transport import UCXTransport

__all__ = ["UCXOptions", "UCXTransport"]
