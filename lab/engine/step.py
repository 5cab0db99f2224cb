"""Describe what one step computes. The scheduler writes it. Connector, mixin and runner read it."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...connector.base import KVConnectorMetadata
from .request import Request


@dataclass(frozen=True)
class ScheduledRequest:
    """What one step computes of a request. It is the `ScheduledRequest` of the connector's interface.

    The step computes tokens `[num_computed_tokens, num_computed_tokens + num_scheduled_tokens)`.

    Attributes:
        num_computed_tokens: The request's `num_computed_tokens` before the step. The request's own number
            goes on after the step; this one stays.
        block_ids: The whole block table, one list per KV cache group, with slots for all these tokens.
    """

    request: Request
    num_computed_tokens: int
    num_scheduled_tokens: int
    block_ids: tuple[list[int], ...]

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def yields_token(self) -> bool:
        """Whether all known tokens are computed afterwards, so that the next one can be sampled."""
        return self.num_computed_tokens + self.num_scheduled_tokens == self.request.num_tokens


@dataclass(frozen=True)
class StepPlan:
    """One step. It is the `SchedulerOutput` of the connector's interface.

    Attributes:
        scheduled_requests: What to compute, each request once.
        finished_req_ids: Requests that finished since the previous step.
        preempted_req_ids: Requests that lost their blocks in this step.
        error: Why the step cannot run; empty if it can. Then it must not be executed: see
            `Scheduler.step_refused`.
    """

    scheduled_requests: tuple[ScheduledRequest, ...] = ()
    finished_req_ids: set[str] = field(default_factory=set)
    preempted_req_ids: set[str] = field(default_factory=set)
    kv_connector_metadata: KVConnectorMetadata | None = None
    error: str = ""

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(item.num_scheduled_tokens for item in self.scheduled_requests)


@dataclass
class StepDraft:
    """A step that is still being planned.

    Attributes:
        suspect: The only request that may be part of it; None: any that is not a suspect.
        pool_is_full: A request that runs did not get all the blocks that it needs.
    """

    num_free_tokens: int
    preempted: set[str]
    suspect: str | None
    scheduled: dict[str, ScheduledRequest] = field(default_factory=dict)
    pool_is_full: bool = False

    def add(self, item: ScheduledRequest) -> None:
        self.scheduled[item.request_id] = item
        self.num_free_tokens -= item.num_scheduled_tokens

    def remove(self, request_id: str) -> None:
        self.preempted.add(request_id)
        if item := self.scheduled.pop(request_id, None):
            self.num_free_tokens += item.num_scheduled_tokens


@dataclass(frozen=True)
class StepOutcome:
    """The result of a step.

    Attributes:
        new_tokens: Requests that have a new token, already appended.
        failed: Requests that failed, and why. The caller must still finish them.
    """

    new_tokens: list[Request] = field(default_factory=list)
    failed: list[tuple[Request, str]] = field(default_factory=list)
