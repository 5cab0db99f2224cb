"""Requests with the same offer: one of them loads it, and the others find the prompt in the prefix cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..p2p.params import TransferWish

#: What identifies an offer: engine id, epoch, request id and lease number.
_OfferName = tuple[str, int, str, int]


@dataclass(frozen=True)
class _Load:
    """The load of one offer.

    Attributes:
        leader: The request that loads.
        prompt: Its tokens.
        followers: Requests that wait for it.
    """

    leader: str
    prompt: Sequence[int]
    followers: list[str] = field(default_factory=list)


class SharedOffers:
    """Decides which of the requests with the same prompt and the same offer loads, and which wait.

    An offer can be read only once. If a client asks for `n` samples, vLLM makes `n` requests, each with all
    the parameters. So the first one loads, and the others wait until its load has ended.

    Attributes:
        has_prefix_cache: Whether a request finds there what another one loaded. Without it, no request waits.
    """

    def __init__(self, has_prefix_cache: bool) -> None:
        self.has_prefix_cache = has_prefix_cache
        self._loads: dict[_OfferName, _Load] = {}
        self._followed: dict[str, _OfferName] = {}

    @property
    def num_requests(self) -> int:
        """Requests that load, or that wait for one that loads."""
        return len(self._loads) + len(self._followed)

    def is_waiting(self, request_id: str) -> bool:
        """Say whether the request waits for another one's load."""
        return request_id in self._followed

    def follow(self, request_id: str, wish: TransferWish, prompt: Sequence[int]) -> bool:
        """Let a request wait for another one's load, if there is one of the same prompt.

        Returns:
            Whether it waits.
        """
        name = _name(wish)
        load = self._loads.get(name) if name is not None and not wish.offer_result else None
        if name is None or load is None or load.prompt != prompt:
            return False
        load.followers.append(request_id)
        self._followed[request_id] = name
        return True

    def lead(self, request_id: str, wish: TransferWish, prompt: Sequence[int]) -> None:
        """Remember that a request loads its offer, if it has one."""
        name = _name(wish)
        if name is not None and self.has_prefix_cache:
            self._loads.setdefault(name, _Load(request_id, prompt))

    def end_load(self, request_id: str) -> Sequence[str]:
        """Forget the request's load, and return the requests that waited for it."""
        name = next((name for name, load in self._loads.items() if load.leader == request_id), None)
        if name is None:
            return ()
        followers = self._loads.pop(name).followers
        for follower in followers:
            del self._followed[follower]
        return followers

    def leave(self, request_id: str) -> None:
        """Forget a request that no longer waits. Idempotent."""
        name = self._followed.pop(request_id, None)
        if name is not None:
            self._loads[name].followers.remove(request_id)


def _name(wish: TransferWish) -> _OfferName | None:
    offer = wish.load_from
    return None if offer is None else (offer.engine_id, offer.epoch, offer.request_id, offer.lease)
