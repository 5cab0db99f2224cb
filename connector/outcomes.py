"""Where the handoff thread leaves what became of each handoff, and the engine thread takes it."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from ..transports.base import Route, TransferEnded
from ..transports.errors import KVTransferError
from .handoff.events import LoadEnded, LocalBlocks, OfferEnded, StartRead
from .metadata import HandoffMetadata, OfferOrder
from .stats import KVConnectorStats, TransferRecord

#: Records kept for an engine that never takes its stats; the counters go on counting.
_MAX_RECORDS = 1024


@dataclass
class Report:
    """What ended since the last report. `invalid_block_ids` and `load_errors` belong to `finished_recving`."""

    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    invalid_block_ids: set[int] = field(default_factory=set)
    load_errors: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Read:
    started: StartRead
    ended: TransferEnded
    route: Route
    end: float


@dataclass(frozen=True)
class _Load:
    """A load that is owed an end.

    Attributes:
        exposed_since: When it was ordered, or later, when the whole offer had become readable.
    """

    blocks: LocalBlocks
    exposed_since: float


def _seconds(reads: Sequence[_Read]) -> float:
    """From the start of the first read to the end of the last one."""
    return max(read.end for read in reads) - min(read.end - read.ended.seconds for read in reads)


class Outcomes:
    """What ended, until it is taken; and what is still owed an end. All methods may be called by any thread.

    Args:
        transport: Scheme of the transport, for the records.
        layout: Name of this node's layout, for the records.
    """

    def __init__(self, transport: str, layout: str) -> None:
        self._transport = transport
        self._layout = layout
        self._lock = threading.Lock()
        self._report = Report()
        self._offers: set[str] = set()
        self._open: set[str] = set()  # offers of requests that have not finished
        self._ended_open: set[str] = set()  # those that ended before their request
        self._loads: dict[str, _Load] = {}
        self._reads: defaultdict[str, list[_Read]] = defaultdict(list)  # by request
        self._records: list[TransferRecord] = []
        self._counters: defaultdict[str, float] = defaultdict(float)

    @property
    def num_owed(self) -> int:
        """Offers and loads that were ordered and have not ended."""
        with self._lock:
            return len(self._offers) + len(self._loads)

    def expect(self, orders: HandoffMetadata, now: float) -> None:
        """Each load of `orders`, and each offer of a request that has finished, is owed an end from now on."""
        with self._lock:
            for request_id, order in orders.offers.items():
                (self._offers if isinstance(order, OfferOrder) else self._open).add(request_id)
            for request_id in (*orders.completions, *orders.aborts):
                self._expect_end_of_open(request_id)
            for request_id, blocks in orders.loads.items():
                self._loads[request_id] = _Load(blocks, exposed_since=now)

    def take_open(self, request_ids: set[str]) -> set[str]:
        """Take the open ones of these requests' offers: they lose their blocks, and no end of them is owed any more."""
        with self._lock:
            self._ended_open -= request_ids
            taken = self._open & request_ids
            self._open -= taken
            return taken

    def offer_completed(self, request_id: str, now: float) -> None:
        """From now on nothing hides the rest of the load of this offer."""
        with self._lock:
            if request_id in self._loads:
                self._loads[request_id] = replace(self._loads[request_id], exposed_since=now)

    def read_ended(self, read: StartRead, ended: TransferEnded, route: Route, now: float) -> None:
        """Keep the figures of a read that ended now, in seconds of any clock, for the record of its load."""
        with self._lock:
            self._reads[read.request_id].append(_Read(read, ended, route, now))

    def offer_ended(self, ended: OfferEnded) -> None:
        """The offer's blocks may be reused."""
        with self._lock:
            self._end_offer(ended)

    def load_ended(self, ended: LoadEnded, now: float) -> None:
        """Nothing writes into the load's blocks any more."""
        with self._lock:
            self._end_load(ended, now)

    def fail_all(self, error: KVTransferError) -> None:
        """End everything that is owed an end: offers as aborted, loads as failed."""
        with self._lock:
            for request_id in tuple(self._offers):
                self._end_offer(OfferEnded(request_id, "aborted", str(error)))
            for request_id, load in tuple(self._loads.items()):
                ended = LoadEnded(request_id, "failed", error, load.blocks)
                self._end_load(ended, load.exposed_since)

    def forget_offers(self) -> None:
        """Never report the offers that are owed an end: peers may go on reading their blocks, which stay held."""
        with self._lock:
            self._offers.clear()

    def forget_loads(self, request_ids: set[str]) -> None:
        """Never report these loads: something may go on writing into their blocks, which stay held."""
        with self._lock:
            for request_id in request_ids:
                self._loads.pop(request_id, None)

    def count(self, name: str) -> None:
        """Count what is no handoff; `name` is a key of `COUNTERS`."""
        with self._lock:
            self._counters[name] += 1

    def take_report(self) -> Report:
        """Take what ended since the last call."""
        with self._lock:
            report, self._report = self._report, Report()
            return report

    def take_stats(self) -> KVConnectorStats | None:
        """Take the figures since the last call, or None without any."""
        with self._lock:
            records, self._records = self._records, []
            counters, self._counters = self._counters, defaultdict(float)
        stats = KVConnectorStats(tuple(records), dict(counters))
        return None if stats.is_empty() else stats

    # -- under the lock ------------------------------------------------------------------------------

    def _end_offer(self, ended: OfferEnded) -> None:
        self._counters[f"offers_{ended.outcome}_total"] += 1
        if ended.request_id in self._offers:
            self._offers.remove(ended.request_id)
            self._report.finished_sending.add(ended.request_id)
        elif ended.request_id in self._open:
            self._open.remove(ended.request_id)
            self._ended_open.add(ended.request_id)

    def _expect_end_of_open(self, request_id: str) -> None:
        """The request of an open offer has finished; the offer may have ended before it."""
        if request_id in self._ended_open:
            self._ended_open.remove(request_id)
            self._report.finished_sending.add(request_id)
        else:
            self._open.discard(request_id)
            self._offers.add(request_id)

    def _end_load(self, ended: LoadEnded, now: float) -> None:
        load = self._loads.pop(ended.request_id, None)
        reads = self._reads.pop(ended.request_id, [])
        self._report.finished_recving.add(ended.request_id)
        if ended.outcome == "dropped":
            return
        if ended.error is not None:
            self._report.invalid_block_ids.update(_real_blocks(ended.blocks))
            self._report.load_errors[ended.request_id] = str(ended.error)
        self._count(self._record(ended, reads, now - load.exposed_since if load else 0.0))

    def _record(self, ended: LoadEnded, reads: Sequence[_Read], exposed_s: float) -> TransferRecord:
        return TransferRecord(
            request_id=ended.request_id,
            transport=_joined(read.route.scheme for read in reads) or self._transport,
            mechanism=_joined(read.ended.mechanism for read in reads),
            layout=self._layout,
            num_blocks=len(_real_blocks(ended.blocks)),
            num_regions=sum(len(read.started.pairs) for read in reads),
            num_regions_per_layer=sum(read.started.num_regions_per_layer for read in reads),
            num_bytes=sum(read.ended.num_bytes for read in reads),
            seconds=_seconds(reads) if reads else 0.0,
            error="" if ended.error is None else str(ended.error),
            reason=_joined(read.route.reason for read in reads),
            exposed_seconds=exposed_s,
        )

    def _count(self, record: TransferRecord) -> None:
        if len(self._records) < _MAX_RECORDS:
            self._records.append(record)
        if record.error:
            self._counters["load_failures_total"] += 1


def _real_blocks(blocks: LocalBlocks) -> set[int]:
    ids: Iterable[int] = (block for group in blocks for block in group.block_ids)
    return set(ids) - {0}


def _joined(words: Iterable[str]) -> str:
    """The distinct words, in the order in which they come first."""
    return ", ".join(filter(None, dict.fromkeys(words)))
