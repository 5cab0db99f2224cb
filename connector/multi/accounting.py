"""Who of a `MultiConnector`'s children loads and who holds a request's blocks: each end is reported once."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ..base import KVConnectorHandshakeMetadata, KVConnectorMetadata
from ..output import KVConnectorOutput

logger = logging.getLogger(__name__)

_NOBODY: frozenset[str] = frozenset()


@dataclass(frozen=True)
class MultiMetadata(KVConnectorMetadata):
    """One step's orders.

    Attributes:
        children: Each child's own metadata, by child.
        loads: Request → the child whose asynchronous load begins in this step.
        holds: Request → the children that hold its blocks from this step on.
    """

    children: Mapping[str, KVConnectorMetadata]
    loads: Mapping[str, str] = field(default_factory=dict)
    holds: Mapping[str, frozenset[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class MultiHandshakeMetadata(KVConnectorHandshakeMetadata):
    """What the children of one worker half say of themselves; a child that says nothing is absent."""

    children: Mapping[str, KVConnectorHandshakeMetadata]


class Ledger:
    """The scheduler half's side: what was ordered of which child and is not over."""

    def __init__(self) -> None:
        self._loads: dict[str, str] = {}
        self._holds: dict[str, frozenset[str]] = {}
        self._new_loads: dict[str, str] = {}
        self._new_holds: dict[str, frozenset[str]] = {}

    def __contains__(self, request_id: str) -> bool:
        """Whether a report of this request is still owed."""
        return request_id in self._loads or request_id in self._holds

    def load(self, request_id: str, child: str) -> None:
        """`child` loads the request, and will say when that is over."""
        self._loads[request_id] = self._new_loads[request_id] = child

    def hold(self, request_id: str, children: frozenset[str]) -> None:
        """`children`, one at least, hold the request's blocks, and will each say when that is over."""
        self._holds[request_id] = self._new_holds[request_id] = children

    def take_metadata(self, children: Mapping[str, KVConnectorMetadata]) -> MultiMetadata:
        """Put what was ordered since the last call beside the children's own orders."""
        metadata = MultiMetadata(children, self._new_loads, self._new_holds)
        self._new_loads, self._new_holds = {}, {}
        return metadata

    def share_of(self, child: str, output: KVConnectorOutput) -> KVConnectorOutput:
        """The part of a report that is about what `child` was ordered to do."""
        recving = {r for r in output.finished_recving if self._loads.get(r) == child}
        sending = {r for r in output.finished_sending if child in self._holds.get(r, _NOBODY)}
        return KVConnectorOutput(
            finished_sending=sending,
            finished_recving=recving,
            invalid_block_ids=set(output.invalid_block_ids),
            load_errors={r: why for r, why in output.load_errors.items() if r in recving},
            kv_connector_stats=output.kv_connector_stats,
        )

    def settle(self, output: KVConnectorOutput) -> None:
        """Forget what is over, on every rank."""
        for request_id in output.finished_recving:
            self._loads.pop(request_id, None)
        for request_id in output.finished_sending:
            self._holds.pop(request_id, None)


class OwedReports:
    """A worker half's side: an end that is not owed, or no longer, is never passed on.

    An engine frees blocks, or ends, by what it is told here, so a child that says something twice, or of a request
    that is another child's, must not be believed.
    """

    def __init__(self) -> None:
        self._loads: dict[str, str] = {}
        self._holds: dict[str, set[str]] = {}

    @property
    def num_owed(self) -> int:
        """Loads and holds that are not over."""
        return len(self._loads) + len(self._holds)

    def expect(self, metadata: MultiMetadata) -> None:
        """Learn of the loads and holds that begin in this step."""
        self._loads.update(metadata.loads)
        self._holds.update((request_id, set(names)) for request_id, names in metadata.holds.items())

    def finish_recving(self, child: str, request_ids: Iterable[str]) -> set[str]:
        """Take in what `child` says it has loaded.

        Returns:
            The requests whose load is over with that.
        """
        over = set()
        for request_id in request_ids:
            if self._loads.get(request_id) == child:
                del self._loads[request_id]
                over.add(request_id)
            else:
                logger.warning("%s reports a load of %s that it does not owe", child, request_id)
        return over

    def finish_sending(self, child: str, request_ids: Iterable[str]) -> set[str]:
        """Take in which requests' blocks `child` needs no more.

        Returns:
            The requests whose blocks nobody needs any more with that.
        """
        over = set()
        for request_id in request_ids:
            holders = self._holds.get(request_id, set())
            if child not in holders:
                logger.warning("%s releases blocks of %s that it does not hold", child, request_id)
                continue
            holders.discard(child)
            if not holders:
                del self._holds[request_id]
                over.add(request_id)
        return over
