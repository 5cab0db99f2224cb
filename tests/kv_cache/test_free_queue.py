from __future__ import annotations

import tracemalloc
from collections import deque
from collections.abc import Callable, Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.runner_mixin.kv_cache import FreeKVCacheBlockQueue, KVCacheBlock
from kvferry.transports.errors import KVTransferStateError


def make_blocks(count: int) -> list[KVCacheBlock]:
    return [KVCacheBlock(i) for i in range(count)]


def ids(blocks: Iterable[KVCacheBlock]) -> list[int]:
    return [block.block_id for block in blocks]


@pytest.mark.parametrize(
    ("call", "message", "left"),
    [
        (lambda queue, blocks: queue.popleft_n(-1), "cannot take -1 blocks: 3 are free", [1, 2, 3]),
        (lambda queue, blocks: queue.popleft_n(4), "cannot take 4 blocks: 3 are free", [1, 2, 3]),
        (
            lambda queue, blocks: queue.remove(blocks[0]),
            "cannot remove block 0: it is not in the free queue",
            [1, 2, 3],
        ),
        (
            lambda queue, blocks: queue.append(blocks[1]),
            "block 1: it is in the free queue already",
            [1, 2, 3],
        ),
        (lambda queue, blocks: FreeKVCacheBlockQueue(blocks), "block 1: .* already", [1, 2, 3]),
        (lambda queue, blocks: queue.append_n(blocks[:2]), "block 1: .* already", [1, 2, 3, 0]),
        (lambda queue, blocks: queue.prepend_n(blocks[1::-1]), "block 1: .* already", [0, 1, 2, 3]),
        (lambda queue, blocks: FreeKVCacheBlockQueue([]).popleft(), "the free queue is empty", [1, 2, 3]),
    ],
)
def test_a_wrong_call_is_refused_and_blocks_before_the_wrong_one_are_moved(
    call: Callable[[FreeKVCacheBlockQueue, list[KVCacheBlock]], object], message: str, left: list[int]
) -> None:
    blocks = make_blocks(4)
    queue = FreeKVCacheBlockQueue(blocks)
    queue.popleft()
    with pytest.raises(KVTransferStateError, match=message):
        call(queue, blocks)
    assert ids(queue.get_all_free_blocks()) == left


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
