"""`shm`: both processes on one host. A read is one copy out of the peer's mapped pool.

The peer's arenas and guard table come as read-only descriptors over a Unix socket and are mapped here, so a read
needs nothing of the peer: it may be busy, or stopped. A write is a read that its target makes. Memory that is in no arena is read with `process_vm_readv`.
An end of the socket is the end of the peer, which the kernel reports at once. Pools on a GPU are mapped by CUDA's driver
instead, and copied by the GPU; guards are in main memory all the same.

    arena       sealed memory files, and the mapping of a peer's
    guards      a peer's guard table
    pools       the memory at both ends of a read
    cuda        one GPU, by CUDA's driver
    cuda_pools  as `pools`, on a GPU
    copier      the threads that copy
    hello       what goes over the socket
    greeting    how a connection begins
    options     what a user may set
    sockets     how it goes: frames, descriptors, the peer's user id
    transport   `SharedMemoryTransport`
"""

from __future__ import annotations

from .options import SharedMemoryOptions
from .transport import SharedMemoryTransport

__all__ = ["SharedMemoryOptions", "SharedMemoryTransport"]
