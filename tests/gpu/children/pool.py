"""A process with a pool: `pool.py PLACE SCHEME [OPTIONS]`, with the transport's options as JSON.

It serves the pool, which is filled with `pattern(0, …)`, and prints one line of JSON: its address, or why the
transport cannot work here. A message with region pairs makes it read these regions from the peer, whose pool
holds `pattern(0, …, seed=1)`; it answers with what is wrong with the bytes. It ends when its stdin is closed.
"""

from __future__ import annotations

import json
import sys
import threading
from contextlib import ExitStack

import numpy as np

from kvferry.transports import MessageReceived, RegionPairs
from kvferry.transports.errors import BackendUnavailableError
from tests.support.gpu_memory import NUM_SEGMENTS, SEGMENT_BYTES, PoolNode, pattern, stand_in_driver


def serve(place: str, scheme: str, options: str = "{}") -> None:
    with ExitStack() as stack:
        if place == "stand-in":
            stack.enter_context(stand_in_driver())
        try:
            node = PoolNode(place, scheme, SEGMENT_BYTES, NUM_SEGMENTS, **json.loads(options))
        except BackendUnavailableError as error:
            print(json.dumps({"unavailable": str(error)}), flush=True)
            return
        stack.callback(node.close)
        node.write(pattern(0, node.num_bytes))
        print(json.dumps({"address": node.endpoint.listen("")}), flush=True)
        is_over = threading.Event()

        def watch() -> None:
            sys.stdin.read()
            is_over.set()
            node.endpoint.wake()

        threading.Thread(target=watch, daemon=True).start()
        while not is_over.is_set():
            for event in node.endpoint.wait_events(60):
                if isinstance(event, MessageReceived):
                    node.endpoint.send(event.peer_id, read_back(node, event).encode())


def read_back(node: PoolNode, request: MessageReceived) -> str:
    """Read regions from a peer's pool. Returns what is wrong; empty if nothing is."""
    pairs = RegionPairs(np.frombuffer(request.message, dtype=np.int64).reshape(-1, 3))
    ended = node.end_of(node.start_read(request.peer_id, pairs))
    if ended.error is not None:
        return repr(ended.error)
    pool = node.read()
    for local, remote, num_bytes in pairs.table.tolist():
        if not np.array_equal(pool[local : local + num_bytes], pattern(remote, num_bytes, seed=1)):
            return f"wrong bytes at {local}"
    return ""


if __name__ == "__main__":
    serve(*sys.argv[1:])
