"""What the conformance suites drive, beside nodes."""

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
    """Run a request's load to its end, good or bad; return the request's block table.

    Args:
        producer: Is stepped too.
        local_blocks: What the consumer has of the prompt already.
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
    """What blocks hold: `(num_layers, 2, num_tokens, num_kv_heads, head_size)`."""
    return node.contents(blocks).transpose(1, 2).flatten(2, 3)


def assert_whole(node: ModelFreeNode) -> None:
    """Nothing is held any more, and every block is free once."""
    assert not node.held
    assert sorted(node.free_blocks) == list(range(1, node.shape.num_blocks))


def is_freed(producer: ModelFreeNode) -> Callable[[], bool]:
    """Whether every offer has ended, as a question for `step_until`."""
    return lambda: not producer.held
