"""The `auto` transport: shared memory with peers on this host, a network transport with all others.

A process listens over both, and its address names both and the host. Who connects chooses: shared memory if the host is
his own and shared memory really connects, else the network. The choice holds for one peer, is made anew with each
connection, is logged, and is told by `route_of`. See docs/decisions/0005-auto-transport.md.
"""

from .transport import AutoOptions, AutoTransport

__all__ = ["AutoOptions", "AutoTransport"]
