"""`tcp`: peers on other hosts, over plain sockets or TLS.

The reader pulls. It cuts a read into slices of about four megabytes and *fetches* them, a few ahead (its
window). The owner answers each fetch in order. The kernel copies a slice straight out of the owner's pool and
straight into the reader's; with TLS the cipher does. After the last byte of a slice has left the pool, the
owner looks at the guard and says in an *end* frame whether it still held. The reader believes only slices
whose end says so, and reports success after the last one. A pool on a GPU is copied to a staging buffer
first, and from one afterwards.

    options    options and addresses
    security   TLS: files, contexts, and which peers are admitted
    wire       frames to dataclasses and back
    iovec      pieces of memory that are sent and filled without a copy
    stream     one connection, in plaintext or with TLS
    serving    answers fetches
    reads      makes fetches
    transport  `TcpTransport`, and everything between `register` and `close`
"""

from __future__ import annotations

from .options import TcpOptions
from .transport import TcpTransport

__all__ = ["TcpOptions", "TcpTransport"]
