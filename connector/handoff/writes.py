"""Writes of a producer that are under way, and the ends of offers that wait for them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ...transports.regions import Guard, RegionPairs
from .events import Action, OfferEnded, Send, StartWrite
from .messages import NotWritten, Reserve, Written


@dataclass
class Writes:
    """One write at a time of an offer to a peer. The blocks that it reads are not reported before it has ended."""

    _under_way: set[tuple[int, int]] = field(default_factory=set)  # (peer id, lease)
    _held_back: dict[int, OfferEnded] = field(default_factory=dict)  # by lease

    def start(self, peer_id: int, reserve: Reserve, max_timeout_s: float) -> Action:
        """Write what was reserved, or say why not."""
        if not len(reserve.sources) == len(reserve.targets) == len(reserve.lengths) > 0:
            return refusal(
                peer_id, reserve, "a reservation has a source, a target and a length for each region"
            )
        if (peer_id, reserve.lease) in self._under_way:
            return refusal(peer_id, reserve, "a write of this offer is under way")
        self._under_way.add((peer_id, reserve.lease))
        table = np.array([reserve.sources, reserve.targets, reserve.lengths], dtype=np.int64).T
        return StartWrite(
            peer_id,
            reserve.request_id,
            reserve.lease,
            RegionPairs(np.ascontiguousarray(table)),
            Guard(reserve.guard_index, reserve.guard_value),
            min(reserve.timeout_ms / 1000, max_timeout_s),
        )

    def end(self, write: StartWrite) -> list[Action]:
        """A write is over: so is an offer that only waited for it."""
        self._under_way.remove((write.peer_id, write.lease))
        ended = None if self._reads(write.lease) else self._held_back.pop(write.lease, None)
        return [] if ended is None else [ended]

    def end_offer(self, lease: int, ended: OfferEnded) -> list[Action]:
        """Report the end of an offer, now or when nothing reads its blocks any more."""
        if not self._reads(lease):
            return [ended]
        self._held_back[lease] = ended
        return []

    def _reads(self, lease: int) -> bool:
        return any(lease == other for _, other in self._under_way)


def refusal(peer_id: int, reserve: Reserve, reason: str) -> Action:
    """Tell a consumer that nothing is, or will be, written for a reservation."""
    return Send(peer_id, NotWritten(reserve.request_id, reserve.lease, reserve.guard_value, reason))


def answer(write: StartWrite, mechanism: str, reason: str) -> Action:
    """Tell a consumer that a write is over: whole if there is no `reason` why not."""
    name = (write.request_id, write.lease, write.guard.value)
    return Send(write.peer_id, NotWritten(*name, reason) if reason else Written(*name, mechanism))
