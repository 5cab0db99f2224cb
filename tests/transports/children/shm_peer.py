"""The other process of the shm tests.

    shm_peer.py serve KIND [UID]      serve a pool; print its address; end when stdin does
    shm_peer.py connect ADDRESS       connect; print "connecting"; end when stdin does
    shm_peer.py read ADDRESS UID      become user UID, connect, read a page, print how that ended

KIND names the parts of the pool: `arena` or `foreign`, joined by `+`. Each part is `PART_BYTES` long.
Guard 3 holds 9. Byte i of the pool is `i * 7 % 251`.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading

import numpy as np

from kvferry.transports import Connected, Guard, Pool, RegionPairs, Segment, TransferEnded
from kvferry.transports.base import Endpoint, PeerLost
from kvferry.transports.shm import SharedMemoryTransport

PART_BYTES = 8 << 20
SEVERAL_USERS = {"allowed_uids": [0, 65534]}


def endpoint_with_pool(kind: str, options: dict[str, object]) -> tuple[Endpoint, list[object]]:
    transport = SharedMemoryTransport(options)
    owners: list[object] = []
    segments = []
    for number, part in enumerate(kind.split("+")):
        values = (np.arange(number * PART_BYTES, (number + 1) * PART_BYTES) * 7 % 251).astype(np.uint8)
        if part == "arena":
            arena = transport.allocate(PART_BYTES)
            np.frombuffer(arena.buffer, dtype=np.uint8)[:] = values
            segments.append(arena.segment)
            owners.append(arena)
        else:
            segments.append(Segment(values.ctypes.data, PART_BYTES))
            owners.append(values)
    endpoint = transport.register(Pool(segments))
    transport.guards.set(3, 9)
    return endpoint, [transport, *owners]


def become(uid: int) -> None:
    os.setuid(uid)
    # After a change of its user, other processes cannot read a process until it allows that
    # (PR_SET_DUMPABLE).
    ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)


def serve_until_stdin_ends(endpoint: Endpoint) -> None:
    is_over = threading.Event()

    def watch() -> None:
        sys.stdin.read()
        is_over.set()
        endpoint.wake()

    threading.Thread(target=watch, daemon=True).start()
    while not is_over.is_set():
        endpoint.wait_events(60)
    endpoint.close()


def read_once(endpoint: Endpoint, address: str) -> str:
    peer_id = endpoint.start_connect(address, timeout_s=10)
    pairs = RegionPairs(np.array([[0, 0, 4096]], dtype=np.int64))
    while True:
        for event in endpoint.wait_events(10):
            if isinstance(event, Connected):
                endpoint.start_read(peer_id, pairs, Guard(3, 9), timeout_s=10)
            elif isinstance(event, (TransferEnded, PeerLost)):
                return f"{type(event.error).__name__} {event.error}"


def main() -> None:
    role = sys.argv[1]
    if role == "serve":
        options = SEVERAL_USERS if len(sys.argv) > 3 else {}
        endpoint, _owners = endpoint_with_pool(sys.argv[2], options)
        if len(sys.argv) > 3:
            become(int(sys.argv[3]))
        print(endpoint.listen(""), flush=True)
        serve_until_stdin_ends(endpoint)
    elif role == "connect":
        endpoint, _owners = endpoint_with_pool("arena", {})
        endpoint.start_connect(sys.argv[2], timeout_s=10)
        print("connecting", flush=True)
        serve_until_stdin_ends(endpoint)
    else:
        endpoint, _owners = endpoint_with_pool("arena", SEVERAL_USERS)
        become(int(sys.argv[3]))
        print(read_once(endpoint, sys.argv[2]), flush=True)
        endpoint.close()


if __name__ == "__main__":
    main()
