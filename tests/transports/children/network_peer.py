"""The other process of the transports' tests.

    network_peer.py SCHEME OPTIONS serve              serve a pool; print its address
    network_peer.py SCHEME OPTIONS connect ADDRESS    connect; print "connected"
    network_peer.py SCHEME OPTIONS read ADDRESS       connect; print "connected"; read the pool again and
    again
    network_peer.py SCHEME OPTIONS try ADDRESS        connect; read the pool once; print how that ended

OPTIONS are the transport's, as JSON. There may be others among them:
`on_gpu`: the pool is on a stand-in's GPU. The value says when the process kills itself: `"launched"` when the
first copies are launched; `"copied"` after the first copy, before the transport learns of it; `"never"`.
`parts`: of what memory the pool is, `arena` or `foreign`, joined by `+`.
`uid`: the user that the process becomes before it listens or connects.

It has a pool of `POOL_BYTES` whose byte i is `i * 7 % 251`. Guard 3 holds 9. It ends when its standard input
ends, and after `try`.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
from typing import Any

import numpy as np

from kvferry.transports import Connected, Guard, PeerLost, Pool, RegionPairs, Segment, TransferEnded
from kvferry.transports.registry import create_transport

POOL_BYTES = 24 << 20


def main() -> None:
    _, scheme, text, task, *address = sys.argv
    options = json.loads(text)
    dies, uid = options.pop("on_gpu", ""), options.pop("uid", 0)
    parts = options.pop("parts", "arena").split("+")
    transport = create_transport(scheme, options)
    pattern = np.resize((np.arange(251) * 7 % 251).astype(np.uint8), POOL_BYTES)
    owners, segments = [], []
    for part, values in zip(parts, np.split(pattern, len(parts)), strict=True):
        if part == "arena":
            arena = allocate_on_gpu(dies) if dies else transport.allocate(len(values))
            np.frombuffer(arena.buffer, dtype=np.uint8)[:] = values
            owners.append(arena)
            segments.append(arena.segment)
        else:
            segments.append(Segment(values.ctypes.data, len(values)))
    endpoint = transport.register(Pool(segments))
    transport.guards.set(3, 9)
    if uid:
        become(uid)
    peer_id = 0
    if task == "serve":
        print(endpoint.listen(""), flush=True)
    else:
        peer_id = endpoint.start_connect(address[0], timeout_s=20)
    whole = RegionPairs(np.array([(0, 0, POOL_BYTES)], dtype=np.int64))
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set(), endpoint.wake()), daemon=True).start()
    while not ended.is_set():
        for event in endpoint.wait_events(1.0):
            if isinstance(event, Connected) and not event.incoming:
                print("connected", flush=True)
            elif isinstance(event, PeerLost):
                print(f"lost a peer: {event.error}", file=sys.stderr, flush=True)
            if task == "try" and isinstance(event, TransferEnded | PeerLost):
                print(f"{type(event.error).__name__} {event.error}", flush=True)
                ended.set()
            elif task in ("read", "try") and isinstance(event, Connected | TransferEnded):
                endpoint.start_read(peer_id, whole, Guard(3, 9), timeout_s=30)
    transport.close()


def become(uid: int) -> None:
    os.setuid(uid)
    # After a change of its user, other processes cannot read a process until it allows that
    # (PR_SET_DUMPABLE).
    ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)


def allocate_on_gpu(dies: str) -> Any:
    # Here, because the tests over RDMA start this file by its path, without the repository's root.
    from tests.support.cuda_stand_in import BINDINGS, CudaDriverStandIn

    driver: Any = CudaDriverStandIn()
    sys.modules.update(dict.fromkeys(BINDINGS, driver))
    if dies == "launched":
        driver._launch = die
    elif dies == "copied":
        driver.on_copied = die
    return driver.allocate(POOL_BYTES)


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
