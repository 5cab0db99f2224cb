"""The other process of the network transports' tests.

    network_peer.py SCHEME OPTIONS serve              serve a pool; print its address
    network_peer.py SCHEME OPTIONS connect ADDRESS    connect; print "connected"
    network_peer.py SCHEME OPTIONS read ADDRESS       connect; print "connected"; read the pool again and again

OPTIONS are the transport's, as JSON.

It has a pool of `POOL_BYTES` whose byte i is `i * 7 % 251`. Guard 3 holds 9. It ends when its standard input ends.
"""

from __future__ import annotations

import json
import sys
import threading

import numpy as np

from kvferry.transports import Connected, Guard, Pool, RegionPairs, TransferEnded
from kvferry.transports.registry import create_transport

POOL_BYTES = 24 << 20


def main() -> None:
    _, scheme, options, task, *address = sys.argv
    transport = create_transport(scheme, json.loads(options))
    arena = transport.allocate(POOL_BYTES)
    np.frombuffer(arena.buffer, dtype=np.uint8)[:] = (np.arange(POOL_BYTES) * 7 % 251).astype(np.uint8)
    endpoint = transport.register(Pool([arena.segment]))
    transport.guards.set(3, 9)
    peer_id = 0
    if task == "serve":
        print(endpoint.listen(""), flush=True)
    else:
        peer_id = endpoint.start_connect(address[0], timeout_s=20)
    whole = RegionPairs(np.array([(0, 0, POOL_BYTES)], dtype=np.int64))
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set(), endpoint.wake())).start()
    while not ended.is_set():
        for event in endpoint.wait_events(1.0):
            if isinstance(event, Connected) and not event.incoming:
                print("connected", flush=True)
            elif not isinstance(event, TransferEnded):
                continue
            if task == "read":
                endpoint.start_read(peer_id, whole, Guard(3, 9), timeout_s=30)
    transport.close()


if __name__ == "__main__":
    main()
