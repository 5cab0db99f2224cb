"""The other process of the network transports' tests.

    network_peer.py SCHEME serve              serve a pool; print its address
    network_peer.py SCHEME connect ADDRESS    connect; print "connected"

It has a pool of `POOL_BYTES` whose byte i is `i * 7 % 251`. Guard 3 holds 9. It ends when its standard input ends.
"""

from __future__ import annotations

import sys
import threading

import numpy as np

from kvferry.transports import Connected, Pool
from kvferry.transports.registry import create_transport

POOL_BYTES = 24 << 20


def main() -> None:
    transport = create_transport(sys.argv[1], {})
    arena = transport.allocate(POOL_BYTES)
    np.frombuffer(arena.buffer, dtype=np.uint8)[:] = (np.arange(POOL_BYTES) * 7 % 251).astype(np.uint8)
    endpoint = transport.register(Pool([arena.segment]))
    transport.guards.set(3, 9)
    if sys.argv[2] == "serve":
        print(endpoint.listen(""), flush=True)
    else:
        endpoint.start_connect(sys.argv[3], timeout_s=20)
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set(), endpoint.wake())).start()
    while not ended.is_set():
        if any(isinstance(event, Connected) and not event.incoming for event in endpoint.wait_events(1.0)):
            print("connected", flush=True)
    transport.close()


if __name__ == "__main__":
    main()
