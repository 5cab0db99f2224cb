"""Nodes with several ranks, each with its own worker half and shard: every head of every token
arrives once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, Protocol

import pytest
import torch

from kvferry.connector.aggregator import KVOutputAggregator
from kvferry.connector.base import KVConnectorBase, KVConnectorRole
from kvferry.connector.config import ParallelConfig
from kvferry.connector.factory import KVConnectorFactory
from kvferry.connector.kv_cache_specs import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
)
from kvferry.connector.output import KVConnectorOutput
from kvferry.connector.p2p.worker import new_epoch
from kvferry.connector.stats import KVConnectorStats
from kvferry.connector.testing import Request, Step, engine_config
from tests.support.gpu_pools import GpuPools
from tests.support.patience import DEADLINE_S

CPU = torch.device("cpu")
NUM_LAYERS, NUM_HEADS, HEAD_SIZE, NUM_BLOCKS = 4, 4, 8, 32
NUM_TOKENS = 21
UCX = pytest.param("ucx", marks=pytest.mark.skipif(find_spec("ucxx") is None, reason="ucxx is not installed"))

Options = Mapping[str, Any]


@dataclass(frozen=True)
class Shape:
    """The shape of a node's cache.

    Attributes:
        num_heads: KV heads of the model. If there are fewer than `tp`, they are replicated.
    """

    tp: int = 1
    pp: int = 1
    block_size: int = 4
    heads_first: bool = False
    uniform: bool = True
    num_heads: int = NUM_HEADS
    use_mla: bool = False

    @property
    def spec(self) -> FullAttentionSpec:
        num_heads = 1 if self.use_mla else max(1, self.num_heads // self.tp)
        return FullAttentionSpec(self.block_size, num_heads, HEAD_SIZE, torch.float32, self.use_mla)


class Rank:
    """One worker half. `caches`: its layers and heads as (layer, block, part, slot, head, element)."""

    def __init__(self, node: Node, number: int) -> None:
        shape = node.shape
        parallel = ParallelConfig(shape.tp, number % shape.tp, shape.pp, number // shape.tp, node.epoch)
        self.layers = range(NUM_LAYERS)[parallel.pipeline_parallel_rank * NUM_LAYERS // shape.pp :][
            : NUM_LAYERS // shape.pp
        ]
        num_heads = shape.spec.num_kv_heads
        first = 0 if shape.use_mla else parallel.tensor_parallel_rank * shape.num_heads // shape.tp
        self.heads = slice(first, first + num_heads)
        names = [f"layers.{layer}" for layer in self.layers]
        config = kv_cache_config(shape, names)
        self.worker = node.create(KVConnectorRole.WORKER, config, parallel)
        size = sum(tensor.size for tensor in config.kv_cache_tensors)
        memory = self.worker.allocate_kv_memory(size, CPU).view(torch.float32)
        self.caches = view_of(memory, shape, len(names))
        registered = [cache[:, 0, :, 0] for cache in self.caches] if shape.use_mla else list(self.caches)
        self.worker.register_kv_caches(dict(zip(names, registered, strict=True)))


class Node:
    """An engine with several ranks in one process: their worker halves and one scheduler half.

    Args:
        options: Options of the connector.
        by_rank: Additional options for single ranks.
    """

    def __init__(
        self,
        connector: str,
        shape: Shape,
        options: Mapping[str, Any] = {},
        by_rank: Mapping[int, Options] = {},
    ) -> None:
        self.shape = shape
        self.options_of = lambda rank: {**options, **by_rank.get(rank, {})}
        self.epoch = new_epoch()
        self.config = engine_config(
            connector,
            block_size=shape.block_size,
            kv_connector_module_path="kvferry.connector.testing" if connector == "FaultyConnector" else "",
        )
        model = replace(self.config.model, num_kv_heads=shape.num_heads, num_layers=NUM_LAYERS)
        self.config = replace(self.config, model=model)
        names = [f"layers.{layer}" for layer in range(NUM_LAYERS)]
        self.scheduler = self.create(
            KVConnectorRole.SCHEDULER, kv_cache_config(shape, names), ParallelConfig()
        )
        self.ranks: list[Rank] = []
        for number in range(shape.tp * shape.pp):
            self.ranks.append(Rank(self, number))
        addresses = (rank.worker.get_handshake_metadata() for rank in self.ranks)
        self.scheduler.set_handshake_metadata(
            {number: address for number, address in enumerate(addresses) if address is not None}
        )
        self.aggregator = KVOutputAggregator(len(self.ranks))
        self.done = KVConnectorOutput()
        self.stats = KVConnectorStats()
        self.num_reports = 0

    def create(
        self, role: KVConnectorRole, config: KVCacheConfig, parallel: ParallelConfig
    ) -> KVConnectorBase:
        transfer = replace(self.config.kv_transfer, kv_connector_extra_config=self.options_of(parallel.rank))
        own = replace(self.config, parallel=parallel, kv_transfer=transfer)
        return KVConnectorFactory.create_connector(own, role, config)

    def close(self) -> None:
        for rank in self.ranks:
            rank.worker.shutdown()
        self.scheduler.shutdown()
        self.ranks.clear()

    def step(self) -> None:
        """Run one step with the same orders for all ranks, and merge their reports."""
        orders = self.scheduler.build_connector_meta(Step())
        outputs = []
        for rank in self.ranks:
            rank.worker.bind_connector_metadata(orders)
            rank.worker.start_load_kv(None)
            sending, recving = rank.worker.get_finished(set())
            output = KVConnectorOutput(sending or set(), recving or set())
            output.invalid_block_ids = rank.worker.get_block_ids_with_load_errors()
            output.load_errors = rank.worker.take_load_errors()
            output.kv_connector_stats = rank.worker.get_kv_connector_stats()
            outputs.append(output)
            rank.worker.clear_connector_metadata()
        joined = self.aggregator.aggregate(outputs)
        self.scheduler.update_connector_output(joined)
        if joined.kv_connector_stats is not None:
            self.stats = self.stats.aggregate(joined.kv_connector_stats)
        self.num_reports += len(joined.finished_recving) + len(joined.finished_sending)
        self.done.finished_sending |= joined.finished_sending
        self.done.finished_recving |= joined.finished_recving
        self.done.invalid_block_ids |= joined.invalid_block_ids
        self.done.load_errors |= joined.load_errors

    def prefill(self, tokens: torch.Tensor, blocks: list[int]) -> dict[str, Any]:
        """Write `tokens`, `(layer, part, token, head, element)`, into the blocks of all ranks, and offer
        them.
        """
        for rank in self.ranks:
            for index, layer in enumerate(rank.layers):
                for token in range(NUM_TOKENS):
                    block, slot = blocks[token // self.shape.block_size], token % self.shape.block_size
                    rank.caches[index, block, :, slot] = tokens[layer, :, token, rank.heads]
        request = Request("p", NUM_TOKENS, {"do_remote_decode": True}, NUM_TOKENS)
        self.scheduler.on_new_request(request)
        self.step()  # computes the prompt
        request.finish_reason = "length"
        must_keep, params = self.scheduler.request_finished(request, [blocks])
        assert must_keep
        assert params is not None
        return params

    def start_load(self, params: dict[str, Any], blocks: list[int]) -> None:
        request = Request("d", NUM_TOKENS, params)
        self.scheduler.on_new_request(request)
        assert self.scheduler.get_num_new_matched_tokens(request, 0) == (NUM_TOKENS, True)
        self.scheduler.update_state_after_alloc(request, [blocks], NUM_TOKENS)

    def holds(self, tokens: torch.Tensor, blocks: list[int]) -> bool:
        """Whether every rank has its layers and heads of `tokens`."""
        return all(
            torch.equal(
                rank.caches[index, blocks].transpose(0, 1).flatten(1, 2)[:, :NUM_TOKENS],
                tokens[layer, :, :, rank.heads],
            )
            for rank in self.ranks
            for index, layer in enumerate(rank.layers)
        )


def kv_cache_config(shape: Shape, names: Sequence[str]) -> KVCacheConfig:
    size = NUM_BLOCKS * shape.spec.page_size_bytes
    tensors = tuple(KVCacheTensor(size, (name,)) for name in names)
    return KVCacheConfig(NUM_BLOCKS, tensors, (KVCacheGroupSpec(tuple(names), shape.spec),))


def view_of(memory: torch.Tensor, shape: Shape, num_layers: int) -> torch.Tensor:
    """View a pool as (layer, block, part, slot, head, element)."""
    num_parts, num_heads = 1 if shape.use_mla else 2, shape.spec.num_kv_heads
    page = (
        (num_parts, num_heads, shape.block_size)
        if shape.heads_first
        else (num_parts, shape.block_size, num_heads)
    )
    outer = (NUM_BLOCKS, num_layers) if shape.uniform else (num_layers, NUM_BLOCKS)
    stored = memory.view(*outer, *page, HEAD_SIZE)
    stored = stored.transpose(0, 1) if shape.uniform else stored
    return stored.transpose(3, 4) if shape.heads_first else stored


def step_until(done: Callable[[], bool], *nodes: Node) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not done():
        assert time.monotonic() < deadline, [node.done for node in nodes]
        for node in nodes:
            node.step()
        time.sleep(0.001)


def random_tokens(shape: Shape) -> torch.Tensor:
    size = (NUM_LAYERS, 1 if shape.use_mla else 2, NUM_TOKENS, shape.num_heads, HEAD_SIZE)
    return torch.rand(size, generator=torch.Generator().manual_seed(1))


class MakeNode(Protocol):
    def __call__(
        self, connector: str, shape: Shape, options: Options = ..., by_rank: Mapping[int, Options] = ...
    ) -> Node: ...


@pytest.fixture
def make_node() -> Iterator[MakeNode]:
    with ExitStack() as stack:

        def make(*arguments: Any, **more: Any) -> Node:
            node = Node(*arguments, **more)
            stack.callback(node.close)
            return node

        yield make


MLA = Shape(use_mla=True, num_heads=1)
PAIRS = {
    "two-ranks-to-one": (Shape(tp=2), Shape()),
    "one-rank-to-two": (Shape(), Shape(tp=2)),
    "four-ranks-to-two": (Shape(tp=4), Shape(tp=2)),
    "two-to-two": (Shape(tp=2), Shape(tp=2)),
    "two-stages-to-one": (Shape(pp=2), Shape()),
    "one-stage-to-two": (Shape(), Shape(pp=2)),
    "two-stages-to-two-ranks": (Shape(pp=2), Shape(tp=2)),
    "stages-of-two-ranks-to-two": (Shape(tp=2, pp=2), Shape(tp=2, block_size=8)),
    "block-sizes": (Shape(tp=2, block_size=16), Shape()),
    "orders": (Shape(heads_first=True, tp=2), Shape(uniform=False)),
    "replicated-heads": (Shape(tp=4, num_heads=2), Shape(num_heads=2)),
    "to-replicated-heads": (Shape(num_heads=2), Shape(tp=4, num_heads=2)),
    "latent": (replace(MLA, tp=2), replace(MLA, block_size=8)),
    "latent-to-two": (MLA, replace(MLA, tp=2)),
}


def hand_over(producer: Node, consumer: Node) -> None:
    """Hand a prompt over. Check that every token arrives, and that each side gets one report."""
    tokens = random_tokens(producer.shape)
    params = producer.prefill(tokens, [9, 1, 20, 4, 30, 5][: -(-NUM_TOKENS // producer.shape.block_size)])
    blocks = [7, 3, 12, 2, 31, 8][: -(-NUM_TOKENS // consumer.shape.block_size)]
    consumer.start_load(params, blocks)
    step_until(
        lambda: bool(consumer.done.finished_recving and producer.done.finished_sending), producer, consumer
    )
    assert consumer.done.load_errors == {}
    assert consumer.holds(tokens, blocks)
    assert (producer.num_reports, consumer.num_reports) == (1, 1)


@pytest.mark.parametrize(("theirs", "ours"), PAIRS.values(), ids=PAIRS)
@pytest.mark.parametrize("connector", ["inproc", "shm"])
def test_every_head_of_every_token_arrives_once(
    connector: str, theirs: Shape, ours: Shape, make_node: MakeNode
) -> None:
    hand_over(make_node(connector, theirs), make_node(connector, ours))


@pytest.mark.parametrize("pair", ["four-ranks-to-two", "stages-of-two-ranks-to-two", "latent-to-two"])
@pytest.mark.parametrize("connector", ["zeromq", "tcp", UCX])
def test_several_ranks_hand_over_through_a_network(connector: str, pair: str, make_node: MakeNode) -> None:
    theirs, ours = PAIRS[pair]
    hand_over(make_node(connector, theirs), make_node(connector, ours))


@pytest.mark.parametrize("connector", ["shm", "zeromq", "tcp", UCX, "auto"])
def test_two_ranks_on_gpus_hand_over_to_one_with_another_layout(
    gpu_pools: GpuPools, connector: str, make_node: MakeNode
) -> None:
    theirs, ours = PAIRS["orders"]
    hand_over(make_node(connector, theirs), make_node(connector, ours))


@pytest.mark.parametrize("dead", [0, 1])
def test_a_load_fails_as_a_whole_when_one_of_the_producers_ranks_is_gone(
    dead: int, make_node: MakeNode
) -> None:
    producer, consumer = make_node("shm", Shape(tp=2)), make_node("shm", Shape())
    params = producer.prefill(random_tokens(Shape()), [1, 2, 3, 4, 5, 6])
    producer.ranks[dead].worker.shutdown()
    consumer.start_load(params, [1, 2, 3, 4, 5, 6])
    step_until(lambda: bool(consumer.done.finished_recving), consumer)
    assert "d" in consumer.done.load_errors
    assert consumer.done.invalid_block_ids == {1, 2, 3, 4, 5, 6}
    step_until(lambda: bool(producer.done.finished_sending), producer, consumer)
    assert (producer.num_reports, consumer.num_reports) == (1, 1)


def test_heads_that_no_rank_has_are_refused_by_name(make_node: MakeNode) -> None:
    producer, consumer = make_node("inproc", Shape(tp=2)), make_node("inproc", Shape())
    params = producer.prefill(random_tokens(Shape()), [1, 2, 3, 4, 5, 6])
    consumer.start_load(
        {**params, "remote_addresses": params["remote_addresses"][:1], "tp_size": 1}, [1, 2, 3, 4, 5, 6]
    )
    step_until(lambda: bool(consumer.done.finished_recving and producer.ranks), consumer, producer)
    assert "shard differs: local '0-3 of 4', remote '0-1 of 4'" in consumer.done.load_errors["d"]


def test_a_model_with_another_number_of_heads_is_refused_by_name(
    make_node: MakeNode,
) -> None:
    producer = make_node("inproc", Shape(tp=2, num_heads=2))
    consumer = make_node("inproc", Shape())
    params = producer.prefill(random_tokens(Shape()), [1, 2, 3, 4, 5, 6])
    consumer.start_load(params, [1, 2, 3, 4, 5, 6])
    step_until(lambda: bool(consumer.done.finished_recving), consumer, producer)
    assert "num_kv_heads differs: local '4', remote '2'" in consumer.done.load_errors["d"]
