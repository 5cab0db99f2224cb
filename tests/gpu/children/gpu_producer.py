"""The other process of the GPU tests. It prints one line of JSON, and ends when its stdin is closed.

gpu_producer.py pool DEVICE     serve a pool of 64 MiB in which byte i is i * 7 % 251; guard 3 holds 9
gpu_producer.py offer DEVICE    offer blocks 1 and 2 of a cache, while a slow kernel delays the one that fills
                                them with 7
"""

from __future__ import annotations

import json
import sys
import threading
from dataclasses import asdict

import torch

from kvferry.connector.metadata import HandoffMetadata, OfferOrder
from kvferry.connector.options import ConnectorOptions
from kvferry.connector.testing import CacheShape, engine_config
from kvferry.connector.worker_half import HandoffWorker
from kvferry.transports import Pool, Segment
from kvferry.transports.shm import SharedMemoryTransport

POOL_BYTES = 64 << 20
SHAPE = CacheShape(dtype=torch.float32)
ABOUT_A_SECOND = 1 << 30  # in cycles


def serve_pool(device: torch.device) -> None:
    memory = (torch.arange(POOL_BYTES, device=device) * 7 % 251).to(torch.uint8)
    torch.cuda.synchronize(device)
    transport = SharedMemoryTransport()
    endpoint = transport.register(Pool([Segment(memory.data_ptr(), POOL_BYTES, "cuda")]))
    transport.guards.set(3, 9)
    print(json.dumps({"address": endpoint.listen("")}), flush=True)
    is_over = threading.Event()

    def watch() -> None:
        sys.stdin.read()
        is_over.set()
        endpoint.wake()

    threading.Thread(target=watch, daemon=True).start()
    while not is_over.is_set():
        endpoint.wait_events(60)
    transport.close()


def offer_blocks(device: torch.device) -> None:
    config = SHAPE.kv_cache_config()
    worker = HandoffWorker(
        engine_config("shm", engine_id="producer"), config, SharedMemoryTransport(), ConnectorOptions()
    )
    num_bytes = sum(tensor.size for tensor in config.kv_cache_tensors)
    pool = worker.allocate_kv_memory(num_bytes, device).view(SHAPE.dtype)
    cache = pool.view(SHAPE.num_blocks, SHAPE.num_layers, *SHAPE.logical_page).transpose(0, 1)
    worker.register_cross_layers_kv_cache(cache)
    torch.cuda._sleep(ABOUT_A_SECOND)
    cache[:, 1:3] = 7.0
    worker.submit(HandoffMetadata(offers={"p": OfferOrder(1, ((1, 2),), 2 * SHAPE.block_size)}))
    print(json.dumps(asdict(worker.get_handshake_metadata())), flush=True)
    sys.stdin.read()
    worker.shutdown()


if __name__ == "__main__":
    {"pool": serve_pool, "offer": offer_blocks}[sys.argv[1]](torch.device(sys.argv[2]))
