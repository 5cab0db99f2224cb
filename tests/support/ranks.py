"""The rank that claims or releases an offer: `Claim("r", 1, **ONLY_RANK)` is of a node with one rank."""

from __future__ import annotations

from typing import Final, TypedDict


class Rank(TypedDict):
    """The fields of `Claim` and `Release` that say whose it is."""

    rank: int
    num_ranks: int


ONLY_RANK: Final[Rank] = {"rank": 0, "num_ranks": 1}
