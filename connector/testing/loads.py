"""Part of the suite for any connector (see `suite`): a prompt that one node computed is loaded by another.

The nodes check every token that the connector supplies, so these tests mostly choose what is computed and
loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from .broken import promise
from .harness import (
    PER_LAYER,
    UNIFORM,
    MakeNode,
    check_supplied,
    compute,
    fetch,
    finish,
    node_of_ranks,
    num_whole_blocks,
    settle,
)
from .node import ModelFreeNode
from .shapes import CacheShape, Request

#: Around each boundary of a block, with blocks of 4 tokens.
LENGTHS = (1, 3, 4, 5, 7, 8, 9, 15, 16, 17, 18)
#: A prompt of four whole blocks and a half.
LENGTH = 18


@dataclass(frozen=True)
class Item:
    """An item of a prompt; see `ContentItem` in `connector/base.py`."""

    identifier: str
    offset: int
    length: int


def prompt_with(changes: Mapping[int, int], num_tokens: int = LENGTH) -> list[int]:
    """Return the default prompt with other tokens at some positions."""
    return [changes.get(position, position) for position in range(num_tokens)]


#: Prompts that have something in common with the default one.
SIMILAR = {
    "its first token differs": prompt_with({0: 99}),
    "its second block differs": prompt_with({5: 99}),
    "its last whole block differs": prompt_with({15: 99}),
    "its last token differs": prompt_with({17: 99}),
    "it is longer": prompt_with({}, 30),
    "it is shorter": prompt_with({}, 11),
    "its blocks are swapped": [*range(4, 8), *range(4), *range(8, LENGTH)],
    # A connector that keeps token ids in too few bits takes these for the default prompt.
    **{f"its first token differs by 2 ** {bits}": prompt_with({0: 1 << bits}) for bits in (8, 16, 31)},
}

SEPARATE = {
    "cache_salt": ({"cache_salt": "one"}, {"cache_salt": "other"}),
    "lora_id": ({"lora_id": "one"}, {"lora_id": "other"}),
    "mm_features": ({"mm_features": (Item("cat", 2, 3),)}, {"mm_features": (Item("dog", 2, 3),)}),
    "offset of mm_features": ({"mm_features": (Item("cat", 2, 3),)}, {"mm_features": (Item("cat", 3, 3),)}),
    "prompt_embeds": ({"prompt_embeds": torch.ones(LENGTH, 2)}, {"prompt_embeds": torch.zeros(LENGTH, 2)}),
}


class LoadPromises:
    """A prompt that one node computed is loaded by another: exactly its bytes, and all of its whole
    blocks.
    """

    # -- every prompt --------------------------------------------------------------------------------

    def test_what_one_node_computed_another_loads(self, make_node: MakeNode) -> None:
        producer, consumer = make_node(PER_LAYER), make_node(PER_LAYER)
        for num_tokens in LENGTHS:
            _hand_over(producer, consumer, num_tokens, f"of {num_tokens} tokens")

    def test_the_uniform_layout(self, make_node: MakeNode) -> None:
        if not make_node(PER_LAYER).worker.prefer_cross_layer_blocks:
            pytest.skip(
                "the capability prefer_cross_layer_blocks was not declared: this connector wants per-layer caches"
            )
        _hand_over(make_node(UNIFORM), make_node(UNIFORM), LENGTH)

    def test_what_is_here_already_is_not_loaded(self, make_node: MakeNode) -> None:
        producer, consumer = make_node(PER_LAYER), make_node(PER_LAYER)
        for num_here in (4, 8, 12, 16):
            name = f"with {num_here} tokens here"
            _hand_over(producer, consumer, LENGTH, name, num_local_tokens=num_here)
            loaded = consumer.num_loaded_tokens.get(f"d {name}", 0)
            promise(
                "only tokens that the node lacks are loaded",
                kept=loaded <= LENGTH - num_here,
                seen=f"{loaded} tokens were loaded, although the node had {num_here} of {LENGTH}",
            )

    def test_a_prompt_that_was_computed_in_chunks(self, make_node: MakeNode) -> None:
        producer, consumer = make_node(PER_LAYER), make_node(PER_LAYER)
        for num_tokens_per_step in (3, 4, 5, 8, 11):
            producer.max_step_tokens = consumer.max_step_tokens = num_tokens_per_step
            _hand_over(producer, consumer, LENGTH, f"in chunks of {num_tokens_per_step}")

    def test_a_prompt_with_a_long_answer(self, make_node: MakeNode) -> None:
        _hand_over(make_node(PER_LAYER), make_node(PER_LAYER), LENGTH, max_answer_tokens=8)

    # -- several requests ----------------------------------------------------------------------------

    def test_requests_of_one_step_are_not_mixed_up(self, make_node: MakeNode) -> None:
        producer, consumer = make_node(PER_LAYER), make_node(PER_LAYER)
        lengths = {"p0": 18, "p1": 9, "p2": 13}
        for index, (request_id, num_tokens) in enumerate(lengths.items()):
            offer = {"do_remote_decode": True}
            producer.add(Request(request_id, num_tokens, offer, first_token_id=100 * index))
        for request_id in lengths:
            finish(producer, request_id)
        wanted = {}
        for index, (request_id, num_tokens) in enumerate(lengths.items()):
            request = Request(
                f"d{index}", num_tokens, producer.params[request_id], first_token_id=100 * index
            )
            wanted[request.request_id] = request, num_whole_blocks(PER_LAYER, num_tokens)
            consumer.add(request, num_wanted_tokens=wanted[request.request_id][1])
        for request, num_tokens in wanted.values():
            finish(consumer, request.request_id, producer)
            check_supplied(consumer, request, num_tokens)
        settle(producer, consumer)

    def test_requests_of_one_step_are_not_mixed_up_in_chunks(self, make_node: MakeNode) -> None:
        producer, consumer = make_node(PER_LAYER, max_step_tokens=14), make_node(PER_LAYER)
        offer = {"do_remote_decode": True}
        producer.add(Request("p0", 18, offer))
        producer.add(Request("p1", 17, offer, first_token_id=100))
        for index in range(2):
            finish(producer, f"p{index}")
            request = Request(
                f"d{index}", 18 - index, producer.params[f"p{index}"], first_token_id=100 * index
            )
            fetch(consumer, producer, request)
        settle(producer, consumer)

    def test_one_step_may_load_compute_and_save(self, make_node: MakeNode) -> None:
        producer, consumer = make_node(PER_LAYER), make_node(PER_LAYER)
        params = compute(producer, Request("p", LENGTH))
        consumer.add(Request("x0", LENGTH, {"do_remote_decode": True}, first_token_id=100))
        consumer.step()
        # This prompt is computed by the step that begins to load another, and to save the one before.
        consumer.add(Request("x1", LENGTH, {"do_remote_decode": True}, first_token_id=200))
        fetch(consumer, producer, Request("d", LENGTH, params))
        for number in range(2):
            finish(consumer, f"x{number}", producer)
            params = consumer.params[f"x{number}"]
            fetch(
                producer, consumer, Request(f"y{number}", LENGTH, params, first_token_id=100 * (number + 1))
            )
        settle(producer, consumer)

    def test_one_prompt_may_be_computed_and_loaded_twice_at_once(self, make_node: MakeNode) -> None:
        producer, consumer = make_node(PER_LAYER), make_node(PER_LAYER)
        names = ("1", "2")
        for name in names:
            producer.add(Request(f"p{name}", LENGTH, {"do_remote_decode": True}))
        for name in names:
            finish(producer, f"p{name}")
        for name in names:
            consumer.add(Request(f"d{name}", LENGTH, producer.params[f"p{name}"]))
        for name in names:
            finish(consumer, f"d{name}", producer)
        settle(producer, consumer)

    # -- several ranks -------------------------------------------------------------------------------

    @pytest.mark.parametrize("num_tokens_per_step", [1 << 20, 5])
    def test_each_rank_gets_its_own_heads(self, make_node: MakeNode, num_tokens_per_step: int) -> None:
        producer, consumer = (node_of_ranks(make_node, 2) for _ in range(2))
        producer.max_step_tokens = num_tokens_per_step
        for num_tokens in (1, 5, LENGTH):
            _hand_over(producer, consumer, num_tokens, f"{num_tokens} tokens")

    @pytest.mark.parametrize("num_ranks", [(1, 2), (2, 1)], ids=["from one to two", "from two to one"])
    def test_other_numbers_of_ranks_are_not_mistaken(
        self, make_node: MakeNode, num_ranks: tuple[int, int]
    ) -> None:
        """The connector may hand over between such nodes, or not."""
        producer, consumer = (node_of_ranks(make_node, num) for num in num_ranks)
        params = compute(producer, Request("p", LENGTH))
        consumer.add(Request("d", LENGTH, params))
        finish(consumer, "d", producer)
        settle(consumer)
        if params is None:  # otherwise the offer still stands, for nodes that can use it
            settle(producer)

    # -- blocks that are lost ------------------------------------------------------------------------

    def test_a_prompt_that_was_preempted(self, make_node: MakeNode) -> None:
        producer, consumer = make_node(PER_LAYER, max_step_tokens=5), make_node(PER_LAYER)
        for num_steps in (1, 2, 3):
            first = 100 * num_steps
            producer.add(Request(f"p{num_steps}", LENGTH, {"do_remote_decode": True}, first_token_id=first))
            for _ in range(num_steps):
                producer.step()
            producer.preempt(f"p{num_steps}")
            producer.step()
            finish(producer, f"p{num_steps}")
            params = producer.params[f"p{num_steps}"]
            fetch(consumer, producer, Request(f"d{num_steps}", LENGTH, params, first_token_id=first))
        settle(producer, consumer)

    def test_blocks_of_a_preempted_prompt_are_another_requests(self, make_node: MakeNode) -> None:
        # So few blocks that the other request gets those which the preempted one lost.
        few = replace(PER_LAYER, num_blocks=11)
        producer, consumer = make_node(few, max_step_tokens=9), make_node(few)
        producer.add(Request("p", LENGTH, {"do_remote_decode": True}))
        producer.step()
        producer.preempt("p")
        producer.step()
        producer.add(Request("x", LENGTH, {"do_remote_decode": True}, first_token_id=100))
        finish(producer, "p")
        finish(producer, "x")
        for request_id, first in (("p", 0), ("x", 100)):
            request = Request(f"d-{request_id}", LENGTH, producer.params[request_id], first_token_id=first)
            fetch(consumer, producer, request)
        settle(producer, consumer)

    # -- what must not be loaded ---------------------------------------------------------------------

    def test_a_prompt_that_no_node_computed_is_not_loaded(self, make_node: MakeNode) -> None:
        node = make_node(PER_LAYER)
        request = Request("d", LENGTH)
        node.scheduler.on_new_request(request)
        answer = node.scheduler.get_num_new_matched_tokens(request, 0)
        promise(
            "a prompt that no node computed is not loaded", kept=answer[0] == 0, seen=f"{answer} were found"
        )
        output = node.step()
        promise("a step without transfers reports nothing", kept=output.is_empty(), seen=output)

    def test_a_similar_prompt_gets_none_of_its_bytes_wrong(self, make_node: MakeNode) -> None:
        producer, consumer = make_node(PER_LAYER), make_node(PER_LAYER)
        for number, (name, token_ids) in enumerate(SIMILAR.items()):
            shift = 100 * number
            params = compute(producer, Request(f"p{number}", LENGTH, first_token_id=shift))
            similar = [token + shift for token in token_ids]
            consumer.add(Request(name, len(similar), params, token_ids=similar))
            finish(consumer, name, producer)
        settle(producer, consumer)

    @pytest.mark.parametrize("fields", SEPARATE.values(), ids=SEPARATE)
    def test_what_bytes_depend_on_separates_caches(
        self, make_node: MakeNode, fields: tuple[dict[str, Any], dict[str, Any]]
    ) -> None:
        one, other = fields
        producer, consumer = make_node(PER_LAYER), make_node(PER_LAYER)
        for number, (ours, theirs) in enumerate([(one, {}), ({}, one), (one, other)]):
            shift = 100 * number
            params = compute(producer, Request(f"p{number}", LENGTH, first_token_id=shift, **ours))
            consumer.add(Request(f"d{number}", LENGTH, params, first_token_id=shift, **theirs))
            finish(consumer, f"d{number}", producer)
        settle(producer, consumer)

    @pytest.mark.parametrize(
        "shape",
        [
            replace(PER_LAYER, num_kv_heads=4),
            replace(PER_LAYER, head_size=16),
            replace(PER_LAYER, num_layers=2),
            replace(PER_LAYER, dtype=torch.bfloat16),
            replace(PER_LAYER, block_size=8),
        ],
        ids=["heads", "head size", "layers", "dtype", "block size"],
    )
    def test_a_cache_of_another_shape_is_not_mistaken(self, make_node: MakeNode, shape: CacheShape) -> None:
        producer, consumer = make_node(PER_LAYER), make_node(shape)
        params = compute(producer, Request("p", LENGTH))
        _check_refused(producer, consumer, params)

    def test_another_models_cache_is_not_loaded(self, make_node: MakeNode) -> None:
        producer, consumer = make_node(PER_LAYER), make_node(PER_LAYER, model="another")
        params = compute(producer, Request("p", LENGTH))
        _check_refused(producer, consumer, params)

    # -- damaged stores ------------------------------------------------------------------------------

    @pytest.mark.parametrize(
        "when", ["before it is asked for", "after the load was ordered", "while it is loaded"]
    )
    def test_a_damaged_store_is_a_failed_load(
        self, make_node: MakeNode, damage: Callable[[], None], when: str
    ) -> None:
        producer, consumer = make_node(PER_LAYER), make_node(PER_LAYER)
        params = compute(producer, Request("p", LENGTH))
        if when == "before it is asked for":
            damage()
        consumer.add(Request("d", LENGTH, params))
        consumer.step(damage if when == "after the load was ordered" else None)
        if when == "while it is loaded":
            damage()
        finish(consumer, "d", producer)
        consumer.add(Request("again", LENGTH, params))
        finish(consumer, "again", producer)
        settle(producer, consumer)


def _hand_over(
    producer: ModelFreeNode,
    consumer: ModelFreeNode,
    num_tokens: int,
    name: str = "",
    *,
    num_local_tokens: int = 0,
    max_answer_tokens: int = 1,
) -> None:
    """Compute a prompt on one node and load it on the other. Each name has a prompt of its own."""
    first = sum(name.encode()) * 100
    params = compute(
        producer,
        Request(f"p {name}", num_tokens, first_token_id=first),
        max_answer_tokens=max_answer_tokens,
    )
    fetch(
        consumer,
        producer,
        Request(f"d {name}", num_tokens, params, first_token_id=first),
        num_local_tokens=num_local_tokens,
        max_answer_tokens=max_answer_tokens,
    )
    settle(producer, consumer)


def _check_refused(
    producer: ModelFreeNode, consumer: ModelFreeNode, params: Mapping[str, Any] | None
) -> None:
    """Run a request on a node that cannot use what the producer has; it computes the prompt itself."""
    consumer.add(Request("d", LENGTH, params))
    finish(consumer, "d", producer)
    settle(consumer)
    if params is None:  # otherwise the offer still stands, for nodes that can use it
        settle(producer)
