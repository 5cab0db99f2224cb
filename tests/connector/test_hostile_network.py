"""An attacker in the network cuts, delays, repeats, drops and flips what two nodes send each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec

import pytest
import torch

from kvferry.connector.testing import CacheShape, ModelFreeNode, Request, engine_config
from kvferry.connector.testing.harness import begin_load
from kvferry.transports.testing import HostileProxy, NetworkFault
from tests.support.gpu_pools import GpuPools

pytestmark = pytest.mark.usefixtures("short_backoffs")

NUM_LOADS = 8
NUM_FLIPPED = 5
BLOCK_IDS = b"block_ids"
#: On a busy machine some loads time out even without faults.
MAX_LOADS = 30
SHAPE = CacheShape(num_layers=4, num_blocks=64, num_kv_heads=8, head_size=64)
NUM_TOKENS = 60
DEADLINES = {
    "lease_s": 0.6,
    "connect_timeout_s": 0.5,
    "claim_timeout_s": 0.5,
    "read_timeout_s": 0.5,
}
EVERY_FAULT: tuple[NetworkFault, ...] = ("cut", "delay", "truncate", "duplicate", "flip")
#: Of the last two only the control connection passes through the proxy.
CONNECTORS = [
    "ZeroMQConnector",
    "TcpConnector",
    pytest.param(
        "UCXConnector", marks=pytest.mark.skipif(find_spec("ucxx") is None, reason="ucxx is not installed")
    ),
    pytest.param(
        "NIXLConnector",
        marks=pytest.mark.skipif(find_spec("nixl_cu12") is None, reason="nixl_cu12 is not installed"),
    ),
]


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
        blocks = begin_load(consumer, request)
        consumer.step_until(lambda: consumer.num_reports(request_id, "recving") > 0, producer)
        is_loaded = not consumer.load_error(request_id)
        if is_loaded:
            assert torch.equal(consumer.contents(blocks), expected)
        consumer.pool.fill(blocks, seed=1000 + number)
        of_another = consumer.contents(blocks)
        producer.step_until(lambda: not producer.held, consumer)
        producer.pool.fill(offered, seed=2000 + number)
        assert torch.equal(consumer.contents(blocks), of_another)
        consumer.finish(request.request_id, "stop")
        return is_loaded


@contextmanager
def hostile_network(
    connector: str,
    faults: Sequence[NetworkFault],
    proxy_type: type[HostileProxy] = HostileProxy,
    *,
    rate: float = 0.06,
    marker: bytes = b"",
) -> Iterator[HostileNetwork]:
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
        proxy = stack.enter_context(proxy_type(int(port), faults, seed=1, rate=rate, marker=marker))
        yield HostileNetwork(producer, consumer, proxy, f"{head}:{proxy.port}")


@pytest.mark.parametrize("connector", CONNECTORS)
def test_bytes_are_right_or_the_load_fails_and_loads_succeed_again_without_faults(connector: str) -> None:
    survives(connector)


class ProxyOfOtherBlocks(HostileProxy):
    """Flips the lowest bit of the first block id of each grant."""

    def _harmed(self, data: bytes, fault: NetworkFault) -> bytes:
        at = data.index(BLOCK_IDS) + len(BLOCK_IDS) + 2  # after the heads of two arrays
        return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize("connector", CONNECTORS)
def test_a_grant_whose_block_id_was_changed_is_not_believed(connector: str) -> None:
    """It names a block of another request, and its guard holds."""
    with hostile_network(connector, ["flip"], ProxyOfOtherBlocks, rate=1.0, marker=BLOCK_IDS) as network:
        # On a busy machine a load may fail before its grant.
        assert not any(network.load(number) for number in range(MAX_LOADS) if not network.proxy.num_faults)
        assert network.proxy.num_faults == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "marker",
    [*(pytest.param(kind, marks=pytest.mark.full) for kind in (b"Hello", b"Welcome", b"Claim")), b"Grant"],
)
@pytest.mark.parametrize("connector", CONNECTORS)
def test_no_load_believes_a_control_message_in_which_a_bit_was_flipped(connector: str, marker: bytes) -> None:
    with hostile_network(connector, ["flip"], rate=1.0, marker=marker) as network:
        for number in range(NUM_FLIPPED):
            assert not network.load(number)
        assert network.proxy.num_faults > 0


@pytest.mark.full
@pytest.mark.parametrize("connector", ["ZeroMQConnector", "TcpConnector"])
def test_the_same_holds_between_gpus(gpu_pools: GpuPools, connector: str) -> None:
    """Afterwards every copy has ended, and every staging buffer is back."""
    survives(connector)


def survives(connector: str) -> None:
    with hostile_network(connector, EVERY_FAULT) as network:
        for number in range(NUM_LOADS):
            network.load(number)
        assert network.proxy.num_faults > 0
        network.proxy.stop_faults()
        assert any(network.load(number) for number in range(NUM_LOADS, MAX_LOADS))
        for node in (network.producer, network.consumer):
            assert sorted(node.pool.free_blocks) == list(range(1, SHAPE.num_blocks))
