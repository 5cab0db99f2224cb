"""Which peers read an offer: the ranks of one node, each for itself."""

from __future__ import annotations

from dataclasses import dataclass

from .messages import Claim, Release

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

    The first rank to claim decides which node that is, and how many ranks it has. Only a rank that claimed can release, so
    a peer that merely learned the number of an offer cannot end it.
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
    def are_done(self) -> bool:
        """Whether every rank is done."""
        return self._consumer is not None and len(self._done) == self._consumer[2]

    @property
    def have_everything(self) -> bool:
        """Whether every rank is done and has what it wanted."""
        return self.are_done and all(self._done.values())

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
        """A rank that claimed is done. Any other release is ignored."""
        if self._consumer == _consumer_of(speaker, release) and self._reads(speaker.peer_id, release.rank):
            del self._peer_of[release.rank]
            self._done[release.rank] = release.delivered

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

    def _refusal(self, speaker: Speaker, claim: Claim) -> str:
        if claim.rank >= claim.num_ranks:
            return f"has no share for rank {claim.rank} of {claim.num_ranks}"
        if self._consumer not in (None, _consumer_of(speaker, claim)):
            return "is claimed by another consumer"
        if claim.rank in self._done:
            return "is over for this rank"
        if self._reads(speaker.peer_id, claim.rank):
            return ""
        if claim.rank in self._peer_of:
            return "is claimed by another consumer"
        # Each rank has a connection of its own. So a peer keeps at most one claim of an offer here.
        return "is claimed by this peer for another rank" if speaker.peer_id in self.peers else ""

    def _reads(self, peer_id: int, rank: int) -> bool:
        return self._peer_of.get(rank) == peer_id


def _consumer_of(speaker: Speaker, message: Claim | Release) -> _Consumer:
    return speaker.engine_id, speaker.epoch, message.num_ranks
