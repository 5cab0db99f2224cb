"""How a consumer tells the ranks of a producer that it is done: at once, or when hands are shaken."""

from __future__ import annotations

from .events import Action, RemoteOffer, Send
from .loads import Load, PartState
from .messages import Claim, Release
from .peers import Peers, PeerSession


class Releases:
    """Releases that are due, also those of loads that were over before their peer was ready.

    Args:
        peers: The consumer's.
        rank: Which rank of this node we are.
        num_ranks: Ranks of this node.
    """

    def __init__(self, peers: Peers, rank: int, num_ranks: int) -> None:
        self._peers = peers
        self._rank = rank
        self._num_ranks = num_ranks
        self._given_up: dict[str, list[RemoteOffer]] = {}  # by address; over before their peer was ready

    def release(self, load: Load, *, delivered: bool) -> list[Action]:
        """Tell every rank that the load is over, except those that know, or are gone."""
        actions: list[Action] = []
        for part in load.parts:
            session = self._peers.session(part.address)
            if part.release and session is None:
                self._given_up.setdefault(part.address, []).append(load.offer)
            elif part.release and session is not None and is_of(load.offer, session):
                if part.state is PartState.CONNECTING:
                    actions.append(self._claim(load.offer, session))
                actions.append(self._release(load.offer, session, delivered=delivered))
        return actions

    def greet(self, address: str, session: PeerSession) -> list[Action]:
        """Hands are shaken: tell what was given up meanwhile."""
        actions: list[Action] = []
        for offer in self._given_up.pop(address, []):
            if is_of(offer, session):
                actions += [self._claim(offer, session), self._release(offer, session, delivered=False)]
        return actions

    def forget(self, address: str) -> None:
        """There will be no session for what was given up."""
        self._given_up.pop(address, None)

    def clear(self) -> None:
        """Forget everything."""
        self._given_up.clear()

    def _claim(self, offer: RemoteOffer, session: PeerSession) -> Action:
        """A producer listens to a release only from the rank that claimed."""
        return Send(session.peer_id, Claim(offer.request_id, offer.lease, self._rank, self._num_ranks))

    def _release(self, offer: RemoteOffer, session: PeerSession, *, delivered: bool) -> Action:
        release = Release(offer.request_id, offer.lease, delivered, self._rank, self._num_ranks)
        return Send(session.peer_id, release)


def is_of(offer: RemoteOffer, session: PeerSession) -> bool:
    """Whether a session is with the start of the node that made the offer."""
    return (offer.engine_id, offer.epoch) == (session.engine_id, session.epoch)
