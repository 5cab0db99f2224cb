"""The events of a prefix cache say, in order, what it stores and removes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvferry.connector.kv_cache_specs import FullAttentionSpec
from kvferry.runner_mixin.kv_cache import CacheEvents, KVCacheManager, MultiModalFeature

MakeManager = Callable[..., KVCacheManager]
MakeRequest = Callable[..., Any]


def compute(manager: KVCacheManager, events: CacheEvents, request: Any) -> None:
    """Compute all of a request's tokens in one step."""
    hit, num_tokens = manager.get_computed_blocks(request)
    assert manager.allocate_slots(request, request.num_tokens - num_tokens, computed_blocks=hit) is not None
    request.num_computed_tokens = request.num_tokens
    manager.cache_blocks(request, request.num_tokens)
    events.note(request)


def held_after(events: list[dict[str, Any]], held: set[tuple[int, bytes]]) -> set[tuple[int, bytes]]:
    """Return what a cache with these blocks has after the events, each of which must change it."""
    for event in events:
        blocks = {(event["group_idx"], block) for block in event["block_hashes"]}
        if event["type"] == "BlockStored":
            assert not blocks & held
            held = held | blocks
        else:
            assert blocks <= held
            held = held - blocks
    return held


def test_events_name_blocks_by_parent_and_token_ids(
    make_manager: MakeManager, make_request: MakeRequest, full: FullAttentionSpec
) -> None:
    manager = make_manager(8, full)
    events = CacheEvents(manager)
    first = make_request("first", list(range(10)))
    compute(manager, events, first)
    (stored,) = events.take()
    assert (stored["type"], stored["parent_block_hash"], stored["block_size"]) == ("BlockStored", None, 4)
    assert stored["block_hashes"] == first.block_hashes[:2]
    assert stored["token_ids"] == list(range(8))
    assert stored["extra_keys"] is None
    second = make_request("second", [*range(8), 90, 91, 92, 93, 94])
    compute(manager, events, second)
    (stored,) = events.take()  # the others are there already
    assert stored["parent_block_hash"] == first.block_hashes[1]
    assert stored["token_ids"] == [90, 91, 92, 93]
    assert events.take() == []


def test_what_a_new_prompt_pushes_out_is_removed_before_it_is_stored(
    make_manager: MakeManager, make_request: MakeRequest, full: FullAttentionSpec
) -> None:
    manager = make_manager(5, full)
    events = CacheEvents(manager)
    held: set[tuple[int, bytes]] = set()
    for number in range(6):
        request = make_request(str(number), [number] * 4 + list(range(9)))
        compute(manager, events, request)
        manager.free(str(number))
        held = held_after(events.take(), held)
        assert held == {(0, block) for block in request.block_hashes[:3]}
    assert manager.reset_prefix_cache()
    assert held_after(events.take(), held) == set()


def test_adapter_salt_and_images_are_in_the_extra_keys(
    make_manager: MakeManager, make_request: MakeRequest, full: FullAttentionSpec
) -> None:
    manager = make_manager(20, full)
    events = CacheEvents(manager)
    compute(manager, events, make_request("a", list(range(8)), lora_id="poet", cache_salt="salt"))
    image = MultiModalFeature("image", 5, 2)
    compute(manager, events, make_request("b", list(range(8)), mm_features=[image]))
    adapter, with_image = events.take()
    assert (adapter["lora_name"], adapter["extra_keys"]) == ("poet", [["poet", "salt"], ["poet"]])
    assert (with_image["lora_name"], with_image["extra_keys"]) == (None, [None, [("image", 1)]])


@pytest.mark.parametrize("is_recorded", [True, False])
def test_a_failed_load_is_removed_and_without_events_nothing_is_recorded(
    make_manager: MakeManager, make_request: MakeRequest, full: FullAttentionSpec, is_recorded: bool
) -> None:
    manager = make_manager(8, full)
    events = CacheEvents(manager) if is_recorded else None
    request = make_request("a", list(range(12)))
    assert manager.allocate_slots(request, 12) is not None
    manager.cache_blocks(request, 12)
    if events is not None:
        events.note(request)
        events.take()
    manager.invalidate_blocks(manager.get_block_ids("a")[0][1:2])
    if events is not None:
        (removed,) = events.take()
        assert removed["block_hashes"] == request.block_hashes[1:2]
    else:
        assert manager._pool.changes is None
