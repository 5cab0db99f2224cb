"""Shapes, steps and checks that the conformance suites share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from .node import CacheShape, ModelFreeNode, Request

UNIFORM = CacheShape()
PER_LAYER = replace(UNIFORM, layout="per-layer")
FOREIGN = replace(UNIFORM, layout="foreign")

#: `(shape=UNIFORM, *, options={}, **fields)`: see `ConnectorConformance.make_node`.
MakeNode = Callable[..., ModelFreeNode]


def load(
    consumer: ModelFreeNode, producer: ModelFreeNode, request: Request, local_blocks: Sequence[int] = ()
) -> list[int]:
    """Run a request's load until it succeeds or fails; return the request's block table.

    Args:
        producer: Stepped together with the consumer.
        local_blocks: Blocks of the prompt that the consumer already has.
    """
    consumer.scheduler.on_new_request(request)
    num_here = len(local_blocks) * consumer.shape.block_size
    _, is_async = consumer.scheduler.get_num_new_matched_tokens(request, num_here)
    blocks, num_tokens = consumer.start_load(request, local_blocks)
    assert num_tokens > 0
    consumer.step()
    if is_async:
        consumer.step_until(lambda: consumer.num_reports(request.request_id, "recving") > 0, producer)
    return blocks


def by_token(node: ModelFreeNode, blocks: Sequence[int]) -> torch.Tensor:
    """Return the contents of blocks: `(num_layers, 2, num_tokens, num_kv_heads, head_size)`."""
    return node.contents(blocks).transpose(1, 2).flatten(2, 3)


def assert_whole(node: ModelFreeNode) -> None:
    """Check that no block is held any more, and that every block is free exactly once."""
    assert not node.held
    assert sorted(node.free_blocks) == list(range(1, node.shape.num_blocks))


def is_freed(producer: ModelFreeNode) -> Callable[[], bool]:
    """Return a function that returns whether every offer has ended, for `step_until`."""
    return lambda: not producer.held
