"""The owner's side of reads: each fetch is answered from the pool, and forgotten."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import xxhash

from .._copy import gather_regions
from .._memory import WordTable, guard_holds, require_guard
from ..errors import ProtocolError, RegionError
from ..regions import AddressArray, Pool
from .frames import Frame
from .links import Link
from .wire import Fetch, Slice, Stale

#: Regions at least this large go out by reference, a frame each; smaller ones are gathered first, since a frame costs
#: more than copying them does.
_ZERO_COPY_BYTES: Final = 256 << 10

#: A peer for which more is queued does not take what it asks for.
_MAX_QUEUED_BYTES = 128 << 20


class PoolServer:
    """Answers fetches from `pool`, under `guards`. The pool outlives every connection."""

    def __init__(self, pool: Pool, guards: WordTable) -> None:
        self._pool = pool
        self._guards = guards

    def answer(self, link: Link, fetch: Fetch) -> None:
        """Send what a peer fetches, or that the guard does not hold.

        Raises:
            ProtocolError: the peer asks for what is not there, or for more than it takes. Nothing was sent.
        """
        try:
            addresses = self._pool.addresses(fetch.rows[:, 0], fetch.rows[:, 1])
            require_guard(fetch.guard, self._guards.num_guards)
        except RegionError as error:
            raise ProtocolError(f"a fetch of what is not ours to give: {error}") from error
        if link.queued_bytes > _MAX_QUEUED_BYTES:
            raise ProtocolError(f"the peer fetches, and does not take: {link.queued_bytes} bytes are queued")
        if not self._holds(fetch):
            _send_stale(link, fetch)
        elif fetch.is_whole or not len(fetch.rows) or fetch.rows[:, 1].min() < _ZERO_COPY_BYTES:
            self._send_gathered(link, fetch, addresses)
        else:
            # By reference: the bytes leave later, so only a later answer can vouch for them. For a single slice
            # to ask again would take longer than copying it.
            rows = zip(addresses.tolist(), fetch.rows[:, 1].tolist(), strict=True)
            _send_slice(link, fetch, [Frame.borrowed(*row) for row in rows], is_settled=False)

    def _send_gathered(self, link: Link, fetch: Fetch, addresses: AddressArray) -> None:
        lengths = fetch.rows[:, 1]
        frame = Frame.allocated(int(lengths.sum()))
        gather_regions(frame.address, addresses, lengths)
        if self._holds(fetch):
            _send_slice(link, fetch, [frame], is_settled=True)
        else:
            _send_stale(link, fetch)

    def _holds(self, fetch: Fetch) -> bool:
        return guard_holds(self._guards.address, fetch.guard)


def checksum_of(frames: Iterable[memoryview | bytes]) -> int:
    """xxh3, 64 bits, of all frames end to end."""
    digest = xxhash.xxh3_64()
    for frame in frames:
        digest.update(frame)
    return digest.intdigest()


def _send_slice(link: Link, fetch: Fetch, frames: list[Frame], *, is_settled: bool) -> None:
    checksum = checksum_of(frame.view for frame in frames) if fetch.with_checksum else 0
    head = Slice(fetch.transfer_id, fetch.index, is_settled, checksum, ()).head()
    link.send([head, *frames])


def _send_stale(link: Link, fetch: Fetch) -> None:
    link.send([Stale(fetch.transfer_id, fetch.index).head(), b""])
