"""Bugs planted in the handoff protocol, which the random schedules, the exhaustive explorer and the whole
stack's simulator find.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from kvferry.connector.handoff.consumer import ConsumerProtocol
from kvferry.connector.handoff.events import ClearGuard, ExtendGuard, LoadEnded, SetGuard
from kvferry.connector.handoff.loads import Verdict
from kvferry.connector.handoff.producer import ProducerProtocol
from kvferry.transports.regions import Guard

from .simulated import BLOCK_SIZE

ONE_VALUE = 2**62


class FreesBeforeItClears(ProducerProtocol):
    def _end(self, *args: Any, **kwargs: Any) -> Any:
        return super()._end(*args, **kwargs)[::-1]


class NeverClears(ProducerProtocol):
    def _end(self, *args: Any, **kwargs: Any) -> Any:
        return [action for action in super()._end(*args, **kwargs) if not isinstance(action, ClearGuard)]


class NeverExpires(ProducerProtocol):
    """The heartbeats of a consumer that is gone are missed by nobody."""

    def advance(self, now: Any) -> Any:
        return []

    def next_deadline(self) -> Any:
        return float("inf")


class UsesOneGuardValue(ProducerProtocol):
    def _make(self, offer: Any) -> Any:
        return [
            replace(action, value=ONE_VALUE) if isinstance(action, SetGuard) else action
            for action in super()._make(offer)
        ]


class ForgetsToExtendGuards(ProducerProtocol):
    """Its owner would refuse what it has granted itself."""

    def _extend(self, *args: Any, **kwargs: Any) -> Any:
        return [action for action in super()._extend(*args, **kwargs) if not isinstance(action, ExtendGuard)]


class ExpectsOneGuardValue(ConsumerProtocol):
    def _start(self, *args: Any) -> Any:
        read: Any
        (read,) = super()._start(*args)
        return [replace(read, guard=Guard(read.guard.index, ONE_VALUE))]


class ReportsTwice(ConsumerProtocol):
    def read_ended(self, *args: Any) -> Any:
        actions = super().read_ended(*args)
        return actions + [action for action in actions if isinstance(action, LoadEnded)]


class ReportsBeforeTheReadEnded(ConsumerProtocol):
    def _end(self, load: Any, verdict: Any) -> Any:
        return self._report(load, verdict)


class AcceptsStaleBytes(ConsumerProtocol):
    """The generation of what was read is not checked."""

    def read_ended(self, read: Any, error: Any, now: Any) -> Any:
        return super().read_ended(read, None, now)


class ForgetsLoadsOfLostPeers(ConsumerProtocol):
    def _fail_peer(self, *args: Any) -> Any:
        return [action for action in super()._fail_peer(*args) if not isinstance(action, LoadEnded)]


class NeverGivesUp(ConsumerProtocol):
    def _time_out(self, load: Any, part: Any, now: Any) -> Any:
        part.deadline = float("inf")
        return []

    def _should_yield(self, load: Any, now: Any) -> bool:
        return False


class CountsWhatIsNotComputed(ProducerProtocol):
    def open(
        self, request_id: Any, lease: Any, block_ids: Any, num_tokens: Any, num_ready: Any, *what: Any
    ) -> Any:
        num_ready = min(num_tokens, num_ready + BLOCK_SIZE)
        return super().open(request_id, lease, block_ids, num_tokens, num_ready, *what)


class ReadsWhateverIsGranted(ConsumerProtocol):
    def _granted(self, load: Any, part: Any, grant: Any, now: Any) -> Any:
        return super()._granted(load, part, replace(grant, content=load.offer.content), now)


class PairsByTheNumberAlone(ConsumerProtocol):
    """Two producers number their offers alike, so this takes one's answer for that of the other."""

    def receive(self, peer_id: Any, message: Any, now: Any) -> Any:
        for load in self._loads:
            session = self._peers.session(load.offer.addresses[0])
            if session is not None and getattr(message, "lease", None) == load.offer.lease:
                return super().receive(session.peer_id, message, now)
        return super().receive(peer_id, message, now)


class ForgetsWhatItAnnounced(ProducerProtocol):
    def withdraw(self, lease: Any) -> Any:
        return []


class AwaitsRequestsForever(ProducerProtocol):
    def _give_up_waiting(self, offer: Any) -> Any:
        offer.await_request(offer.deadline + 60.0)  # longer than a schedule's longest step
        return []


class ReportsWithTheFirstPart(ConsumerProtocol):
    """This bug is invisible between nodes with one rank."""

    def read_ended(self, read: Any, error: Any, now: Any) -> Any:
        actions = super().read_ended(read, error, now)
        load = self._loads.get(read.request_id)
        return actions if load is None or error else self._report(load, Verdict("loaded"))


class DeliversToTheFirstRank(ProducerProtocol):
    def _end_if_done(self, held: Any, why_not: Any) -> Any:
        return self._end(held, "delivered", "was delivered")


class KeepsOffersOfOtherWeights(ProducerProtocol):
    """Its consumers compared digests when they connected, and stay connected."""

    def begin_anew(self, identity: Any, why: Any) -> Any:
        return []


class KeepsLoadsOfOtherWeights(ConsumerProtocol):
    def begin_anew(self, identity: Any, error: Any) -> Any:
        return []


class ForgetsClaimsThatCameFirst(ProducerProtocol):
    """A claim that reaches a rank before its request."""

    def announce(
        self, request_id: Any, lease: Any, name: Any = "", now: Any = 0.0, num_loads: Any = 1
    ) -> Any:
        self._offers.pop(lease, None)
        return super().announce(request_id, lease, name, now, num_loads)


class ForgetsProgressWhileItReads(ConsumerProtocol):
    def _progressed(self, load: Any, part: Any, progress: Any, now: Any) -> Any:
        return [] if load.num_reads else super()._progressed(load, part, progress, now)


class ReleasesTheFirstRankOnly(ConsumerProtocol):
    def _release_all(self, load: Any, *, delivered: Any) -> Any:
        for part in load.parts[1:]:
            load.forgive(part)
        return super()._release_all(load, delivered=delivered)


FREED_TOO_EARLY = "the guard is cleared before blocks can be reused"
OUT_OF_BOUNDS = "a read lies within what its guard was set for"
WRONG_BYTES = "loaded bytes are the offered ones"
WAITS = "no handoff waits for a deadline"


@dataclass(frozen=True)
class Planted:
    """A bug, and a part of the promise that it breaks."""

    promise: str
    producer: type[ProducerProtocol] = ProducerProtocol
    consumer: type[ConsumerProtocol] = ConsumerProtocol
    checks_after_copy: bool = True


CORRECT = Planted("")
#: Those that show between nodes of one rank, if time passes.
PLANTED = {
    "guard-cleared-after-free": Planted(FREED_TOO_EARLY, FreesBeforeItClears),
    "guard-never-cleared": Planted(FREED_TOO_EARLY, NeverClears),
    "lease-never-expires": Planted("every offer", NeverExpires),
    "guard-checked-before-the-copy": Planted(WRONG_BYTES, checks_after_copy=False),
    "stale-bytes-accepted": Planted(WRONG_BYTES, consumer=AcceptsStaleBytes),
    "load-reported-twice": Planted("reported once", consumer=ReportsTwice),
    "load-reported-while-reading": Planted("nothing writes", consumer=ReportsBeforeTheReadEnded),
    "lost-load-forgotten": Planted("every offer and every load", consumer=ForgetsLoadsOfLostPeers),
    "guard-never-extended": Planted(OUT_OF_BOUNDS, ForgetsToExtendGuards),
    "not-computed-is-ready": Planted(WRONG_BYTES, CountsWhatIsNotComputed),
    "waits-forever": Planted("something still waits", consumer=NeverGivesUp),
    "awaits-forever": Planted("something still waits", AwaitsRequestsForever),
    "content-not-compared": Planted("the same prompt", consumer=ReadsWhateverIsGranted),
    "announced-forever": Planted("something still waits", ForgetsWhatItAnnounced),
    "offers-outlive-weights": Planted("the same weights", KeepsOffersOfOtherWeights),
    "loads-outlive-weights": Planted("the same weights", consumer=KeepsLoadsOfOtherWeights),
}
#: Those that show only between nodes of several ranks, or that a deadline would hide: a timeout or the end of
#: a lease ends the handoffs.
HIDDEN = {
    "claim-forgotten": Planted(WAITS, ForgetsClaimsThatCameFirst),
    "progress-forgotten": Planted(WAITS, consumer=ForgetsProgressWhileItReads),
    "rank-not-released": Planted(WAITS, consumer=ReleasesTheFirstRankOnly),
    "pairing-by-number": Planted(WAITS, consumer=PairsByTheNumberAlone),
    "one-part-is-the-load": Planted(
        "nothing writes into the blocks of a load that is over", consumer=ReportsWithTheFirstPart
    ),
    "one-rank-is-the-node": Planted("delivered means loaded by every rank", DeliversToTheFirstRank),
}
