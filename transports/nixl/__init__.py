"""`nixl`: reads by NIXL, over RDMA or whatever else its backends have, that succeed only if a guard held.

Control messages go over one TCP connection per peer. A read is NIXL's READ of the data, and after its end a
READ of the guard's word; it succeeds if the word still holds the guard's value. The owner of the memory takes
no part. Over a path that is not one-sided, such as TCP, its agent has to answer, so readers tell the owner
when to let the agent work.

NIXL cannot cancel a transfer: whatever else is released or removed, its bytes still land. So a read that has
timed out keeps its blocks until NIXL reports its end. If that takes longer than `DRAIN_S`, or if the peer is
lost, the agent that talks to the peer is destroyed, which ends the read for certain, and only then is the end
reported.

    options    options and addresses
    library    all calls of NIXL
    libnl      keeps the host's libnl apart from the copy in NIXL's wheel
    wire       frames ↔ dataclasses
    reads      slices, and the look at the guard
    transport  `NIXLTransport` and its backend: connections, handshakes and agents
"""

from __future__ import annotations

from .options import NIXLOptions
from .transport import NIXLTransport

__all__ = ["NIXLOptions", "NIXLTransport"]
