"""A producer: `offer.py DEVICE SCHEME LAYOUT` offers blocks while a slow kernel delays the one that fills
them.

It prints its address as one line of JSON, and ends when its stdin is closed.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import torch

from kvferry.connector.p2p.orders import OfferOrder
from kvferry.transports.errors import BackendUnavailableError
from tests.support.gpu_offers import CONTENT, OFFERED, SHAPE, make_worker, offered_values, sleep_on
from tests.support.handoff_orders import ordered


def offer(device: torch.device, scheme: str, layout: str) -> None:
    try:
        worker, cache = make_worker("producer", scheme, layout, device)
    except BackendUnavailableError as error:
        print(json.dumps({"unavailable": str(error)}), flush=True)
        return
    values = [offered_values(layer).to(device) for layer in range(SHAPE.num_layers)]
    sleep_on(device)
    for view, value in zip(cache, values, strict=True):
        view[list(OFFERED)] = value
    order = OfferOrder(1, (OFFERED,), len(OFFERED) * SHAPE.block_size, CONTENT)
    worker.submit(ordered("p", offer=order))
    print(json.dumps(asdict(worker.get_handshake_metadata())), flush=True)
    sys.stdin.read()
    worker.shutdown()


if __name__ == "__main__":
    offer(torch.device(sys.argv[1]), *sys.argv[2:])
