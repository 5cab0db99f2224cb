"""The parts of a simulated world: engines with their ranks and memory, and reads that copy region by
region.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product

import numpy as np
import numpy.typing as npt

from kvferry.connector.handoff.events import Action, BlockTables, Identity, RemoteOffer, StartRead
from kvferry.connector.handoff.node import NodeProtocol
from kvferry.connector.planning.layout import KVLayout, per_layer_layout, uniform_layout
from kvferry.connector.planning.slots import Shard, SlotArray
from kvferry.transports.errors import KVTransferError

BLOCK_SIZE = 4
NUM_BLOCKS = 12
NUM_GUARDS = 3
NUM_LAYERS = 2
NUM_HEADS = 4

#: A block's contents in the whole model, shape `(NUM_LAYERS, BLOCK_SIZE, NUM_HEADS)`: one byte per head of a
#: token.
Bytes = npt.NDArray[np.uint8]
#: An offer among all that were ever made: (engine id, epoch, lease).
OfferName = tuple[str, int, int]


@dataclass(frozen=True)
class Spread:
    """How an engine's model is spread over ranks: layers over pipeline stages, heads over the ranks of a
    stage.
    """

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1

    @property
    def num_ranks(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    def layers(self, rank: int) -> range:
        """The layers that a rank keeps."""
        num = NUM_LAYERS // self.pipeline_parallel_size
        first = rank // self.tensor_parallel_size * num
        return range(first, first + num)

    def heads(self, rank: int) -> range:
        """The heads of each layer that a rank keeps."""
        num = NUM_HEADS // self.tensor_parallel_size
        first = rank % self.tensor_parallel_size * num
        return range(first, first + num)


@dataclass
class SimulatedRead:
    """A read that is in progress in a consumer's transport."""

    order: StartRead
    source: SimulatedRank
    deadline: float
    num_copied: int = 0
    error: KVTransferError | None = None
    held_before: bool = False


@dataclass
class SimulatedOffer:
    """An offer of an engine. Each rank ends it once.

    Attributes:
        content: The digest of its prompt.
        guard_value: What its guards hold.
        num_ready: Blocks that are computed, or ordered to be.
        is_finished: Whether its request has finished. Until then its blocks are the engine's, whatever
            becomes of the offer.
        closed: The ranks that know that it has finished.
        ended: The ranks at which it has ended.
    """

    lease: int
    content: str
    guard_value: int
    block_ids: tuple[int, ...]
    num_ready: int
    is_finished: bool
    closed: set[int] = field(default_factory=set)
    ended: set[int] = field(default_factory=set)


@dataclass
class SimulatedLoad:
    """A load of an engine. Each rank reports its end once."""

    name: OfferName
    content: str
    first_block_index: int
    block_ids: tuple[int, ...]
    ended: set[int] = field(default_factory=set)


#: An order of a scheduler to a rank. It is carried out when the rank comes to it, which is not when the
#: others do.
Order = Callable[[], list[Action]]
PeerEvent = bool | bytes | KVTransferError  # connected (incoming or not), a message, lost


@dataclass
class SimulatedRank:
    """One process of an engine: its protocol, memory and transport."""

    engine: SimulatedEngine
    number: int
    identity: Identity
    protocol: NodeProtocol
    pool: Bytes
    guards: list[int] = field(default_factory=lambda: [0] * NUM_GUARDS)
    allowed: dict[int, BlockTables] = field(default_factory=dict)
    links: dict[int, tuple[SimulatedRank, int]] = field(default_factory=dict)
    inbox: dict[int, deque[PeerEvent]] = field(default_factory=dict)
    reads: dict[tuple[str, int], SimulatedRead] = field(default_factory=dict)
    orders: deque[Order] = field(default_factory=deque)
    is_dead: bool = False

    @property
    def name(self) -> str:
        return f"{self.engine.name}/{self.number}" if len(self.engine.ranks) > 1 else self.engine.name

    def places(self) -> Iterable[tuple[int, int, int, int]]:
        """Every byte of block 0 that this rank keeps: (layer, slot, head, pool offset)."""
        spread = self.engine.spread
        heads = spread.heads(self.number)
        for index, layer in enumerate(spread.layers(self.number)):
            base = self.identity.layout.layers[index].base_offset
            for slot, (place, head) in product(range(BLOCK_SIZE), enumerate(heads)):
                yield layer, slot, head, base + slot * len(heads) + place

    def fill(self, block_ids: Iterable[int], contents: Iterable[Bytes]) -> None:
        """Write the contents of blocks, as far as this rank keeps them."""
        strides = {layer.block_stride for layer in self.identity.layout.layers}
        (stride,) = strides
        for block_id, content in zip(block_ids, contents, strict=True):
            for layer, slot, head, offset in self.places():
                self.pool[offset + block_id * stride] = content[layer, slot, head]

    def scribble(self, block_ids: Iterable[int], value: int) -> None:
        """Overwrite blocks that were freed, so that a late reader gets wrong bytes."""
        for layer in self.identity.layout.layers:
            for block_id in block_ids:
                start = layer.base_offset + block_id * layer.block_stride
                self.pool[start : start + layer.page_bytes] = value

    def holds(self, block_ids: Iterable[int], contents: Iterable[Bytes]) -> bool:
        """Whether blocks have these contents."""
        stride = self.identity.layout.layers[0].block_stride
        return all(
            self.pool[offset + block_id * stride] == content[layer, slot, head]
            for block_id, content in zip(block_ids, contents, strict=True)
            for layer, slot, head, offset in self.places()
        )


@dataclass
class SimulatedEngine:
    """A node: its ranks, its block allocator, and the state of its scheduler.

    Attributes:
        offers: By request; those whose end is owed.
        preempted: Requests that lost their blocks while they were offered. No end of their offers is owed.
        claims: By request.
        loads: By request; those whose end is owed.
    """

    address: str
    epoch: int
    spread: Spread
    ranks: list[SimulatedRank] = field(default_factory=list)
    free_blocks: list[int] = field(default_factory=lambda: list(range(1, NUM_BLOCKS)))
    offers: dict[str, SimulatedOffer] = field(default_factory=dict)
    preempted: set[str] = field(default_factory=set)
    claims: dict[str, RemoteOffer] = field(default_factory=dict)
    loads: dict[str, SimulatedLoad] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.address.removeprefix("sim://")

    @property
    def is_doomed(self) -> bool:
        """Whether a rank is dead.

        The others live on for a while, but no end of an offer or a load is owed any more.
        """
        return any(rank.is_dead for rank in self.ranks)

    @property
    def living_ranks(self) -> list[SimulatedRank]:
        return [rank for rank in self.ranks if not rank.is_dead]

    def allocate(self, num_blocks: int) -> tuple[int, ...]:
        """Take free blocks; none if there are too few."""
        if len(self.free_blocks) < num_blocks:
            return ()
        return tuple(self.free_blocks.pop() for _ in range(num_blocks))

    def free(self, block_ids: tuple[int, ...], scribble: int) -> None:
        """Free blocks that no rank has a use for any more."""
        for rank in self.ranks:
            rank.scribble(block_ids, scribble)
        self.free_blocks.extend(block_ids)


@cache
def simulated_layout(spread: Spread, rank: int, *, is_uniform: bool) -> KVLayout:
    """The layout of one rank's layers: uniform, or one pool part per layer."""
    heads = spread.heads(rank)
    page_bytes = BLOCK_SIZE * len(heads)
    layout = (uniform_layout if is_uniform else per_layer_layout)(
        [f"layer.{layer}" for layer in spread.layers(rank)],
        page_bytes=page_bytes,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        page_format=f"uint8[{BLOCK_SIZE},{len(heads)}]",
    )
    shard = Shard(heads.start, len(heads), NUM_HEADS)
    layers = tuple(
        replace(
            layer,
            shard=shard,
            slots=SlotArray("uint8", 1, 1, BLOCK_SIZE, layer.block_stride, len(heads), 0, 1),
        )
        for layer in layout.layers
    )
    return replace(layout, layers=layers)
