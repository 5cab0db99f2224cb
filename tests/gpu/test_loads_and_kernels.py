"""Loads while the GPU computes: nothing is read before it was computed, nothing is written that is still in
use.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from kvferry.transports.errors import BackendUnavailableError
from tests.support.gpu_memory import DEADLINE_S, StartChild
from tests.support.gpu_offers import (
    LOADED,
    SHAPE,
    Layout,
    load_order,
    make_worker,
    offered_values,
    sleep_on,
)

OTHERS = [block for block in range(SHAPE.num_blocks) if block not in LOADED]


@pytest.mark.parametrize("layout", ["uniform", "per-layer"])
@pytest.mark.parametrize("scheme", ["shm", "tcp", "zeromq", "ucx", "nixl", "auto"])
def test_a_load_never_races_a_forward_pass(
    scheme: str, layout: Layout, torch_device: torch.device, start_child: StartChild, record_property: Any
) -> None:
    """The producer still computes the offered blocks, and this process still reads the blocks that it loads
    into.
    """
    _, told = start_child("offer.py", str(torch_device), scheme, layout)
    try:
        worker, cache = make_worker("consumer", scheme, layout, torch_device)
    except BackendUnavailableError as error:
        pytest.skip(str(error))
    try:
        words = [view.view(torch.int16) for view in cache]
        loaded, others = (torch.tensor(blocks, device=torch_device) for blocks in (LOADED, OTHERS))
        for view in words:
            view.fill_(2)
        scratch = torch.randn(1024, 1024, device=torch_device)
        sleep_on(torch_device)
        # An earlier step uses the old content of the blocks, and has not run yet.
        old = [view[loaded] for view in words]
        worker.submit(load_order(told))
        # Meanwhile steps compute, and write into the other blocks.
        num_steps, deadline = 0, time.monotonic() + DEADLINE_S
        while "d" not in worker.get_finished()[1]:
            for view in words:
                view[others] += 1
                scratch = torch.tanh(scratch @ scratch)
            num_steps += 1
            if num_steps % 8 == 0 and torch_device.type == "cuda":
                torch.cuda.synchronize()  # otherwise thousands of steps would be queued
            assert time.monotonic() < deadline
        # The step that uses the loaded blocks is launched at once.
        new = [view[loaded] for view in cache]
        assert worker.take_load_errors() == {}
        stats = worker.get_kv_connector_stats()
        record_property("mechanism", stats.transfers[0].mechanism if stats is not None else "")
        for layer in range(SHAPE.num_layers):
            assert (old[layer] == 2).all(), "the load wrote into blocks that were in use"
            assert torch.equal(new[layer].cpu(), offered_values(layer)), f"wrong bytes in layer {layer}"
            untouched = words[layer][others].cpu()
            assert (untouched == torch.tensor(2 + num_steps).to(torch.int16)).all(), "a block was overwritten"
    finally:
        worker.shutdown()
