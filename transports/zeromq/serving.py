"""The owner's side of reads: each fetch is answered from the pool, and forgotten."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import xxhash

from .._copy import gather_regions
from .._memory import WordTable, guard_holds, require_guard
from ..errors import ProtocolError, RegionError
from ..regions import AddressArray, Pool
from .channel import Channel
from .frames import Frame
from .wire import Fetch, Slice, Stale

#: Regions at least this large go out by reference, a frame each; smaller ones are gathered first, since a frame costs
#: more than copying them does.
_ZERO_COPY_BYTES: Final = 256 << 10

#: A peer for which more is queued does not receive what it fetches, and is dropped.
_MAX_QUEUED_BYTES = 128 << 20


class PoolServer:
    """Answers fetches from `pool`, under `guards`. The pool outlives every connection."""

    def __init__(self, pool: Pool, guards: WordTable) -> None:
        self.pool = pool
        self.guards = guards

    def answer(self, channel: Channel, fetch: Fetch) -> None:
        """Send a slice, or say that the guard does not hold.

        Raises:
            ProtocolError: the peer asks for what does not exist, or for more than it receives. Nothing was sent.
        """
        try:
            addresses = self.pool.addresses(fetch.rows[:, 0], fetch.rows[:, 1])
            require_guard(fetch.guard, self.guards.num_guards)
        except RegionError as error:
            raise ProtocolError(f"the peer fetches what it may not: {error}") from error
        if channel.queued_bytes > _MAX_QUEUED_BYTES:
            raise ProtocolError(
                f"the peer fetches slices but does not receive them: {channel.queued_bytes} bytes are queued"
            )
        if not self._holds(fetch):
            _send_stale(channel, fetch)
        elif fetch.is_whole or not len(fetch.rows) or fetch.rows[:, 1].min() < _ZERO_COPY_BYTES:
            self._send_gathered(channel, fetch, addresses)
        else:
            # By reference: the bytes leave later, so only a later answer can vouch for them. A read of one slice is
            # copied instead, because to ask again would take longer.
            rows = zip(addresses.tolist(), fetch.rows[:, 1].tolist(), strict=True)
            _send_slice(channel, fetch, [Frame.borrowed(*row) for row in rows], is_settled=False)

    def _send_gathered(self, channel: Channel, fetch: Fetch, addresses: AddressArray) -> None:
        lengths = fetch.rows[:, 1]
        frame = Frame.allocated(int(lengths.sum()))
        gather_regions(frame.address, addresses, lengths)
        # Once more, after the copy: what was reused meanwhile must not be taken for what was promised.
        if self._holds(fetch):
            _send_slice(channel, fetch, [frame], is_settled=True)
        else:
            _send_stale(channel, fetch)

    def _holds(self, fetch: Fetch) -> bool:
        return guard_holds(self.guards.address, fetch.guard)


def checksum_of(frames: Iterable[memoryview | bytes]) -> int:
    """xxh3, 64 bits, of all frames end to end."""
    digest = xxhash.xxh3_64()
    for frame in frames:
        digest.update(frame)
    return digest.intdigest()


def _send_slice(channel: Channel, fetch: Fetch, frames: list[Frame], *, is_settled: bool) -> None:
    checksum = checksum_of(frame.view for frame in frames) if fetch.with_checksum else 0
    head = Slice(fetch.transfer_id, fetch.index, is_settled, checksum, ()).head()
    channel.send([head, *frames])


def _send_stale(channel: Channel, fetch: Fetch) -> None:
    channel.send([Stale(fetch.transfer_id, fetch.index).head(), b""])
