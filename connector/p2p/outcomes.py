"""What became of each handoff: the handoff thread puts it here, and the engine thread takes it.

In come what the orders expect, the ends of offers and loads, and the reads of each load. Out go one report
per step (`KVConnectorOutput`) and the figures about it.

What must never break: each end that is owed is reported once, and none that is not owed.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from ...transports.base import Route, TransferEnded
from ...transports.errors import KVTransferError
from ..handoff.events import LoadEnded, LocalBlocks, OfferEnded, StartRead
from ..output import KVConnectorOutput
from ..spans import SpanRecord
from ..stats import KVConnectorStats, StatsCollector, TransferRecord
from .orders import HandoffMetadata, OfferOrder


class OfferEnd(Enum):
    """Whether the end of an offer of this rank is owed to the engine.

    An end that is owed is reported and forgotten.
    """

    #: The request is still computed, so it keeps its blocks whatever becomes of the offer.
    NOT_OWED = "not owed"
    #: The offer ended, and its request has not finished. The end is reported as soon as it has.
    KEPT = "kept"
    #: The request has finished; its blocks are held until the end is reported.
    OWED = "owed"


@dataclass(frozen=True)
class _Read:
    started: StartRead
    ended: TransferEnded
    route: Route
    end: float


@dataclass
class _Load:
    """A load whose end is owed.

    Attributes:
        exposed_since: When it was ordered, or later, when the whole offer had become readable.
        reads: Its reads that have ended.
    """

    blocks: LocalBlocks
    exposed_since: float
    reads: list[_Read] = field(default_factory=list)


class Outcomes:
    """Keeps what ended until it is taken, and what is still owed an end. Any thread may call any method.

    Args:
        transport: Scheme of the transport, for the records.
        layout: Name of this node's layout, for the records.
        is_first: Count what the scheduler half has counted, which all ranks get.
    """

    def __init__(self, transport: str, layout: str, *, is_first: bool = True) -> None:
        self._is_first = is_first
        self._transport = transport
        self._layout = layout
        self._lock = threading.Lock()
        self._has_news = threading.Condition(self._lock)
        self._report = KVConnectorOutput()
        self._offers: dict[str, OfferEnd] = {}
        self._retracted: Counter[str] = Counter()  # offers that were taken, whose end has not come
        self._loads: dict[str, _Load] = {}
        self._stats = StatsCollector()

    def __repr__(self) -> str:
        states = Counter(state.value for state in self._offers.values())
        return f"<Outcomes: offers {dict(states)}, {len(self._loads)} loads>"

    def expect(self, orders: HandoffMetadata, now: float) -> None:
        """Owe an end to each load of `orders`, and to each offer of a request that has finished."""
        with self._lock:
            for key, number in orders.counts.items() if self._is_first else ():
                self._stats.count(key, number)
            for order in orders.requests:
                if order.offer is not None:
                    self._stats.count("live_leases")
                    is_whole = isinstance(order.offer, OfferOrder)
                    self._offers[order.request_id] = OfferEnd.OWED if is_whole else OfferEnd.NOT_OWED
                # After the offer: one step may bring an open offer and its abort.
                if order.completion is not None or order.abort:
                    self._request_finished(order.request_id)
                if order.load is not None:
                    self._stats.count("live_loads")
                    self._loads[order.request_id] = _Load(order.load, exposed_since=now)

    def take_open(self, request_ids: set[str]) -> set[str]:
        """Forget these requests' offers that are not owed, because the requests lose their blocks.

        Returns:
            The requests whose offers have not ended.
        """
        taken = set()
        with self._lock:
            for request_id in request_ids:
                state = self._offers.get(request_id)
                if state in (OfferEnd.NOT_OWED, OfferEnd.KEPT):
                    del self._offers[request_id]
                if state is OfferEnd.NOT_OWED:
                    taken.add(request_id)
            # Each of them still ends once, and that end must not be taken for the end of the request's next
            # offer.
            self._retracted.update(taken)
        return taken

    def offer_completed(self, request_id: str, now: float) -> None:
        """Note that the producer has computed all of the offer: from now on, the rest of the load is not
        hidden.
        """
        with self._lock:
            if (load := self._loads.get(request_id)) is not None:
                load.exposed_since = now

    def read_ended(self, read: StartRead, ended: TransferEnded, route: Route, now: float) -> None:
        """Keep the figures of a read that ended now, in seconds of any clock, for the record of its load."""
        with self._lock:
            if (load := self._loads.get(read.request_id)) is not None:
                load.reads.append(_Read(read, ended, route, now))

    def offer_ended(self, ended: OfferEnded) -> None:
        """Note that the offer's blocks may be reused."""
        with self._lock:
            self._end_offer(ended)

    def figures_of(self, ended: LoadEnded, now: float) -> TransferRecord:
        """Return the record of a load that ends now."""
        with self._lock:
            return self._record(ended, self._loads.get(ended.request_id), now)

    def load_ended(self, ended: LoadEnded, now: float) -> None:
        """Note that nothing writes into the load's blocks any more."""
        with self._lock:
            self._end_load(ended, now)

    def fail_all(self, error: KVTransferError) -> None:
        """End everything that is owed an end: offers as aborted, loads as failed."""
        with self._lock:
            for request_id, state in tuple(self._offers.items()):
                if state is OfferEnd.OWED:
                    self._end_offer(OfferEnded(request_id, "aborted", str(error)))
            for request_id, load in tuple(self._loads.items()):
                ended = LoadEnded(request_id, "failed", error, load.blocks)
                self._end_load(ended, load.exposed_since)

    def forget_offers(self) -> None:
        """Never report the offers that are owed an end: peers may go on reading their blocks, which stay
        held.
        """
        with self._lock:
            self._offers = {
                request_id: state for request_id, state in self._offers.items() if state is not OfferEnd.OWED
            }

    def forget_loads(self, request_ids: set[str]) -> None:
        """Never report these loads: something may go on writing into their blocks, which stay held."""
        with self._lock:
            for request_id in request_ids:
                if self._loads.pop(request_id, None) is not None:
                    self._stats.count("live_loads", -1)

    def count(self, name: str) -> None:
        """Count something that is not the end of a handoff; `name` is one of `COUNTERS`."""
        self._stats.count(name)

    def keep_span(self, span: SpanRecord) -> None:
        """Keep a span of a handoff for the stats."""
        self._stats.keep_span(span)

    def wait(self, timeout_s: float) -> None:
        """Return as soon as there is something to report, or after `timeout_s`; at once if nothing is owed an
        end.
        """
        with self._lock:
            if self._offers or self._loads:
                report = self._report
                self._has_news.wait_for(lambda: report.finished_sending or report.finished_recving, timeout_s)

    def take_report(self) -> KVConnectorOutput:
        """Take what ended since the last call; `invalid_block_ids` and `load_errors` belong to
        `finished_recving`.
        """
        with self._lock:
            report, self._report = self._report, KVConnectorOutput()
            return report

    def take_stats(self) -> KVConnectorStats | None:
        """Take the figures since the last call, or None without any."""
        return self._stats.take()

    # -- under the lock ------------------------------------------------------------------------------

    def _end_offer(self, ended: OfferEnded) -> None:
        self._stats.count(f"offers_{ended.outcome}_total")
        self._stats.count("live_leases", -1)
        if self._retracted[ended.request_id]:
            self._retracted -= Counter([ended.request_id])
            return
        match self._offers.get(ended.request_id):
            case OfferEnd.OWED:
                del self._offers[ended.request_id]
                self._report.finished_sending.add(ended.request_id)
                self._has_news.notify_all()
            case OfferEnd.NOT_OWED:
                # The scheduler half takes an end as leave to free the blocks, but the request still computes
                # with them.
                self._offers[ended.request_id] = OfferEnd.KEPT

    def _request_finished(self, request_id: str) -> None:
        if self._offers.get(request_id) is OfferEnd.KEPT:
            del self._offers[request_id]
            self._report.finished_sending.add(request_id)
            self._has_news.notify_all()
        else:
            self._offers[request_id] = OfferEnd.OWED

    def _end_load(self, ended: LoadEnded, now: float) -> None:
        # A load that was refused before it could be ordered has no record here, and is reported all the same.
        load = self._loads.pop(ended.request_id, None)
        if load is not None:
            self._stats.count("live_loads", -1)
        self._report.finished_recving.add(ended.request_id)
        self._has_news.notify_all()
        if ended.outcome == "dropped":
            return
        if ended.error is not None:
            self._report.invalid_block_ids.update(_real_blocks(ended.blocks))
            self._report.load_errors[ended.request_id] = str(ended.error)
        self._stats.add(self._record(ended, load, now))

    def _record(self, ended: LoadEnded, load: _Load | None, now: float) -> TransferRecord:
        reads: Sequence[_Read] = () if load is None else load.reads
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
            exposed_seconds=0.0 if load is None else now - load.exposed_since,
            sums=_joined(read.route.sums for read in reads),
        )


def _seconds(reads: Sequence[_Read]) -> float:
    """From the start of the first read to the end of the last one."""
    return max(read.end for read in reads) - min(read.end - read.ended.seconds for read in reads)


def _real_blocks(blocks: LocalBlocks) -> set[int]:
    ids: Iterable[int] = (block for group in blocks for block in group.block_ids)
    return set(ids) - {0}


def _joined(words: Iterable[str]) -> str:
    """Join the distinct words, in the order of their first appearance."""
    return ", ".join(filter(None, dict.fromkeys(words)))
