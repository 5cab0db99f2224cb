"""Decide which requests compute which tokens in the next step.

A request holds blocks while it is *loading*, *ready* or *running*; together at most `max_num_seqs` do. Among
those that compete for blocks the oldest wins: it takes them from the newest, which is recomputed later. The
newest itself waits for blocks rather than give up its own, so the oldest can always go on, unless another
node holds blocks of this one; those come back at the latest when their lease ends.

After a step that failed, its requests are *suspects*: each is computed again, from its first token and with
nothing else in its steps, until it has passed the tokens of that step. So a request that makes every step
fail fails alone, and the others only lose time.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Literal

from ...connector.base import SchedulerHalf
from ...connector.config import EngineConfig
from ...connector.errors import ConnectorError
from ...connector.output import KVConnectorOutput
from ...runner_mixin.kv_cache.events import CacheEvents
from ...runner_mixin.kv_cache.kv_cache_manager import KVCacheManager
from ...runner_mixin.outputs import ModelRunnerOutput
from .errors import RequestFailedError, StepFailedError, reason_of
from .handoffs import Handoffs
from .request import Request, RequestStatus
from .step import ScheduledRequest, StepDraft, StepOutcome, StepPlan
from .types import FinishReason

logger = logging.getLogger(__name__)

#: Prompts that fit into this part of a step, one n-th of its tokens, do not wait for longer ones that are
#: being computed.
SHORT_SHARE: Final = 4
#: Up to this share of the pool in use.
MAX_USAGE: Final = 0.75


class Scheduler:
    """The queues of a node. One thread calls `plan` and `update` in turn, and `add` and `finish` in between.

    Args:
        connector: The scheduler half of the node's connector, if it has one.
        events: Notes what the manager caches; None: nothing does.
    """

    def __init__(
        self,
        config: EngineConfig,
        manager: KVCacheManager,
        connector: SchedulerHalf | None,
        events: CacheEvents | None = None,
    ) -> None:
        self._events = events
        self._limits = config.scheduler
        self._fails_on_load_error = (
            config.kv_transfer is not None and config.kv_transfer.kv_load_failure_policy == "fail"
        )
        self._manager = manager
        self.handoffs = Handoffs(connector)
        self.waiting: deque[Request] = deque()
        self.ready: list[Request] = []
        self.running: list[Request] = []
        self._finished_ids: set[str] = set()
        self._suspects: dict[str, int] = {}  # by request: up to which token it is computed alone
        self._lost_blocks: set[str] = set()  # requests that lost their blocks since the latest plan
        #: By request: failed in `plan`, still to be finished.
        self._failed: dict[str, tuple[Request, str]] = {}

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything: a request is alive, a transfer is pending, or the connector must
        learn of an end.
        """
        is_alive = self.waiting or self.ready or self.running
        has_news = self.handoffs.has_connector and self._finished_ids
        return bool(is_alive or has_news or self.handoffs.is_pending)

    @property
    def live_requests(self) -> list[Request]:
        """Requests that are not finished."""
        return [*self.running, *self.ready, *self.handoffs.loading.values(), *self.waiting]

    def add(self, request: Request) -> None:
        """Accept a request.

        Raises:
            ConnectorError: its `kv_transfer_params` are malformed; it was not accepted.
            RequestFailedError: the connector raised something else; the request was not accepted.
        """
        try:
            self.handoffs.on_new_request(request)
        except ConnectorError:
            raise
        except Exception as error:
            # The connector may remember the request up to the line that failed, so let it forget.
            request.finish_reason = "error"
            self.handoffs.on_finished(request, ())
            raise RequestFailedError(self.handoffs.describe("on_new_request", error)) from error
        self.waiting.append(request)

    def finish(self, request: Request, reason: FinishReason) -> Mapping[str, Any] | None:
        """End a request wherever it stands; blocks that a transfer still uses stay out of the pool until it
        ended.

        Returns:
            `kv_transfer_params` for the client.

        Raises:
            RequestFailedError: the connector failed to say what becomes of the blocks. The request is over
                all the same.
        """
        self._forget(request)
        self._suspects.pop(request.request_id, None)
        request.finish_reason = reason
        request.status = RequestStatus.FINISHED
        block_ids = self._manager.get_block_ids(request.request_id)
        keep_blocks, params, error = self.handoffs.on_finished(request, block_ids)
        if keep_blocks:
            self._manager.pin(request.request_id)
        self._manager.free(request.request_id)
        self._finished_ids.add(request.request_id)
        if error is not None:
            # An early offer of these blocks may still be open; the worker half ends it before they are
            # written again.
            self._lost_blocks.add(request.request_id)
            raise RequestFailedError(self.handoffs.describe("request_finished", error)) from error
        return params

    def _forget(self, request: Request) -> None:
        if request.status is RequestStatus.WAITING:
            self.waiting.remove(request)
        elif request.status is RequestStatus.READY:
            self.ready.remove(request)
        elif request.status is RequestStatus.RUNNING:
            self.running.remove(request)

    # -- the next step -------------------------------------------------------------------------------

    def plan(self) -> StepPlan:
        """Decide the next step, and allocate the slots that it needs."""
        lost, self._lost_blocks = self._lost_blocks, set()
        suspect = next(iter(self._suspects), None)
        draft = StepDraft(self._limits.max_num_batched_tokens, lost, suspect)
        self._plan_all(draft)
        if suspect is not None and not draft.scheduled:
            # The suspect waits for blocks or for a load. Let the others run meanwhile; otherwise no blocks
            # would come free.
            draft.suspect = None
            self._plan_all(draft)
        finished, self._finished_ids = self._finished_ids, set()
        scheduled = tuple(draft.scheduled.values())
        plan = StepPlan(scheduled, finished, draft.preempted)
        try:
            return replace(plan, kv_connector_metadata=self.handoffs.take_metadata(plan))
        except StepFailedError as failure:
            # The model runner and the worker half do not see this step, so the next one must name these
            # requests.
            self._finished_ids |= finished
            self._lost_blocks |= draft.preempted
            return replace(plan, error=str(failure))

    def _plan_all(self, draft: StepDraft) -> None:
        self._plan_running(draft)
        self._plan_ready(draft)
        if not draft.pool_is_full:
            self._plan_waiting(draft)

    def _admits(self, draft: StepDraft, request: Request) -> bool:
        if request.request_id in self._failed:
            return False
        if draft.suspect is not None:
            return request.request_id == draft.suspect
        return request.request_id not in self._suspects

    def _plan_running(self, draft: StepDraft) -> None:
        # A long prompt must not delay requests that need one token each, nor short prompts.
        prompts = [request for request in self.running if request.num_uncomputed_tokens > 1]
        self._plan_each([request for request in self.running if request not in prompts], draft)
        if prompts:
            self._plan_short(draft)
        self._plan_each(prompts, draft)

    def _plan_each(self, requests: Sequence[Request], draft: StepDraft) -> None:
        for request in requests:
            if draft.num_free_tokens == 0:
                return
            # An earlier request of this loop may have preempted it.
            if request.status is RequestStatus.RUNNING and self._admits(draft, request):
                self._try_schedule(request, draft)

    def _plan_short(self, draft: StepDraft) -> None:
        """Let prompts that wait go first, as far as they fit whole into a part of the step.

        The long ones keep the rest.
        """
        num_tokens = min(self._limits.max_num_batched_tokens // SHORT_SHARE, draft.num_free_tokens)
        for request in list(self.waiting):
            # Requests that run may soon need all blocks of a nearly full pool, and would take them back from
            # this one.
            if self._num_holders >= self._limits.max_num_seqs or self._manager.usage > MAX_USAGE:
                return
            if request.num_tokens > num_tokens or not self._admits(draft, request):
                continue
            num_before = draft.num_free_tokens
            if self._try_start(request, draft) is None:
                self.waiting.remove(request)
                num_tokens -= num_before - draft.num_free_tokens

    def _plan_ready(self, draft: StepDraft) -> None:
        for request in list(self.ready):
            if draft.num_free_tokens == 0:
                return
            if request.status is not RequestStatus.READY or not self._admits(draft, request):
                continue
            if self._try_schedule(request, draft):
                self.ready.remove(request)
                self._run(request)
                if not self._tell_allocated(request, 0, is_async=False):
                    del draft.scheduled[request.request_id]

    def _try_schedule(self, request: Request, draft: StepDraft) -> bool:
        """Schedule a request that holds blocks. If it needs more, take them from newer requests."""
        num_new_tokens = min(request.num_uncomputed_tokens, draft.num_free_tokens)
        while self._manager.allocate_slots(request, num_new_tokens) is None:
            draft.pool_is_full = True
            newest = max(self.running + self.ready, key=lambda other: other.figures.arrival_s)
            if newest is request:
                return False
            self._preempt(newest, draft)
        self._draft(request, num_new_tokens, draft)
        return True

    def _draft(self, request: Request, num_new_tokens: int, draft: StepDraft) -> None:
        block_ids = self._manager.get_block_ids(request.request_id)
        draft.add(ScheduledRequest(request, request.num_computed_tokens, num_new_tokens, block_ids))

    def _run(self, request: Request) -> None:
        request.status = RequestStatus.RUNNING
        self.running.append(request)

    def _preempt(self, request: Request, draft: StepDraft) -> None:
        logger.debug("preempt %s: the pool is full", request)
        draft.remove(request.request_id)
        self._start_over(request)

    def _start_over(self, request: Request) -> None:
        """Take a request's blocks away and queue it for new ones."""
        self._forget(request)
        self._manager.free(request.request_id)
        request.status = RequestStatus.WAITING
        request.num_computed_tokens = 0
        request.figures.num_preemptions += 1
        self.waiting.appendleft(request)

    # -- requests without blocks ---------------------------------------------------------------------

    def _plan_waiting(self, draft: StepDraft) -> None:
        not_yet: list[Request] = []
        while self.waiting and draft.num_free_tokens > 0 and self._num_holders < self._limits.max_num_seqs:
            request = self.waiting[0]
            why_not = self._try_start(request, draft) if self._admits(draft, request) else "not yet"
            if why_not == "no blocks":
                break
            self.waiting.popleft()
            if why_not == "not yet":
                not_yet.append(request)
        self.waiting.extendleft(reversed(not_yet))

    def _try_start(self, request: Request, draft: StepDraft) -> Literal["not yet", "no blocks"] | None:
        """Start a request that waits, which the caller takes out of the queue.

        Otherwise return why it stays there.
        """
        local_blocks, num_local = self._manager.get_computed_blocks(request)
        num_external, is_async = self._num_loadable_tokens(request, num_local)
        if num_external is None:
            return "not yet"
        num_uncomputed = request.num_tokens - num_local - num_external
        num_new_tokens = 0 if is_async else min(num_uncomputed, draft.num_free_tokens)
        if not self._manager.allocate_slots(
            request, num_new_tokens, computed_blocks=local_blocks, num_external_tokens=num_external
        ):
            return "no blocks"
        self._start(request, num_local, num_external, num_new_tokens, draft)
        return None

    def _start(
        self, request: Request, num_local: int, num_external: int, num_new_tokens: int, draft: StepDraft
    ) -> None:
        """Start a request that has its first blocks: it loads if there is nothing to compute yet, otherwise
        it runs.
        """
        if request.figures.first_blocks_s is None:
            request.figures.first_blocks_s = time.monotonic()
        if not self._tell_allocated(request, num_external, is_async=num_new_tokens == 0):
            self._run(request)  # until it is finished as failed, so that it is in a queue
            return
        if request.figures.num_preemptions == 0:
            # Of an answer that comes back to its node, more than the prompt may be there.
            request.figures.num_cached_tokens = min(num_local, request.num_prompt_tokens)
        request.num_computed_tokens = num_local
        request.figures.num_loaded_tokens += num_external
        if num_new_tokens == 0:
            request.status = RequestStatus.LOADING
            self.handoffs.on_load_started(request)
            return
        request.num_computed_tokens += num_external
        self._run(request)
        self._draft(request, num_new_tokens, draft)

    def _num_loadable_tokens(self, request: Request, num_local: int) -> tuple[int | None, bool]:
        try:
            return self.handoffs.num_loadable_tokens(request, num_local)
        except Exception as error:  # noqa: BLE001 - logged there
            self._note_failure(request, "get_num_new_matched_tokens", error)
            return None, False  # it stays where it is until it is finished as failed

    def _tell_allocated(self, request: Request, num_external: int, *, is_async: bool) -> bool:
        """Pass a request's blocks to the connector. Return False if the connector raised."""
        try:
            block_ids = self._manager.get_block_ids(request.request_id)
            self.handoffs.on_allocated(request, block_ids, num_external)
        except Exception as error:  # noqa: BLE001 - logged there
            why = self._note_failure(request, "update_state_after_alloc", error)
            # With a `ConnectorError` the connector says that it has ordered nothing. Any other exception may
            # have come after it noted the load, and then the worker half may still write into these blocks.
            if num_external and not isinstance(error, ConnectorError):
                self.handoffs.on_load_in_doubt(request, is_async, why)
                self._lost_blocks.add(request.request_id)
            return False
        return True

    def _note_failure(self, request: Request, hook: str, error: Exception) -> str:
        why = self.handoffs.describe(hook, error)
        logger.error("failing %s: %s", request, why, exc_info=error)
        self._failed[request.request_id] = request, why
        return why

    @property
    def _num_holders(self) -> int:
        return len(self.running) + len(self.ready) + len(self.handoffs.loading)

    # -- what the step brought -----------------------------------------------------------------------

    def update(self, plan: StepPlan, result: ModelRunnerOutput) -> StepOutcome:
        """Apply the result of a step: the sampled tokens, and the report of the connector's worker half.

        If a hook raised in the step, its tokens do not count, and its requests fail; see `handoffs`.
        """
        outcome = StepOutcome(failed=self._take_failed())
        sampled = dict(zip(result.req_ids, result.sampled_token_ids, strict=True))
        report = result.kv_connector_output
        cut = self._apply_report(report, outcome) if report is not None else set()
        if not self._end_step(plan, report.hook_errors if report is not None else {}, outcome):
            return outcome
        for item in plan.scheduled_requests:
            request = item.request
            if request.request_id in cut:
                continue  # it was computed from blocks without valid contents
            request.num_computed_tokens += item.num_scheduled_tokens
            # Not guarded: if the block manager raises, blocks may be lost or in use twice, and the engine
            # must end.
            self._cache_blocks(request)
            if request.num_computed_tokens >= self._suspects.get(request.request_id, math.inf):
                del self._suspects[request.request_id]
            request.logprobs = result.logprobs.get(request.request_id, ())
            try:
                self._take_in(request, sampled[request.request_id], outcome)
            except Exception as error:
                logger.exception("failing %s: the result of a step could not be applied", request)
                failed_already = isinstance(error, RequestFailedError)
                outcome.failed.append((request, str(error) if failed_already else reason_of(error)))
        return outcome

    def _take_in(self, request: Request, token_ids: Sequence[int], outcome: StepOutcome) -> None:
        if request.num_computed_tokens < request.num_prompt_tokens:
            self._tell_progress(request)
        for token_id in token_ids:
            request.append_token(token_id)
            outcome.new_tokens.append(request)

    def step_failed(self, plan: StepPlan, report: KVConnectorOutput | None, why: str) -> StepOutcome:
        """Note that a step computed nothing.

        A request that was alone in the step fails. Several requests become suspects. They start over, because
        the contents of their blocks are unknown; the prefix cache only has blocks of earlier steps.

        Args:
            report: What the connector's worker half reported, if anything.
        """
        outcome = StepOutcome(failed=self._take_failed())
        if report is not None:
            self._apply_report(report, outcome)
        if not self._end_step(plan, report.hook_errors if report is not None else {}, outcome):
            return outcome
        if len(plan.scheduled_requests) == 1:
            outcome.failed.append((plan.scheduled_requests[0].request, why))
            return outcome
        for item in plan.scheduled_requests:
            request = item.request
            self._suspects[request.request_id] = item.num_computed_tokens + item.num_scheduled_tokens
            self._lost_blocks.add(request.request_id)
        for item in reversed(plan.scheduled_requests):  # each goes to the head of the queue
            self._start_over(item.request)
        return outcome

    def step_refused(self, plan: StepPlan) -> StepOutcome:
        """Note that a step cannot run, because the connector gave no orders for it."""
        outcome = StepOutcome(failed=self._take_failed())
        self._end_step(plan, {"build_connector_meta": plan.error}, outcome)
        return outcome

    def _end_step(self, plan: StepPlan, hook_errors: Mapping[str, str], outcome: StepOutcome) -> bool:
        """Act on what hooks raised in a step.

        Return False if its tokens do not count; then its requests fail.
        """
        ended, why_void = self.handoffs.end_step(hook_errors)
        for request_id in ended.released:
            self._manager.unpin(request_id)
        outcome.failed.extend(ended.lost)
        if not why_void:
            return True
        logger.error("failing the %d requests of a step: %s", len(plan.scheduled_requests), why_void)
        for item in plan.scheduled_requests:
            self.handoffs.on_step_void(item.request)
            # The next step names them to `handle_preemptions`, before their blocks can be used again.
            self._lost_blocks.add(item.request_id)
            outcome.failed.append((item.request, why_void))
        return False

    def _take_failed(self) -> list[tuple[Request, str]]:
        failed, self._failed = self._failed, {}
        return list(failed.values())

    def _tell_progress(self, request: Request) -> None:
        block_ids = self._manager.get_block_ids(request.request_id)
        try:
            self.handoffs.on_progress(request, block_ids)
        except Exception as error:
            raise RequestFailedError(self.handoffs.describe("request_progressed", error)) from error

    def _apply_report(self, report: KVConnectorOutput, outcome: StepOutcome) -> set[str]:
        """Act on the report of the worker half; return the running requests whose step is void."""
        loading = {
            request_id: set().union(*self._manager.get_block_ids(request_id)) - {0}
            for request_id in self.handoffs.loading
        }
        ended = self.handoffs.apply(report, loading)
        for request_id in ended.released:
            self._manager.unpin(request_id)
        for request in ended.loaded:
            self._end_load(request)
        valid_tokens = self._manager.invalidate_blocks(ended.invalid_block_ids)
        for request, why in ended.failed:
            self._end_failed_load(request, why, valid_tokens, outcome)
        return self._cut_running(report, valid_tokens, outcome)

    def _cache_blocks(self, request: Request) -> None:
        self._manager.cache_blocks(request, request.num_computed_tokens)
        if self._events is not None:
            self._events.note(request)

    def _end_load(self, request: Request) -> None:
        request.num_computed_tokens += request.figures.num_loaded_tokens
        self._cache_blocks(request)
        # The next token needs the logits of the last known one, so compute that one here even if it was
        # loaded.
        request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens - 1)
        self._make_ready(request)

    def _end_failed_load(
        self, request: Request, why: str, valid_tokens: Mapping[str, int], outcome: StepOutcome
    ) -> None:
        request.num_computed_tokens = valid_tokens.get(request.request_id, request.num_computed_tokens)
        request.figures.note_failed_load(request.request_id, why)
        self._make_ready(request)
        if self._fails_on_load_error:
            outcome.failed.append((request, f"the KV cache of the prompt could not be loaded: {why}"))
        else:
            logger.warning("%s: %s; computing its prompt here instead", request.request_id, why)

    def _make_ready(self, request: Request) -> None:
        request.status = RequestStatus.READY
        self.ready.append(request)

    def _cut_running(
        self, report: KVConnectorOutput, valid_tokens: Mapping[str, int], outcome: StepOutcome
    ) -> set[str]:
        """Move requests that ran on synchronously loaded blocks whose load failed back to their valid
        prefix.
        """
        cut = {request.request_id: request for request in self.running if request.request_id in valid_tokens}
        for request_id, request in cut.items():
            request.num_computed_tokens = min(request.num_computed_tokens, valid_tokens[request_id])
            why = report.load_errors.get(request_id, "the load failed")
            request.figures.note_failed_load(request_id, why)
            if self._fails_on_load_error:
                outcome.failed.append((request, f"the KV cache of the prompt could not be loaded: {why}"))
        return set(cut)
