"""Which of a `MultiConnector`'s children loads a request, and which hold its blocks, so that each end is reported once."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ..base import KVConnectorHandshakeMetadata, KVConnectorMetadata
from ..output import KVConnectorOutput

logger = logging.getLogger(__name__)

_NO_CHILDREN: frozenset[str] = frozenset()


@dataclass(frozen=True)
class MultiMetadata(KVConnectorMetadata):
    """One step's orders.

    Attributes:
        children: Each child's own metadata, by child.
        loads: By request, the child whose asynchronous load begins in this step.
        holds: By request, the children that hold its blocks from this step on.
    """

    children: Mapping[str, KVConnectorMetadata]
    loads: Mapping[str, str] = field(default_factory=dict)
    holds: Mapping[str, frozenset[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class MultiHandshakeMetadata(KVConnectorHandshakeMetadata):
    """The handshake metadata of one worker half's children; without those that have none."""

    children: Mapping[str, KVConnectorHandshakeMetadata]


class Ledger:
    """The scheduler half's account of what each child was ordered to do and is not over."""

    def __init__(self) -> None:
        self._loads: dict[str, str] = {}
        self._holds: dict[str, frozenset[str]] = {}
        self._new_loads: dict[str, str] = {}
        self._new_holds: dict[str, frozenset[str]] = {}

    def __contains__(self, request_id: str) -> bool:
        """Return whether a report about this request is still owed."""
        return request_id in self._loads or request_id in self._holds

    def load(self, request_id: str, child: str) -> None:
        """Note that `child` loads the request, and will report the end of the load."""
        self._loads[request_id] = self._new_loads[request_id] = child

    def hold(self, request_id: str, children: frozenset[str]) -> None:
        """Note that `children`, at least one, hold the request's blocks, and will each report when they release them."""
        self._holds[request_id] = self._new_holds[request_id] = children

    def take_metadata(self, children: Mapping[str, KVConnectorMetadata]) -> MultiMetadata:
        """Take the orders since the last call, together with the children's own orders."""
        metadata = MultiMetadata(children, self._new_loads, self._new_holds)
        self._new_loads, self._new_holds = {}, {}
        return metadata

    def share_of(self, child: str, output: KVConnectorOutput) -> KVConnectorOutput:
        """Return the part of a report that is about what `child` was ordered to do."""
        recving = {r for r in output.finished_recving if self._loads.get(r) == child}
        sending = {r for r in output.finished_sending if child in self._holds.get(r, _NO_CHILDREN)}
        return KVConnectorOutput(
            finished_sending=sending,
            finished_recving=recving,
            invalid_block_ids=set(output.invalid_block_ids),
            load_errors={r: why for r, why in output.load_errors.items() if r in recving},
            kv_connector_stats=output.kv_connector_stats,
            hook_errors=dict(output.hook_errors),
        )

    def settle(self, output: KVConnectorOutput) -> None:
        """Forget what a report says is over. It is over on every rank: reports of ranks are combined before."""
        for request_id in output.finished_recving:
            self._loads.pop(request_id, None)
        for request_id in output.finished_sending:
            self._holds.pop(request_id, None)


class OwedReports:
    """A worker half's account of the ends that its children owe; an end that is not owed is never passed on.

    The engine frees blocks as soon as an end is reported. If a child reports an end twice, or that of a request which
    another child transfers, blocks that are still in use would be freed. So such a report is dropped and logged.
    """

    def __init__(self) -> None:
        self._loads: dict[str, str] = {}
        self._holds: dict[str, set[str]] = {}

    @property
    def num_owed(self) -> int:
        """Number of loads and holds that are not over."""
        return len(self._loads) + len(self._holds)

    def expect(self, metadata: MultiMetadata) -> None:
        """Add the loads and holds that begin in this step."""
        self._loads.update(metadata.loads)
        self._holds.update((request_id, set(names)) for request_id, names in metadata.holds.items())

    def finish_recving(self, child: str, request_ids: Iterable[str]) -> set[str]:
        """Take note of the loads that `child` reports as over.

        Returns:
            Those that were owed, and are now over.
        """
        over = set()
        for request_id in request_ids:
            if self._loads.get(request_id) == child:
                del self._loads[request_id]
                over.add(request_id)
            else:
                logger.warning(
                    "ignoring a report of connector %r: it did not load request %r, or has reported this already",
                    child,
                    request_id,
                )
        return over

    def finish_sending(self, child: str, request_ids: Iterable[str]) -> set[str]:
        """Take note of the requests whose blocks `child` releases.

        Returns:
            The requests whose blocks no child holds any more.
        """
        over = set()
        for request_id in request_ids:
            holders = self._holds.get(request_id, set())
            if child not in holders:
                logger.warning(
                    "ignoring a report of connector %r: it does not hold blocks of request %r, or has released them "
                    "already",
                    child,
                    request_id,
                )
                continue
            holders.discard(child)
            if not holders:
                del self._holds[request_id]
                over.add(request_id)
        return over
