"""The scheduler half of a `MultiConnector`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, cast

from ...transports.errors import KVTransferStateError
from ..base import KVConnectorHandshakeMetadata, SchedulerHalf
from ..errors import ConnectorError
from .accounting import Ledger, MultiHandshakeMetadata, MultiMetadata
from .params import ChildRequest, join_params, split_params

if TYPE_CHECKING:
    from ..base import ConnectorRequest, KVConnectorMetadata, SchedulerOutput
    from ..output import KVConnectorOutput


@dataclass
class _Request:
    """A request that has not finished.

    Attributes:
        params: The params for each child.
        loader: The child that could load when last asked; empty if none could.
        is_async: Whether that child loads asynchronously.
    """

    params: Mapping[str, Mapping[str, Any] | None]
    loader: str = ""
    is_async: bool = False


class MultiScheduler(SchedulerHalf):
    """Choose the child that loads each request, and remember which children hold its blocks.

    Args:
        children: By name, in order of preference. They belong to this object from now on.
    """

    def __init__(self, children: Mapping[str, SchedulerHalf]) -> None:
        self.children = children
        self._requests: dict[str, _Request] = {}
        self._ledger = Ledger()
        #: Of children that answered before another one raised.
        self._orders: dict[str, KVConnectorMetadata] = {}

    def set_handshake_metadata(self, metadata: Mapping[int, KVConnectorHandshakeMetadata]) -> None:
        by_rank = cast(Mapping[int, MultiHandshakeMetadata], metadata)
        for name, child in self.children.items():
            own = {rank: sent.children[name] for rank, sent in by_rank.items() if name in sent.children}
            if own:
                child.set_handshake_metadata(own)

    def recognizes_params(self, kv_transfer_params: Mapping[str, Any]) -> bool:
        return any(child.recognizes_params(kv_transfer_params) for child in self.children.values())

    def on_new_request(self, request: ConnectorRequest) -> None:
        request_id = request.request_id
        if request_id in self._requests or request_id in self._ledger:
            raise ConnectorError(
                f"request id {request_id!r} is in use: its transfer is not over; use another request id"
            )
        known = _Request(split_params(request.kv_transfer_params, self.children))
        # If one child refuses the request, the children asked before it must forget it: to them it has ended.
        with ExitStack() as undo:
            for name, child in self.children.items():
                child.on_new_request(ChildRequest(request, known.params[name]))
                refused = _Refused(request, known.params[name])
                undo.callback(child.request_finished, refused, ())
            undo.pop_all()
        self._requests[request_id] = known

    def get_num_new_matched_tokens(
        self, request: ConnectorRequest, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        known = self._known(request)
        known.loader = ""
        for name, child in self.children.items():
            view = ChildRequest(request, known.params[name])
            num_tokens, is_async = child.get_num_new_matched_tokens(view, num_computed_tokens)
            if num_tokens is None:
                return None, False
            if num_tokens > 0:
                known.loader, known.is_async = name, is_async
                return num_tokens, is_async
        return 0, False

    def update_state_after_alloc(
        self, request: ConnectorRequest, block_ids: Sequence[Sequence[int]], num_external_tokens: int
    ) -> None:
        known = self._known(request)
        if num_external_tokens and not known.loader:
            raise KVTransferStateError(
                f"cannot load {num_external_tokens} tokens of request {request.request_id!r}: no connector offered to; "
                "call get_num_new_matched_tokens first"
            )
        if num_external_tokens and known.is_async:
            self._ledger.load(request.request_id, known.loader)
        for name, child in self.children.items():
            num_tokens = num_external_tokens if name == known.loader else 0
            child.update_state_after_alloc(ChildRequest(request, known.params[name]), block_ids, num_tokens)
        known.loader = ""

    def request_progressed(self, request: ConnectorRequest, block_ids: Sequence[Sequence[int]]) -> None:
        known = self._known(request)
        for name, child in self.children.items():
            child.request_progressed(ChildRequest(request, known.params[name]), block_ids)

    def request_stopping(self, request: ConnectorRequest) -> None:
        known = self._known(request)
        for name, child in self.children.items():
            child.request_stopping(ChildRequest(request, known.params[name]))

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> MultiMetadata:
        for name, child in self.children.items():
            # A child gives its orders once, and this is the second call if another one raised.
            if name not in self._orders:
                self._orders[name] = child.build_connector_meta(scheduler_output)
        orders, self._orders = self._orders, {}
        return self._ledger.take_metadata(orders)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        for name, child in self.children.items():
            child.update_connector_output(self._ledger.share_of(name, connector_output))
        self._ledger.settle(connector_output)

    def request_finished(
        self, request: ConnectorRequest, block_ids: Sequence[Sequence[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        known = self._known(request)
        del self._requests[request.request_id]
        answers: dict[str, Mapping[str, Any]] = {}
        holders = set()
        for name, child in self.children.items():
            view = ChildRequest(request, known.params[name])
            delay_free, params = child.request_finished(view, block_ids)
            if delay_free:
                holders.add(name)
            if params is not None:
                answers[name] = params
        if holders:
            self._ledger.hold(request.request_id, frozenset(holders))
        return bool(holders), join_params(answers)

    def take_events(self) -> Iterable[Any]:
        return list(chain.from_iterable(child.take_events() for child in self.children.values()))

    def shutdown(self) -> None:
        with ExitStack() as stack:  # shuts every child down even if one raises
            for child in self.children.values():
                stack.callback(child.shutdown)

    def _known(self, request: ConnectorRequest) -> _Request:
        if request.request_id not in self._requests:
            raise KVTransferStateError(
                f"request {request.request_id!r} is unknown: it has finished or was never announced; "
                "call on_new_request first"
            )
        return self._requests[request.request_id]


class _Refused(ChildRequest):
    """A request as a child sees it that accepted it, when another child refused it."""

    @property
    def finish_reason(self) -> str:
        return "abort"
