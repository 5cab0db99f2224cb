from __future__ import annotations

import tracemalloc
from collections import deque
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.runner_mixin.kv_cache import FreeKVCacheBlockQueue, KVCacheBlock
from kvferry.transports.errors import KVTransferStateError


def make_blocks(count: int) -> list[KVCacheBlock]:
    return [KVCacheBlock(i) for i in range(count)]


def ids(blocks: Iterable[KVCacheBlock]) -> list[int]:
    return [block.block_id for block in blocks]


def test_blocks_come_out_in_the_order_in_which_they_went_in() -> None:
    queue = FreeKVCacheBlockQueue(make_blocks(5))
    assert ids([queue.popleft(), queue.popleft()]) == [0, 1]
    assert ids(queue.popleft_n(2)) == [2, 3]
    assert queue.num_free_blocks == 1


def test_a_block_that_is_put_back_comes_out_last() -> None:
    queue = FreeKVCacheBlockQueue(make_blocks(3))
    first, second = queue.popleft_n(2)
    queue.append_n([second, first])
    assert ids(queue.get_all_free_blocks()) == [2, 1, 0]


def test_a_block_leaves_from_the_head_the_middle_and_the_tail() -> None:
    blocks = make_blocks(5)
    queue = FreeKVCacheBlockQueue(blocks)
    for i, left in ((2, [0, 1, 3, 4]), (0, [1, 3, 4]), (4, [1, 3])):
        queue.remove(blocks[i])
        assert ids(queue.get_all_free_blocks()) == left


def test_the_last_blocks_can_be_taken_at_once_and_the_queue_used_again() -> None:
    blocks = make_blocks(3)
    queue = FreeKVCacheBlockQueue(blocks)
    assert queue.popleft_n(0) == []
    assert queue.popleft_n(3) == blocks
    assert queue.get_all_free_blocks() == []
    queue.append(blocks[1])
    assert queue.popleft() is blocks[1]


def test_an_empty_queue_says_that_it_is_empty() -> None:
    with pytest.raises(KVTransferStateError, match="the free queue is empty"):
        FreeKVCacheBlockQueue([]).popleft()


@pytest.mark.parametrize("count", [-1, 4])
def test_a_request_for_more_blocks_than_there_are_takes_none(count: int) -> None:
    queue = FreeKVCacheBlockQueue(make_blocks(3))
    with pytest.raises(KVTransferStateError, match=f"cannot take {count} blocks: 3 are free"):
        queue.popleft_n(count)
    assert ids(queue.get_all_free_blocks()) == [0, 1, 2]


def test_a_block_that_is_not_free_cannot_be_removed() -> None:
    queue = FreeKVCacheBlockQueue(make_blocks(3))
    taken = queue.popleft()
    with pytest.raises(KVTransferStateError, match="cannot remove block 0: it is not in the free queue"):
        queue.remove(taken)
    assert ids(queue.get_all_free_blocks()) == [1, 2]


def test_a_block_cannot_be_freed_twice() -> None:
    blocks = make_blocks(2)
    queue = FreeKVCacheBlockQueue(blocks)
    with pytest.raises(KVTransferStateError, match="block 1: it is in the free queue already"):
        queue.append(blocks[1])
    assert ids(queue.get_all_free_blocks()) == [0, 1]


def test_a_list_with_a_duplicate_is_appended_up_to_the_duplicate() -> None:
    blocks = make_blocks(3)
    queue = FreeKVCacheBlockQueue([])
    with pytest.raises(KVTransferStateError, match="block 0: it is in the free queue already"):
        queue.append_n([blocks[0], blocks[1], blocks[0], blocks[2]])
    assert ids(queue.get_all_free_blocks()) == [0, 1]


def test_a_block_that_is_put_in_front_comes_out_first() -> None:
    queue = FreeKVCacheBlockQueue(make_blocks(3))
    queue.prepend_n([KVCacheBlock(7), KVCacheBlock(8)])
    assert ids(queue.get_all_free_blocks()) == [7, 8, 0, 1, 2]
    with pytest.raises(KVTransferStateError, match="block 0: it is in the free queue already"):
        queue.prepend_n([queue.get_all_free_blocks()[2], KVCacheBlock(9)])
    assert ids(queue.get_all_free_blocks()) == [9, 7, 8, 0, 1, 2]


def test_a_block_cannot_be_in_two_queues() -> None:
    blocks = make_blocks(1)
    FreeKVCacheBlockQueue(blocks)
    with pytest.raises(KVTransferStateError, match="already"):
        FreeKVCacheBlockQueue(blocks)


operations = st.lists(
    st.tuples(
        st.sampled_from(["popleft", "popleft_n", "remove", "append", "append_n", "prepend_n"]),
        st.integers(0, 9),
    )
)


@given(count=st.integers(0, 10), steps=operations)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_it_behaves_as_a_plain_deque(count: int, steps: list[tuple[str, int]]) -> None:
    blocks = make_blocks(count)
    queue, model = FreeKVCacheBlockQueue(blocks), deque(range(count))
    for name, number in steps:
        out = [i for i in range(count) if i not in model]
        if name == "popleft" and model:
            assert queue.popleft().block_id == model.popleft()
        elif name == "popleft_n" and number <= len(model):
            assert ids(queue.popleft_n(number)) == [model.popleft() for _ in range(number)]
        elif name == "remove" and number in model:
            queue.remove(blocks[number])
            model.remove(number)
        elif name == "append" and number in out:
            queue.append(blocks[number])
            model.append(number)
        elif name == "append_n":
            queue.append_n(blocks[i] for i in out[:number])
            model.extend(out[:number])
        elif name == "prepend_n":
            queue.prepend_n([blocks[i] for i in out[:number]])
            model.extendleft(reversed(out[:number]))
        assert ids(queue.get_all_free_blocks()) == list(model)
        assert queue.num_free_blocks == len(model)


def test_moving_blocks_allocates_nothing() -> None:
    blocks = make_blocks(200)
    queue = FreeKVCacheBlockQueue(blocks)

    def move_all() -> None:
        for block in blocks:
            queue.remove(block)
            queue.append(block)
            queue.append(queue.popleft())

    move_all()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        move_all()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak - before < 1024  # frames and loop variables; one node per block would take tens of kilobytes
