"""Random schedules for the whole manager, with a model of its memory: no query ever sees a wrong token.

For each slot that was written, the model knows which token of which prefix it holds. Every step checks all
slots that its queries see. A transfer checks that the blocks that it holds do not change. A request has no
block more than it needs.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvferry.connector.kv_cache_specs import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    SlidingWindowSpec,
)
from kvferry.runner_mixin.kv_cache import BlockHash, KVCacheManager, get_request_block_hasher, sha256

BLOCK_SIZE = 2
MAX_MODEL_LEN = 14
WINDOW, CHUNK = 3, 5
HASHER = get_request_block_hasher(BLOCK_SIZE, sha256)

FULL = FullAttentionSpec(BLOCK_SIZE, 1, 8, torch.float32)
WINDOWED = SlidingWindowSpec(BLOCK_SIZE, 1, 8, torch.float32, sliding_window=WINDOW)
CHUNKED = ChunkedLocalAttentionSpec(BLOCK_SIZE, 1, 8, torch.float32, attention_chunk_size=CHUNK)
FIRST_SEEN: dict[KVCacheSpec, Callable[[int], int]] = {
    FULL: lambda position: 0,
    WINDOWED: lambda position: max(0, position - WINDOW + 1),
    CHUNKED: lambda position: position - position % CHUNK,
}
MODELS = [(FULL,), (FULL, WINDOWED), (FULL, WINDOWED, CHUNKED), (WINDOWED, WINDOWED)]

Content = tuple[int, tuple[int, ...]]
"""A token's contents: its group, and all tokens up to it."""


@dataclass
class Request:
    request_id: str
    all_token_ids: list[int]
    num_computed_tokens: int = 0
    num_loading: int = 0
    block_hashes: list[BlockHash] = field(default_factory=list)
    lora_id: None = None
    cache_salt: None = None
    mm_features: tuple[()] = ()

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    def append(self, *tokens: int) -> None:
        self.all_token_ids += tokens
        self.block_hashes += HASHER(self)


tokens = st.lists(st.integers(0, 1), min_size=1, max_size=MAX_MODEL_LEN - 2)
picks = st.integers(0, 30)


class EngineWithMemory(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.memory: dict[tuple[int, int], Content] = {}
        self.waiting: list[Request] = []
        self.loading: list[Request] = []
        self.running: list[Request] = []
        self.held: dict[str, dict[tuple[int, int], Content]] = {}
        self.spans: dict[str, tuple[int, int]] = {}
        """By request: the first token that it computes next, and the end of its slots."""
        self.num_requests = 0

    @initialize(specs=st.sampled_from(MODELS), num_blocks=st.sampled_from([9, 14, 24]))
    def start(self, specs: tuple[KVCacheSpec, ...], num_blocks: int) -> None:
        self.specs = specs
        self.num_blocks = num_blocks
        groups = tuple(KVCacheGroupSpec((f"layers.{i}",), spec) for i, spec in enumerate(specs))
        self.manager = KVCacheManager(KVCacheConfig(num_blocks, (), groups), MAX_MODEL_LEN)

    # -- the memory ------------------------------------------------------------------------------------

    def slot(self, request: Request, group: int, position: int) -> tuple[int, int]:
        block_id = self.manager.get_block_ids(request.request_id)[group][position // BLOCK_SIZE]
        return block_id, position % BLOCK_SIZE

    def content(self, request: Request, group: int, position: int) -> Content:
        return group, tuple(request.all_token_ids[: position + 1])

    def write(self, request: Request, start: int, end: int) -> None:
        for group in range(len(self.specs)):
            for position in range(start, end):
                slot = self.slot(request, group, position)
                assert slot[0] != 0, "a computed token needs its own slot"
                self.memory[slot] = self.content(request, group, position)

    def check_seen(self, request: Request, start: int, end: int) -> None:
        """Check that all tokens that the queries from `start` to `end` see are the right ones."""
        for group, spec in enumerate(self.specs):
            for position in range(FIRST_SEEN[spec](start), end):
                slot = self.slot(request, group, position)
                assert slot[0] != 0, f"group {group} lost position {position}"
                assert self.memory[slot] == self.content(request, group, position)

    # -- requests --------------------------------------------------------------------------------------

    @rule(prompt=tokens)
    def arrive(self, prompt: list[int]) -> None:
        self.num_requests += 1
        request = Request(f"r{self.num_requests}", [])
        request.append(*prompt)
        self.waiting.append(request)

    @precondition(lambda self: self.waiting)
    @rule(pick=picks)
    def look_up(self, pick: int) -> None:
        request = self.waiting[pick % len(self.waiting)]
        before = self.manager.num_free_blocks
        _, num_hit = self.manager.get_computed_blocks(request)
        assert num_hit < request.num_tokens, "the last token is always computed"
        self.check_unchanged(request, before)

    def check_unchanged(self, request: Request, num_free_blocks: int) -> None:
        assert self.manager.num_free_blocks == num_free_blocks
        assert not any(self.manager.get_block_ids(request.request_id))

    @precondition(lambda self: self.waiting)
    @rule(pick=picks, chunk=st.integers(1, 8))
    def admit(self, pick: int, chunk: int) -> None:
        request = self.waiting[pick % len(self.waiting)]
        blocks, num_hit = self.manager.get_computed_blocks(request)
        num_new = min(chunk, request.num_tokens - num_hit)
        before = self.manager.num_free_blocks
        if self.manager.allocate_slots(request, num_new, computed_blocks=blocks) is None:
            self.check_unchanged(request, before)
            return
        self.waiting.remove(request)
        self.running.append(request)
        request.num_computed_tokens = num_hit
        self.forward(request, num_new)

    @precondition(lambda self: self.running)
    @rule(pick=picks, chunk=st.integers(1, 8))
    def step(self, pick: int, chunk: int) -> None:
        request = self.running[pick % len(self.running)]
        num_new = min(chunk, request.num_tokens - request.num_computed_tokens)
        if self.manager.allocate_slots(request, num_new) is None:
            self.preempt(pick)
            return
        self.forward(request, num_new)

    def forward(self, request: Request, num_new: int) -> None:
        start, end = request.num_computed_tokens, request.num_computed_tokens + num_new
        self.spans[request.request_id] = start, end
        self.write(request, start, end)
        self.check_seen(request, start, end)
        request.num_computed_tokens = end
        self.manager.cache_blocks(request, end)
        if end == request.num_tokens:
            if end == MAX_MODEL_LEN:
                self.running.remove(request)
                self.manager.free(request.request_id)
            else:
                request.append(end % 2)

    @precondition(lambda self: self.running)
    @rule(pick=picks)
    def preempt(self, pick: int) -> None:
        request = self.running.pop(pick % len(self.running))
        self.manager.free(request.request_id)
        request.num_computed_tokens = 0
        self.waiting.append(request)

    @precondition(lambda self: self.running)
    @rule(pick=picks)
    def finish(self, pick: int) -> None:
        request = self.running.pop(pick % len(self.running))
        self.manager.free(request.request_id)

    # -- transfers -------------------------------------------------------------------------------------

    @precondition(lambda self: self.running)
    @rule(pick=picks)
    def finish_and_offer(self, pick: int) -> None:
        request = self.running.pop(pick % len(self.running))
        ids = self.manager.get_block_ids(request.request_id)
        slots = [(i, offset) for table in ids for i in table if i for offset in range(BLOCK_SIZE)]
        self.held[request.request_id] = {slot: self.memory[slot] for slot in slots if slot in self.memory}
        self.manager.pin(request.request_id)
        self.manager.free(request.request_id)

    @precondition(lambda self: self.held)
    @rule(pick=picks)
    def delivered(self, pick: int) -> None:
        request_id = sorted(self.held)[pick % len(self.held)]
        del self.held[request_id]
        self.manager.unpin(request_id)

    @precondition(lambda self: self.waiting)
    @rule(pick=picks, beyond=st.integers(1, MAX_MODEL_LEN))
    def start_load(self, pick: int, beyond: int) -> None:
        request = self.waiting[pick % len(self.waiting)]
        blocks, num_hit = self.manager.get_computed_blocks(request)
        num_external = min(beyond, request.num_tokens - num_hit)
        before = self.manager.num_free_blocks
        allocated = self.manager.allocate_slots(
            request, 0, computed_blocks=blocks, num_external_tokens=num_external
        )
        if allocated is None:
            self.check_unchanged(request, before)
            return
        self.waiting.remove(request)
        self.loading.append(request)
        end = num_hit + num_external
        self.spans[request.request_id] = min(end, request.num_tokens - 1), end
        request.num_computed_tokens = num_hit
        request.num_loading = num_external

    @precondition(lambda self: self.loading)
    @rule(pick=picks)
    def load_ended(self, pick: int) -> None:
        request = self.loading.pop(pick % len(self.loading))
        self.receive(request, failed=set())
        request.num_computed_tokens += request.num_loading
        self.manager.cache_blocks(request, request.num_computed_tokens)
        request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens - 1)
        self.running.append(request)

    @precondition(lambda self: self.loading)
    @rule(pick=picks, bad=st.lists(picks, min_size=1, max_size=3))
    def load_failed(self, pick: int, bad: list[int]) -> None:
        request = self.loading.pop(pick % len(self.loading))
        loaded = self.loaded_blocks(request)
        failed = {loaded[i % len(loaded)] for i in bad}
        self.receive(request, failed)
        arrived = request.num_computed_tokens + request.num_loading
        valid = self.manager.invalidate_blocks(failed)
        assert set(valid) == {request.request_id}, (
            "no other request can have a block that is still being loaded"
        )
        request.num_computed_tokens = min(arrived, valid[request.request_id], request.num_tokens - 1)
        del self.spans[request.request_id]  # its tables are cut, and grow again in its next step
        self.running.append(request)

    def loaded_blocks(self, request: Request) -> list[int]:
        first = request.num_computed_tokens // BLOCK_SIZE
        tables = self.manager.get_block_ids(request.request_id)
        return sorted({i for table in tables for i in table[first:] if i})

    def receive(self, request: Request, failed: set[int]) -> None:
        start, end = request.num_computed_tokens, request.num_computed_tokens + request.num_loading
        for group in range(len(self.specs)):
            for position in range(start, end):
                slot = self.slot(request, group, position)
                if slot[0] in failed:
                    self.memory[slot] = (-1, ())
                elif slot[0] != 0:
                    self.memory[slot] = self.content(request, group, position)

    @rule(ids=st.sets(st.integers(1, 23), max_size=4))
    def lose(self, ids: set[int]) -> None:
        """Invalidate blocks that no request holds, which leaves holes in cached prefixes."""
        in_tables = {
            block_id
            for request in self.loading + self.running
            for table in self.manager.get_block_ids(request.request_id)
            for block_id in table
        }
        in_transfers = {block_id for slots in self.held.values() for block_id, _ in slots}
        lost = {i for i in ids if i < self.num_blocks} - in_tables - in_transfers
        assert self.manager.invalidate_blocks(lost) == {}
        for slot in [slot for slot in self.memory if slot[0] in lost]:
            self.memory[slot] = (-1, ())

    @rule()
    def reset(self) -> None:
        idle = self.manager.usage == 0.0
        assert self.manager.reset_prefix_cache() == idle

    # -- always ----------------------------------------------------------------------------------------

    @invariant()
    def nothing_is_broken(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.manager.check_integrity()
        assert self.manager.pinned_request_ids == self.held.keys()
        for slots in self.held.values():
            for slot, content in slots.items():
                assert self.memory[slot] == content, "a block changed under a transfer"

    @invariant()
    def no_request_has_a_block_that_it_does_not_need(self) -> None:
        for request in self.loading + self.running:
            if request.request_id not in self.spans:
                continue
            start, end = self.spans[request.request_id]
            for spec, table in zip(self.specs, self.manager.get_block_ids(request.request_id), strict=True):
                assert len(table) == -(-end // BLOCK_SIZE)
                assert not any(table[: FIRST_SEEN[spec](start) // BLOCK_SIZE]), "no query sees these blocks"

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        for request in self.loading + self.running:
            self.manager.free(request.request_id)
        for request_id in self.held:
            self.manager.unpin(request_id)
        self.manager.check_integrity()
        assert self.manager.num_free_blocks == self.num_blocks - 1


TestContents = EngineWithMemory.TestCase
TestContents.settings = settings(max_examples=100, stateful_step_count=50, deadline=None, derandomize=True)


@pytest.mark.slow
@pytest.mark.full
class TestContentsLonger(EngineWithMemory.TestCase):
    settings = settings(max_examples=500, stateful_step_count=80, deadline=None, derandomize=True)


def _random_step(machine: EngineWithMemory, rng: random.Random) -> None:
    """Take one step that is possible now. Hypothesis' schedules shrink well, but they are short."""
    pick, chunk = rng.randrange(31), rng.randint(1, 8)
    steps: list[tuple[object, Callable[[], None]]] = [
        (
            len(machine.waiting) < 6,
            lambda: machine.arrive([rng.random() < 0.2 for _ in range(rng.randint(1, 12))]),
        ),
        (machine.waiting, lambda: machine.admit(pick, chunk)),
        (machine.waiting, lambda: machine.start_load(pick, rng.choice([chunk, MAX_MODEL_LEN]))),
        (machine.loading, lambda: machine.load_ended(pick)),
        (machine.loading, lambda: machine.load_failed(pick, [pick, chunk])),
        (machine.running, lambda: machine.step(pick, chunk)),
        (machine.running, lambda: machine.step(pick, 1)),
        (machine.running and rng.random() < 0.2, lambda: machine.preempt(pick)),
        (machine.running and rng.random() < 0.3, lambda: machine.finish(pick)),
        (machine.running and len(machine.held) < 2, lambda: machine.finish_and_offer(pick)),
        (machine.held and rng.random() < 0.5, lambda: machine.delivered(pick)),
        (rng.random() < 0.1, lambda: machine.lose({rng.randrange(1, 24)})),
    ]
    rng.choice([step for possible, step in steps if possible])()


@pytest.mark.parametrize("specs", MODELS, ids=lambda specs: "+".join(type(s).__name__[:7] for s in specs))
@pytest.mark.parametrize("num_blocks", [9, 14, 24])
def test_long_schedules(specs: tuple[KVCacheSpec, ...], num_blocks: int) -> None:
    machine, rng = EngineWithMemory(), random.Random(num_blocks)
    machine.start(specs, num_blocks)
    for _ in range(2000):
        _random_step(machine, rng)
        machine.nothing_is_broken()
        machine.no_request_has_a_block_that_it_does_not_need()
    machine.teardown()
