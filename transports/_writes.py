"""Writes, made of reads: the writer asks, the target reads.

A write is a *request* to the target's transport: which regions of ours into which of yours, under which guard. The
target checks it against what its owner accepted, reads from the writer's pool like from any other, straight into its
own, and *answers* how that ended. So nobody but the target's own transport ever writes into its memory; all that makes
reads safe and fast holds for writes, and they come to every transport that can read.

While a write is under way, a word of the writer's table holds a number drawn for it, under which the target reads:
nobody else knows it, and when the write is over for the writer, what the target still reads is stale.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from ._memory import MAX_GUARD_VALUE, NUM_OWN_WORDS, WordTable
from ._windows import Windows
from ._write_frames import MAX_ROWS, Answer, Outcome, Request, decode
from .base import Event, TransferEnded
from .errors import (
    BackpressureError,
    KVTransferError,
    PeerLostError,
    ProtocolError,
    RegionError,
    StaleRegionError,
    TransferTimeoutError,
)
from .regions import Guard, Pool, RegionPairs, Regions

#: How long after a write's deadline its target may take to say that it has stopped.
_GRACE_S = 1.0

#: A target reads for one peer at most this many requests, of this many regions in all, at a time.
_MAX_INCOMING = 4096
_MAX_INCOMING_ROWS = 4 << 20

#: A peer for which more is queued does not take the answers to what it writes.
_MAX_QUEUED_BYTES = 128 << 20


class Host(Protocol):
    """What the transport does for its writes."""

    def start_read(self, peer_id: int, pairs: RegionPairs, guard: Guard, *, timeout_s: float) -> int:
        """As `Transport.start_read`; its end goes to `Writes.take_read`."""

    def stop_read(self, peer_id: int, read_id: int, error: KVTransferError) -> None:
        """End a read with `error`, once nothing is under way for it; do nothing if it is over."""

    def send_write_frame(self, peer_id: int, frame: bytes) -> None:
        """Send to a peer, in order, whatever is queued; to none that is gone."""


@dataclass
class _Outgoing:
    """A write of ours. `unanswered`: its requests. `failure`: why it will fail, once that is known."""

    transfer_id: int
    peer_id: int
    num_bytes: int
    word: Guard
    deadline: float
    unanswered: set[int]
    started: float = field(default_factory=time.monotonic)
    failure: list[KVTransferError] = field(default_factory=list)


@dataclass(frozen=True)
class _Incoming:
    """A request of a peer's that we read for."""

    peer_id: int
    request_id: int
    guard: Guard
    num_rows: int


class Writes:
    """Both sides of every write of one process. The owner's thread calls it.

    Args:
        table: The words of this process.
        events: Where to say that a write ended.
    """

    def __init__(self, host: Host, table: WordTable, events: list[Event]) -> None:
        self._host = host
        self._table = table
        self._events = events
        self._windows = Windows(table)
        self._words = list(range(table.num_guards, table.num_guards + NUM_OWN_WORDS))
        self._request_ids = itertools.count(1)
        self._outgoing: dict[int, _Outgoing] = {}  # by transfer id
        self._asked: dict[int, _Outgoing] = {}  # by request id
        self._incoming: dict[int, _Incoming] = {}  # by the id of the read

    # -- the writer ----------------------------------------------------------------------------------

    def start(
        self, transfer_id: int, peer_id: int, pairs: RegionPairs, guard: Guard, timeout_s: float
    ) -> None:
        """Begin a write to a peer that is there. Its regions and its guard were checked.

        Raises:
            BackpressureError: too many are under way.
        """
        if not self._words:
            raise BackpressureError(f"{NUM_OWN_WORDS} writes are under way")
        word = Guard(self._words.pop(), 1 + secrets.randbelow(MAX_GUARD_VALUE))
        self._table.store(word)
        parts = np.split(pairs.table, range(MAX_ROWS, len(pairs), MAX_ROWS))
        requests = {next(self._request_ids): RegionPairs(part[:, [1, 0, 2]]) for part in parts}
        deadline = time.monotonic() + timeout_s
        write = _Outgoing(transfer_id, peer_id, pairs.num_bytes, word, deadline, set(requests))
        self._outgoing[transfer_id] = write
        for request_id, rows in requests.items():
            self._asked[request_id] = write
            self._host.send_write_frame(peer_id, Request(request_id, word, guard, timeout_s, rows).encode())

    def _on_answer(self, peer_id: int, answer: Answer) -> None:
        write = self._asked.get(answer.request_id)
        if write is None or write.peer_id != peer_id:
            raise ProtocolError("the peer answered a write that nobody asked for")
        del self._asked[answer.request_id]
        write.unanswered.remove(answer.request_id)
        if answer.outcome is not Outcome.WRITTEN:
            write.failure.append(answer.error())
        if not write.unanswered:
            self._end(write, answer.mechanism)

    def _end(self, write: _Outgoing, mechanism: str) -> None:
        del self._outgoing[write.transfer_id]
        for request_id in write.unanswered:
            del self._asked[request_id]
        self._table.wipe(write.word)
        self._words.append(write.word.index)
        error = write.failure[0] if write.failure else None
        seconds = time.monotonic() - write.started
        self._events.append(TransferEnded(write.transfer_id, error, write.num_bytes, seconds, mechanism))

    def deadlines(self) -> Iterator[float]:
        """When `expire` has something to do, in `time.monotonic` seconds."""
        for write in self._outgoing.values():
            yield write.deadline + (_GRACE_S if write.failure else 0.0)

    def expire(self, now: float) -> Iterator[tuple[int, KVTransferError]]:
        """Fail the writes whose time is up; they end when their target has stopped. As a target, stop where guards
        hold no more.

        Returns:
            The peers that have to be dropped, and why: they did not stop in time.
        """
        for read_id, incoming in list(self._incoming.items()):
            if not self._table.holds(incoming.guard):
                self._host.stop_read(incoming.peer_id, read_id, _stale(incoming.guard))
        for write in self._outgoing.values():
            if write.deadline <= now and not write.failure:
                self._table.wipe(write.word)
                write.failure.append(TransferTimeoutError("the write did not end in time"))
        late = {write.peer_id for write in self._outgoing.values() if write.deadline + _GRACE_S <= now}
        for peer_id in late:
            yield peer_id, TransferTimeoutError("the peer did not say that it has stopped writing")

    # -- the target ----------------------------------------------------------------------------------

    def accept(self, peer_id: int, guard: Guard, regions: Regions, pool: Pool) -> None:
        """See `Transport.accept_writes`; the peer is there."""
        self._windows.accept(peer_id, guard, regions, pool)

    def _on_request(self, peer_id: int, request: Request) -> None:
        rows = [incoming.num_rows for incoming in self._incoming.values() if incoming.peer_id == peer_id]
        if len(rows) >= _MAX_INCOMING or sum(rows) > _MAX_INCOMING_ROWS:
            raise ProtocolError(f"the peer asks for {len(rows)} writes of {sum(rows)} regions at a time")
        if not self._windows.admits(peer_id, request.guard, request.pairs):
            self._answer(peer_id, request.request_id, _stale(request.guard), "")
            return
        try:
            read_id = self._host.start_read(peer_id, request.pairs, request.word, timeout_s=request.timeout_s)
        except PeerLostError:
            return  # it is not there to be answered
        except RegionError as error:
            raise ProtocolError(f"a write of what is not the peer's: {error}") from error
        self._incoming[read_id] = _Incoming(peer_id, request.request_id, request.guard, len(request.pairs))

    def take_read(self, ended: TransferEnded) -> bool:
        """Answer the peer for whom a read was made; whether it was made for one."""
        incoming = self._incoming.pop(ended.transfer_id, None)
        if incoming is None:
            return False
        error = ended.error
        if error is None and not self._table.holds(incoming.guard):
            error = _stale(incoming.guard)
        self._answer(incoming.peer_id, incoming.request_id, error, ended.mechanism)
        return True

    def _answer(self, peer_id: int, request_id: int, error: KVTransferError | None, mechanism: str) -> None:
        self._host.send_write_frame(peer_id, Answer.of(request_id, error, mechanism).encode())

    # -- both ----------------------------------------------------------------------------------------

    def on_frame(self, peer_id: int, frame: bytes, queued_bytes: int) -> None:
        """A frame came from a peer.

        Args:
            queued_bytes: What waits for the peer to take it.

        Raises:
            ProtocolError: it is none; or it asks for what was not accepted, or for more than it takes answers.
                Nothing was written.
        """
        incoming = decode(frame)
        if isinstance(incoming, Answer):
            self._on_answer(peer_id, incoming)
        elif queued_bytes > _MAX_QUEUED_BYTES:
            raise ProtocolError(f"the peer writes, and takes no answer: {queued_bytes} bytes are queued")
        else:
            self._on_request(peer_id, incoming)

    def end_all(self, peer_id: int, error: KVTransferError) -> None:
        """A peer is gone: end the writes to it, and accept none of it. Reads made for it end by themselves."""
        self._windows.forget(peer_id)
        for write in [write for write in self._outgoing.values() if write.peer_id == peer_id]:
            write.failure.append(error)
            self._end(write, "")

    def reads_for(self, peer_id: int) -> list[int]:
        """The reads that are under way for a peer's writes."""
        return [read_id for read_id, incoming in self._incoming.items() if incoming.peer_id == peer_id]


def _stale(guard: Guard) -> StaleRegionError:
    return StaleRegionError(f"guard {guard.index} does not hold {guard.value} for this writer")
