"""The reader's side: a read becomes slices, which NIXL copies a window at a time, and then a look at the
guard.

The owner takes no part. So the guard is read as the data was: by a READ of its word, begun only after NIXL
has reported that all of the data is in place. The owner clears the word before it changes the guarded bytes.
If the word still holds the value, every byte was copied before that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .._memory import WORD_BYTES
from .._slices import RoundRobin, SlicePlan
from ..endpoint import Read
from ..serving import PeerPool, stale
from .library import Agent, Memory, Transfer, descriptors

#: Looks that a reader keeps for the next read under the same guard. Each has a handle of NIXL and a word.
_MAX_LOOKS = 64


@dataclass(frozen=True)
class Remote:
    """What a peer's hello says about its memory.

    Attributes:
        agent: Name of its NIXL agent.
        memory: Its pool, with the addresses of its own process.
        device: The number of its GPU in its process.
        guard_table: Address of its guard table.
    """

    agent: str
    memory: PeerPool
    device: int
    guard_table: int

    def guard(self, index: int) -> Memory:
        """Return the word of a guard."""
        return Memory.word(self.guard_table + index * WORD_BYTES)


@dataclass(eq=False)
class _Look:
    """A READ of a guard's word. To post it again takes less time than to prepare another one.

    Attributes:
        word: Where the guard's word arrives.
    """

    transfer: Transfer
    word: int


@dataclass(eq=False)
class _Transfer:
    """A read that has not ended, and how far it is.

    If `read.error` is set, only what is in flight is waited for.

    Attributes:
        slices: The slices in flight.
        look: The look at the guard, once all slices are in place.
    """

    read: Read[Any]
    plan: SlicePlan
    num_posted: int = 0
    slices: list[Transfer] = field(default_factory=list)
    look: _Look | None = None


class Reader:
    """The reads from one peer.

    Args:
        device: The number of our GPU; 0 for main memory.
        clock: That of the reads' deadlines.
        end_read: Called when a read is over, once per read.
    """

    def __init__(
        self,
        agent: Agent,
        remote: Remote,
        kind: Any,
        device: int,
        window_slices: int,
        clock: Callable[[], float],
        end_read: Callable[[Read[Any]], None],
    ) -> None:
        self._agent = agent
        self._remote = remote
        self._kind = kind
        self._device = device
        self._window_slices = window_slices
        self._clock = clock
        self._end_read = end_read
        self._transfers: dict[int, _Transfer] = {}
        self._fetching: RoundRobin[_Transfer] = RoundRobin(self._wants_slice)
        self._num_slices = 0  # in flight
        self._looks: dict[int, _Look] = {}  # not in flight, by the guard's index; the oldest first

    def start(self, read: Read[Any], plan: SlicePlan) -> None:
        """Begin a read whose regions were checked.

        Raises:
            TransportError: NIXL has lost the peer. So it is with every method here.
        """
        transfer = self._transfers[read.transfer_id] = _Transfer(read, plan)
        self._fetching.add(transfer)
        self.settle()

    def stop(self, read: Read[Any]) -> bool:
        """Post nothing more for a read. Returns whether it is over; if not, `end_read` follows."""
        transfer = self._transfers[read.transfer_id]
        if transfer.slices or transfer.look is not None:
            return False
        self._drop(transfer)
        return True

    @property
    def num_in_flight(self) -> int:
        """Reads that have not ended."""
        return len(self._transfers)

    def settle(self) -> bool:
        """Look at what is in flight, and continue. Returns whether anything has finished."""
        has_finished = False
        self._post()
        for transfer in list(self._transfers.values()):
            has_finished |= self._advance(transfer)
        if has_finished:
            self._post()
        return has_finished

    def _post(self) -> None:
        """Fill the window."""
        for transfer in self._fetching:
            if self._num_slices >= self._window_slices:
                return
            self._post_slice(transfer)

    def _wants_slice(self, transfer: _Transfer) -> bool:
        return transfer.num_posted < len(transfer.plan) and self._is_wanted(transfer.read)

    def _is_wanted(self, read: Read[Any]) -> bool:
        """Whether a read may go on.

        Past its deadline it may not, and `stop` follows: one call of NIXL can take long.
        """
        return read.error is None and read.transfer_id in self._transfers and self._clock() < read.deadline

    def _post_slice(self, transfer: _Transfer) -> None:
        plan, index = transfer.plan, transfer.num_posted
        rows = plan.rows_of(index)
        lengths = rows[:, 1]
        pool = self._remote.memory.pool
        local = Memory(self._kind, descriptors(plan.targets_of(index), lengths, self._device))
        sources = pool.addresses(rows[:, 0], lengths)
        remote = Memory(pool.kind, descriptors(sources, lengths, self._remote.device))
        transfer.num_posted += 1
        transfer.slices.append(self._agent.read(self._remote.agent, local, remote))
        self._num_slices += 1

    def _advance(self, transfer: _Transfer) -> bool:
        """Look at one read. Returns whether something of it has finished."""
        num_done = self._take_done(transfer)
        read = transfer.read
        if transfer.slices or (transfer.num_posted < len(transfer.plan) and read.error is None):
            return num_done > 0
        if transfer.look is None and read.error is None:
            if not self._is_wanted(read):
                return num_done > 0
            # Only now: the guard vouches for what was copied before it is read, and for nothing else.
            transfer.look = self._take_look(read.guard.index)
            transfer.look.transfer.start()
        if transfer.look is not None:
            if not transfer.look.transfer.is_done():
                return num_done > 0
            value = self._agent.load(transfer.look.word)
            self._give_back_look(read.guard.index, transfer.look)
            if value != read.guard.value and read.error is None:
                read.error = stale(read.guard)
        self._drop(transfer)
        self._end_read(read)
        return True

    def _take_done(self, transfer: _Transfer) -> int:
        """Release the slices that are in place; return how many these are."""
        done = [piece for piece in transfer.slices if piece.is_done()]
        for piece in done:
            piece.release()
            transfer.slices.remove(piece)
        self._num_slices -= len(done)
        return len(done)

    def _take_look(self, index: int) -> _Look:
        """Return a look at a guard that is not in flight."""
        look = self._looks.pop(index, None)
        if look is None:
            word = self._agent.take_word()
            local, remote = Memory.word(word), self._remote.guard(index)
            look = _Look(self._agent.prepare(self._remote.agent, local, remote), word)
        return look

    def _give_back_look(self, index: int, look: _Look) -> None:
        """Keep a look that has ended, instead of another one at the same guard, or of the oldest if there are
        too many.
        """
        old = self._looks.pop(index, None)
        if old is None and len(self._looks) == _MAX_LOOKS:
            old = self._looks.pop(next(iter(self._looks)))
        self._looks[index] = look
        if old is not None:
            old.transfer.release()
            self._agent.give_back_word(old.word)

    def _drop(self, transfer: _Transfer) -> None:
        del self._transfers[transfer.read.transfer_id]
