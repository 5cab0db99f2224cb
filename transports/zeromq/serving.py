"""The owner's side of reads: it answers each fetch from its pool, and keeps no state about it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import xxhash

from ..errors import ProtocolError
from ..serving import ServedPool
from .channel import Channel
from .frames import Frame
from .wire import Fetch, Slice, Stale

#: Regions of at least this size are sent by reference, in one frame each. Smaller ones are gathered into one frame
#: first, because a frame costs more than the copy.
_ZERO_COPY_BYTES: Final = 256 << 10

#: If more is queued for a peer, it does not receive what it fetches, and is dropped.
_MAX_QUEUED_BYTES = 128 << 20


def answer(served: ServedPool, channel: Channel, fetch: Fetch) -> None:
    """Answer with a slice, or with `Stale` if the guard does not hold. The pool outlives every connection.

    Raises:
        ProtocolError: the peer asks for regions or a guard that do not exist, or fetches more than it receives.
            Nothing was sent.
    """
    addresses, lengths = served.locate(fetch.rows, fetch.guard), fetch.rows[:, 1]
    if channel.queued_bytes > _MAX_QUEUED_BYTES:
        raise ProtocolError(
            f"the peer fetches slices but does not receive them: {channel.queued_bytes} bytes are queued"
        )
    if not served.guards.holds(fetch.guard):
        _send_stale(channel, fetch)
    elif fetch.is_whole or not len(lengths) or lengths.min() < _ZERO_COPY_BYTES:
        frame = Frame.allocated(int(lengths.sum()))
        served.gather(frame.address, addresses, lengths)
        # Look again after the copy: blocks that were reused in the meantime must not pass for the promised ones.
        if served.guards.holds(fetch.guard):
            _send_slice(channel, fetch, [frame], is_settled=True)
        else:
            _send_stale(channel, fetch)
    else:
        # By reference: libzmq reads the bytes after we looked at the guard, so only a later answer can confirm them.
        # A read of a single slice is copied instead, because another round trip would take longer than the copy.
        rows = zip(addresses.tolist(), lengths.tolist(), strict=True)
        _send_slice(channel, fetch, [Frame.borrowed(*row) for row in rows], is_settled=False)


def checksum_of(frames: Iterable[memoryview | bytes]) -> int:
    """Return the 64-bit xxh3 of all frames, end to end."""
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
