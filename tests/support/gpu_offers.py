"""Two nodes without a model that hand blocks over: their caches, and what the offered blocks contain."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import torch

from kvferry.connector.handoff.events import GroupBlocks, RemoteOffer
from kvferry.connector.p2p.options import ConnectorOptions
from kvferry.connector.p2p.orders import HandoffMetadata
from kvferry.connector.p2p.worker import HandoffWorker
from kvferry.connector.testing import CacheShape, engine_config
from kvferry.transports.registry import create_transport

Layout = Literal["uniform", "per-layer"]

#: Pages of 64 KiB, blocks of 512 KiB, a pool of 64 MiB.
SHAPE = CacheShape(
    num_layers=8, num_blocks=128, block_size=16, num_kv_heads=8, head_size=128, dtype=torch.float16
)
from tests.support.handoff_orders import ordered

OFFERED = tuple(range(1, 33))
LOADED = tuple(range(64, 96))
#: Stands for the digest of the prompt.
CONTENT = "of p"

_ABOUT_HALF_A_SECOND = 1 << 30  # in cycles


def sleep_on(device: torch.device) -> None:
    """Keep the current stream of a GPU busy for a while. Main memory has no stream."""
    if device.type == "cuda":
        torch.cuda._sleep(_ABOUT_HALF_A_SECOND)  # type: ignore[no-untyped-call]


def offered_values(layer: int) -> torch.Tensor:
    """Return what the offered blocks of a layer contain: `(num_offered, *page)`, in main memory."""
    generator = torch.Generator().manual_seed(layer)
    return torch.randn(len(OFFERED), *SHAPE.logical_page, generator=generator).to(SHAPE.dtype)


def make_worker(
    engine_id: str, scheme: str, layout: Layout, device: torch.device
) -> tuple[HandoffWorker, list[torch.Tensor]]:
    """Make a node's worker half, with its caches.

    Returns:
        The worker, and each layer's cache, `(num_blocks, *page)`.

    Raises:
        BackendUnavailableError: the transport cannot work here.
    """
    shape = replace(SHAPE, layout=layout)
    config = shape.kv_cache_config()
    engine = engine_config(scheme, engine_id=engine_id, block_size=shape.block_size)
    worker = HandoffWorker(engine, config, create_transport(scheme, {}), ConnectorOptions())
    try:
        sizes = [tensor.size for tensor in config.kv_cache_tensors]
        if layout == "uniform":
            memory = worker.allocate_kv_memory(sum(sizes), device).view(shape.dtype)
            cache = memory.view(shape.num_blocks, shape.num_layers, *shape.logical_page).transpose(0, 1)
            worker.register_cross_layers_kv_cache(cache)
            return worker, list(cache)
        views = [
            worker.allocate_kv_memory(size, device).view(shape.dtype).view(-1, *shape.logical_page)
            for size in sizes
        ]
        names = [name for tensor in config.kv_cache_tensors for name in tensor.shared_by]
        worker.register_kv_caches(dict(zip(names, views, strict=True)))
        return worker, views
    except BaseException:
        worker.shutdown()
        raise


def load_order(told: Mapping[str, Any]) -> HandoffMetadata:
    """Return the order to load the offered blocks into `LOADED`. `told`: what the producer printed."""
    num_tokens = len(OFFERED) * SHAPE.block_size
    offer = RemoteOffer(
        "producer", told["epoch"], "p", 1, (told["address"],), num_tokens, (OFFERED,), CONTENT
    )
    return ordered("d", claim=offer, load=(GroupBlocks(0, LOADED),))
