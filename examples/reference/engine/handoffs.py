"""The scheduler's side of the connector: who loads, whose blocks are kept for another node, what failed."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvferry.connector.base import KVConnectorBase, KVConnectorMetadata, SchedulerOutput
from kvferry.connector.output import KVConnectorOutput

from .errors import EngineDeadError, reason_of
from .request import Request

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EndedLoads:
    """What one step's report of the worker half means for the scheduler.

    Attributes:
        loaded: Requests whose tokens are in place.
        failed: Requests whose load failed, and why.
        invalid_block_ids: Blocks whose contents are undefined; nothing writes there any more.
        released: Ids of finished requests whose blocks nobody needs any more.
    """

    loaded: list[Request] = field(default_factory=list)
    failed: list[tuple[Request, str]] = field(default_factory=list)
    invalid_block_ids: set[int] = field(default_factory=set)
    released: set[str] = field(default_factory=set)


class Handoffs:
    """Speaks to the scheduler half of the connector, or stands for its absence.

    What a hook raises about one request is passed on, and ends that request alone. What the connector raises about a
    whole step ends nothing, unless it does so twice.

    Every transfer that is under way is in exactly one of three places: `loading` (a live request), `draining` (the
    request was aborted, its blocks may still be written), `offered` (a finished request's blocks, for another node).
    """

    def __init__(self, connector: KVConnectorBase | None) -> None:
        self._connector = connector
        self.loading: dict[str, Request] = {}
        self.draining: set[str] = set()
        self.offered: set[str] = set()
        self._invalid_while_loading: set[int] = set()

    @property
    def has_connector(self) -> bool:
        return self._connector is not None

    @property
    def is_pending(self) -> bool:
        """Whether steps must go on even if there is nothing to compute."""
        return bool(self.loading or self.draining or self.offered)

    def on_new_request(self, request: Request) -> None:
        """Tell the connector of a request before anything is allocated.

        Raises:
            ConnectorError: its `kv_transfer_params` are malformed.
        """
        if self._connector is not None:
            self._connector.on_new_request(request)

    def num_loadable_tokens(self, request: Request, num_local_tokens: int) -> tuple[int | None, bool]:
        """Tokens beyond the node's own prefix hit that can be loaded, and whether asynchronously; None: ask later."""
        if self._connector is None or not request.may_load:
            return 0, False
        num_tokens, is_async = self._connector.get_num_new_matched_tokens(request, num_local_tokens)
        if num_tokens is None:
            return None, False
        # A step must compute something; a request that only loads is not part of one.
        num_wanted = request.num_tokens - num_local_tokens - (0 if is_async else 1)
        num_tokens = max(0, min(num_tokens, num_wanted))
        return num_tokens, is_async and num_tokens > 0

    def on_allocated(
        self, request: Request, block_ids: Sequence[Sequence[int]], num_external_tokens: int
    ) -> None:
        """Tell the connector which blocks the request has, and how many tokens to load into them."""
        if num_external_tokens:
            request.may_load = False
        if self._connector is not None:
            self._connector.update_state_after_alloc(request, block_ids, num_external_tokens)

    def on_progress(self, request: Request, block_ids: Sequence[Sequence[int]]) -> Mapping[str, Any] | None:
        """Part of the prompt was computed; returns what another node needs to begin with it, if that is news."""
        return None if self._connector is None else self._connector.request_progressed(request, block_ids)

    def take_metadata(self, output: SchedulerOutput) -> KVConnectorMetadata | None:
        """What the worker half must do in this step."""
        if self._connector is None:
            return None
        try:
            return self._connector.build_connector_meta(output)
        except Exception:
            # A step cannot run without it. What was ordered is still with the connector, so the second call tells it.
            logger.exception("the connector's build_connector_meta failed; it is asked once more")
        try:
            return self._connector.build_connector_meta(output)
        except Exception as error:
            raise EngineDeadError(
                f"the connector's build_connector_meta failed twice in a row: {reason_of(error)}"
            ) from error

    def on_finished(
        self, request: Request, block_ids: Sequence[Sequence[int]]
    ) -> tuple[bool, Mapping[str, Any] | None, Exception | None]:
        """The request is over.

        Returns:
            `(keep_blocks, kv_transfer_params, error)`. Blocks that are kept are needed until `apply` releases them.
            `error` is what the connector raised instead of an answer; then nothing is offered.
        """
        is_loading = self.loading.pop(request.request_id, None) is not None
        if is_loading:
            self.draining.add(request.request_id)
        if self._connector is None:
            return False, None, None
        try:
            is_offered, params = self._connector.request_finished(request, block_ids)
        except Exception as error:
            logger.exception("%s: the connector's request_finished failed; nothing of it is offered", request)
            return is_loading, None, error
        if is_offered and any(block_ids):
            self.offered.add(request.request_id)
        return request.request_id in self.draining | self.offered, params, None

    def apply(self, report: KVConnectorOutput, block_ids_of: Mapping[str, Iterable[int]]) -> EndedLoads:
        """Take in what the worker half reported.

        Args:
            block_ids_of: Blocks of each request that is loading; see `loading`.
        """
        if self._connector is not None:
            self._tell_outcomes(self._connector, report)
        ended = EndedLoads(released=self._take_released(report))
        invalid = report.invalid_block_ids | self._invalid_while_loading
        for request_id in report.finished_recving & self.loading.keys():
            request = self.loading.pop(request_id)
            if (invalid & set(block_ids_of[request_id])) or request_id in report.load_errors:
                ended.failed.append((request, report.load_errors.get(request_id, "the load failed")))
            else:
                ended.loaded.append(request)
        # A connector may name blocks before their request; until then the load may still write into the others.
        still_loading = {block for request_id in self.loading for block in block_ids_of[request_id]}
        self._invalid_while_loading = invalid & still_loading
        ended.invalid_block_ids.update(invalid - still_loading)
        return ended

    def _tell_outcomes(self, connector: KVConnectorBase, report: KVConnectorOutput) -> None:
        try:
            connector.update_connector_output(report)
            for event in connector.take_events():
                logger.debug("the connector reports %s", event)
        except Exception:
            # The transfers have ended whatever the connector makes of it, so their requests go on.
            logger.exception("the connector failed to take in a step's report")

    def _take_released(self, report: KVConnectorOutput) -> set[str]:
        released = (self.offered & report.finished_sending) | (self.draining & report.finished_recving)
        self.offered -= report.finished_sending
        self.draining -= report.finished_recving
        # A request can be in both: it was loading, was aborted, and its blocks are offered all the same.
        return released - self.offered - self.draining
