"""`stopping`: a transport whose process stops itself in the middle of a write, for tests that then kill or wake it."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import ClassVar

import numpy as np

from .._options import parse_options, require_int
from ..base import Event, TransferEnded
from ..errors import KVTransferError
from ..regions import Guard, RegionPairs
from ..registry import create_transport
from .wrapping import WrappedTransport

#: For so long what was asked for may get under way, where another thread sends it. Nobody is answered meanwhile.
_SENDING_S = 0.05


@dataclass(frozen=True)
class StoppingOptions:
    """Options of the transport.

    Attributes:
        inner: Scheme of the transport that does the work; `options` are its own.
        nth: The write in whose middle the process stops, from 1.
    """

    inner: str = "inproc"
    options: Mapping[str, object] = field(default_factory=dict)
    nth: int = 1

    def __post_init__(self) -> None:
        require_int("nth", self.nth, 1, 1 << 30)


@dataclass
class _CutWrite:
    """A write of which a part is under way.

    Attributes:
        transfer_id: What its owner knows it by.
        start: Starts a part.
        rest: The parts that have not begun.
    """

    transfer_id: int
    num_bytes: int
    start: Callable[[RegionPairs], int]
    rest: list[RegionPairs]


class StoppingTransport(WrappedTransport):
    """Writes a third, asks for the next one, and stops its process (`SIGSTOP`); awake again, it goes on to the last.

    Its addresses are those of the transport below, whose peers need not know.
    """

    scheme: ClassVar[str] = "stopping"

    def __init__(self, options: Mapping[str, object] = {}) -> None:
        parsed = parse_options(StoppingOptions, options, self.scheme)
        super().__init__(create_transport(parsed.inner, parsed.options))
        self._num_writes_left = parsed.nth
        self._cut: dict[int, _CutWrite] = {}  # by the transfer that is under way

    def listen(self, address: str) -> str:
        return self._inner.listen(address)

    def _inner_address(self, address: str) -> str:
        return address

    def start_write(self, peer_id: int, pairs: RegionPairs, guard: Guard, *, timeout_s: float) -> int:
        start = partial(super().start_write, peer_id, guard=guard, timeout_s=timeout_s)
        self._num_writes_left -= 1
        if self._num_writes_left:
            return start(pairs)
        first, *rest = _thirds(pairs)
        transfer_id = start(first)
        self._cut[transfer_id] = _CutWrite(transfer_id, pairs.num_bytes, start, rest)
        return transfer_id

    def wait_events(self, timeout_s: float) -> list[Event]:
        happened = super().wait_events(timeout_s)
        return [heard for event in happened for heard in self._heard(event)]

    def _heard(self, event: Event) -> Iterator[Event]:
        """What the owner hears of an event: of the end of a part nothing, but of the last."""
        if not isinstance(event, TransferEnded) or event.transfer_id not in self._cut:
            yield event
            return
        cut = self._cut.pop(event.transfer_id)
        error = event.error
        if error is None and cut.rest:
            try:
                self._cut[cut.start(cut.rest.pop(0))] = cut
            except KVTransferError as lost:
                error = lost
            else:
                if cut.rest:
                    time.sleep(_SENDING_S)
                    # To this thread, which then does nothing more; another one would take its time to stop it.
                    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
                return
        yield replace(event, transfer_id=cut.transfer_id, num_bytes=cut.num_bytes, error=error)


def _thirds(pairs: RegionPairs) -> list[RegionPairs]:
    """The first third of every region, the second, the last. Regions have at least three bytes."""
    local, remote = pairs.local_offsets, pairs.remote_offsets
    bounds = [pairs.lengths * third // 3 for third in range(4)]
    return [
        RegionPairs(np.column_stack([local + start, remote + start, end - start]))
        for start, end in pairwise(bounds)
    ]
