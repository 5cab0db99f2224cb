"""What a consumer knows of one request's load: its offer, and how far it is with each rank of the producer."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import Literal

from ...transports.errors import KVTransferError
from .events import LocalBlocks, RemoteOffer
from .messages import Grant

__all__ = ["Load", "Part", "PartKey", "PartState", "Verdict"]

#: One rank's offer among all that there are: (address, epoch, lease).
PartKey = tuple[str, int, int]


class PartState(enum.Enum):
    CONNECTING = enum.auto()
    CLAIMING = enum.auto()
    GRANTED = enum.auto()
    READING = enum.auto()


@dataclass
class Part:
    """One rank of the producer, as far as one load is concerned.

    Attributes:
        rank: Its number among the offer's addresses.
        deadline: End of the present state; infinity where another deadline counts: a connecting part has its peer's.
        grant: What the rank granted; from the state GRANTED on.
        release: Whether the rank is still to be told that the load is over.
    """

    rank: int
    address: str
    state: PartState = PartState.CONNECTING
    deadline: float = math.inf
    grant: Grant | None = None
    release: bool = True


@dataclass(frozen=True)
class Verdict:
    """How a load is reported."""

    outcome: Literal["loaded", "failed", "dropped"]
    error: KVTransferError | None = None


class Load:
    """One request's way from the claim to the report.

    It is *connecting* or *claiming* until every part is granted, then *granted*, and *reading* while a part is. With a
    verdict it is over but for the reads that still write into its blocks: it is *draining*.

    Attributes:
        blocks: Where to load to; None until somebody asked for it.
        verdict: How it will be reported; None while that is open.
    """

    def __init__(self, request_id: str, offer: RemoteOffer) -> None:
        self.request_id = request_id
        self.offer = offer
        self.parts = tuple(Part(rank, address) for rank, address in enumerate(offer.addresses))
        self.blocks: LocalBlocks | None = None
        self.verdict: Verdict | None = None

    @property
    def keys(self) -> list[PartKey]:
        """The offer's names, by part."""
        return [(part.address, self.offer.epoch, self.offer.lease) for part in self.parts]

    @property
    def is_granted(self) -> bool:
        """Whether every part is granted."""
        return all(part.grant is not None for part in self.parts)

    @property
    def num_reads(self) -> int:
        """Reads that write into its blocks."""
        return sum(part.state is PartState.READING for part in self.parts)

    def part_at(self, address: str) -> Part:
        """The part of an address that the offer names."""
        return next(part for part in self.parts if part.address == address)

    def has_part_at(self, address: str) -> bool:
        """Whether the offer names this address."""
        return address in self.offer.addresses

    def grants(self) -> list[Grant]:
        """What was granted so far, by part."""
        return [part.grant for part in self.parts if part.grant is not None]
