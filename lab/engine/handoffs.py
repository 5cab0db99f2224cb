"""The engine's side of the connector's scheduler half: which requests load, which blocks are kept, what
failed.

What an exception in a hook means is decided by the hook:

- Hooks about one request: the exception is passed on, and that request fails.
- `_ORDERING`: what the hook was to order may have begun or not. The loads that began in this step fail.
- `_REPORTING`: the end of a transfer may be lost. Every request that waits for a load fails.
- `_HARMLESS`: nothing depends on the hook. All others except `get_finished` make invalid what the step
  computed, so its requests fail.

Blocks of a failed request are not reused while the connector may still read or write them: see `Hold`.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from ...connector.base import KVConnectorMetadata, SchedulerHalf, SchedulerOutput
from ...connector.output import KVConnectorOutput
from ...transports.outside import bug_log, log_traceback
from .errors import StepFailedError, reason_of
from .request import Request
from .types import TransferHealth

logger = logging.getLogger(__name__)

_ORDERING = frozenset({"build_connector_meta", "bind_connector_metadata", "start_load_kv"})
_REPORTING = frozenset({"get_finished", "get_block_ids_with_load_errors", "take_load_errors"})
_HARMLESS = frozenset(
    {"get_kv_connector_stats", "failure", "warning", "update_connector_output", "take_events"}
)

#: A connector counts as broken after it raised in this many steps in a row, during this many seconds at
#: least.
MAX_HOOK_FAILURES_IN_A_ROW = 8
MIN_HOOK_FAILURE_S = 10.0


@dataclass(frozen=True)
class EndedLoads:
    """The loads and offers that one step's report of the worker half has ended.

    Attributes:
        loaded: Requests whose tokens were loaded.
        failed: Requests whose load failed, and why.
        lost: Requests whose load may go on or not, because a hook raised, and why. They fail whatever the
            policy is.
        invalid_block_ids: Blocks whose contents are undefined. No transfer writes to them any more.
        released: Ids of finished requests whose blocks are no longer needed.
    """

    loaded: list[Request] = field(default_factory=list)
    failed: list[tuple[Request, str]] = field(default_factory=list)
    lost: list[tuple[Request, str]] = field(default_factory=list)
    invalid_block_ids: set[int] = field(default_factory=set)
    released: set[str] = field(default_factory=set)


class Hold(Enum):
    """What a request's blocks are kept for, apart from computing."""

    #: The request waits until its blocks are filled.
    LOADING = "loading"
    #: The request ended while it was loading. Its blocks may be written to until the worker half reports the
    #: end.
    DRAINING = "draining"
    #: The request has finished. Its blocks are kept for another node until the worker half reports the end.
    OFFERED = "offered"
    #: A hook raised in a step that concerned the blocks. They may be read or written until the end of a later
    #: step in which no hook raises.
    UNSETTLED = "unsettled"


@dataclass
class _Transfer:
    """What a request's blocks are kept for.

    Attributes:
        is_over: The request has finished, so the block manager keeps the blocks only for this.
        is_ordered: The worker half has got its orders.
        doubt: Why the end may never be reported; empty if it will be.
    """

    request: Request
    holds: set[Hold] = field(default_factory=set)
    is_over: bool = False
    is_ordered: bool = False
    doubt: str = ""


@dataclass
class _HookHealth:
    """Whether hooks of the connector raise in one step after the other.

    Attributes:
        error: Why the connector counts as broken. Once set, this stays.
    """

    num_in_a_row: int = 0
    first_s: float = 0.0
    warning: str = ""
    error: str = ""

    def note_step(self, errors: Mapping[str, str]) -> None:
        self.num_in_a_row = self.num_in_a_row + 1 if errors else 0
        self.warning = next(iter(errors.values()), "")
        now_s = time.monotonic()
        if self.num_in_a_row <= 1:
            self.first_s = now_s
        is_long = now_s - self.first_s >= MIN_HOOK_FAILURE_S
        if self.num_in_a_row >= MAX_HOOK_FAILURES_IN_A_ROW and is_long and not self.error:
            self.error = (
                f"the connector raised in {self.num_in_a_row} steps in a row; restart the node; "
                f"the latest: {self.warning}"
            )
            logger.error("%s", self.error)


class Handoffs:
    """Calls the scheduler half of the connector; without a connector it does nothing."""

    def __init__(self, connector: SchedulerHalf | None) -> None:
        self._connector = connector
        self._transfers: dict[str, _Transfer] = {}
        self._invalid_while_loading: set[int] = set()
        #: What the scheduler half's hooks raised since the latest step ended.
        self._step_errors: dict[str, str] = {}
        self._health = _HookHealth()
        self._log = bug_log(logger)

    def __repr__(self) -> str:
        return (
            f"<Handoffs: {dict(Counter(hold.value for t in self._transfers.values() for hold in t.holds))}>"
        )

    @property
    def has_connector(self) -> bool:
        return self._connector is not None

    @property
    def is_pending(self) -> bool:
        """Whether steps must go on even if there is nothing to compute."""
        return bool(self._transfers)

    @property
    def loading(self) -> dict[str, Request]:
        """Requests that wait until their blocks are filled, by id."""
        return {
            request_id: transfer.request
            for request_id, transfer in self._transfers.items()
            if Hold.LOADING in transfer.holds
        }

    @property
    def unfinished_loads(self) -> set[str]:
        """Requests whose asynchronous load has not ended, including those that have finished meanwhile."""
        return {
            request_id
            for request_id, transfer in self._transfers.items()
            if transfer.holds & {Hold.LOADING, Hold.DRAINING}
        }

    @property
    def num_offered(self) -> int:
        """Finished requests whose blocks are kept for another node."""
        return sum(Hold.OFFERED in transfer.holds for transfer in self._transfers.values())

    @property
    def health(self) -> TransferHealth:
        """What the hooks' exceptions say about the connector."""
        doubts = [transfer.doubt for transfer in self._transfers.values() if transfer.doubt]
        warnings = [self._health.warning] if self._health.warning else []
        if doubts:
            warnings.append(
                f"blocks stay reserved until the connector reports the end of their requests' transfers, or the node is "
                f"restarted (requests: {len(doubts)}): {doubts[0]}"
            )
        return TransferHealth(self._health.error, "; ".join(warnings))

    def describe(self, hook: str, error: Exception) -> str:
        """Say in one line, for a client, which hook raised what."""
        return f"{hook} of the connector {type(self._connector).__name__} failed: {reason_of(error)}"

    def on_new_request(self, request: Request) -> None:
        """Hand a new request to the connector, before anything is allocated.

        Raises:
            ConnectorError: its `kv_transfer_params` are malformed.
        """
        if self._connector is not None:
            self._connector.on_new_request(request)

    def num_loadable_tokens(self, request: Request, num_local_tokens: int) -> tuple[int | None, bool]:
        """Return how many tokens beyond the node's own prefix hit can be loaded, and whether asynchronously.

        None instead of a number means that the connector is to be asked again in the next step.
        """
        if self._connector is None or not request.may_load:
            return 0, False
        num_tokens, is_async = self._connector.get_num_new_matched_tokens(request, num_local_tokens)
        if num_tokens is None:
            return None, False
        # A request that loads synchronously is part of the step, so at least one token must be left to
        # compute. A request that loads asynchronously is not part of it.
        num_wanted = request.num_tokens - num_local_tokens - (0 if is_async else 1)
        num_tokens = max(0, min(num_tokens, num_wanted))
        return num_tokens, is_async and num_tokens > 0

    def on_allocated(
        self, request: Request, block_ids: Sequence[Sequence[int]], num_external_tokens: int
    ) -> None:
        """Give the connector the request's blocks, and the number of tokens to load into them."""
        if num_external_tokens:
            request.may_load = False
        if self._connector is not None:
            self._connector.update_state_after_alloc(request, block_ids, num_external_tokens)

    def on_load_started(self, request: Request) -> None:
        """Wait for the end of the request's asynchronous load."""
        self._hold(request, Hold.LOADING)

    def on_load_in_doubt(self, request: Request, is_async: bool, why: str) -> None:
        """Keep the blocks of a request that fails although its load may have been ordered."""
        if is_async:
            self._hold(request, Hold.DRAINING).doubt = why
        else:
            self._hold(request, Hold.UNSETTLED)  # the load ends with this step

    def on_step_void(self, request: Request) -> None:
        """Keep the blocks of a request that fails because a hook raised in the step that just ended."""
        self._hold(request, Hold.UNSETTLED)

    def _hold(self, request: Request, hold: Hold) -> _Transfer:
        transfer = self._transfers.setdefault(request.request_id, _Transfer(request))
        transfer.holds.add(hold)
        return transfer

    def on_progress(self, request: Request, block_ids: Sequence[Sequence[int]]) -> None:
        """Note that part of the prompt was computed."""
        if self._connector is not None:
            self._connector.request_progressed(request, block_ids)

    def on_stopping(self, request: Request) -> None:
        """Note that the answer stops after its next token, for another node."""
        if self._connector is not None:
            self._connector.request_stopping(request)

    def take_metadata(self, output: SchedulerOutput) -> KVConnectorMetadata | None:
        """Take what the worker half must do in this step.

        Raises:
            StepFailedError: the connector raised, twice. It still has the orders, and the step cannot run
                without them.
        """
        if self._connector is None:
            return None
        try:
            return self._connector.build_connector_meta(output)
        except Exception as error:  # noqa: BLE001 - an author's code may raise anything
            # The connector has the orders until it has returned them, so a second call loses nothing.
            log_traceback(
                error, "the connector's build_connector_meta failed, and is called once more", self._log
            )
        try:
            return self._connector.build_connector_meta(output)
        except Exception as error:
            raise StepFailedError(self.describe("build_connector_meta", error), None) from error

    def on_finished(
        self, request: Request, block_ids: Sequence[Sequence[int]]
    ) -> tuple[bool, Mapping[str, Any] | None, Exception | None]:
        """End the request.

        Returns:
            `(keep_blocks, kv_transfer_params, error)`. If the blocks are kept, they are needed until `apply`
            or `end_step` releases them. `error` is what the connector raised instead of an answer; then
            nothing is offered.
        """
        params, error = None, None
        if Hold.LOADING in self._holds(request.request_id):
            self._transfers[request.request_id].holds ^= {Hold.LOADING, Hold.DRAINING}
        if self._connector is not None:
            try:
                is_offered, params = self._connector.request_finished(request, block_ids)
                if is_offered and any(block_ids):
                    self._hold(request, Hold.OFFERED)
            except Exception as raised:
                logger.exception("%s: the connector's request_finished failed; nothing is offered", request)
                error = raised
        if (transfer := self._transfers.get(request.request_id)) is not None:
            transfer.is_over = True
        return transfer is not None, params, error

    def _holds(self, request_id: str) -> set[Hold]:
        transfer = self._transfers.get(request_id)
        return set() if transfer is None else transfer.holds

    # -- what a step brought -------------------------------------------------------------------------

    def apply(self, report: KVConnectorOutput, block_ids_of: Mapping[str, Iterable[int]]) -> EndedLoads:
        """Apply the worker half's report of a step.

        Args:
            block_ids_of: The blocks of each request in `loading`.
        """
        if self._connector is not None:
            self._pass_on(self._connector, report)
        ended = EndedLoads()
        invalid = report.invalid_block_ids | self._invalid_while_loading
        unknown = _first(report.hook_errors, _REPORTING)
        for request_id in report.finished_sending:
            self._release(request_id, Hold.OFFERED, ended)
        for request_id in report.finished_recving:
            if Hold.LOADING not in self._holds(request_id):
                self._release(request_id, Hold.DRAINING, ended)
                continue
            request = self._transfers.pop(request_id).request
            if (invalid & set(block_ids_of[request_id])) or request_id in report.load_errors or unknown:
                reason = report.load_errors.get(request_id, unknown or "the load failed")
                ended.failed.append((request, reason))
            else:
                ended.loaded.append(request)
        # A connector may name failed blocks before it reports their request. Until it does, the load may
        # still write into the request's other blocks, so none of them may be reused.
        still_loading = {block for request_id in self.loading for block in block_ids_of[request_id]}
        self._invalid_while_loading = invalid & still_loading
        ended.invalid_block_ids.update(invalid - still_loading)
        return ended

    def end_step(self, errors: Mapping[str, str]) -> tuple[EndedLoads, str]:
        """Take in what hooks raised in a step. Call this after `apply`, also if nothing was raised.

        Args:
            errors: Hook → what it raised.

        Returns:
            What ended, and why the step's tokens are not valid; empty if they are.
        """
        ended = EndedLoads()
        self._health.note_step({**errors, **self._step_errors})
        self._step_errors = {}
        not_begun, not_reported = _first(errors, _ORDERING), _first(errors, _REPORTING)
        for transfer in self._transfers.values():
            doubt = not_reported or ("" if transfer.is_ordered else not_begun)
            transfer.is_ordered = True
            if transfer.holds != {Hold.UNSETTLED}:  # these need no report
                transfer.doubt = transfer.doubt or doubt
            if doubt and Hold.LOADING in transfer.holds:
                ended.lost.append((transfer.request, doubt))
        if not errors.keys() - _HARMLESS:
            for request_id in list(self._transfers):
                self._release(request_id, Hold.UNSETTLED, ended)
        return ended, _first(errors, errors.keys() - _HARMLESS - {"get_finished"})

    def _pass_on(self, connector: SchedulerHalf, report: KVConnectorOutput) -> None:
        # The transfers have ended even if the connector cannot take note of it, so their requests go on.
        with self._noting("update_connector_output"):
            connector.update_connector_output(report)
        with self._noting("take_events"):
            for event in connector.take_events():
                logger.debug("the connector reports %s", event)

    @contextmanager
    def _noting(self, hook: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 - an author's code may raise anything
            log_traceback(error, f"the connector's {hook} failed", self._log)
            self._step_errors[hook] = self.describe(hook, error)

    def _release(self, request_id: str, hold: Hold, ended: EndedLoads) -> None:
        transfer = self._transfers.get(request_id)
        if transfer is None or hold not in transfer.holds:
            return
        transfer.holds.remove(hold)
        if not transfer.holds:
            del self._transfers[request_id]
            if transfer.is_over:
                ended.released.add(request_id)


def _first(errors: Mapping[str, str], hooks: AbstractSet[str]) -> str:
    """Return what the first of these hooks raised; empty if none of them did."""
    return next((reason for hook, reason in errors.items() if hook in hooks), "")
