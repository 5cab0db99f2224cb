"""An attacker in the network cuts, delays, repeats, drops and flips what two nodes send each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec

import pytest
import torch

from kvferry.connector.testing import CacheShape, ModelFreeNode, Request, engine_config
from kvferry.transports.testing import HostileProxy, NetworkFault
from tests.support.gpu_pools import GpuPools

NUM_LOADS = 8
#: On a busy machine some loads time out even without faults.
MAX_LOADS = 30
SHAPE = CacheShape(num_layers=4, num_blocks=64, num_kv_heads=8, head_size=64)
NUM_TOKENS = 60
DEADLINES = {
    "lease_s": 0.6,
    "heartbeat_s": 0.1,
    "connect_timeout_s": 0.5,
    "claim_timeout_s": 0.5,
    "read_timeout_s": 0.5,
    "backoff_s": 0.02,
    "max_backoff_s": 0.1,
}
EVERY_FAULT: tuple[NetworkFault, ...] = ("cut", "delay", "truncate", "duplicate", "flip")
UCX = pytest.param(
    "UCXConnector",
    # UCX's own traffic does not pass through the proxy. The control connection does, but only TCP's checksums protect
    # it, so no bit is flipped there.
    EVERY_FAULT[:-1],
    marks=pytest.mark.skipif(find_spec("ucxx") is None, reason="ucxx is not installed"),
)

NIXL = pytest.param(
    "NIXLConnector",
    # As with UCX, the bytes do not pass through the proxy.
    EVERY_FAULT[:-1],
    marks=pytest.mark.skipif(find_spec("nixl_cu12") is None, reason="nixl_cu12 is not installed"),
)


@dataclass(frozen=True)
class HostileNetwork:
    """A producer and a consumer, with a hostile proxy between them."""

    producer: ModelFreeNode
    consumer: ModelFreeNode
    proxy: HostileProxy
    address: str

    def load(self, number: int) -> bool:
        """Hand a prompt over, then reuse its blocks on both nodes. Returns whether its bytes arrived."""
        producer, consumer, request_id = self.producer, self.consumer, f"d{number}"
        offered, params = producer.prefill(f"p{number}", NUM_TOKENS, seed=number)
        expected = producer.contents(offered)
        request = Request(request_id, NUM_TOKENS, {**(params or {}), "remote_addresses": [self.address]})
        consumer.scheduler.on_new_request(request)
        blocks, _ = consumer.start_load(request)
        consumer.step_until(lambda: consumer.num_reports(request_id, "recving") > 0, producer)
        is_loaded = not consumer.load_error(request_id)
        if is_loaded:
            assert torch.equal(consumer.contents(blocks), expected)
        consumer.fill(blocks, seed=1000 + number)
        of_another = consumer.contents(blocks)
        producer.step_until(lambda: not producer.held, consumer)
        producer.fill(offered, seed=2000 + number)
        assert torch.equal(consumer.contents(blocks), of_another)
        consumer.finish(request, blocks, "stop")
        return is_loaded


@contextmanager
def hostile_network(connector: str, faults: Sequence[NetworkFault], seed: int) -> Iterator[HostileNetwork]:
    with ExitStack() as stack:
        producer, consumer = (
            stack.enter_context(
                ModelFreeNode(engine_config(connector, kv_connector_extra_config=DEADLINES), SHAPE)
            )
            for _ in range(2)
        )
        _, params = producer.prefill("first", 1)
        assert params is not None
        head, _, port = params["remote_addresses"][0].rpartition(":")
        proxy = stack.enter_context(HostileProxy(int(port), faults, seed=seed, rate=0.06))
        yield HostileNetwork(producer, consumer, proxy, f"{head}:{proxy.port}")


@pytest.mark.parametrize(
    ("connector", "faults"),
    [("ZeroMQConnector", EVERY_FAULT), ("TcpConnector", EVERY_FAULT), UCX, NIXL],
)
def test_bytes_are_right_or_the_load_fails_and_loads_succeed_again_without_faults(
    connector: str, faults: Sequence[NetworkFault]
) -> None:
    survives(connector, faults)


@pytest.mark.slow
@pytest.mark.parametrize("connector", ["ZeroMQConnector", "TcpConnector"])
def test_the_same_holds_between_gpus(gpu_pools: GpuPools, connector: str) -> None:
    """Afterwards every copy has ended, and every staging buffer is back."""
    survives(connector, EVERY_FAULT)


def survives(connector: str, faults: Sequence[NetworkFault]) -> None:
    with hostile_network(connector, faults, seed=1) as network:
        for number in range(NUM_LOADS):
            network.load(number)
        assert network.proxy.num_faults > 0
        network.proxy.stop_faults()
        assert any(network.load(number) for number in range(NUM_LOADS, MAX_LOADS))
        for node in (network.producer, network.consumer):
            assert sorted(node.free_blocks) == list(range(1, SHAPE.num_blocks))
