"""The engine's side of the connector's scheduler half: which requests load, which blocks are kept, what failed."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from kvferry.connector.base import KVConnectorMetadata, SchedulerHalf, SchedulerOutput
from kvferry.connector.output import KVConnectorOutput

from .errors import EngineDeadError, reason_of
from .request import Request

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EndedLoads:
    """The loads and offers that one step's report of the worker half has ended.

    Attributes:
        loaded: Requests whose tokens were loaded.
        failed: Requests whose load failed, and why.
        invalid_block_ids: Blocks whose contents are undefined. No transfer writes to them any more.
        released: Ids of finished requests whose blocks are no longer needed.
    """

    loaded: list[Request] = field(default_factory=list)
    failed: list[tuple[Request, str]] = field(default_factory=list)
    invalid_block_ids: set[int] = field(default_factory=set)
    released: set[str] = field(default_factory=set)


class TransferState(Enum):
    """What a request's blocks are used for, apart from computing."""

    #: The request waits until its blocks are filled.
    LOADING = "loading"
    #: The request ended while it was loading; its blocks may still be written to.
    DRAINING = "draining"
    #: The request has finished; its blocks are kept for another node.
    OFFERED = "offered"


@dataclass
class _Transfer:
    """A transfer in progress.

    Attributes:
        is_offered: True if the connector offers the blocks of a `DRAINING` request. They are then released only after both
            the load and the offer have ended.
    """

    request: Request
    state: TransferState
    is_offered: bool = False


class Handoffs:
    """Calls the scheduler half of the connector; without a connector it does nothing.

    If a hook raises about one request, the exception is passed on and ends that request alone. If the connector raises
    about a whole step, nothing ends, unless it raises twice in a row.
    """

    def __init__(self, connector: SchedulerHalf | None) -> None:
        self._connector = connector
        self._transfers: dict[str, _Transfer] = {}
        self._invalid_while_loading: set[int] = set()

    def __repr__(self) -> str:
        return f"<Handoffs: {dict(Counter(transfer.state.value for transfer in self._transfers.values()))}>"

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
            if transfer.state is TransferState.LOADING
        }

    @property
    def num_offered(self) -> int:
        """Finished requests whose blocks are kept for another node."""
        return sum(
            transfer.is_offered or transfer.state is TransferState.OFFERED
            for transfer in self._transfers.values()
        )

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
        # A request that loads synchronously is part of the step, so at least one token must be left to compute. A request
        # that loads asynchronously is not part of it.
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
        self._transfers[request.request_id] = _Transfer(request, TransferState.LOADING)

    def on_progress(self, request: Request, block_ids: Sequence[Sequence[int]]) -> Mapping[str, Any] | None:
        """Note that part of the prompt was computed.

        Returns:
            What another node needs to start loading, the first time that it can; otherwise None.
        """
        return None if self._connector is None else self._connector.request_progressed(request, block_ids)

    def take_metadata(self, output: SchedulerOutput) -> KVConnectorMetadata | None:
        """Take the connector's orders for the worker half in this step."""
        if self._connector is None:
            return None
        try:
            return self._connector.build_connector_meta(output)
        except Exception:
            # A step cannot run without it. The connector still has the orders, so the second call returns them.
            logger.exception("the connector's build_connector_meta failed; calling it once more")
        try:
            return self._connector.build_connector_meta(output)
        except Exception as error:
            raise EngineDeadError(
                f"the connector's build_connector_meta failed twice in a row: {reason_of(error)}"
            ) from error

    def on_finished(
        self, request: Request, block_ids: Sequence[Sequence[int]]
    ) -> tuple[bool, Mapping[str, Any] | None, Exception | None]:
        """End the request.

        Returns:
            `(keep_blocks, kv_transfer_params, error)`. If the blocks are kept, they are needed until `apply` releases them.
            `error` is what the connector raised instead of an answer; then nothing is offered.
        """
        transfer = self._transfers.get(request.request_id)
        if transfer is not None:
            transfer.state = TransferState.DRAINING
        if self._connector is None:
            return False, None, None
        try:
            is_offered, params = self._connector.request_finished(request, block_ids)
        except Exception as error:
            logger.exception("%s: the connector's request_finished failed; nothing is offered", request)
            return transfer is not None, None, error
        if is_offered and any(block_ids):
            if transfer is None:
                self._transfers[request.request_id] = _Transfer(request, TransferState.OFFERED)
            else:
                transfer.is_offered = True
        return request.request_id in self._transfers, params, None

    def apply(self, report: KVConnectorOutput, block_ids_of: Mapping[str, Iterable[int]]) -> EndedLoads:
        """Apply the worker half's report of a step.

        Args:
            block_ids_of: The blocks of each request in `loading`.
        """
        if self._connector is not None:
            self._pass_on(self._connector, report)
        ended = EndedLoads()
        invalid = report.invalid_block_ids | self._invalid_while_loading
        for request_id in report.finished_sending & self._transfers.keys():
            self._offer_ended(request_id, ended)
        for request_id in report.finished_recving & self._transfers.keys():
            transfer = self._transfers[request_id]
            if transfer.state is TransferState.LOADING:
                del self._transfers[request_id]
                if (invalid & set(block_ids_of[request_id])) or request_id in report.load_errors:
                    reason = report.load_errors.get(request_id, "the load failed")
                    ended.failed.append((transfer.request, reason))
                else:
                    ended.loaded.append(transfer.request)
            elif transfer.state is TransferState.DRAINING:
                self._drained(request_id, ended)
        # A connector may name failed blocks before it reports their request. Until it does, the load may still write into
        # the request's other blocks, so none of them may be reused.
        still_loading = {block for request_id in self.loading for block in block_ids_of[request_id]}
        self._invalid_while_loading = invalid & still_loading
        ended.invalid_block_ids.update(invalid - still_loading)
        return ended

    def _pass_on(self, connector: SchedulerHalf, report: KVConnectorOutput) -> None:
        try:
            connector.update_connector_output(report)
            for event in connector.take_events():
                logger.debug("the connector reports %s", event)
        except Exception:
            # The transfers have ended even if the connector cannot take note of it, so their requests go on.
            logger.exception("the connector failed to take in a step's report; the requests go on")

    def _offer_ended(self, request_id: str, ended: EndedLoads) -> None:
        transfer = self._transfers[request_id]
        if transfer.state is TransferState.OFFERED:
            del self._transfers[request_id]
            ended.released.add(request_id)
        else:
            transfer.is_offered = False

    def _drained(self, request_id: str, ended: EndedLoads) -> None:
        transfer = self._transfers[request_id]
        if transfer.is_offered:
            transfer.state, transfer.is_offered = TransferState.OFFERED, False
        else:
            del self._transfers[request_id]
            ended.released.add(request_id)
