"""Who reads an offer: the ranks of one node, each for itself; and who has spoken of an offer that has not come yet."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from .messages import Claim, Release

__all__ = ["Claimants", "EarlyClaims", "Speaker"]

#: A consumer: engine id, epoch, number of its ranks.
_Consumer = tuple[str, int, int]


@dataclass(frozen=True)
class Speaker:
    """One rank of a consumer, as it named itself."""

    peer_id: int
    engine_id: str
    epoch: int


class Claimants:
    """The ranks of the one node that reads an offer. Each claims once and is done once; all of them make an end.

    The first to speak decides which node that is, and how many ranks it has.
    """

    def __init__(self) -> None:
        self._consumer: _Consumer | None = None
        self._peer_of: dict[int, int] = {}  # by rank; those that read
        self._done: dict[int, bool] = {}  # by rank; whether it has what it wanted

    @property
    def peers(self) -> list[int]:
        """Peers that read, by rank."""
        return [self._peer_of[rank] for rank in sorted(self._peer_of)]

    @property
    def num_ranks(self) -> int:
        """Ranks that spoke."""
        return len(self._peer_of) + len(self._done)

    @property
    def are_done(self) -> bool:
        """Whether every rank is done."""
        return self._consumer is not None and len(self._done) == self._consumer[2]

    @property
    def have_everything(self) -> bool:
        """Whether every rank is done and has what it wanted."""
        return self.are_done and all(self._done.values())

    def know(self, rank: int) -> bool:
        """Whether this rank spoke."""
        return rank in self._peer_of or rank in self._done

    def may_renew(self, peer_id: int) -> bool:
        """Whether a sign of life of this peer counts: it reads, or nobody has spoken yet."""
        return self._consumer is None or peer_id in self._peer_of.values()

    def claim(self, speaker: Speaker, claim: Claim) -> str:
        """Let a rank read; once more is as good as once.

        Returns:
            Why it may not; empty if it may.
        """
        if refusal := self._refusal(speaker, claim):
            return refusal
        self._consumer = _consumer_of(speaker, claim)
        self._peer_of[claim.rank] = speaker.peer_id
        return ""

    def release(self, speaker: Speaker, release: Release) -> None:
        """A rank is done; also without a claim. What it must not say is ignored."""
        if self._refusal(speaker, release):
            return
        self._consumer = _consumer_of(speaker, release)
        had_claimed = self._peer_of.pop(release.rank, None) is not None
        self._done[release.rank] = had_claimed and release.delivered

    def lose(self, peer_id: int) -> bool:
        """A peer is gone: so are its shares.

        Returns:
            Whether it read.
        """
        ranks = [rank for rank, reader in self._peer_of.items() if reader == peer_id]
        for rank in ranks:
            del self._peer_of[rank]
            self._done[rank] = False
        return bool(ranks)

    def _refusal(self, speaker: Speaker, message: Claim | Release) -> str:
        if message.rank >= message.num_ranks:
            return f"has no share for rank {message.rank} of {message.num_ranks}"
        if self._consumer not in (None, _consumer_of(speaker, message)):
            return "is claimed by another consumer"
        if self._peer_of.get(message.rank, speaker.peer_id) != speaker.peer_id:
            return "is claimed by another consumer"
        return "is over for this rank" if message.rank in self._done else ""


def _consumer_of(speaker: Speaker, message: Claim | Release) -> _Consumer:
    return speaker.engine_id, speaker.epoch, message.num_ranks


@dataclass
class _Early:
    deadline: float
    claimants: Claimants = field(default_factory=Claimants)


class EarlyClaims:
    """What consumers said about offers that have not come yet, each kept for a while.

    Args:
        wait_s: From the first word about an offer.
        max_claims: Ranks that are remembered, over all offers.
    """

    def __init__(self, wait_s: float, max_claims: int) -> None:
        self._wait_s = wait_s
        self._max_claims = max_claims
        self._waiting: dict[tuple[int, str], _Early] = {}  # by lease and request

    def keep(self, speaker: Speaker, message: Claim | Release, now: float) -> str:
        """Remember what a rank said.

        Returns:
            Why it is not remembered; empty if it is, or if a release needs no answer.
        """
        key = (message.lease, message.request_id)
        early = self._waiting.get(key, _Early(now + self._wait_s))
        if not early.claimants.know(message.rank) and self._is_full():
            return "has not been made, and too many others are waited for"
        refusal = ""
        if isinstance(message, Claim):
            refusal = early.claimants.claim(speaker, message)
        else:
            early.claimants.release(speaker, message)
        if early.claimants.num_ranks:
            self._waiting[key] = early
        return refusal

    def take(self, lease: int, request_id: str) -> Claimants:
        """Take those who spoke of an offer that comes now."""
        early = self._waiting.pop((lease, request_id), None)
        return Claimants() if early is None else early.claimants

    def take_up_to(self, lease: int) -> Iterator[tuple[int, str, Claimants]]:
        """Take those who wait for an offer up to this number, which will never come: lease, request, who."""
        return self._take([key for key in self._waiting if key[0] <= lease])

    def take_overdue(self, now: float) -> Iterator[tuple[int, str, Claimants]]:
        """Take those who have waited long enough, likewise."""
        return self._take([key for key, early in self._waiting.items() if early.deadline <= now])

    def lose(self, peer_id: int) -> None:
        """A peer is gone. What it released stays released."""
        for early in self._waiting.values():
            early.claimants.lose(peer_id)

    def next_deadline(self) -> float:
        """When `take_overdue` will have something to take; infinity if never."""
        return min((early.deadline for early in self._waiting.values()), default=float("inf"))

    def _is_full(self) -> bool:
        return sum(early.claimants.num_ranks for early in self._waiting.values()) >= self._max_claims

    def _take(self, keys: list[tuple[int, str]]) -> Iterator[tuple[int, str, Claimants]]:
        for lease, request_id in keys:
            yield lease, request_id, self._waiting.pop((lease, request_id)).claimants
