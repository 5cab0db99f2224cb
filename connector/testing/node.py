"""A node without a model, for tests of connectors: a small engine that makes every call of
`connector/base.py`.

It schedules requests, allocates blocks, and computes: instead of running a model it writes values that are
known for each token (see `values`), so that it notices what a real engine would not. In each step it checks
that

- every token that a connector supplied has its own values, in every layer, when the connector says so;
- nothing was written into a block without a load, or after the load's end was reported;
- each end is reported once, and only of what was under way;
- orders can be sent to another process, and do not change after `build_connector_meta` returned them.

What it finds is raised as `BrokenPromiseError` by the call that shows it.
"""

from __future__ import annotations

import copy
import json
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

import torch

from ..aggregator import KVOutputAggregator
from ..base import (
    KVConnectorMetadata,
    KVConnectorRole,
    SchedulerHalf,
    WorkerHalf,
)
from ..config import EngineConfig, ParallelConfig
from ..factory import KVConnectorFactory
from ..output import KVConnectorOutput
from ..p2p.worker import new_epoch
from ..stats import KVConnectorStats
from .broken import BrokenPromiseError, StillWaitingError, promise
from .pool import Pool
from .shapes import CacheShape, ComputedRequest, Request, Step
from .values import POISON, Journal, TokenValues

_POLL_S = 0.001


@dataclass
class _Load:
    """A load that was ordered and whose end was not reported yet.

    Attributes:
        table: The request's whole block table.
        values: What the loaded tokens must have; None if the test compares them itself.
        is_abandoned: The request was aborted, so the blocks are freed when the load ends.
        invalid_block_ids: Blocks that were reported as failed so far.
        late: What `wait_for_layer_load` had not waited for; empty if nothing.
    """

    request: Request
    table: list[int]
    first_token: int
    last_token: int
    is_async: bool
    block_size: int
    values: TokenValues | None = None
    is_abandoned: bool = False
    invalid_block_ids: set[int] = field(default_factory=set)
    late: str = ""

    @property
    def block_ids(self) -> set[int]:
        """The blocks that the load writes."""
        first = self.first_token // self.block_size
        return set(self.table[first : -(-self.last_token // self.block_size)])

    @property
    def num_valid_tokens(self) -> int:
        """Tokens of the request before the first failed block."""
        failed = [index for index, block in enumerate(self.table) if block in self.invalid_block_ids]
        return min(self.last_token, failed[0] * self.block_size) if failed else self.last_token


@dataclass
class _Entry:
    """A request that the node runs, from `add` to its end.

    Attributes:
        num_local_tokens: The node's own prefix hit, when the request is first admitted.
        num_wanted_tokens: Until `give_up_at`, the request waits until the connector can supply as many
            tokens.
        num_answer_tokens: Tokens sampled so far, of `max_answer_tokens`.
        may_load: A request loads at most once.
        is_queued: It waits until `start`.
        computes: Otherwise it only loads, and keeps its blocks until `finish`.
    """

    request: Request
    values: TokenValues
    num_local_tokens: int
    max_answer_tokens: int
    num_wanted_tokens: int = 0
    give_up_at: float = 0.0
    state: Literal["waiting", "loading", "ready", "running"] = "waiting"
    block_ids: list[int] = field(default_factory=list)
    num_answer_tokens: int = 0
    may_load: bool = True
    is_queued: bool = False
    computes: bool = True

    def __str__(self) -> str:
        return f"{self.state}, {self.request.num_computed_tokens} tokens computed"

    @property
    def num_uncomputed_tokens(self) -> int:
        known = self.request.num_prompt_tokens + self.num_answer_tokens
        return known - self.request.num_computed_tokens


class ModelFreeNode:
    """A connector's scheduler half, and a worker half for each rank, with a pool and a scheduler.

    A context manager that shuts down.

    `add` requests and run steps, as an engine does. A test that compares contents itself passes
    `computes=False`.

    Args:
        max_step_tokens: Tokens that one step computes at most. Longer prompts are computed in chunks.
        deadline_s: How long the suites wait for what a connector must do in the end.
        journal: Shared by the nodes of one test, so that a message can name another node's values.

    Attributes:
        workers: The worker half of each rank.
        pool: Its blocks, and what they contain.
        held: Blocks of finished requests that the connector still needs, by request.
        outputs: The worker half's reports, of the steps in which it reported something.
        params: What the connector gave the client of each finished request, or of one whose prompt is still
            computed.
        num_loaded_tokens: Tokens that the connector supplied, by request, of loads that ended well.
        failed_loads: Requests whose load was reported as failed.
        events: What `take_events` returned.
    """

    def __init__(
        self,
        config: EngineConfig,
        shape: CacheShape,
        *,
        max_step_tokens: int = 1 << 20,
        deadline_s: float = 20.0,
        journal: Journal | None = None,
    ) -> None:
        if shape.num_ranks > 1:
            parallel = ParallelConfig(tensor_parallel_size=shape.num_ranks, epoch=new_epoch())
            model = replace(config.model, num_kv_heads=shape.num_kv_heads)
            config = replace(config, parallel=parallel, model=model)
        self.config = config
        self.shape = shape
        self.kv_cache_config = shape.of_one_rank.kv_cache_config()
        create = KVConnectorFactory.create_connector
        self.workers: list[WorkerHalf] = []
        caches = []
        try:
            for rank in range(shape.num_ranks):
                of_rank = replace(config, parallel=replace(config.parallel, tensor_parallel_rank=rank))
                self.workers.append(create(of_rank, KVConnectorRole.WORKER, self.kv_cache_config))
                caches.append(self._register(self.workers[-1]))
        except BaseException:
            for worker in self.workers:
                worker.shutdown()
            raise
        self.scheduler: SchedulerHalf = create(config, KVConnectorRole.SCHEDULER, self.kv_cache_config)
        handshakes = {rank: worker.get_handshake_metadata() for rank, worker in enumerate(self.workers)}
        self.scheduler.set_handshake_metadata(
            {rank: handshake for rank, handshake in handshakes.items() if handshake is not None}
        )
        self._aggregator = KVOutputAggregator(shape.num_ranks)
        self.max_step_tokens = max_step_tokens
        self.deadline_s = deadline_s
        self.pool = Pool(shape, caches, journal or Journal())
        self.held: dict[str, list[int]] = {}
        self.outputs: list[KVConnectorOutput] = []
        self.params: dict[str, dict[str, Any] | None] = {}
        self.num_loaded_tokens: dict[str, int] = {}
        self.failed_loads: set[str] = set()
        self.events: list[Any] = []
        self._entries: dict[str, _Entry] = {}
        self._loads: dict[str, _Load] = {}
        self._finished: set[str] = set()
        self._lost_blocks: dict[str, list[int]] = {}
        self._num_steps = 0
        self._is_mid_step = False
        #: Step in which an end was reported, by direction and request.
        self._ended: dict[tuple[str, str], int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            # If the test has failed, that error is the one to report.
            with nullcontext() if kind is None else suppress(Exception):
                for half in self.halves:
                    half.shutdown()
            if kind is None and not self._is_mid_step:
                self.check_untouched()
        finally:
            del self.workers, self.scheduler, self.pool  # the last view of the memory closes its descriptors

    @property
    def worker(self) -> WorkerHalf:
        """The worker half of the first rank."""
        return self.workers[0]

    @property
    def halves(self) -> Sequence[SchedulerHalf | WorkerHalf]:
        """The worker half of each rank, and the scheduler half."""
        return (*self.workers, self.scheduler)

    # -- memory --------------------------------------------------------------------------------------

    def _register(self, worker: WorkerHalf) -> torch.Tensor:
        """Give a rank its caches; return them, `(num_layers, num_blocks, 2, block_size, num_kv_heads,
        head_size)`.
        """
        shape = self.shape.of_one_rank
        num_bytes = sum(tensor.size for tensor in self.kv_cache_config.kv_cache_tensors)
        if shape.layout == "foreign":
            memory = torch.zeros(num_bytes, dtype=torch.int8)
        else:
            memory = worker.allocate_kv_memory(num_bytes, torch.device("cpu"))
        elements = memory.view(shape.dtype)
        if shape.layout == "uniform":
            cache = elements.view(shape.num_blocks, shape.num_layers, *shape.logical_page).transpose(0, 1)
            worker.register_cross_layers_kv_cache(cache, object)
        else:
            cache = elements.view(shape.num_layers, shape.num_blocks, *shape.logical_page)
            worker.register_kv_caches(dict(zip(self.layer_names, cache, strict=True)))
        return cache

    @property
    def layer_names(self) -> tuple[str, ...]:
        return tuple(self.kv_cache_config.kv_cache_groups[0].layer_names)

    def contents(self, block_ids: Sequence[int]) -> torch.Tensor:
        """Return a copy of blocks: `(num_layers, num_block_ids, 2, block_size, num_kv_heads, head_size)`."""
        return self.pool.read()[:, list(block_ids)]

    def is_poison(self, block_ids: Sequence[int]) -> bool:
        """Return whether nothing was written into blocks since they were free."""
        return bool((self.contents(block_ids) == POISON).all())

    def check_untouched(self) -> None:
        """Check that nothing was written but what the node wrote and what the connector was to load.

        Raises:
            BrokenPromiseError: something else was written.
        """
        loading = set().union(*(load.block_ids for load in self._loads.values()))
        self.pool.check_untouched(loading, self._owner_of)

    def _owner_of(self, block: int) -> str:
        if block == 0:
            return "which every engine uses as padding"
        tables = {request_id: entry.block_ids for request_id, entry in self._entries.items()} | self.held
        owners = [repr(request_id) for request_id, table in tables.items() if block in table]
        return f"which request {owners[0]} uses" if owners else "which is free"

    # -- requests that the node runs -----------------------------------------------------------------

    def add(
        self,
        request: Request,
        *,
        num_local_tokens: int = 0,
        max_answer_tokens: int = 1,
        num_wanted_tokens: int = 0,
        seed: int = 0,
        is_queued: bool = False,
        computes: bool = True,
    ) -> None:
        """Accept a request; the next steps load or compute its prompt, then its answer, and finish it.

        Args:
            num_local_tokens: Tokens that the node's own prefix cache holds, a multiple of the block size.
            num_wanted_tokens: Wait until the connector can supply as many tokens, for half of `deadline_s` at
                most: another node's connector may still be saving them.
            seed: See `TokenValues`.
            is_queued: Give it no blocks before `start`.
            computes: If False, the node neither computes the request nor checks what it loads, which must be
                asynchronous. The request keeps its blocks until `finish`.
        """
        self.scheduler.on_new_request(request)
        values = TokenValues(request, self.config.model.model, seed, self.shape)
        give_up_at = time.monotonic() + self.deadline_s / 2  # so that it is computed before the deadline
        self._entries[request.request_id] = _Entry(
            request,
            values,
            num_local_tokens,
            max_answer_tokens,
            num_wanted_tokens,
            give_up_at,
            is_queued=is_queued,
            computes=computes,
        )

    def start(self, request_id: str) -> None:
        """Let a queued request have its blocks in the next step."""
        self._entries[request_id].is_queued = False

    def blocks_of(self, request_id: str) -> list[int]:
        """Return the block table of a request that has not ended."""
        return list(self._entries[request_id].block_ids)

    def is_waiting(self, request_id: str) -> bool:
        """Return whether a request waits for its blocks or for its load."""
        return self._entries[request_id].state in {"waiting", "loading"}

    def is_running(self, request_id: str) -> bool:
        """Return whether a request was added and has not ended."""
        return request_id in self._entries

    @property
    def is_busy(self) -> bool:
        """Whether a request has not ended, or a transfer is under way."""
        return bool(self._entries or self._loads or self.held)

    def preempt(self, request_id: str) -> None:
        """Take a request's blocks away; it starts over. The connector learns of it in the next step."""
        entry = self._entries[request_id]
        assert entry.state in {"ready", "running"}, "only a request that computes is preempted"
        self._lost_blocks[request_id] = entry.block_ids
        entry.state, entry.block_ids, entry.num_local_tokens = "waiting", [], 0
        entry.request.num_computed_tokens = 0

    def prefill(
        self, request_id: str, num_tokens: int, *, seed: int = 0
    ) -> tuple[list[int], dict[str, Any] | None]:
        """Run a request that is to be handed over, until it ends.

        Returns:
            Its blocks, and the `kv_transfer_params` for the client.
        """
        request = Request(request_id, num_tokens, {"do_remote_decode": True})
        self.add(request, seed=seed)
        entry = self._entries[request_id]
        self.step()
        self.step_until(lambda: not self.is_running(request_id))
        return entry.block_ids, self.params[request_id]

    def _order(self, entry: _Entry, first_token: int, last_token: int, *, is_async: bool) -> None:
        request_id, size = entry.request.request_id, self.shape.block_size
        values = entry.values if entry.computes else None
        table = list(entry.block_ids)
        load = _Load(entry.request, table, first_token, last_token, is_async, size, values)
        self._loads[request_id] = load
        self._ended.pop(("recving", request_id), None)

    def finish(self, request_id: str, reason: str = "abort") -> dict[str, Any] | None:
        """End a request, by default before its time.

        Its blocks are freed as soon as no load and no offer needs them.

        Returns:
            What the connector gives the client.
        """
        entry = self._entries.pop(request_id)
        request, blocks = entry.request, entry.block_ids
        request.finish_reason = reason
        is_held, params = self.scheduler.request_finished(request, [blocks])
        self._finished.add(request_id)
        self._take_params(request_id, params)
        self._ended.pop(("sending", request_id), None)
        if is_held:
            self.held[request_id] = blocks
        if entry.state == "loading":
            self._loads[request_id].is_abandoned = True  # the load may still write into its blocks
        elif not is_held:
            self.pool.free(blocks)
        return params

    def _take_params(self, request_id: str, params: dict[str, Any] | None) -> None:
        try:
            survives = params is None or json.loads(json.dumps(params)) is not None
        except (TypeError, ValueError) as error:
            survives, params = False, {"error": str(error)}
        promise(
            "kv_transfer_params can be sent to a client as JSON",
            kept=survives,
            seen=f"those of request {request_id!r} cannot: {params}",
        )
        self.params[request_id] = params

    # -- a step --------------------------------------------------------------------------------------

    def step(
        self, meanwhile: Callable[[], None] | None = None, *, failing_layer: int | None = None
    ) -> KVConnectorOutput:
        """Run one step of both halves, and compute what can be computed.

        Args:
            meanwhile: Called when the orders are given, before the worker half carries them out.
            failing_layer: Act as if the last rank's `wait_for_layer_load` had raised at this layer. From
                there on what is computed is wrong and the last rank saves nothing. The requests of the step
                fail.

        Raises:
            BrokenPromiseError: see this module's docstring.
        """
        self._num_steps += 1
        self._is_mid_step = True  # and stays so if something raises
        plan = self._plan()
        metadata, sent = self._take_orders(plan)
        if meanwhile is not None:
            meanwhile()
        output = self._work(plan, metadata, failing_layer)
        self.check_untouched()  # before blocks are freed, which hides what was written into them
        if plan.scheduled_requests or not output.is_empty():
            self.scheduler.update_connector_output(output)
            self.events += self.scheduler.take_events()
        if not output.is_empty():
            self.outputs.append(output)
        self._end_transfers(output)
        if failing_layer is None:
            self._advance(plan, self._end_synchronous_loads())
        else:
            self._fail(plan)
        # Equal orders may be pickled differently, for example once a property has been cached.
        promise(
            "orders are not changed after build_connector_meta has returned them",
            kept=pickle.dumps(metadata) == sent or metadata == pickle.loads(sent),
            seen=f"in step {self._num_steps} they were changed to {metadata}",
        )
        self._is_mid_step = False
        return output

    # -- what to compute

    def _plan(self) -> Step:
        """Decide what the step computes: requests in the order in which they came, as far as
        `max_step_tokens` goes.
        """
        finished, self._finished = self._finished, set()
        scheduled: list[ComputedRequest] = []
        num_left = self.max_step_tokens
        for entry in list(self._entries.values()):
            if num_left and entry.state == "waiting" and not entry.is_queued:
                self._admit(entry, num_left)
            if num_left and entry.state in {"ready", "running"} and entry.computes:
                item = self._schedule(entry, num_left)
                scheduled.append(item)
                num_left -= item.num_scheduled_tokens
        return Step(None, finished, set(self._lost_blocks), tuple(scheduled))

    def _ask(self, request: Request, num_here: int) -> tuple[int | None, bool]:
        num_tokens, is_async = self.scheduler.get_num_new_matched_tokens(request, num_here)
        if num_tokens is None:
            return None, False
        num_prompt = request.num_prompt_tokens
        seen = (
            f"get_num_new_matched_tokens returned {(num_tokens, is_async)} for request {request.request_id!r} with "
            f"{num_prompt} prompt tokens, of which the node has {num_here}; a block has {self.shape.block_size} tokens"
        )
        promise("no negative number of tokens is loaded", kept=num_tokens >= 0, seen=seen)
        promise(
            "no more tokens are loaded than the prompt has",
            kept=num_here + num_tokens <= num_prompt,
            seen=seen,
        )
        promise(
            "a synchronous load leaves at least the prompt's last token to compute, which gives the logits",
            kept=is_async or num_tokens == 0 or num_here + num_tokens < num_prompt,
            seen=seen,
        )
        return num_tokens, is_async and num_tokens > 0

    def _admit(self, entry: _Entry, max_tokens: int) -> None:
        """Give a request its first blocks, unless the connector is to be asked again in the next step."""
        request, num_local = entry.request, entry.num_local_tokens
        num_external, is_async = self._ask(request, num_local) if entry.may_load else (0, False)
        if num_external is None:
            return
        if entry.may_load and num_external < entry.num_wanted_tokens and time.monotonic() < entry.give_up_at:
            return
        num_ready = num_local + num_external
        known = request.num_prompt_tokens + entry.num_answer_tokens
        num_new = 0 if is_async else min(known - num_ready, max_tokens)
        num_blocks = -(-(num_ready + num_new) // self.shape.block_size)
        if num_blocks > len(self.pool.free_blocks):
            return
        entry.block_ids = self.pool.allocate(num_blocks)
        self._write_tokens(entry, 0, num_local, range(self.shape.num_layers))
        self.scheduler.update_state_after_alloc(request, [list(entry.block_ids)], num_external)
        if num_external:
            entry.may_load = False
            self._order(entry, num_local, num_ready, is_async=is_async)
        entry.state = "loading" if is_async else "running"
        request.num_computed_tokens = num_local if is_async else num_ready

    def _schedule(self, entry: _Entry, max_tokens: int) -> ComputedRequest:
        request = entry.request
        start, num_new = request.num_computed_tokens, min(entry.num_uncomputed_tokens, max_tokens)
        num_missing = -(-(start + num_new) // self.shape.block_size) - len(entry.block_ids)
        entry.block_ids += self.pool.allocate(max(num_missing, 0))
        if entry.state == "ready":
            self.scheduler.update_state_after_alloc(request, [list(entry.block_ids)], 0)
            entry.state = "running"
        return ComputedRequest(request.request_id, start, num_new, (tuple(entry.block_ids),))

    def _take_orders(self, plan: Step) -> tuple[KVConnectorMetadata, bytes]:
        """Return the orders of the step, and how they are sent to another process."""
        before = copy.deepcopy(plan)
        metadata = self.scheduler.build_connector_meta(plan)
        promise(
            "build_connector_meta does not change its argument",
            kept=plan == before,
            seen=f"{before} was changed to {plan}",
        )
        try:
            sent = pickle.dumps(metadata)
            pickle.loads(sent)
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            raise BrokenPromiseError(
                "orders can be sent to another process, so they can be pickled",
                f"those of step {self._num_steps}, {metadata!r}, cannot: {what}",
            ) from error
        return metadata, sent

    # -- the worker's part

    def _work(
        self, plan: Step, metadata: KVConnectorMetadata, failing_layer: int | None
    ) -> KVConnectorOutput:
        """Make the worker halves' calls of a step, in their order; return what all ranks report together."""
        if plan.preempted_req_ids:
            for worker in self.workers:
                worker.handle_preemptions(set(plan.preempted_req_ids))
        for blocks in self._lost_blocks.values():
            self.pool.free(blocks)  # from here on they may be another request's
        self._lost_blocks.clear()
        self.check_untouched()
        for worker in self.workers:
            # A copy for each rank, as if it were another process. The bytes are made here; none come from
            # outside.
            worker.bind_connector_metadata(pickle.loads(pickle.dumps(metadata)))
        try:
            for worker in self.workers:
                worker.start_load_kv(None)
            if plan.scheduled_requests:
                self._compute(plan, failing_layer)
            for worker in self.workers:
                worker.wait_for_save()
            reports = [_report_of(worker, plan) for worker in self.workers]
            if failing_layer is not None:
                reports[-1].hook_errors["wait_for_layer_load"] = f"it failed at layer {failing_layer}"
            return self._aggregator.aggregate(reports)
        finally:
            for worker in self.workers:
                worker.clear_connector_metadata()

    def _compute(self, plan: Step, failing_layer: int | None) -> None:
        """Compute the step's tokens layer by layer, each between the connector's two calls about the
        layer.
        """
        for layer, name in enumerate(self.layer_names):
            has_failed = failing_layer is not None and layer >= failing_layer
            for worker in self.workers:
                worker.wait_for_layer_load(name)
            for load in self._loads.values():
                if load.values is not None and not load.is_async and not load.late:
                    load.late = self._wrong_token(load, [layer])
            for item in plan.scheduled_requests:
                entry = self._entries.get(item.request_id)
                if entry is not None:
                    start = item.num_computed_tokens
                    self._write_tokens(
                        entry, start, start + item.num_scheduled_tokens, [layer], is_wrong=has_failed
                    )
            for worker, cache in zip(self.workers, self.pool.caches, strict=True):
                if not has_failed or worker is not self.workers[-1]:
                    worker.save_kv_layer(name, cache[layer], None)

    def _write_tokens(
        self, entry: _Entry, first: int, last: int, layers: Sequence[int], *, is_wrong: bool = False
    ) -> None:
        self.pool.journal.note(entry.values, last)
        values = entry.values.between(first, last)
        # No token has a negative value.
        self.pool.write_tokens(entry.block_ids, first, -values if is_wrong else values, layers)

    def _wrong_token(self, load: _Load, layers: Sequence[int]) -> str:
        assert load.values is not None
        return self.pool.wrong_token(load.table, load.first_token, load.num_valid_tokens, load.values, layers)

    # -- what the step brought

    def _end_transfers(self, output: KVConnectorOutput) -> None:
        self._note_failed_blocks(output.invalid_block_ids)
        for request_id in sorted(output.finished_recving):
            load = self._loads.get(request_id)
            self._require_first("recving", request_id, is_expected=load is not None and load.is_async)
            assert load is not None
            self._end_load(load, output.load_errors.get(request_id, ""))
        for request_id in sorted(output.finished_sending):
            self._require_first("sending", request_id, is_expected=request_id in self.held)
            blocks = self.held.pop(request_id)
            if request_id not in self._loads:
                self.pool.free(blocks)

    def _note_failed_blocks(self, invalid_block_ids: set[int]) -> None:
        for load in self._loads.values():
            load.invalid_block_ids |= load.block_ids & invalid_block_ids
        known = set().union(*(load.block_ids for load in self._loads.values()))
        promise(
            "get_block_ids_with_load_errors names blocks of loads that are not over, no later than get_finished "
            "names their request",
            kept=invalid_block_ids <= known,
            seen=f"step {self._num_steps} names blocks {sorted(invalid_block_ids - known)}, and no load into them is under way",
        )

    def _require_first(
        self, direction: Literal["sending", "recving"], request_id: str, *, is_expected: bool
    ) -> None:
        """Check that a request may be named as finished, and remember that it was."""
        seen = f"step {self._num_steps} names request {request_id!r} in finished_{direction}"
        before = self._ended.get((direction, request_id))
        promise(
            "each completion is reported once",
            kept=before is None,
            seen=f"{seen}, and step {before} had named it already",
        )
        why = (
            "no asynchronous load of it was ordered"
            if direction == "recving"
            else "its blocks are not held for it"
        )
        promise("only what is under way is reported as finished", kept=is_expected, seen=f"{seen}; {why}")
        self._ended[direction, request_id] = self._num_steps

    def _end_load(self, load: _Load, error: str) -> None:
        """Take note that a load is over: nothing may write into its blocks from now on."""
        request_id = load.request.request_id
        del self._loads[request_id]
        has_failed = bool(load.invalid_block_ids or error)
        if load.values is not None and not load.is_abandoned:
            self._require_values(load, has_failed)
        self.pool.accept(request_id, load.block_ids)
        entry = self._entries.get(request_id)
        if load.is_abandoned:
            if request_id not in self.held:
                self.pool.free(load.table)
        elif entry is not None:
            num_valid = load.first_token if error and not load.invalid_block_ids else load.num_valid_tokens
            self._note_loaded(load, num_valid, has_failed)
            entry.state = "ready"
            # The prompt's last token gives the logits, so it is computed here even if it was loaded.
            entry.request.num_computed_tokens = min(num_valid, entry.request.num_prompt_tokens - 1)
            if has_failed and entry.computes:
                self._give_up_blocks(entry)

    def _give_up_blocks(self, entry: _Entry) -> None:
        """Free the blocks past the valid prefix; the request gets others."""
        num_kept = -(-entry.request.num_computed_tokens // self.shape.block_size)
        lost = entry.block_ids[num_kept:]
        entry.block_ids = entry.block_ids[:num_kept]
        self.pool.free(lost)

    def _require_values(self, load: _Load, has_failed: bool) -> None:
        if has_failed and not load.invalid_block_ids:
            return
        wrong = self._wrong_token(load, range(self.shape.num_layers))
        end = "it was reported as failed in later blocks only" if has_failed else "no error was reported"
        promise(
            "a load that is reported as done, and not as failed, has brought each token's keys and values",
            kept=not wrong,
            seen=f"{wrong}; {end}",
        )

    def _note_loaded(self, load: _Load, num_valid: int, has_failed: bool) -> None:
        request_id = load.request.request_id
        if has_failed:
            self.failed_loads.add(request_id)
        else:
            self.num_loaded_tokens[request_id] = num_valid - load.first_token

    def _end_synchronous_loads(self) -> dict[str, int]:
        """End the loads of this step.

        Returns:
            Number of valid tokens of each request that was computed from blocks whose load failed.
        """
        void = {}
        for request_id, load in list(self._loads.items()):
            if load.is_async:
                continue
            del self._loads[request_id]
            has_failed = bool(load.invalid_block_ids)
            if load.values is not None:
                self._require_values(load, has_failed)
                promise(
                    "wait_for_layer_load returns when the layer's part of the step's synchronous loads is in place",
                    kept=has_failed or not load.late,
                    seen=f"after it returned, {load.late}; later in the step this was no longer so",
                )
            self._note_loaded(load, load.num_valid_tokens, has_failed)
            if has_failed:
                void[request_id] = load.num_valid_tokens
            self.pool.accept(request_id, load.block_ids)
        return void

    def _advance(self, plan: Step, void: Mapping[str, int]) -> None:
        """Count what was computed, tell the connector, and finish requests that have their answer."""
        for item in plan.scheduled_requests:
            entry = self._entries[item.request_id]
            request = entry.request
            if item.request_id in void:
                request.num_computed_tokens = void[item.request_id]
                self._give_up_blocks(entry)
                continue
            request.num_computed_tokens += item.num_scheduled_tokens
            self._require_computed(entry)
            if request.num_computed_tokens < request.num_prompt_tokens:
                self.scheduler.request_progressed(request, [list(entry.block_ids)])
                continue
            entry.num_answer_tokens += 1
            if entry.num_answer_tokens >= entry.max_answer_tokens:
                self.finish(item.request_id, "length")

    def _fail(self, plan: Step) -> None:
        """End the requests of a step that failed. Their blocks stay reserved until the next step."""
        for item in plan.scheduled_requests:
            entry = self._entries.pop(item.request_id)
            request = entry.request
            if (load := self._loads.pop(request.request_id, None)) is not None:
                self.pool.accept(
                    request.request_id, load.block_ids
                )  # a synchronous load is over with its step
            request.finish_reason = "error"
            is_held, params = self.scheduler.request_finished(request, [entry.block_ids])
            self._finished.add(request.request_id)
            self._take_params(request.request_id, params)
            if is_held:
                self.held[request.request_id] = entry.block_ids
            # The next step names the request to `handle_preemptions`, and only then frees the blocks: another
            # rank may still use them. Blocks that are held are freed by the report of their end instead, so
            # that they are freed once.
            self._lost_blocks[request.request_id] = [] if is_held else entry.block_ids

    def _require_computed(self, entry: _Entry) -> None:
        """Check all of a request's tokens, also those that share a block with loaded ones."""
        last = entry.request.num_computed_tokens
        wrong = self.pool.wrong_token(entry.block_ids, 0, last, entry.values, range(self.shape.num_layers))
        promise("what the node computed stays as it is", kept=not wrong, seen=wrong)

    # -- results -------------------------------------------------------------------------------------

    def step_until(
        self, done: Callable[[], bool], *others: ModelFreeNode, timeout_s: float | None = None
    ) -> None:
        """Step this node, and other nodes of this process with it, until `done` returns True.

        Args:
            timeout_s: By default, `deadline_s`.

        Raises:
            StillWaitingError: `done` did not return True in time.
        """
        timeout_s = self.deadline_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + timeout_s
        while not done():
            if time.monotonic() > deadline:
                raise StillWaitingError(timeout_s, f"{self.state}; reported so far: {self.outputs}")
            for node in (self, *others):
                node.step()
            time.sleep(_POLL_S)

    @property
    def state(self) -> str:
        """What the node waits for, for messages."""
        requests = {request_id: str(entry) for request_id, entry in self._entries.items()}
        loads = sorted(self._loads)
        return f"requests {requests}, loads not over {loads}, blocks held for {sorted(self.held)}"

    def num_reports(self, request_id: str, direction: Literal["sending", "recving"]) -> int:
        """Return how often a request was named as finished."""
        return sum(request_id in getattr(output, f"finished_{direction}") for output in self.outputs)

    def load_error(self, request_id: str) -> str:
        """Return why a load failed; empty if it did not."""
        return "".join(output.load_errors.get(request_id, "") for output in self.outputs)

    @property
    def invalid_block_ids(self) -> set[int]:
        """All blocks that were reported as failed."""
        return set().union(*(output.invalid_block_ids for output in self.outputs))

    @property
    def stats(self) -> KVConnectorStats:
        """All figures so far."""
        total = KVConnectorStats()
        for output in self.outputs:
            total = total if output.kv_connector_stats is None else total.aggregate(output.kv_connector_stats)
        return total


def _report_of(worker: WorkerHalf, plan: Step) -> KVConnectorOutput:
    output = KVConnectorOutput()
    sending, recving = worker.get_finished(set(plan.finished_req_ids))
    output.finished_sending, output.finished_recving = sending or set(), recving or set()
    output.invalid_block_ids = worker.get_block_ids_with_load_errors()
    output.load_errors = worker.take_load_errors()
    output.kv_connector_stats = worker.get_kv_connector_stats()
    output.failure, output.warning = worker.failure, worker.warning
    return output
