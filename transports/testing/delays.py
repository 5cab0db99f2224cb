"""`delayed`: a transport that holds events back, as a seed says.

Delays are counted in *turns*, calls of `wait_events`. So a test with delays is as fast as one without, and a
seed that failed once fails again.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from ..base import Endpoint, Event, PeerLost, TransferEnded
from ..checked import integer
from ..options import parse_options, require_valid
from ..regions import Guard, Pool, RegionPairs
from ..registry import create_transport
from .wrapping import RenamedEndpoint, WrappedTransport


@dataclass(frozen=True)
class DelayOptions:
    """Options of the transport.

    Attributes:
        inner: Scheme of the transport that does the work.
        options: Options of that transport.
        seed: Seed of the delays.
        max_turns: Most turns that an event is held; longer only if an event before it is held longer.
    """

    inner: str = "inproc"
    options: Mapping[str, object] = field(default_factory=dict)
    seed: Annotated[int, integer(0, 2**63 - 1)] = 0
    max_turns: Annotated[int, integer(0, 1 << 20)] = 8

    def __post_init__(self) -> None:
        require_valid(self)


@dataclass(order=True)
class _Held:
    """An event that is held.

    Attributes:
        turn: The turn that reports it.
        number: Its position among the events of the same turn.
    """

    turn: int
    number: int
    peer_id: int = field(compare=False)
    event: Event = field(compare=False)


class DelayedTransport(WrappedTransport):
    """A transport with a `DelayedEndpoint`."""

    scheme: ClassVar[str] = "delayed"

    def __init__(self, options: Mapping[str, object] = {}) -> None:
        self._options = parse_options(DelayOptions, options, self.scheme)
        super().__init__(create_transport(self._options.inner, self._options.options))

    def _wrap(self, inner: Endpoint, pool: Pool) -> Endpoint:
        return DelayedEndpoint(inner, self._options)


class DelayedEndpoint(RenamedEndpoint):
    """Hold every event for some turns.

    The events of one peer keep their order. The ends of its reads may move, but stay before the peer's loss.
    """

    def __init__(self, inner: Endpoint, options: DelayOptions) -> None:
        super().__init__(DelayedTransport.scheme, inner)
        self._options = options
        self._random = random.Random(self._options.seed)
        self._turn = 0
        self._number = 0
        self._held: list[_Held] = []
        self._peers: dict[int, int] = {}  # by transfer

    def disconnect(self, peer_id: int) -> None:
        self._inner.disconnect(peer_id)
        self._held = [
            held for held in self._held if held.peer_id != peer_id or isinstance(held.event, TransferEnded)
        ]
        heapq.heapify(self._held)

    def start_read(self, peer_id: int, pairs: RegionPairs, guard: Guard, *, timeout_s: float) -> int:
        transfer_id = self._inner.start_read(peer_id, pairs, guard, timeout_s=timeout_s)
        self._peers[transfer_id] = peer_id
        return transfer_id

    def wait_events(self, timeout_s: float) -> list[Event]:
        self._turn += 1
        for event in self._inner.wait_events(0.0 if self._held else timeout_s):
            self._hold(event)
        ready: list[Event] = []
        while self._held and self._held[0].turn <= self._turn:
            ready.append(heapq.heappop(self._held).event)
        return ready

    def _hold(self, event: Event) -> None:
        turn = self._turn + self._random.randint(0, self._options.max_turns)
        if isinstance(event, TransferEnded):
            peer_id = self._peers.pop(event.transfer_id)
        else:
            peer_id = event.peer_id
            before = (
                held.turn for held in self._held if held.peer_id == peer_id and _precedes(held.event, event)
            )
            turn = max(turn, *before, 0)
        self._number += 1
        heapq.heappush(self._held, _Held(turn, self._number, peer_id, event))


def _precedes(earlier: Event, later: Event) -> bool:
    return isinstance(later, PeerLost) or not isinstance(earlier, TransferEnded)
