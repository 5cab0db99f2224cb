"""Lease numbers, which guards hold: unique and unguessable."""

from __future__ import annotations

import secrets
from hashlib import blake2b

_HALF_BITS = 31
_HALF = (1 << _HALF_BITS) - 1
#: Four rounds make a permutation that cannot be told from a random one without the key (Luby and Rackoff,
#: 1988).
_NUM_ROUNDS = 4


class GuardNumbers:
    """Draws numbers from 1 to 2**62 - 1: a counter under a keyed permutation.

    A peer that was admitted can read under any guard whose value it knows. Consecutive numbers would let it
    read what it never claimed, and random numbers could repeat. A permutation of a counter avoids both.
    """

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)
        self._count = 0

    def draw(self) -> int:
        """Draw a number that was not drawn before."""
        number = 0
        while number == 0:  # a guard that holds 0 is clear
            number = self._permute(self._count)
            self._count += 1
        return number

    def _permute(self, value: int) -> int:
        """A Feistel network: each round swaps the halves and covers one with a keyed hash of the other."""
        left, right = value >> _HALF_BITS, value & _HALF
        for index in range(_NUM_ROUNDS):
            message = bytes([index]) + right.to_bytes(4, "big")
            cover = int.from_bytes(blake2b(message, digest_size=4, key=self._key).digest(), "big")
            left, right = right, left ^ (cover & _HALF)
        return left << _HALF_BITS | right
