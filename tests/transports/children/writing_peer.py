"""The other process of the tests of writes.

    writing_peer.py SCHEME ADDRESS

Connects, and once it hears `begin` writes all of its pool into the other's under guard 3, which holds 9, again and
again, each time another value; says `lost` and ends when the other is gone.
"""

from __future__ import annotations

import sys
from contextlib import suppress

import numpy as np

from kvferry.transports import Guard, MessageReceived, PeerLost, Pool, RegionPairs, TransferEnded
from kvferry.transports.errors import PeerLostError
from kvferry.transports.registry import create_transport

POOL_BYTES = 16 << 20


def main() -> None:
    transport = create_transport(sys.argv[1], {})
    arena = transport.allocate(POOL_BYTES)
    memory = np.frombuffer(arena.buffer, dtype=np.uint8)
    transport.register(Pool([arena.segment]))
    peer_id = transport.start_connect(sys.argv[2], timeout_s=20)
    pairs = RegionPairs(np.array([[0, 0, POOL_BYTES]], dtype=np.int64))
    while True:
        for event in transport.wait_events(20):
            if isinstance(event, MessageReceived) or (isinstance(event, TransferEnded) and not event.error):
                memory[:] = memory[0] % 100 + 1
                with suppress(PeerLostError):  # the event comes next
                    transport.start_write(peer_id, pairs, Guard(3, 9), timeout_s=20)
            elif isinstance(event, PeerLost):
                print("lost", flush=True)
                transport.close()
                return


if __name__ == "__main__":
    main()
