"""The `auto` transport: shared memory with peers on this host, a network transport with all others.

A process listens over all of them, and its address names them and the host. The side that connects chooses:
shared memory if it runs on the same host and shared memory really connects, otherwise the first network
transport that both sides have and that connects. The choice is made for each connection and holds as long as
it does; it is logged, and `route_of` returns it. See docs/decisions/0005-auto-transport.md.
"""

from .transport import AutoOptions, AutoTransport

__all__ = ["AutoOptions", "AutoTransport"]
