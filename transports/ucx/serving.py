"""The owner's side of reads: each fetch is answered from the pool, and forgotten when its bytes have left."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Final

from .._copy import gather_regions
from .._memory import WordTable, guard_holds, require_guard
from ..errors import ProtocolError, RegionError
from ..regions import AddressArray, Guard, Pool
from .channel import Channel
from .library import Operation, Worker
from .stages import Stage, Stages
from .wire import Answer, Fetch

#: A peer for which more is on its way does not take what it asks for.
_MAX_SERVED_BYTES = 512 << 20

#: What is sent where there is nothing to send: each fetch gets one UCX message, so that the receive for it ends.
_NOTHING: Final = ctypes.c_ubyte()


@dataclass(frozen=True)
class PoolServer:
    """What this process gives to peers: a pool, the words under which it may be read, and stages."""

    pool: Pool
    guards: WordTable
    stages: Stages

    def holds(self, guard: Guard) -> bool:
        return guard_holds(self.guards.address, guard)

    def addresses(self, fetch: Fetch) -> AddressArray:
        """Where the regions of a fetch are, shape `(num_rows,)`.

        Raises:
            ProtocolError: they, or the guard, are not there.
        """
        try:
            require_guard(fetch.guard, self.guards.num_guards)
            return self.pool.addresses(fetch.rows[:, 0], fetch.rows[:, 1])
        except RegionError as error:
            raise ProtocolError(f"a fetch of what is not ours to give: {error}") from error


@dataclass(frozen=True)
class _Outgoing:
    """An answer on its way. `stages`: the memory it is sent from, if it is not the pool."""

    tag: int
    guard: Guard
    num_bytes: int
    operation: Operation
    stages: tuple[Stage, ...]


class Server:
    """Answers the fetches of one peer."""

    def __init__(self, source: PoolServer, worker: Worker, channel: Channel) -> None:
        self._source = source
        self._worker = worker
        self._channel = channel
        self._outgoing: list[_Outgoing] = []

    @property
    def num_under_way(self) -> int:
        """Slices that have not left."""
        return len(self._outgoing)

    def answer(self, fetch: Fetch) -> None:
        """Send what the peer fetches; or a single byte if the guard does not hold or nothing was asked for.

        Raises:
            ProtocolError: the peer asks for what is not there, or for more than it takes. Nothing was sent.
        """
        addresses = self._source.addresses(fetch)
        if sum(outgoing.num_bytes for outgoing in self._outgoing) > _MAX_SERVED_BYTES:
            raise ProtocolError(f"the peer fetches more than {_MAX_SERVED_BYTES} bytes that it does not take")
        if len(fetch.rows) and self._source.holds(fetch.guard):
            self._send(fetch, addresses)
        else:
            operation = self._worker.send(fetch.tag, ctypes.addressof(_NOTHING), 1)
            self._outgoing.append(_Outgoing(fetch.tag, fetch.guard, 1, operation, ()))

    def _send(self, fetch: Fetch, addresses: AddressArray) -> None:
        if len(fetch.rows) == 1:
            operation = self._worker.send(fetch.tag, int(addresses[0]), fetch.num_bytes)
            self._outgoing.append(_Outgoing(fetch.tag, fetch.guard, fetch.num_bytes, operation, ()))
            return
        lengths = fetch.rows[:, 1]
        stage = self._source.stages.take(fetch.num_bytes)
        gather_regions(stage.address, addresses, lengths)
        operation = self._worker.send(fetch.tag, stage.address, fetch.num_bytes)
        self._outgoing.append(_Outgoing(fetch.tag, fetch.guard, fetch.num_bytes, operation, (stage,)))

    def settle(self) -> None:
        """Vouch for what has left, if its guard still holds.

        Raises:
            PeerLostError: UCX could not send.
        """
        done = [outgoing for outgoing in self._outgoing if outgoing.operation.is_done]
        if not done:
            return
        self._outgoing = [outgoing for outgoing in self._outgoing if not outgoing.operation.is_done]
        for outgoing in done:
            outgoing.operation.check()
            for stage in outgoing.stages:
                self._source.stages.give_back(stage)
            self._channel.send(Answer(outgoing.tag, self._source.holds(outgoing.guard)).encode())
