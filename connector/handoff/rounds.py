"""How what is ready gets here: we read it or, if this node prefers that, its producer writes it."""

from __future__ import annotations

from dataclasses import replace

from ...transports.errors import KVTransferError
from ...transports.regions import Guard, RegionPairs
from .events import Action, ClearGuard, PushEnded, SetGuard, StartPush, StartRead
from .loads import Load, Part, PartState
from .messages import MAX_PUSH_REGIONS, Reserve
from .numbers import GuardNumbers
from .pairing import RankPlan

#: Added to the number of a reservation: it is never that of a lease, so that a word means one thing only.
_ABOVE_LEASES = 1 << 62


class Rounds:
    """Starts a load's reads and pushes. Until either has ended, the part that it is for is READING.

    Args:
        timeout_s: Of one read, or one push.
        push_guards: Words of this node's guard table under which producers write; none of them if it reads.
    """

    def __init__(self, timeout_s: float, push_guards: range) -> None:
        self._timeout_s = timeout_s
        self._prefers_push = bool(push_guards)
        self._free_guards = list(push_guards)
        self._numbers = GuardNumbers()
        self._pushed: dict[int, Part] = {}  # by the guard's value

    def start(self, load: Load, part: Part, plan: RankPlan, peer_id: int) -> list[Action]:
        """Start what one rank of the producer has for us."""
        grant = part.grant
        assert grant is not None
        read = StartRead(
            load.request_id,
            part.rank,
            peer_id,
            plan.pairs,
            Guard(grant.guard_index, grant.lease),
            self._timeout_s,
            plan.num_regions_per_layer,
        )
        # READING is set after all that can fail: the end of a read that no action starts would never be reported.
        if not self._prefers_push:
            part.state = PartState.READING
            return [read]
        if refusal := self._refusal(plan.pairs):
            part.state = PartState.READING
            return [replace(read, not_pushed=refusal)]
        guard = Guard(self._free_guards[-1], _ABOVE_LEASES | self._numbers.draw())
        push = StartPush(read, self._reserve(load, guard, plan.pairs))
        self._free_guards.pop()
        part.state, part.push = PartState.READING, push
        self._pushed[guard.value] = part
        return [SetGuard(guard.index, guard.value), push]

    def finish(self, push: StartPush, error: KVTransferError | None, mechanism: str) -> list[Action]:
        """Nothing is written for a push any more, or nothing ever was. Nothing is to be done if that was known."""
        if push.reserve.guard_value not in self._pushed:
            return []
        return [self._take_back(push), PushEnded(push, error, mechanism)]

    def pull_instead(self, push: StartPush, reason: str) -> list[Action]:
        """What was to be pushed is read."""
        if push.reserve.guard_value not in self._pushed:
            return []
        return [self._take_back(push), replace(push.read, not_pushed=reason)]

    def end_with_peer(self, part: Part, error: KVTransferError) -> list[Action]:
        """The part's peer is gone or dropped, and its push with it. A read of such a peer ends by itself."""
        if part.push is None:
            return []
        part.state = PartState.GRANTED
        return self.finish(part.push, error, "")

    def cancel(self, load: Load) -> list[Action]:
        """Have the pushes of a load end early; they are under way until their producers say that they are over."""
        return [ClearGuard(part.push.reserve.guard_index) for part in load.parts if part.push is not None]

    def _take_back(self, push: StartPush) -> Action:
        self._pushed.pop(push.reserve.guard_value).push = None
        self._free_guards.append(push.reserve.guard_index)
        return ClearGuard(push.reserve.guard_index)

    def _refusal(self, pairs: RegionPairs) -> str:
        if len(pairs) > MAX_PUSH_REGIONS:
            return f"{len(pairs)} regions; at most {MAX_PUSH_REGIONS} are reserved at once"
        return "" if self._free_guards else "no guard is free"

    def _reserve(self, load: Load, guard: Guard, pairs: RegionPairs) -> Reserve:
        targets, sources, lengths = (tuple(column) for column in pairs.table.T.tolist())
        offer, timeout_ms = load.offer, max(1, int(self._timeout_s * 1000))
        return Reserve(
            offer.request_id, offer.lease, guard.index, guard.value, timeout_ms, sources, targets, lengths
        )
