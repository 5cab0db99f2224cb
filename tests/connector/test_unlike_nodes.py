"""Two engines register caches of different shapes: a plan copies every token from one to the other."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from kvferry.connector.config import ParallelConfig
from kvferry.connector.p2p.registration import Registration, describe_caches
from kvferry.connector.planning.compatibility import require_compatible
from kvferry.connector.planning.plan import Planner
from kvferry.connector.planning.reshard import GroupTables, ReshardPlanner
from kvferry.connector.testing import CacheShape, engine_config
from kvferry.transports.errors import IncompatiblePeerError

NUM_TOKENS = 21
NUM_HEADS = 4


@dataclass(frozen=True)
class Engine:
    """One rank. `caches`: its heads as (layer, block, key or value, slot, head, element)."""

    shape: CacheShape
    caches: torch.Tensor
    registration: Registration

    def tokens(self, block_ids: Sequence[int]) -> torch.Tensor:
        """Return the first `NUM_TOKENS` tokens in these blocks as (layer, key or value, token, head,
        element).
        """
        return self.caches[:, list(block_ids)].transpose(1, 2).flatten(2, 3)[:, :, :NUM_TOKENS]


def engine_of(
    *, block_size: int = 4, heads_first: bool = False, uniform: bool = True, tp: int = 1, rank: int = 0
) -> Engine:
    shape = replace(CacheShape(), block_size=block_size, num_kv_heads=NUM_HEADS // tp)
    layers, blocks = shape.num_layers, shape.num_blocks
    page = (2, block_size, shape.num_kv_heads, shape.head_size)
    generator = torch.Generator().manual_seed(100 * tp + rank)
    outer = (blocks, layers) if uniform else (layers, blocks)
    stored = (page[0], page[2], page[1], page[3]) if heads_first else page
    memory = torch.rand((*outer, *stored), generator=generator)
    caches = memory.transpose(3, 4) if heads_first else memory
    caches = caches.transpose(0, 1) if uniform else caches
    config = replace(engine_config("inproc"), parallel=ParallelConfig(tp, rank))
    kv_cache_config = shape.kv_cache_config()
    names = kv_cache_config.kv_cache_groups[0].layer_names
    registered = dict(zip(names, caches, strict=True))
    return Engine(shape, caches, describe_caches(config, kv_cache_config, registered, []))


def load(ours: Engine, producers: Sequence[Engine], local: list[int], remote: list[int]) -> None:
    """Copy bytes between addresses, as a transport would."""
    tables = GroupTables(0, np.array(local, dtype=np.int64), np.array(remote, dtype=np.int64))
    planner = ReshardPlanner(
        ours.registration.layout, [producer.registration.layout for producer in producers]
    )
    for producer, pairs in zip(producers, planner.plan([tables], NUM_TOKENS), strict=True):
        to = ours.registration.pool.addresses(pairs.local_offsets, pairs.lengths)
        source = producer.registration.pool.addresses(pairs.remote_offsets, pairs.lengths)
        for target, origin, num_bytes in zip(
            to.tolist(), source.tolist(), pairs.lengths.tolist(), strict=True
        ):
            ctypes.memmove(target, origin, num_bytes)


@pytest.mark.parametrize("ours_uniform", [True, False])
@pytest.mark.parametrize("heads_first", [True, False])
@pytest.mark.parametrize("block_size", [4, 8, 16])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_every_token_arrives(tp: int, block_size: int, heads_first: bool, ours_uniform: bool) -> None:
    ours = engine_of(block_size=8, uniform=ours_uniform)
    producers = [
        engine_of(block_size=block_size, heads_first=heads_first, tp=tp, rank=rank) for rank in range(tp)
    ]
    local, remote = [7, 3, 12], [9, 1, 20, 4, 30, 5][: -(-NUM_TOKENS // block_size)]
    expected = torch.cat([producer.tokens(remote) for producer in producers], dim=3)
    before = ours.caches.clone()
    load(ours, producers, local, remote)
    assert torch.equal(ours.tokens(local), expected)
    is_other = torch.ones(ours.shape.num_blocks, dtype=torch.bool)
    is_other[local] = False
    assert torch.equal(ours.caches[:, is_other], before[:, is_other])
    assert torch.equal(ours.caches[:, 12, :, NUM_TOKENS % 8 :], before[:, 12, :, NUM_TOKENS % 8 :])


def test_a_rank_loads_its_heads_from_a_cache_with_all_heads() -> None:
    producer = engine_of()
    for rank in range(2):
        ours = engine_of(tp=2, rank=rank)
        load(ours, [producer], [6, 5, 4, 3, 2, 1], [1, 2, 3, 4, 5, 6])
        expected = producer.tokens([1, 2, 3, 4, 5, 6])[:, :, :, 2 * rank : 2 * rank + 2]
        assert torch.equal(ours.tokens([6, 5, 4, 3, 2, 1]), expected)


@pytest.mark.parametrize(
    ("theirs", "field"),
    [
        ({"block_size": 8}, "block_size"),
        ({"tp": 2}, "shard"),
        ({"tp": 2, "rank": 1}, "shard"),
    ],
)
def test_the_plain_planner_names_the_field_that_it_cannot_pair(theirs: dict[str, int], field: str) -> None:
    ours, peer = engine_of().registration, engine_of(**theirs).registration  # type: ignore[arg-type]
    assert ours.fields == peer.fields
    with pytest.raises(IncompatiblePeerError) as caught:
        Planner(ours.layout, peer.layout)
    assert caught.value.field == f"layers.model.layers.0.self_attn.{field}"


def test_ranks_with_one_head_of_differently_sharded_models_are_distinguished() -> None:
    """Rank 1 of 4 and rank 1 of 8 keep one head each.

    Their pages look the same, but may hold different heads.
    """
    ours, peer = (engine_of(tp=NUM_HEADS, rank=1).registration for _ in range(2))
    require_compatible(ours.fields, peer.fields)
    of_eight = describe_with(ParallelConfig(2 * NUM_HEADS, 1))
    with pytest.raises(IncompatiblePeerError, match="num_kv_heads differs: local '4', remote '8'"):
        require_compatible(ours.fields, of_eight.fields)
    with pytest.raises(IncompatiblePeerError, match="shard differs"):
        Planner(ours.layout, of_eight.layout)


def describe_with(parallel: ParallelConfig) -> Registration:
    """Describe the caches of a rank that has one head."""
    shape = replace(CacheShape(), num_kv_heads=1)
    caches = torch.zeros(shape.num_layers, shape.num_blocks, *shape.logical_page)
    config = shape.kv_cache_config()
    registered = dict(zip(config.kv_cache_groups[0].layer_names, caches, strict=True))
    return describe_caches(replace(engine_config("inproc"), parallel=parallel), config, registered, [])
