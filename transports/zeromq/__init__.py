"""`zeromq`: two hosts, over TCP, by ZeroMQ.

The reader pulls. It cuts a read into slices of about four megabytes and *fetches* them one by one, a few ahead (its
window); the owner keeps no state about a read: it answers each fetch from its pool, without a copy, and forgets it.
So a reader that stalls holds nothing of the owner's, many reads share a connection fairly, and control messages
never queue behind more than one window. When the last slice is in place the reader asks once more whether the guard
still holds; that answer was given after every byte had left the owner's memory, which is what makes it a proof.

    options    what a user may set; addresses
    security   CURVE keys, and who may connect
    wire       frames ↔ dataclasses
    frames     bytes in libzmq's hands, without a copy made for them
    links      one connection each: the dialled kind here, the accepted kind in `listener`
    serving    answers fetches
    reads      makes fetches
    node       everything between `register` and `close`
    transport  `ZeroMQTransport`
"""

from __future__ import annotations

from .options import ZeroMQOptions
from .transport import ZeroMQTransport

__all__ = ["ZeroMQOptions", "ZeroMQTransport"]
