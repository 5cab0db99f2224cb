"""`EngineCore`: model, pool, scheduler, runner and connector halves, driven step by step by one thread."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any

from ...connector.output import KVConnectorOutput
from ...connector.stats import KVConnectorStats, TransferRecord
from ...transports.errors import KVTransferStateError
from .answers import Answer
from .assembly import assemble
from .errors import (
    EngineDeadError,
    InvalidRequestError,
    PromptTooLongError,
    RequestFailedError,
    StepFailedError,
    reason_of,
)
from .request import Request
from .settings import EngineSettings
from .step import StepOutcome, StepPlan
from .types import (
    EngineStats,
    EngineTotals,
    FinishReason,
    GenerationRequest,
    RequestOutput,
    SamplingParams,
    TransferHealth,
)

logger = logging.getLogger(__name__)

#: Requests that may fail one after the other, each alone in its step, without a step that succeeds in
#: between. After more, the model counts as broken, even if its check on a few tokens still passes.
MAX_FAILED_STEPS_IN_A_ROW = 8
#: Seconds to tell another node that its offer is not wanted. This takes a step, a handshake and a message.
SETTLE_S = 1.0
#: Most loads in flight whose records are kept. Only a connector that never ends the loads it records can
#: exceed this.
MAX_OPEN_LOADS = 1024


class EngineCore:
    """The engine without its thread: `add`, `abort` and `step` are called one at a time.

    A failure of one request ends that request only. An exception in work for one request (block hasher,
    detokenizer, a hook of the connector's scheduler half) ends it with `finish_reason` `"error"`, and it
    returns its blocks as any request does. A step that fails concerns all its requests; see `executor`, and
    `handoffs` for hooks of the connector that are called for a whole step. Any other exception ends the
    engine: the model no longer runs, a worker process is gone, or the block manager contradicts itself.

    Args:
        on_handoffs: Called with the connector's stats of a step in which handoffs ended.

    Raises:
        ConfigurationError: a setting, the model or a connector option cannot work. Nothing is left over.
        KVTransferStateError: this process runs an engine with a connector already.
    """

    def __init__(
        self, settings: EngineSettings, on_handoffs: Callable[[KVConnectorStats], None] = lambda stats: None
    ) -> None:
        self._on_handoffs = on_handoffs
        self.parts = assemble(settings)
        self._answers: dict[str, Answer] = {}
        self._num_added = 0
        self._totals = EngineTotals()
        self._records = _RankRecords()
        self._transfer_health = TransferHealth()
        self._gave_up_s = -math.inf  # when a request last ended whose prompt another node offered
        self._num_failed_in_a_row = 0

    @property
    def max_model_len(self) -> int:
        """Longest sequence, prompt and answer together, in tokens."""
        return self.parts.config.model.max_model_len

    # -- requests ------------------------------------------------------------------------------------

    def add(self, source: GenerationRequest, arrival_s: float) -> None:
        """Accept a request.

        Args:
            arrival_s: Time of its arrival, from `time.monotonic()`.

        Raises:
            InvalidRequestError: it cannot be served.
            ConnectorError: its `kv_transfer_params` are malformed.
            Exception: any other failure of this request; it was not accepted.
        """
        self._check(source)
        self._num_added += 1
        # A client may reuse an id while the blocks of its first request are still offered to another node.
        unique_id = f"{source.request_id}-{self._num_added}"
        request = Request(unique_id, source, self.parts.hasher, arrival_s)
        model = self.parts.model
        answer = Answer(request, model.tokenizer, model.eos_token_ids, self.max_model_len)
        # The scheduler comes last, so that nothing must be undone if any of this raises.
        self.parts.scheduler.add(request)
        self._answers[source.request_id] = answer

    def decline(self, kv_transfer_params: Mapping[str, Any]) -> None:
        """Release what another node holds for a request that was refused.

        Raises:
            ConnectorError: the params are malformed; they name nothing that is held.
        """
        self._num_added += 1
        source = GenerationRequest("declined", (0,), SamplingParams(), kv_transfer_params)
        # Nothing of it is computed, so it needs no hashes; the hasher may be why the request was refused.
        request = Request(f"declined-{self._num_added}", source, lambda _: [], 0.0)
        self.parts.scheduler.add(request)
        with contextlib.suppress(RequestFailedError):  # it was logged
            self.parts.scheduler.finish(request, "abort")
        self._gave_up_s = time.monotonic()

    def _check(self, source: GenerationRequest) -> None:
        if source.request_id in self._answers:
            raise InvalidRequestError(f"request id {source.request_id!r} is in use", param="request_id")
        if not source.prompt_token_ids:
            raise InvalidRequestError("the prompt is empty", param="prompt")
        vocab_size = self.parts.model.text_config.vocab_size
        if not all(0 <= token_id < vocab_size for token_id in source.known_token_ids):
            raise InvalidRequestError(
                f"continues: a token id is not in 0..{vocab_size - 1}", param="kv_transfer_params"
            )
        if not all(0 <= token_id < vocab_size for token_id in source.prompt_token_ids):
            raise InvalidRequestError(
                f"a token id of the prompt is not in 0..{vocab_size - 1}", param="prompt"
            )
        num_prompt, longest = len(source.prompt_token_ids), self.max_model_len - 1
        if num_prompt > longest:
            raise PromptTooLongError(
                f"the prompt has {num_prompt} tokens; with room for an answer of one token, "
                f"at most {longest} are possible here",
                num_prompt_tokens=num_prompt,
                max_prompt_tokens=longest,
            )

    def abort(self, request_id: str) -> list[RequestOutput]:
        """End a request now; returns its last output, or nothing if there is no such request."""
        answer = self._answers.get(request_id)
        if answer is None:
            return []
        return [self._cut_off(answer, "abort")]

    def move(self, name: str) -> None:
        """Stop the answer that may be moved by this name after its next token, and offer its cache."""
        for answer in self._answers.values():
            if answer.request.source.move_as == name and not answer.is_to_move:
                try:
                    self.parts.scheduler.handoffs.on_stopping(answer.request)
                except Exception:
                    # The next node computes what it cannot load.
                    logger.exception("%s: the connector's request_stopping failed", answer.request)
                answer.is_to_move = True

    def _cut_off(self, answer: Answer, reason: FinishReason, why: str = "") -> RequestOutput:
        """End a request for a reason outside the model; return its last output."""
        with contextlib.suppress(RequestFailedError):  # it was logged, and the request ends anyway
            self._finish(answer, reason)
        return answer.cut_off(reason, why)

    def _finish(self, answer: Answer, reason: FinishReason) -> Mapping[str, Any] | None:
        request = answer.request
        del self._answers[request.source.request_id]
        if reason in ("abort", "error") and (request.kv_transfer_params or {}).get("do_remote_prefill"):
            self._gave_up_s = time.monotonic()
        try:
            params = self.parts.scheduler.finish(request, reason)
        except RequestFailedError:
            self._count_finished(request, "error")
            raise
        self._count_finished(request, reason)
        return params

    def _count_finished(self, request: Request, reason: FinishReason) -> None:
        totals = self._totals
        totals.num_finished[reason] = totals.num_finished.get(reason, 0) + 1
        totals.num_preemptions += request.figures.num_preemptions
        totals.num_prompt_tokens += request.num_prompt_tokens
        totals.num_cached_tokens += request.figures.num_cached_tokens
        totals.num_loaded_tokens += request.figures.num_loaded_tokens

    # -- steps ---------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return self.parts.scheduler.has_work

    @property
    def is_loading(self) -> bool:
        """Whether a request waits for another node's KV cache."""
        return bool(self.parts.scheduler.handoffs.loading)

    def check(self) -> None:
        """Check, while the engine is idle, that a step and transfers would work.

        Raises:
            EngineDeadError: a worker process is gone.
        """
        self._note_transfer_health(self.parts.executor.check())

    def step(self) -> tuple[int, list[RequestOutput]]:
        """Run one step.

        Returns:
            `(num_tokens, outputs)`: tokens computed, and outputs for clients. If no token was computed, the
            step only handled transfers, and the next one may wait a moment.

        Raises:
            EngineDeadError: a worker process is gone, or the model no longer runs.
        """
        plan = self.parts.scheduler.plan()
        if plan.error:
            return 0, self._outputs(self.parts.scheduler.step_refused(plan))
        try:
            result = self.parts.executor.execute(plan)
        except StepFailedError as failure:
            outcome = self._step_failed(plan, failure)
        else:
            if plan.scheduled_requests:
                self._num_failed_in_a_row = 0
            self._note_report(result.kv_connector_output or KVConnectorOutput())
            outcome = self.parts.scheduler.update(plan, result)
        return plan.total_num_scheduled_tokens, self._outputs(outcome)

    def publish_events(self) -> None:
        """Publish what the prefix cache has stored and removed since the last call, if the settings
        say so.
        """
        events, publisher = self.parts.events, self.parts.publisher
        if events is not None and publisher is not None and (batch := events.take()):
            publisher.publish(batch)

    def _step_failed(self, plan: StepPlan, failure: StepFailedError) -> StepOutcome:
        logger.error(
            "a step of %d requests failed: %s", len(plan.scheduled_requests), failure, exc_info=failure
        )
        is_model_to_blame = failure.report is None or not failure.report.hook_errors
        if len(plan.scheduled_requests) == 1 and is_model_to_blame:
            self._num_failed_in_a_row += 1
        if self._num_failed_in_a_row > MAX_FAILED_STEPS_IN_A_ROW:
            raise EngineDeadError(
                f"{self._num_failed_in_a_row} requests failed one after the other, the latest with {failure}"
            ) from failure
        if failure.report is not None:
            self._note_report(failure.report)
        return self.parts.scheduler.step_failed(plan, failure.report, f"its computation failed: {failure}")

    def _outputs(self, outcome: StepOutcome) -> list[RequestOutput]:
        outputs: list[RequestOutput] = []
        for request in outcome.new_tokens:
            known = self._answers[request.source.request_id].take_known_piece()
            outputs += [self._piece(request)] if known is None else [known, self._piece(request)]
        for request, why in outcome.failed:
            answer = self._answers.get(request.source.request_id)
            # Otherwise it is over already: it failed twice in this step.
            if answer is not None and answer.request is request:
                outputs.append(self._cut_off(answer, "error", why))
        return outputs

    def _piece(self, request: Request) -> RequestOutput:
        answer = self._answers[request.source.request_id]
        try:
            text, reason = answer.push_last_token()
        except Exception as error:
            logger.exception("%s: its newest token cannot be answered; the request fails", request)
            return self._cut_off(answer, "error", reason_of(error))
        self._totals.num_output_tokens += 1
        if reason is None:
            return answer.piece(text)
        try:
            return answer.last_piece(text, reason, self._finish(answer, reason))
        except RequestFailedError as error:
            return answer.cut_off("error", str(error))

    def _note_report(self, report: KVConnectorOutput) -> None:
        self._note_transfer_health(TransferHealth(report.failure, report.warning))
        self._note_transfers(report)

    def _note_transfer_health(self, health: TransferHealth) -> None:
        # An error is final. A worker process that reported it with a step has not yet reported it on its own.
        self._transfer_health = replace(health, error=self._transfer_health.error or health.error)

    def _note_transfers(self, report: KVConnectorOutput) -> None:
        if isinstance(report.kv_connector_stats, KVConnectorStats):
            self._on_handoffs(report.kv_connector_stats)
        scheduler = self.parts.scheduler
        if records := self._records.take_ended(report, scheduler.handoffs.unfinished_loads):
            for request in scheduler.live_requests:
                request.figures.transfer = records.get(request.request_id, request.figures.transfer)

    # -- figures and the end -------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """The figures after the latest step."""
        scheduler, manager = self.parts.scheduler, self.parts.manager
        hooks = scheduler.handoffs.health
        return EngineStats(
            healthy=True,
            transfer_error=self._transfer_health.error or hooks.error,
            transfer_warning="; ".join(filter(None, (self._transfer_health.warning, hooks.warning))),
            num_waiting=len(scheduler.waiting),
            num_loading=len(scheduler.handoffs.loading),
            num_running=len(scheduler.running) + len(scheduler.ready),
            num_offered=scheduler.handoffs.num_offered,
            num_blocks=self.parts.kv_cache_config.num_blocks - 1,
            num_free_blocks=manager.num_free_blocks,
            prefix_cache_hit_rate=manager.metrics.hit_rate,
            totals=replace(self._totals, num_finished=dict(self._totals.num_finished)),
        )

    def abort_all(self) -> list[RequestOutput]:
        """End every request; returns their last outputs."""
        return [output for request_id in list(self._answers) for output in self.abort(request_id)]

    def settle(self) -> None:
        """Run steps until the nodes whose offers were just declined have been told.

        Otherwise the connector would shut down before it has carried out its last orders, and the offers
        would hold their blocks until their leases end.
        """
        while self.parts.connector_name and time.monotonic() < self._gave_up_s + SETTLE_S:
            self.step()
            time.sleep(SETTLE_S / 100)

    def close(self) -> None:
        """Shut the connector down. Idempotent; handoffs that are not over end as aborted.

        A block that was lost or given out twice on the way is logged as an error.
        """
        self.parts.resources.close()
        try:
            self.parts.manager.check_integrity()
        except KVTransferStateError as error:
            logger.error("the engine lost track of its blocks: %s", error)


class _RankRecords:
    """Keep the records of a load until all ranks have ended it."""

    def __init__(self) -> None:
        self._open: dict[str, list[TransferRecord]] = {}

    def take_ended(self, report: KVConnectorOutput, loading: AbstractSet[str]) -> dict[str, TransferRecord]:
        """Take in one step's report of all ranks; return one record per load that ended in it, by request.

        Args:
            loading: Requests whose asynchronous load had not ended before this step. A load of any other
                request was synchronous: every rank ended it in this step.
        """
        stats = report.kv_connector_stats
        # A connector from outside the project may have stats of another class, which hold no records of ours.
        for record in stats.transfers if isinstance(stats, KVConnectorStats) else ():
            self._open.setdefault(record.request_id, []).append(record)
        # Ranks need not end a load in the same step. `finished_recving` names it only after the last of them
        # has.
        unfinished = loading - report.finished_recving
        joined = {
            request_id: TransferRecord.joined(self._open.pop(request_id))
            for request_id in list(self._open)
            if request_id not in unfinished
        }
        while len(self._open) > MAX_OPEN_LOADS:
            del self._open[next(iter(self._open))]
        return joined
