"""The sum at the end of what two nodes tell each other, except the bytes of pools, which have checksums of
their own.

TCP's own sum has 16 bits, and every device that rewrites a segment computes it anew. So now and then a
changed bit arrives, and in a grant it is another block's number: the wrong cache under a guard that holds. A
sum is no authentication: a peer that lies can compute it. It is there on encrypted connections too, because
it costs less than a second format.
"""

from __future__ import annotations

from typing import Final

import xxhash

from .errors import ChecksumError

#: Bytes of a sum.
SUM_BYTES: Final = 8


def sum_of(data: bytes) -> bytes:
    """Return the sum of some bytes: their 64-bit xxh3, most significant byte first."""
    return xxhash.xxh3_64_digest(data)


def require_sum(data: bytes, found: bytes) -> None:
    """Check that bytes from a peer have the sum that came with them.

    Raises:
        ChecksumError: they do not. Nothing that the same connection brings can be trusted.
    """
    if sum_of(data) != found:
        raise ChecksumError("a control message was changed on its way: its checksum differs")
