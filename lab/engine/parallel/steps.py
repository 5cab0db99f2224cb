"""Reduce a step to what is new to the workers, and restore the whole step in the worker."""

from __future__ import annotations

import math
from dataclasses import replace

from ..request import Request
from ..step import ScheduledRequest, StepPlan
from .messages import Step, StepItem


class StepSender:
    """The scheduler's side. It keeps how many tokens of each request were sent to the workers."""

    def __init__(self) -> None:
        self._num_sent: dict[str, int] = {}

    def step(self, plan: StepPlan) -> Step:
        """Return what is new in a step.

        Call this for every step, in order, because workers add each to what they have.
        """
        for request_id in plan.finished_req_ids:
            self._num_sent.pop(request_id, None)
        return Step(
            items=tuple(self._item(item) for item in plan.scheduled_requests),
            finished_req_ids=frozenset(plan.finished_req_ids),
            preempted_req_ids=frozenset(plan.preempted_req_ids),
            kv_connector_metadata=plan.kv_connector_metadata,
        )

    def _item(self, item: ScheduledRequest) -> StepItem:
        request = item.request
        num_sent = self._num_sent.get(request.request_id, 0)
        self._num_sent[request.request_id] = request.num_tokens
        tokens = tuple(request.all_token_ids[num_sent:])
        # Workers need no `kv_transfer_params`: only the scheduler half reads them.
        source = replace(request.source, prompt_token_ids=tokens, kv_transfer_params=None)
        return StepItem(
            request_id=request.request_id,
            source=None if num_sent else source,
            num_known_tokens=num_sent or len(tokens),
            new_token_ids=tokens if num_sent else (),
            num_computed_tokens=item.num_computed_tokens,
            num_scheduled_tokens=item.num_scheduled_tokens,
            block_ids=tuple(tuple(table) for table in item.block_ids),
        )


class StepMirror:
    """The worker's side: a copy of the scheduler's requests, with the fields that a model runner reads."""

    def __init__(self) -> None:
        self._requests: dict[str, Request] = {}

    def plan(self, step: Step) -> StepPlan:
        """Restore the step as the scheduler planned it."""
        for request_id in step.finished_req_ids:
            self._requests.pop(request_id, None)
        return StepPlan(
            scheduled_requests=tuple(self._scheduled(item) for item in step.items),
            finished_req_ids=set(step.finished_req_ids),
            preempted_req_ids=set(step.preempted_req_ids),
            kv_connector_metadata=step.kv_connector_metadata,
        )

    def _scheduled(self, item: StepItem) -> ScheduledRequest:
        if item.source is not None:
            self._requests[item.request_id] = Request(item.request_id, item.source, lambda _: [], -math.inf)
        request = self._requests[item.request_id]
        request.all_token_ids[item.num_known_tokens :] = item.new_token_ids
        request.num_computed_tokens = item.num_computed_tokens
        return ScheduledRequest(
            request,
            item.num_computed_tokens,
            item.num_scheduled_tokens,
            tuple(list(table) for table in item.block_ids),
        )
