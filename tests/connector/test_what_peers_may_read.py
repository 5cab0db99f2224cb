"""An owner that sends the bytes itself keeps an admitted peer to the blocks of its offer."""

from __future__ import annotations

from contextlib import ExitStack
from importlib.util import find_spec
from math import prod
from typing import Any

import pytest
import torch

from kvferry.connector.testing import CacheShape, ModelFreeNode, Request, engine_config, load
from kvferry.transports.endpoint import PeerEndpoint
from kvferry.transports.regions import Guard, RegionPairs

pytestmark = pytest.mark.usefixtures("short_backoffs")

SHAPE = CacheShape(num_layers=2, num_blocks=32)
BLOCK_BYTES = SHAPE.num_layers * prod(SHAPE.logical_page) * SHAPE.dtype.itemsize
NUM_TOKENS = 9
CONNECTORS = [
    "TcpConnector",
    "ZeroMQConnector",
    pytest.param(
        "UCXConnector", marks=pytest.mark.skipif(find_spec("ucxx") is None, reason="ucxx is not installed")
    ),
]


@pytest.mark.parametrize("connector", CONNECTORS)
def test_a_peer_that_asks_for_the_blocks_of_another_request_gets_none_of_them(
    connector: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as stack:
        producer, consumer = (
            stack.enter_context(ModelFreeNode(engine_config(connector), SHAPE)) for _ in range(2)
        )
        secret, _ = producer.prefill("of another client", NUM_TOKENS, seed=1)
        offered, params = producer.prefill("p", NUM_TOKENS, seed=2)
        start_read = PeerEndpoint.start_read
        shift = (secret[0] - offered[0]) * BLOCK_BYTES

        def read_the_secret(
            self: Any, peer_id: int, pairs: RegionPairs, guard: Guard, *, timeout_s: float
        ) -> int:
            table = pairs.table.copy()
            table[:, 1] += shift
            return start_read(self, peer_id, RegionPairs(table), guard, timeout_s=timeout_s)

        monkeypatch.setattr(PeerEndpoint, "start_read", read_the_secret)
        request = Request("d", NUM_TOKENS, params)
        blocks = load(consumer, producer, request)
        assert consumer.load_error("d")
        assert not torch.equal(consumer.contents(blocks), producer.contents(secret))
        monkeypatch.undo()
        # The owner goes on with peers that ask for what they were granted, and with this one.
        _, params = producer.prefill("p2", NUM_TOKENS, seed=3)
        load(consumer, producer, Request("d2", NUM_TOKENS, params))
        assert not consumer.load_error("d2")
