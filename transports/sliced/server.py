"""The owner's side of sliced reads; see the package."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Generic, Protocol, TypeVar

from ..errors import ProtocolError
from ..movers import Ring, StagingBuffer, Ticket
from ..regions import AddressArray, Guard, Int64Array
from ..serving import ServedPool, require_slice

#: A peer that fetches more than this before it receives does not follow the protocol: its window is smaller.
_MAX_UNSENT: Final = 128


class Fetch(Protocol):
    """What a peer asks for. `rows`: `(num_rows, 2)` offset, num_bytes."""

    @property
    def guard(self) -> Guard: ...
    @property
    def rows(self) -> Int64Array: ...
    @property
    def num_bytes(self) -> int: ...


F = TypeVar("F", bound=Fetch)


@dataclass(eq=False, slots=True)
class Answer(Generic[F]):
    """A fetch, and what is sent for it. A transport may derive from it.

    Attributes:
        addresses: Where the regions lie in the pool, shape `(num_rows,)`.
        buffer: Where the bytes are gathered; None if they are sent straight from the pool.
        has_bytes: There are bytes to send. If not, only the verdict is.
        is_held: The guard has held whenever it was looked at.
    """

    fetch: F
    addresses: AddressArray
    buffer: StagingBuffer | None = field(default=None, init=False)
    has_bytes: bool = field(default=True, init=False)
    is_held: bool = field(default=True, init=False)


A = TypeVar("A", bound="Answer[Any]")


class Server(ABC, Generic[F, A]):
    """Answers the fetches of one peer.

    All peers share the ring. A peer that fetches and does not receive would keep its buffers from the others
    for as long as it is connected, so `require_progress` ends that. A backend calls it from time to time.

    Args:
        max_slice_bytes: The most bytes per slice, which our hello states.
        fail: Called with what ended the connection, if something fails outside of `answer`.
        ring: Where bytes are gathered; by default the mover's.
    """

    def __init__(
        self,
        served: ServedPool,
        max_slice_bytes: int,
        fail: Callable[[Exception], None],
        ring: Ring | None = None,
    ) -> None:
        self._served = served
        self._mover = served.mover
        self._max_slice_bytes = max_slice_bytes
        self._fail_peer = fail
        self._ring = ring or served.mover.gather_ring
        self._waiting: deque[A] = deque()  # those that need a buffer
        self._sending: set[A] = set()  # those that are sent from a buffer
        self._is_closed = False
        self.num_unsent = 0  # answers that have not left
        self._num_returned = 0  # buffers
        self._num_seen = -1  # of `_num_returned`, at the latest call of `require_progress`
        self._stuck_since = 0.0

    # -- how answers travel ----------------------------------------------------------------------------

    @abstractmethod
    def make_answer(self, fetch: F, addresses: AddressArray) -> A:
        """Return an answer to a fetch that was checked."""

    @abstractmethod
    def is_gathered(self, fetch: F) -> bool:
        """Return whether bytes are copied to a buffer before they are sent."""

    @abstractmethod
    def send(self, answer: A) -> None:
        """Send the bytes of an answer, if there are any.

        Call `left` when the last one has left, and send the verdict.

        Whatever it raises ends the peer.
        """

    def resumed(self) -> None:
        """Something was sent outside of `answer`, because a copy ended or a buffer came back."""

    # -- what a transport calls ------------------------------------------------------------------------

    def answer(self, fetch: F) -> A:
        """Send what the peer fetches; only the verdict if the guard does not hold or the fetch has no rows.

        Raises:
            ProtocolError: a region or the guard is out of bounds, or the peer fetches more than it receives.
                Nothing was sent.
        """
        addresses = self._served.locate(fetch.rows, fetch.guard)
        if self.num_unsent >= _MAX_UNSENT:
            raise ProtocolError(
                f"the peer does not receive what it fetches: {self.num_unsent} slices wait for it"
            )
        require_slice(fetch.num_bytes, self._max_slice_bytes)
        answer = self.make_answer(fetch, addresses)
        self.num_unsent += 1
        # Looked at before the copy only to save its cost: what counts is the look after it, in `left`.
        if not len(fetch.rows) or not self._served.guards.holds(fetch.guard):
            answer.has_bytes, answer.is_held = False, not len(fetch.rows)
            self.send(answer)
        elif self.is_gathered(fetch):
            self._waiting.append(answer)
            self._gather()
        else:
            self.send(answer)
        return answer

    def left(self, answer: A) -> bool:
        """The last byte of an answer has left. Return the verdict: whether the guard held after that."""
        # Straight from the pool, the last byte was read only just now. A buffer's content was looked at in
        # `_on_gathered`.
        is_held = answer.is_held and (
            answer.buffer is not None or self._served.guards.holds(answer.fetch.guard)
        )
        self.forget(answer)
        return is_held

    def forget(self, answer: A) -> None:
        """An answer has left, or never will. Nothing is sent from its buffer any more."""
        self.num_unsent -= 1
        self._give_back(answer)

    def require_progress(self, now: float, missed_s: float, timeout_s: float) -> None:
        """Check that the peer does not keep all its buffers for longer than `timeout_s` while others wait for
        one.

        Args:
            now, missed_s: The time, and how long this node did not look at its sockets since the last call,
                in seconds.

        Raises:
            ProtocolError: it does.
        """
        has_progressed = self._num_returned != self._num_seen
        self._num_seen = self._num_returned
        if has_progressed or not self._sending or not self._ring.is_awaited(besides=self):
            self._stuck_since = now
            return
        self._stuck_since += missed_s
        if now - self._stuck_since > timeout_s:
            raise ProtocolError(
                f"the peer keeps staging buffers that others wait for: it received nothing for {timeout_s:g} s"
            )

    def close(self) -> None:
        """The connection is closed, so nothing is sent any more.

        Copies that were launched give their buffers back.
        """
        self._is_closed = True
        self._waiting.clear()
        self._ring.forget(self)
        for answer in list(self._sending):
            self._give_back(answer)

    # -- inside ----------------------------------------------------------------------------------------

    def _gather(self) -> None:
        """Gather as many of the waiting slices as there are buffers, in the order in which they were
        fetched.
        """
        while self._waiting:
            answer = self._waiting[0]
            answer.buffer = buffer = self._ring.take(answer.fetch.num_bytes)
            if buffer is None:
                self._ring.when_free(self, partial(self._later, self._gather))
                return
            self._waiting.popleft()
            ticket = self._mover.start_gather(buffer.address, answer.addresses, answer.fetch.rows[:, 1])
            if ticket.is_over:
                self._on_gathered(answer, ticket)
            else:
                ticket.then(partial(self._later, self._on_gathered, answer, ticket))

    def _later(self, step: Callable[..., None], *args: object) -> None:
        # A copy ended, or another peer's buffer came back, in the course of other work, which an error must
        # not end.
        try:
            step(*args)
            self.resumed()
        except Exception as error:  # noqa: BLE001 - whatever it is, it ends this peer alone
            self._fail_peer(error)

    def _on_gathered(self, answer: A, ticket: Ticket) -> None:
        if self._is_closed or ticket.error is not None:
            self.forget(answer)
            if ticket.error is not None and not self._is_closed:
                # The guard may hold, so a verdict that denies it would send the reader after the wrong cause.
                raise ticket.error
            return
        # After the copy: what is sent from here on is the copy, whatever happens to the pool.
        if self._served.guards.holds(answer.fetch.guard):
            self._sending.add(answer)
        else:
            answer.has_bytes = answer.is_held = False
            self._give_back(answer)
        self.send(answer)

    def _give_back(self, answer: A) -> None:
        if answer.buffer is not None:
            buffer, answer.buffer = answer.buffer, None
            self._sending.discard(answer)
            self._num_returned += 1
            self._ring.give_back(buffer)
