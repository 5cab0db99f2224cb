"""What a simulated world consists of: nodes with their memory, and reads that copy region by region."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ...transports.errors import KVTransferError
from ..planning.layout import KVLayout, per_layer_layout, uniform_layout
from .events import BlockTables, Identity, RemoteOffer, StartRead
from .node import NodeProtocol

BLOCK_SIZE = 4
NUM_BLOCKS = 12
NUM_GUARDS = 3

Bytes = npt.NDArray[np.uint8]
#: An offer among all that ever were: (engine id, epoch, lease).
OfferName = tuple[str, int, int]


class PromiseBroken(AssertionError):
    """The protocol did what it must never do."""


def require(kept: bool, promise: str) -> None:
    if not kept:
        raise PromiseBroken(promise)


@dataclass
class SimulatedRead:
    """A read under way in a consumer's transport."""

    order: StartRead
    source: SimulatedNode
    deadline: float
    num_copied: int = 0
    error: KVTransferError | None = None
    held_before: bool = False


@dataclass(frozen=True)
class SimulatedLoad:
    """What a request's `LoadEnded` must fit."""

    name: OfferName
    first_block_index: int
    block_ids: tuple[int, ...]


PeerEvent = bool | bytes | KVTransferError  # connected (incoming or not), a message, lost


@dataclass
class SimulatedNode:
    """One process: protocols, memory, transport and a minute engine."""

    identity: Identity
    protocol: NodeProtocol
    pool: Bytes
    guards: list[int] = field(default_factory=lambda: [0] * NUM_GUARDS)
    links: dict[int, tuple[SimulatedNode, int]] = field(default_factory=dict)
    inbox: dict[int, deque[PeerEvent]] = field(default_factory=dict)
    reads: dict[str, SimulatedRead] = field(default_factory=dict)
    free_blocks: list[int] = field(default_factory=lambda: list(range(1, NUM_BLOCKS)))
    offers: dict[str, tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    orders: deque[tuple[str, int, BlockTables]] = field(default_factory=deque)
    claims: dict[str, RemoteOffer] = field(default_factory=dict)
    loads: dict[str, SimulatedLoad] = field(default_factory=dict)

    @property
    def address(self) -> str:
        """Where others connect to; also its engine id."""
        return self.identity.engine_id

    def page(self, layer: int, block_id: int) -> Bytes:
        """One layer's bytes of a block, as a view."""
        place = self.identity.layout.layers[layer]
        start = place.base_offset + block_id * place.block_stride
        return self.pool[start : start + place.page_bytes]

    def fill(self, block_ids: Iterable[int], contents: Iterable[Bytes]) -> None:
        """Give blocks their contents, each of shape `(layers, page bytes)`."""
        for block_id, content in zip(block_ids, contents, strict=True):
            for layer in range(len(self.identity.layout.layers)):
                self.page(layer, block_id)[:] = content[layer]

    def holds(self, block_ids: Iterable[int], contents: Iterable[Bytes]) -> bool:
        """Whether blocks have these contents."""
        return all(
            np.array_equal(self.page(layer, block_id), content[layer])
            for block_id, content in zip(block_ids, contents, strict=True)
            for layer in range(len(content))
        )

    def allocate(self, num_blocks: int) -> tuple[int, ...]:
        """Take blocks that are free; none if there are too few."""
        if len(self.free_blocks) < num_blocks:
            return ()
        return tuple(self.free_blocks.pop(0) for _ in range(num_blocks))

    def free(self, block_ids: tuple[int, ...], scribble: int) -> None:
        """Take blocks back and give them another meaning at once."""
        for block_id in block_ids:
            for layer in range(len(self.identity.layout.layers)):
                self.page(layer, block_id)[:] = scribble
        self.free_blocks.extend(block_ids)


def simulated_layout(address: str) -> KVLayout:
    """Two layers; one node keeps them apart, the others keep them together."""
    build = per_layer_layout if address == "sim://c" else uniform_layout
    return build(
        ["layer.0", "layer.1"],
        page_bytes=8,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        page_format="uint8[8]",
    )
