"""Shapes, steps and checks that the conformance suites share."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from ...transports.errors import ConfigurationError
from .broken import BrokenPromiseError, promise
from .node import ModelFreeNode
from .shapes import CacheShape, Request, engine_config
from .values import Journal

UNIFORM = CacheShape()
PER_LAYER = replace(UNIFORM, layout="per-layer")
FOREIGN = replace(UNIFORM, layout="foreign")

#: Steps that a node runs after everything has ended, to see that nothing else happens.
NUM_QUIET_STEPS = 5

_POLL_S = 0.001

#: `(shape=UNIFORM, *, options={}, max_step_tokens=…, **fields)`: see `node_maker`.
MakeNode = Callable[..., ModelFreeNode]


@contextmanager
def node_maker(
    transfer: Mapping[str, Any], deadline_s: float = 20.0, node_type: type[ModelFreeNode] = ModelFreeNode
) -> Iterator[MakeNode]:
    """Make nodes with one connector, and shut them down at the end.

    Yields a function `(shape=UNIFORM, *, options={}, max_step_tokens=None, **fields)`. `options` are added to
    the connector's options; `fields` are passed to `engine_config`; `max_step_tokens` is that of
    `ModelFreeNode`.

    Args:
        transfer: Fields of `KVTransferConfig`.
        node_type: Class of the nodes.
    """
    journal = Journal()
    with ExitStack() as stack:

        def make(
            shape: CacheShape = UNIFORM,
            *,
            options: Mapping[str, Any] = {},
            max_step_tokens: int = 1 << 20,
            **fields: Any,
        ) -> ModelFreeNode:
            common = dict(transfer)
            merged = {**common.pop("kv_connector_extra_config", {}), **options}
            config = engine_config(
                common.pop("kv_connector"),
                block_size=shape.block_size,
                kv_connector_extra_config=merged,
                **common,
                **fields,
            )
            node = node_type(
                config, shape, max_step_tokens=max_step_tokens, deadline_s=deadline_s, journal=journal
            )
            return stack.enter_context(node)

        yield make


def node_of_ranks(make_node: MakeNode, num_ranks: int) -> ModelFreeNode:
    """Make a node of several ranks, or skip the test if the connector refuses them."""
    try:
        node: ModelFreeNode = make_node(replace(PER_LAYER, num_ranks=num_ranks))
    except ConfigurationError as error:
        pytest.skip(
            f"the capability to serve several ranks was not declared: the connector refuses them: {error}"
        )
    return node


# == requests that the nodes run ===================================================================


def eventually(text: str, done: Callable[[], bool], *nodes: ModelFreeNode) -> None:
    """Step nodes until `done` returns True.

    Raises:
        BrokenPromiseError: the nodes made no progress for as long as their deadline. `text` is the promise.
    """
    deadline_s = nodes[0].deadline_s
    before: list[str] = []
    deadline = 0.0
    while not done():
        if (states := [node.state for node in nodes]) != before:
            before, deadline = states, time.monotonic() + deadline_s
        elif time.monotonic() > deadline:
            numbered = "; ".join(f"node {number}: {state}" for number, state in enumerate(states, 1))
            raise BrokenPromiseError(text, f"nothing changed during {deadline_s:g} s of steps; {numbered}")
        for node in nodes:
            node.step()
        time.sleep(_POLL_S)


def compute(node: ModelFreeNode, request: Request, **add: Any) -> Mapping[str, Any] | None:
    """Have a node compute a prompt, and wait until it is saved if the connector does so by itself.

    Args:
        request: If its `kv_transfer_params` are None, they ask that its blocks be offered.
        add: Arguments of `ModelFreeNode.add`.

    Returns:
        The `kv_transfer_params` for the request that loads it.
    """
    if request.kv_transfer_params is None:
        request.kv_transfer_params = {"do_remote_decode": True}
    node.add(request, **add)
    finish(node, request.request_id)
    params = node.params[request.request_id]
    if params is None:  # otherwise another node has to come for the blocks
        eventually("blocks that are kept for saving are released in the end", lambda: not node.held, node)
    return params


def finish(node: ModelFreeNode, request_id: str, *others: ModelFreeNode) -> None:
    """Step nodes until a request has its answer."""
    eventually("every request gets its answer", lambda: not node.is_running(request_id), node, *others)


def num_whole_blocks(shape: CacheShape, num_tokens: int, num_here: int = 0) -> int:
    """Return how many tokens every connector supplies: the whole blocks before the prompt's last token."""
    return max(0, (num_tokens - 1) // shape.block_size * shape.block_size - num_here)


def fetch(
    consumer: ModelFreeNode,
    producer: ModelFreeNode,
    request: Request,
    *,
    num_local_tokens: int = 0,
    max_answer_tokens: int = 1,
) -> None:
    """Run a request whose prompt another node computed, and check that the connector supplied it."""
    wanted = num_whole_blocks(consumer.shape, request.num_prompt_tokens, num_local_tokens)
    consumer.add(
        request,
        num_local_tokens=num_local_tokens,
        max_answer_tokens=max_answer_tokens,
        num_wanted_tokens=wanted,
    )
    finish(consumer, request.request_id, producer)
    check_supplied(consumer, request, wanted)


def check_supplied(consumer: ModelFreeNode, request: Request, wanted: int) -> None:
    """Check that the connector supplied at least `wanted` tokens of a request that has ended."""
    request_id = request.request_id
    loaded = consumer.num_loaded_tokens.get(request_id, 0)
    has_failed = request_id in consumer.failed_loads
    promise(
        "a prompt that one node computed is loaded by another: each whole block before the prompt's last token",
        kept=loaded >= wanted,
        seen=(
            f"{loaded} of {request.num_prompt_tokens} tokens were loaded for request {request_id!r}, {wanted} are the whole "
            f"blocks that it lacked; a block has {consumer.shape.block_size} tokens"
            + (
                f"; the load failed: {consumer.load_error(request_id) or 'no reason was given'}"
                if has_failed
                else ""
            )
        ),
    )


def settle(*nodes: ModelFreeNode) -> None:
    """Step nodes until everything has ended and a few times more, and check that each has all its blocks
    back.
    """
    eventually(
        "every transfer ends and is reported: asynchronous loads in finished_recving, kept blocks in finished_sending",
        lambda: not any(node.is_busy for node in nodes),
        *nodes,
    )
    for _ in range(NUM_QUIET_STEPS):
        for node in nodes:
            node.step()
        time.sleep(_POLL_S)
    for node in nodes:
        assert_whole(node)


# == contents ======================================================================================


def load(
    consumer: ModelFreeNode, producer: ModelFreeNode, request: Request, num_local_tokens: int = 0
) -> list[int]:
    """Run a request's load until it succeeds or fails; return the request's block table.

    The request does not end.

    Args:
        producer: Stepped together with the consumer.
        num_local_tokens: Tokens of the prompt that the consumer already has, in whole blocks.
    """
    request_id = request.request_id
    consumer.add(request, num_local_tokens=num_local_tokens, computes=False)
    consumer.step()
    consumer.step_until(lambda: not consumer.is_waiting(request_id), producer)
    promise(
        "a prompt that another node offers is loaded",
        kept=request_id in consumer.num_loaded_tokens.keys() | consumer.failed_loads,
        seen=f"get_num_new_matched_tokens found nothing to load for request {request_id!r}",
    )
    return consumer.blocks_of(request_id)


def begin_load(consumer: ModelFreeNode, request: Request) -> list[int]:
    """Order a request's load; return the request's block table."""
    consumer.add(request, computes=False)
    consumer.step()
    return consumer.blocks_of(request.request_id)


def by_token(node: ModelFreeNode, blocks: Sequence[int]) -> torch.Tensor:
    """Return the contents of blocks: `(num_layers, 2, num_tokens, num_kv_heads, head_size)`."""
    return node.contents(blocks).transpose(1, 2).flatten(2, 3)


def check_contents(node: ModelFreeNode, blocks: Sequence[int], expected: torch.Tensor, text: str) -> None:
    """Check what blocks contain; `expected` is what `ModelFreeNode.contents` returned for the blocks that
    they equal.
    """
    is_wrong = (
        (node.contents(blocks) != expected).transpose(0, 1).flatten(1).any(dim=1).nonzero().flatten().tolist()
    )
    promise(
        text,
        kept=not is_wrong,
        seen=f"blocks {[blocks[index] for index in is_wrong]} of {list(blocks)} differ",
    )


def check_counts(text: str, seen: object, expected: object) -> None:
    """Check something that is reported."""
    promise(text, kept=seen == expected, seen=f"{seen!r} instead of {expected!r}")


def check_load_error(node: ModelFreeNode, request_id: str, *parts: str) -> None:
    """Check that a load failed, with one of some texts in its reason."""
    reason = node.load_error(request_id)
    promise(
        "a load that fails says why",
        kept=bool(reason) and (not parts or any(part in reason for part in parts)),
        seen=f"the reason for request {request_id!r} is {reason!r}" + (f", without {parts}" if parts else ""),
    )


def check_failed_blocks(node: ModelFreeNode, blocks: Sequence[int]) -> None:
    """Check which blocks were reported as failed."""
    check_counts("the blocks of a failed load are reported", sorted(node.invalid_block_ids), sorted(blocks))


def assert_whole(node: ModelFreeNode) -> None:
    """Check that no block is held any more, and that every block is free exactly once."""
    missing = sorted(set(range(1, node.shape.num_blocks)) - set(node.pool.free_blocks))
    twice = sorted({block for block in node.pool.free_blocks if node.pool.free_blocks.count(block) > 1})
    promise(
        "in the end every block is free, once",
        kept=not (node.held or missing or twice),
        seen=f"blocks {missing} are in use, {twice} are free more than once; blocks are held for {node.held}",
    )


def is_freed(producer: ModelFreeNode) -> Callable[[], bool]:
    """Return a function that returns whether every offer has ended, for `step_until`."""
    return lambda: not producer.held
