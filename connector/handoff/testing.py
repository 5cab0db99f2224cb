"""A simulated world for the handoff protocol: a virtual clock, a network that delays, memory, and death.

`Simulation` runs real `NodeProtocol`s. Every operation is a method that takes numbers as its choices, so that
a seeded generator (`explore`) and a property-based test can drive the same world. Reads copy region by region,
and anything may happen between two regions; blocks are overwritten the moment their owner may reuse them.

A promise that is broken raises `PromiseBroken`.
"""

from __future__ import annotations

import math
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ...transports.errors import (
    KVTransferError,
    PeerLostError,
    StaleRegionError,
    TransferTimeoutError,
    TransportClosedError,
)
from ..planning import compatibility
from ._simulated import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    NUM_GUARDS,
    Bytes,
    OfferName,
    PromiseBroken,
    SimulatedLoad,
    SimulatedNode,
    SimulatedRead,
    require,
    simulated_layout,
)
from .config import HandoffConfig
from .consumer import ConsumerProtocol
from .events import (
    Action,
    ClearGuard,
    Connect,
    Disconnect,
    GroupBlocks,
    Identity,
    LoadEnded,
    OfferEnded,
    RemoteOffer,
    Send,
    SetGuard,
    StartRead,
)
from .messages import encode
from .node import NodeProtocol
from .producer import ProducerProtocol

__all__ = ["PromiseBroken", "Simulation", "explore"]

_CONFIG = HandoffConfig(load_wait_s=60.0, max_early_claims=4)
#: Longest time, in virtual seconds, until everything is over once nobody orders anything any more.
_LONGEST_WAIT_S = 200.0


class Simulation:
    """Three nodes, each producer and consumer, and everything between them.

    Args:
        producer_class, consumer_class: The protocols under test.
        checks_after_copy: Whether the transport checks guards when it should. False is a planted bug.
    """

    def __init__(
        self,
        producer_class: type[ProducerProtocol] = ProducerProtocol,
        consumer_class: type[ConsumerProtocol] = ConsumerProtocol,
        checks_after_copy: bool = True,
    ) -> None:
        self.now = 0.0
        self.outcomes: Counter[str] = Counter()
        self._classes = (producer_class, consumer_class)
        self._checks_after_copy = checks_after_copy
        self._counter = 0
        self._contents: dict[OfferName, list[Bytes]] = {}
        self._made: list[RemoteOffer] = []
        self._loaded: set[OfferName] = set()
        self._nodes = {address: self._new_node(address) for address in ("sim://a", "sim://b", "sim://c")}

    # -- operations: each picks its subject by a number, and does nothing if there is none -----------

    def offer(self, which: int, num_blocks: int) -> None:
        """A producer's scheduler makes an offer; its worker hears of it with `hear`."""
        node = self._pick_node(which)
        block_ids = node.allocate(1 + num_blocks % 3)
        if not block_ids:
            return
        # Names repeat from one start of a node to the next: only the epoch tells them apart.
        lease = 1 + sum(made.epoch == node.identity.epoch for made in self._made)
        request_id = f"prefill-{lease}"
        generator = np.random.default_rng(self._next())
        contents = [generator.integers(0, 255, (2, 8), dtype=np.uint8) for _ in block_ids]
        node.fill(block_ids, contents)
        me = node.identity
        node.offers[request_id] = (lease, block_ids)
        node.orders.append((request_id, lease, (block_ids,)))
        self._contents[me.engine_id, me.epoch, lease] = contents
        tokens = len(block_ids) * BLOCK_SIZE
        self._made.append(
            RemoteOffer(me.engine_id, me.epoch, request_id, lease, (node.address,), tokens, (block_ids,))
        )

    def hear(self, which: int) -> None:
        """A producer's worker hears of its scheduler's oldest offer."""
        node = self._pick_node(which)
        if node.orders:
            request_id, lease, tables = node.orders.popleft()
            tokens = len(tables[0]) * BLOCK_SIZE
            self._do(node, node.protocol.producer.offer(request_id, lease, tables, tokens, self.now))

    def abort(self, which: int, offer: int) -> None:
        """A producer's engine takes an offer back."""
        node = self._pick_node(which)
        heard = sorted(set(node.offers) - {order[0] for order in node.orders})
        if heard:
            self._do(node, node.protocol.producer.abort(heard[offer % len(heard)], self.now))

    def claim(self, which: int, offer: int, change: int) -> None:
        """A request arrives that refers to some offer, of now or long ago, sometimes tampered with."""
        if not self._made:
            return
        node = self._pick_node(which)
        named = self._made[-1 - offer % min(len(self._made), 6)]
        tampered = {
            1: replace(named, lease=named.lease + 1),
            2: replace(named, epoch=named.epoch + 1),
            3: replace(named, request_id=f"{named.request_id}-other"),
            4: replace(named, num_tokens=named.num_tokens + BLOCK_SIZE),
        }.get(change, named)
        request_id = f"decode-{self._next()}"
        node.claims[request_id] = tampered
        self._do(node, node.protocol.consumer.claim(request_id, tampered, self.now))

    def load(self, which: int, request: int, first_block_index: int) -> None:
        """A request that has claimed gets blocks."""
        node = self._pick_node(which)
        waiting = sorted(set(node.claims) - set(node.loads))
        if not waiting:
            return
        request_id = waiting[request % len(waiting)]
        offer = node.claims[request_id]
        num_blocks = offer.num_tokens // BLOCK_SIZE
        first = first_block_index % num_blocks
        block_ids = node.allocate(num_blocks - first)
        if not block_ids:
            return
        node.loads[request_id] = SimulatedLoad((offer.engine_id, offer.epoch, offer.lease), first, block_ids)
        blocks = (GroupBlocks(first, block_ids),)
        self._do(node, node.protocol.consumer.load(request_id, blocks, self.now))

    def drop(self, which: int, request: int) -> None:
        """A request is aborted by its client."""
        node = self._pick_node(which)
        if node.claims:
            request_id = sorted(node.claims)[request % len(node.claims)]
            if request_id not in node.loads:
                del node.claims[request_id]
            self._do(node, node.protocol.consumer.drop(request_id, self.now))

    def deliver(self, which: int) -> bool:
        """Something that is under way between two nodes arrives."""
        waiting = [(node, peer) for node in self._nodes.values() for peer, box in node.inbox.items() if box]
        if not waiting:
            return False
        node, peer_id = waiting[which % len(waiting)]
        event = node.inbox[peer_id].popleft()
        if isinstance(event, bool):
            self._do(node, node.protocol.peer_connected(peer_id, event, self.now))
        elif isinstance(event, bytes):
            self._do(node, node.protocol.message_received(peer_id, event, self.now))
        else:
            self._forget_peer(node, peer_id)
            for request_id in [key for key, read in node.reads.items() if read.order.peer_id == peer_id]:
                self._end_read(node, request_id, event)
            self._do(node, node.protocol.peer_lost(peer_id, event, self.now))
        return True

    def copy(self, which: int) -> bool:
        """A read goes on by one region, or checks its guard and ends."""
        reading = [(node, key) for node in self._nodes.values() for key in node.reads]
        if not reading:
            return False
        node, request_id = reading[which % len(reading)]
        read = node.reads[request_id]
        guard = read.order.guard
        holds = read.source.guards[guard.index] == guard.value
        if read.num_copied == 0:
            read.held_before = holds
        if read.error is not None:
            self._end_read(node, request_id, read.error)
        elif read.num_copied < len(read.order.pairs):
            local, remote, size = (int(value) for value in read.order.pairs.table[read.num_copied])
            node.pool[local : local + size] = read.source.pool[remote : remote + size]
            read.num_copied += 1
        else:
            is_fresh = holds if self._checks_after_copy else read.held_before
            self._end_read(node, request_id, None if is_fresh else StaleRegionError("the guard changed"))
        return True

    def tick(self, seconds: float) -> None:
        """Time passes."""
        self.now += seconds
        for node in self._nodes.values():
            for read in node.reads.values():
                if read.deadline <= self.now and read.error is None:
                    read.error = TransferTimeoutError("the read took too long")
            self._do(node, node.protocol.advance(self.now))
            require(node.protocol.next_deadline() > self.now, "advance does everything that is due")

    def kill(self, which: int) -> None:
        """A node dies and another start of it takes its place. Mapped memory outlives it in its readers."""
        old = self._pick_node(which)
        for remote, remote_peer_id in list(old.links.values()):
            remote.inbox[remote_peer_id].append(PeerLostError("the peer died"))
            del remote.links[remote_peer_id]
        self._nodes[old.address] = self._new_node(old.address)

    def sever(self, which: int) -> None:
        """A connection breaks; either end learns of it in its own time."""
        linked = [(node, peer_id) for node in self._nodes.values() for peer_id in node.links]
        if linked:
            node, peer_id = linked[which % len(linked)]
            remote, remote_peer_id = node.links.pop(peer_id)
            del remote.links[remote_peer_id]
            node.inbox[peer_id].append(PeerLostError("the connection broke"))
            remote.inbox[remote_peer_id].append(PeerLostError("the connection broke"))

    def settle(self) -> None:
        """Everything that is under way arrives, and every read ends. No time passes."""
        for node_index in range(len(self._nodes)):
            while self._pick_node(node_index).orders:
                self.hear(node_index)
        while self.deliver(0) or self.copy(0):
            pass

    def finish(self) -> None:
        """Order nothing any more, let time pass, and see that everything ends and nothing is left."""
        self.settle()
        end = self.now + _LONGEST_WAIT_S
        while (due := min(node.protocol.next_deadline() for node in self._nodes.values())) < math.inf:
            require(due <= end, f"something still waits after {_LONGEST_WAIT_S} s")
            self.tick(max(due - self.now, 0.0))
            self.settle()
        for node in self._nodes.values():
            require(not node.offers and not node.loads, "every offer and every load is reported")
            for request_id in node.claims:
                self._do(node, node.protocol.consumer.drop(request_id, self.now))
            require(node.protocol.producer.num_offers == 0, "the producer forgets what ended")
            require(node.protocol.consumer.num_loads == 0, "the consumer forgets what ended")
            require(not any(node.guards), "guards are clear")
            require(sorted(node.free_blocks) == list(range(1, NUM_BLOCKS)), "all blocks are free")

    # -- what a runtime does with actions --------------------------------------------------------------

    def _do(self, node: SimulatedNode, actions: list[Action]) -> None:
        waiting = deque(actions)
        while waiting:
            waiting.extend(self._act(node, waiting.popleft()))

    def _act(self, node: SimulatedNode, action: Action) -> list[Action]:
        match action:
            case Connect(address):
                return self._connect(node, address)
            case Send(peer_id, message):
                data = encode(message)
                if peer_id in node.links:
                    remote, remote_peer_id = node.links[peer_id]
                    remote.inbox[remote_peer_id].append(data)
            case SetGuard(index, value):
                node.guards[index] = value
            case ClearGuard(index):
                node.guards[index] = 0
            case StartRead():
                require(action.request_id not in node.reads, "one read at a time for a request")
                source = node.links.get(action.peer_id, (node, 0))[0]
                node.reads[action.request_id] = SimulatedRead(action, source, self.now + action.timeout_s)
                if action.peer_id not in node.links:
                    node.reads[action.request_id].error = PeerLostError("no such peer")
            case Disconnect(peer_id):
                self._disconnect(node, peer_id)
            case OfferEnded():
                self._offer_ended(node, action)
            case LoadEnded():
                self._load_ended(node, action)
        return []

    def _connect(self, node: SimulatedNode, address: str) -> list[Action]:
        remote = self._nodes[address]
        peer_id, remote_peer_id = self._next(), self._next()
        node.links[peer_id] = (remote, remote_peer_id)
        remote.links[remote_peer_id] = (node, peer_id)
        node.inbox[peer_id] = deque([False])
        remote.inbox[remote_peer_id] = deque([True])
        return node.protocol.consumer.connecting(address, peer_id, self.now)

    def _disconnect(self, node: SimulatedNode, peer_id: int) -> None:
        for read in node.reads.values():
            if read.order.peer_id == peer_id:
                read.error = TransportClosedError("disconnected")
        if peer_id in node.links:
            remote, remote_peer_id = node.links[peer_id]
            remote.inbox[remote_peer_id].append(PeerLostError("the peer hung up"))
            del remote.links[remote_peer_id]
        self._forget_peer(node, peer_id)

    def _forget_peer(self, node: SimulatedNode, peer_id: int) -> None:
        node.links.pop(peer_id, None)
        node.inbox.pop(peer_id, None)

    def _end_read(self, node: SimulatedNode, request_id: str, error: KVTransferError | None) -> None:
        del node.reads[request_id]
        self._do(node, node.protocol.consumer.read_ended(request_id, error, self.now))

    # -- what must hold --------------------------------------------------------------------------------

    def _offer_ended(self, node: SimulatedNode, ended: OfferEnded) -> None:
        require(ended.request_id in node.offers, "an offer ends once")
        lease, block_ids = node.offers.pop(ended.request_id)
        require(lease not in node.guards, "the guard is cleared before blocks can be reused")
        name = (node.identity.engine_id, node.identity.epoch, lease)
        require(ended.outcome != "delivered" or name in self._loaded, "delivered means loaded")
        self.outcomes[f"offer {ended.outcome}"] += 1
        node.free(block_ids, scribble=255)

    def _load_ended(self, node: SimulatedNode, ended: LoadEnded) -> None:
        require(ended.request_id in node.loads, "a load is reported once")
        require(ended.request_id not in node.reads, "nothing writes into the blocks of a load that is over")
        load = node.loads.pop(ended.request_id)
        del node.claims[ended.request_id]
        require((ended.error is None) == (ended.outcome != "failed"), "a failure has a reason")
        if ended.outcome == "loaded":
            self._loaded.add(load.name)
            require(load.name in self._contents, "what was loaded had been offered")
            expected = self._contents[load.name][load.first_block_index :]
            require(node.holds(load.block_ids, expected), "loaded bytes are the offered ones")
        self.outcomes[f"load {ended.outcome}"] += 1
        node.free(load.block_ids, scribble=254)

    # -- small things ----------------------------------------------------------------------------------

    def _new_node(self, address: str) -> SimulatedNode:
        fields: dict[str, str | int] = {"model": "simulated", "block_size": BLOCK_SIZE}
        layout = simulated_layout(address)
        identity = Identity(address, self._next(), compatibility.digest(fields), fields, layout)
        producer_class, consumer_class = self._classes
        protocol = NodeProtocol(
            producer_class(identity, _CONFIG, NUM_GUARDS), consumer_class(identity, _CONFIG)
        )
        return SimulatedNode(identity, protocol, np.zeros(layout.pool_bytes, np.uint8))

    def _pick_node(self, which: int) -> SimulatedNode:
        return list(self._nodes.values())[which % len(self._nodes)]

    def _next(self) -> int:
        self._counter += 1
        return self._counter


def explore(simulation: Simulation, seed: int, num_steps: int = 60) -> None:
    """Drive a simulation through one random schedule, and see that it ends well.

    Raises:
        PromiseBroken: a promise of the protocol does not hold in this schedule.
    """
    generator = random.Random(seed)

    def number() -> int:
        return generator.randrange(64)

    def seconds() -> float:
        return generator.choices((0.01, 0.2, 2.0, 6.0, 40.0), (8, 4, 2, 1, 1))[0]

    operations: dict[Callable[[], object], float] = {
        lambda: simulation.offer(number(), number()): 6,
        lambda: simulation.hear(number()): 8,
        lambda: simulation.abort(number(), number()): 1,
        lambda: simulation.claim(number(), number(), number()): 8,
        lambda: simulation.load(number(), number(), number()): 8,
        lambda: simulation.drop(number(), number()): 1,
        lambda: simulation.deliver(number()): 40,
        lambda: simulation.copy(number()): 20,
        lambda: simulation.tick(seconds()): 3,
        lambda: simulation.kill(number()): 0.4,
        lambda: simulation.sever(number()): 0.4,
    }
    for operation in generator.choices(list(operations), list(operations.values()), k=num_steps):
        operation()
    simulation.finish()
