"""`zeromq`: peers on other hosts, over TCP, by ZeroMQ.

The reader pulls. It cuts a read into slices of about four megabytes and *fetches* them one by one, a few
ahead (its window). The owner keeps no state about a read: it answers each fetch from its pool, without a
copy, and forgets it. So a reader that stalls holds no memory of the owner's, many reads share a connection
fairly, and control messages never wait for more than one window. When the last slice is in place the reader
asks once more whether the guard still holds; that answer was given after every byte had left the owner's
memory, which is what makes it a proof.

    options    options and addresses
    security   CURVE keys
    wire       frames to dataclasses and back
    frames     bytes in libzmq's memory, without a copy
    channel    one connection each: the dialled kind; the accepted kind is in `listener`
    listener   accepts peers, and decides which CURVE keys are admitted
    sockets    all sockets of a process, and the wait for them
    serving    answers fetches
    reads      makes fetches
    transport  `ZeroMQTransport` and its backend: connections and handshakes
"""

from __future__ import annotations

from .options import ZeroMQOptions
from .transport import ZeroMQTransport

__all__ = ["ZeroMQOptions", "ZeroMQTransport"]
