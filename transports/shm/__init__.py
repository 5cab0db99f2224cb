"""`shm`: both processes on one host. A read is one copy out of the peer's mapped pool.

The peer's arenas and guard table come as read-only descriptors over a Unix socket and are mapped here, so a
read needs nothing from the peer: it may be busy, or stopped. Memory that is in no arena is read with
`process_vm_readv`. If the peer's process ends, the kernel closes the socket, so the loss is noticed at once.
Pools on a GPU are mapped by CUDA's driver instead, and copied by the GPU; their guards are in main memory all
the same.

    arena       sealed memory files, and the mapping of a peer's
    guards      a peer's guard table
    pools       the memory at both ends of a read
    cuda        one GPU, through CUDA's driver
    cuda_pools  like `pools`, on a GPU
    copier      the threads that copy
    hello       the messages of the handshake
    handshake   its steps
    sockets     frames and descriptors over Unix sockets, and the peer's user id
    options     `SharedMemoryOptions`
    transport   `SharedMemoryTransport`, its endpoint and backend
"""

from __future__ import annotations

from .options import SharedMemoryOptions
from .transport import SharedMemoryTransport

__all__ = ["SharedMemoryOptions", "SharedMemoryTransport"]
