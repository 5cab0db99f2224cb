"""Bugs as they happen in the field, each as the parts of a fleet with exactly one thing broken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvferry.connector.handoff.consumer import ConsumerProtocol
from kvferry.connector.handoff.events import LoadEnded
from kvferry.connector.p2p.outcomes import Outcomes
from kvferry.connector.p2p.scheduler import HandoffScheduler
from kvferry.router.answer import exchange as does
from kvferry.router.answer.exchange import Exchange
from kvferry.runner_mixin.kv_cache import KVCacheManager, get_request_block_hasher, sha256
from kvferry.runner_mixin.kv_cache.block_hash import HashableRequest

from ..exchange_bugs import EndsTwice, LosesTheLastToken
from ..handoff_simulator.planted import (
    AcceptsStaleBytes,
    CountsWhatIsNotComputed,
    ForgetsLoadsOfLostPeers,
    ForgetsWhatItAnnounced,
    NeverClears,
    NeverExpires,
    NeverGivesUp,
    ReportsBeforeTheReadEnded,
)
from .network import Read, SimulatedEndpoint
from .node import BLOCK_SIZE, Parts


class FreesBeforeRelease(KVCacheManager):
    """An offered block is free as soon as its request has ended."""

    def pin(self, request_id: str) -> None:
        self._pinned[request_id] = ()  # type: ignore[assignment]


class DropsInSilence(ConsumerProtocol):
    """A request that is aborted while it loads tells its peer nothing."""

    def drop(self, request_id: str, now: float) -> Any:
        return []


class SwallowsFailures(Outcomes):
    """A load that failed is reported as one that has arrived."""

    def load_ended(self, ended: LoadEnded, now: float) -> None:
        if ended.outcome == "failed":
            ended = replace(ended, outcome="loaded", error=None)
        super().load_ended(ended, now)


class SwapsTheGroups(HandoffScheduler):
    """Loads into the block table of another group."""

    def update_state_after_alloc(
        self, request: Any, block_ids: Sequence[Sequence[int]], num_external_tokens: int
    ) -> None:
        super().update_state_after_alloc(request, [*block_ids][::-1], num_external_tokens)


class PairsByPosition(SimulatedEndpoint):
    """Pairs the regions of both sides by their place in a list that one side has in another order."""

    def _copy(self, read: Read, first: int, end: int) -> None:
        rows = read.pairs.table[first:end].tolist()
        for (local, _, size), (_, remote, _) in zip(rows, rows[::-1], strict=True):
            self.pool[local : local + size] = read.owner.pool[remote : remote + size]


def _hash_without_beginning(request: HashableRequest) -> Any:
    """Hash each block by itself, as if two prompts with one block in common had the same before it."""
    whole = get_request_block_hasher(BLOCK_SIZE, sha256)
    hashed, tokens, found = len(request.block_hashes), request.all_token_ids, []

    class Alone:
        def __init__(self, tokens: Sequence[int]) -> None:
            self.all_token_ids, self.block_hashes = tokens, ()

        def __getattr__(self, name: str) -> Any:
            return getattr(request, name)

    for start in range(hashed * BLOCK_SIZE, len(tokens) - BLOCK_SIZE + 1, BLOCK_SIZE):
        found += whole(Alone(tokens[start : start + BLOCK_SIZE]))
    return found


class SendsTwice(Exchange):
    def events_arrived(self, events: Any) -> Any:
        actions = super().events_arrived(events)
        return actions + [action for action in actions if isinstance(action, does.Send)]


class MovesTwice(Exchange):
    """Two nodes are asked to go on with an answer that moves."""

    def _stopped(self, stop: Any) -> Any:
        actions = super()._stopped(stop)
        return actions + [action for action in actions if isinstance(action, does.ChooseDecode)]


#: Name of a bug → the fleet that has it.
BUGS: Mapping[str, Parts] = {
    "free before release": Parts(manager=FreesBeforeRelease),
    "guard never cleared": Parts(producer=NeverClears),
    "lost heartbeat": Parts(producer=NeverExpires),
    "offer of what is not computed": Parts(producer=CountsWhatIsNotComputed),
    "withdrawn offer kept": Parts(producer=ForgetsWhatItAnnounced),
    "abort that forgets the peer": Parts(consumer=DropsInSilence),
    "completion before the last byte": Parts(consumer=ReportsBeforeTheReadEnded),
    "missing generation check": Parts(consumer=AcceptsStaleBytes),
    "loads of a lost peer forgotten": Parts(consumer=ForgetsLoadsOfLostPeers),
    "wait without a deadline": Parts(consumer=NeverGivesUp),
    "swallowed failure": Parts(outcomes=SwallowsFailures),
    "wrong group's table": Parts(half=SwapsTheGroups),
    "pairing by position": Parts(endpoint=PairsByPosition),
    "stale prefix hash": Parts(hasher=_hash_without_beginning),
    "token sent twice": Parts(exchange=SendsTwice),
    "double move of an answer": Parts(exchange=MovesTwice),
    "last token of a move lost": Parts(exchange=LosesTheLastToken),
    "end reported twice": Parts(exchange=EndsTwice),
}
