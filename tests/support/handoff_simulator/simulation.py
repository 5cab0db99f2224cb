"""A simulated world for the handoff protocol: a virtual clock, a network with delays, memory, and processes
that die.

`Simulation` runs real `NodeProtocol`s, one for each rank of each engine. Every operation is a method that
takes numbers as its choices, so that a seeded generator (`explore`) and a property-based test can drive the
same world. Reads copy region by region, and anything may happen between two regions. Blocks are overwritten
as soon as their owner may reuse them.

A promise that is broken raises `PromiseBroken`, which shows the state of every offer and load.
"""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from kvferry.connector.handoff.config import HandoffConfig
from kvferry.connector.handoff.consumer import ConsumerProtocol
from kvferry.connector.handoff.events import (
    Action,
    GroupBlocks,
    Identity,
    LoadEnded,
    LocalBlocks,
    OfferEnded,
    RemoteOffer,
)
from kvferry.connector.handoff.messages import OLDEST_VERSION, PROTOCOL_VERSION
from kvferry.connector.handoff.node import NodeProtocol
from kvferry.connector.handoff.producer import ProducerProtocol
from kvferry.connector.planning import compatibility
from kvferry.transports.errors import KVTransferStateError

from ..explore import PromiseBroken
from .simulated import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    NUM_GUARDS,
    NUM_HEADS,
    NUM_LAYERS,
    Bytes,
    OfferName,
    SimulatedEngine,
    SimulatedLoad,
    SimulatedOffer,
    SimulatedRank,
    Spread,
    simulated_layout,
)
from .world import SimulatedWorld

_CONFIG = HandoffConfig(load_wait_s=60.0)
_ALIKE = (Spread(), Spread(), Spread())
#: The address of the engine that also speaks the version that will come after today's.
UPGRADED = "sim://b"
_ADDRESSES = ("sim://a", UPGRADED, "sim://c")
#: The first of three numbers that make `Simulation.offer` open an offer early, of one to three blocks.
_EARLY = 42
#: Longest time, in virtual seconds, until everything has ended after the last order.
_LONGEST_WAIT_S = 200.0


class Simulation(SimulatedWorld):
    """Engines, each producer and consumer, and everything between them.

    The one at `sim://c` keeps its layers apart.

    Args:
        producer_class, consumer_class: The protocols under test.
        checks_after_copy: Whether the transport checks guards after it has copied. False is a planted bug.
        spreads: How each engine's model is spread over ranks.
        addresses: Of the engines.

    Attributes:
        num_offered_loads: Reads after which an offer that no router has named is over.
    """

    num_offered_loads = 1

    def __init__(
        self,
        producer_class: type[ProducerProtocol] = ProducerProtocol,
        consumer_class: type[ConsumerProtocol] = ConsumerProtocol,
        checks_after_copy: bool = True,
        spreads: Sequence[Spread] = _ALIKE,
        addresses: Sequence[str] = _ADDRESSES,
        config: HandoffConfig = _CONFIG,
    ) -> None:
        super().__init__(checks_after_copy)
        self.outcomes: Counter[str] = Counter()
        self._classes = (producer_class, consumer_class)
        self._config = config
        self._contents: dict[OfferName, list[Bytes]] = {}
        # Digests of the ranks that computed it.
        self._weights: defaultdict[OfferName, set[str]] = defaultdict(set)
        self.made: list[RemoteOffer] = []
        # Rendezvous that were claimed, and whose request may still come.
        self._meetings: list[RemoteOffer] = []
        self._loaded: defaultdict[OfferName, set[tuple[str, int]]] = defaultdict(set)
        for address, spread in zip(addresses, spreads, strict=True):
            self.engines[address] = self._new_engine(address, spread)

    # -- what there is to choose from ------------------------------------------------------------------

    @property
    def num_made(self) -> int:
        """Offers that were made so far, by any engine."""
        return len(self.made)

    def is_awaited(self, which: int, num_blocks: int) -> bool:
        """Whether `offer` with these arguments makes the offer of a rendezvous that a request waits for."""
        return bool(self._fitting(self._pick_engine(which), 1 + num_blocks % 3))

    def is_computing(self, which: int) -> bool:
        """Whether an engine computes a prompt that it offers."""
        return self._pick_open(self._pick_engine(which), 0) is not None

    # -- operations: each picks its subject by a number, and does nothing if there is none -----------

    def offer(self, which: int, num_blocks: int) -> None:
        """Have a producer's scheduler make an offer.

        Args:
            num_blocks: Below 40: of a prompt that is computed. Below 60: of one that is still being computed.
                From 60 on: the offer is announced and then withdrawn, because its blocks were lost.
        """
        engine = self._pick_engine(which)
        block_ids = engine.allocate(1 + num_blocks % 3)
        if not block_ids:
            return
        self.say(
            lambda: (
                f"{engine.name}'s engine {'announces and withdraws' if num_blocks >= 60 else 'offers'} "
                f"a prompt of {len(block_ids)} block(s){' that is still being computed' * (40 <= num_blocks < 60)}"
            )
        )
        # Names repeat from one start of a node to the next: only the epoch tells them apart.
        number = 1 + sum(made.epoch == engine.epoch for made in self.made)
        request_id = f"prefill-{number}"
        meeting = self._take_meeting(engine, len(block_ids))
        offer = self._named(engine, request_id, number, len(block_ids))
        if meeting is not None:  # perhaps of another prompt than its consumer's
            named = self._named(engine, meeting.request_id, meeting.lease, len(block_ids))
            offer = replace(named, is_rendezvous=True)
        self.made.append(offer)
        lease = offer.lease
        for rank in engine.living_ranks:
            name = "" if meeting is None else meeting.request_id
            announce = partial(self._announce, rank, request_id, lease, name)
            if meeting is None:
                # Every rank learns of a request before it computes any of it, so before a consumer can know
                # the number.
                self.do(rank, announce())
            else:
                rank.orders.append(announce)
        if num_blocks >= 60:
            for rank in engine.living_ranks:
                rank.orders.append(partial(rank.protocol.producer.withdraw, lease))
            engine.free_blocks.extend(block_ids)  # nothing was written to them
            return
        is_finished = num_blocks < 40
        num_ready = len(block_ids) if is_finished else min(num_blocks % 2, len(block_ids) - 1)
        made = SimulatedOffer(lease, offer.content, number, block_ids, num_ready, is_finished)
        self._order_offer(engine, request_id, made)

    def _announce(self, rank: SimulatedRank, request_id: str, lease: int, name: str) -> list[Action]:
        num_loads = 1 if name else self.num_offered_loads
        return rank.protocol.producer.announce(request_id, lease, name, self.now, num_loads)

    def meet(self, which: int, producer: int, num_blocks: int) -> None:
        """Have a router name an offer that is still to be made, and a request that loads it arrive.

        The request that makes it arrives with one of the next offers of that producer, or never.
        """
        engine = self._pick_engine(producer)
        number = self.next_number("meeting")
        # Every other number: a claim of the next one, as `claim` may make, is of no rendezvous.
        named = self._named(engine, f"meeting-{number}", 2**40 + 2 * number, 1 + num_blocks % 3)
        self._meetings.append(replace(named, is_rendezvous=True))
        self.say(lambda: f"the router names {named.request_id} at {engine.name} for a rendezvous")
        self._claim(which, self._meetings[-1])

    def hand_over(self, producer: int, consumer: int, num_blocks: int) -> None:
        """Have a producer's scheduler make an offer, and a request arrive at a consumer that names it."""
        self.offer(producer, num_blocks)
        self.claim(consumer, 0, 0)

    def _take_meeting(self, engine: SimulatedEngine, num_blocks: int) -> RemoteOffer | None:
        """Take a rendezvous that the router may have sent an offer of this many blocks to, rightly or not."""
        fitting = self._fitting(engine, num_blocks)
        if not fitting:
            return None
        self._meetings.remove(fitting[0])
        return fitting[0]

    def _fitting(self, engine: SimulatedEngine, num_blocks: int) -> list[RemoteOffer]:
        return [
            meeting
            for meeting in self._meetings
            if meeting.epoch == engine.epoch and meeting.num_tokens <= num_blocks * BLOCK_SIZE
        ]

    def _named(self, engine: SimulatedEngine, name: str, lease: int, num_blocks: int) -> RemoteOffer:
        addresses = tuple(f"{engine.address}/{rank.number}" for rank in engine.ranks)
        tokens = num_blocks * BLOCK_SIZE
        content = f"of {name}, {tokens} tokens"
        return RemoteOffer(engine.address, engine.epoch, name, lease, addresses, tokens, (), content)

    def _order_offer(self, engine: SimulatedEngine, request_id: str, offer: SimulatedOffer) -> None:
        generator = np.random.default_rng(self.next_number("content"))
        shape = (NUM_LAYERS, BLOCK_SIZE, NUM_HEADS)
        contents = [generator.integers(0, 255, shape, dtype=np.uint8) for _ in offer.block_ids]
        engine.offers[request_id] = offer
        self._contents[engine.address, engine.epoch, offer.lease] = contents
        for rank in engine.living_ranks:
            so_far = (offer.num_ready, _table_so_far(offer), offer.is_finished)
            rank.orders.append(partial(self._make_offer, rank, request_id, offer, *so_far))

    def _make_offer(
        self,
        rank: SimulatedRank,
        request_id: str,
        offer: SimulatedOffer,
        num_ready: int,
        table: tuple[int, ...],
        is_finished: bool,
    ) -> list[Action]:
        producer, num_tokens = rank.protocol.producer, len(offer.block_ids) * BLOCK_SIZE
        lease, what = offer.lease, (offer.content, offer.guard_value)
        self._fill(rank, offer, slice(num_ready))
        if not is_finished:
            return producer.open(request_id, lease, (table,), num_tokens, num_ready * BLOCK_SIZE, *what)
        self._close(rank, request_id, offer)
        return producer.offer(request_id, lease, (table,), num_tokens, self.now, *what)

    def compute(self, which: int, offer: int) -> None:
        """Have a producer compute one more block of a prompt, perhaps the last."""
        engine = self._pick_engine(which)
        if named := self._pick_open(engine, offer):
            request_id, held = named
            self.say(lambda: f"{engine.name}'s engine computes one more block of {request_id}")
            held.num_ready += 1
            held.is_finished = held.num_ready == len(held.block_ids)
            for rank in engine.living_ranks:
                so_far = (held.num_ready, _table_so_far(held), held.is_finished)
                rank.orders.append(partial(self._extend, rank, request_id, held, *so_far))

    def _extend(
        self,
        rank: SimulatedRank,
        request_id: str,
        held: SimulatedOffer,
        num_ready: int,
        table: tuple[int, ...],
        is_finished: bool,
    ) -> list[Action]:
        producer = rank.protocol.producer
        self._fill(rank, held, slice(num_ready - 1, num_ready))
        if not is_finished:
            return producer.extend(request_id, (table,), num_ready * BLOCK_SIZE)
        self._close(rank, request_id, held)
        return producer.complete(request_id, (table,), self.now)

    def _fill(self, rank: SimulatedRank, offer: SimulatedOffer, computed: slice) -> None:
        name = (rank.engine.address, rank.engine.epoch, offer.lease)
        rank.fill(offer.block_ids[computed], self._contents[name][computed])
        self._weights[name].add(rank.identity.digest)

    def _close(self, rank: SimulatedRank, request_id: str, offer: SimulatedOffer) -> None:
        """A rank learns that the request of an offer has finished. From now on it owes the offer's end."""
        offer.closed.add(rank.number)
        self._free_if_over(rank.engine, request_id, offer)

    def preempt(self, which: int, offer: int) -> None:
        """Take the blocks of a request away while its prompt is being computed.

        Each rank ends the offer before it goes on.
        """
        engine = self._pick_engine(which)
        if named := self._pick_open(engine, offer):
            request_id, held = named
            self.say(lambda: f"{engine.name}'s engine preempts {request_id}")
            del engine.offers[request_id]
            engine.preempted.add(request_id)
            for rank in engine.living_ranks:
                rank.orders.append(partial(self._take_back, rank, request_id, held))
            # What is ordered with these blocks from now on, each rank carries out after it has ended the
            # offer.
            engine.free_blocks.extend(held.block_ids)

    def _take_back(self, rank: SimulatedRank, request_id: str, held: SimulatedOffer) -> list[Action]:
        self.do(rank, rank.protocol.producer.abort(request_id, self.now))
        self.require(held.guard_value not in rank.guards, "the guard is cleared before blocks can be reused")
        rank.scribble(held.block_ids, 253)
        return []

    def carry_out(self, which: int) -> None:
        """Have a rank carry out its scheduler's oldest order."""
        if waiting := [rank for rank in self.ranks if rank.orders]:
            rank = waiting[which % len(waiting)]
            order = rank.orders.popleft()
            self.say(lambda: f"{rank.name} carries out the order {_words_of(order)}")
            self.do(rank, order())

    def abort(self, which: int, offer: int) -> None:
        """Have a producer's engine take an offer back, or end its request before the prompt is computed."""
        engine = self._pick_engine(which)
        if engine.offers:
            request_id = sorted(engine.offers)[offer % len(engine.offers)]
            held = engine.offers[request_id]
            self.say(lambda: f"{engine.name}'s engine aborts {request_id}")
            held.is_finished = True
            for rank in engine.living_ranks:
                rank.orders.append(partial(self._abort, rank, request_id, held))

    def _abort(self, rank: SimulatedRank, request_id: str, offer: SimulatedOffer) -> list[Action]:
        self._close(rank, request_id, offer)
        return rank.protocol.producer.abort(request_id, self.now)

    def give_up(self, which: int, offer: int) -> None:
        """Have a router say that no consumer will come for an offer, rightly or not."""
        if self.made:
            named = self.made[-1 - offer % min(len(self.made), 6)]
            engine = self.engines[named.engine_id]
            self.say(lambda: f"the router tells {engine.name} that no consumer comes for {named.request_id}")
            for rank in engine.living_ranks:
                give_up = rank.protocol.producer.give_up
                rank.orders.append(partial(give_up, named.request_id, named.lease))

    def claim(self, which: int, offer: int, change: int) -> None:
        """Have a request arrive that names an offer, a current or an old one, sometimes with tampered
        params.
        """
        if not self.made:
            return
        named = self.made[-1 - offer % min(len(self.made), 6)]
        tampered = {
            1: replace(named, lease=named.lease + 1),
            2: replace(named, epoch=named.epoch + 1),
            # The lease number is part of a rendezvous's name, so no other rendezvous has it.
            3: replace(named, request_id=f"{named.request_id}-other", is_rendezvous=False),
            4: replace(named, num_tokens=named.num_tokens + BLOCK_SIZE),
            5: replace(named, addresses=named.addresses[::-1]),
            6: replace(named, addresses=named.addresses[:1]),
            7: replace(named, addresses=(*named.addresses, "sim://b/0")),
            8: replace(named, content="of another prompt"),
        }.get(change, named)
        self._claim(which, tampered)

    def _claim(self, which: int, named: RemoteOffer) -> None:
        engine = self._pick_engine(which)
        request_id = f"decode-{self.next_number('claim')}"
        is_right = named in (*self.made, *self._meetings)
        self.say(
            lambda: (
                f"{engine.name}'s engine gets {request_id}, which names {named.request_id}"
                f"{'' if is_right else f' wrongly: {named}'}"
            )
        )
        engine.claims[request_id] = named
        for rank in engine.living_ranks:
            rank.orders.append(partial(self._claim_at, rank, request_id, named))

    def _claim_at(self, rank: SimulatedRank, request_id: str, named: RemoteOffer) -> list[Action]:
        return rank.protocol.consumer.claim(request_id, named, self.now)

    def load(self, which: int, request: int, first_block_index: int) -> None:
        """Give blocks to a request that has claimed."""
        engine = self._pick_engine(which)
        waiting = sorted(set(engine.claims) - set(engine.loads))
        if not waiting or engine.is_doomed:
            return
        request_id = waiting[request % len(waiting)]
        offer = engine.claims[request_id]
        num_blocks = offer.num_tokens // BLOCK_SIZE
        first = first_block_index % num_blocks
        block_ids = engine.allocate(num_blocks - first)
        if not block_ids:
            return
        self.say(lambda: f"{engine.name}'s engine gives blocks to {request_id}")
        name = (offer.engine_id, offer.epoch, offer.lease)
        engine.loads[request_id] = SimulatedLoad(name, offer.content, first, block_ids)
        blocks = (GroupBlocks(first, block_ids),)
        for rank in engine.ranks:
            rank.orders.append(partial(self._load_at, rank, request_id, blocks))

    def _load_at(self, rank: SimulatedRank, request_id: str, blocks: LocalBlocks) -> list[Action]:
        return rank.protocol.consumer.load(request_id, blocks, self.now)

    def drop(self, which: int, request: int) -> None:
        """Abort a request, as its client may."""
        engine = self._pick_engine(which)
        if engine.claims:
            request_id = sorted(engine.claims)[request % len(engine.claims)]
            self.say(lambda: f"{engine.name}'s engine aborts {request_id}")
            if request_id not in engine.loads:
                del engine.claims[request_id]
            for rank in engine.living_ranks:
                rank.orders.append(partial(self._drop_at, rank, request_id))

    def _drop_at(self, rank: SimulatedRank, request_id: str) -> list[Action]:
        return rank.protocol.consumer.drop(request_id, self.now)

    def change_weights(self, which: int, weights: int) -> None:
        """Change what an engine computes.

        Each rank does so in its own time, after the orders that it already has.
        """
        engine = self._pick_engine(which)
        self.say(lambda: f"{engine.name}'s weights change")
        for rank in engine.living_ranks:
            # One of two, so that two engines are alike again after a while.
            rank.orders.append(partial(self._begin_anew, rank, weights % 2))

    def _begin_anew(self, rank: SimulatedRank, weights: int) -> list[Action]:
        fields = _fields(weights)
        rank.identity = replace(rank.identity, fields=fields, digest=compatibility.digest(fields))
        return rank.protocol.begin_anew(rank.identity, "the weights changed")

    def kill(self, which: int) -> None:
        """Kill an engine, and start another in its place."""
        old = self._pick_engine(which)
        for rank in old.living_ranks:
            self.die(rank)
        self.say(lambda: f"{old.name} starts again")
        self.engines[old.address] = self._new_engine(old.address, old.spread)

    def crash(self, which: int, is_mute: bool = False) -> None:
        """Kill an engine. Nothing is at its address until `kill` starts another.

        Args:
            is_mute: As for `die`.
        """
        for rank in self._pick_engine(which).living_ranks:
            self.die(rank, is_mute=is_mute)

    def kill_rank(self, which: int) -> None:
        """Kill one process of an engine. The others do not know yet, and live on."""
        self.die(self.ranks[which % len(self.ranks)])
        for address, engine in self.engines.items():
            if not engine.living_ranks:
                self.engines[address] = self._new_engine(address, engine.spread)

    # -- the end ---------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Deliver everything that is in flight, and end every read. No time passes."""
        while any(rank.orders for rank in self.ranks):
            self.carry_out(0)
        while self.deliver(0) or self.copy(0):
            pass

    def finish(self) -> None:
        """Stop giving orders, let time pass, and check that everything ends and nothing is left."""
        self.finish_orders()
        self.wait_for_the_end()

    def finish_orders(self) -> None:
        """Restart what is down, and carry out everything that can be without time passing, apart from new
        requests.
        """
        for index, engine in enumerate(list(self.engines.values())):
            if engine.is_doomed:
                self.kill(index)
            while self._pick_open(self._pick_engine(index), 0):
                self.compute(index, 0)
        self.settle()

    def wait_for_the_end(self) -> None:
        """Let time pass, and check that everything ends and nothing is left."""
        end = self.now + _LONGEST_WAIT_S
        while (due := min(rank.protocol.next_deadline() for rank in self.ranks)) < math.inf:
            self.require(due <= end, f"something still waits after {_LONGEST_WAIT_S} s")
            self.tick(max(due - self.now, 0.0))
            self.settle()
        for engine in self.engines.values():
            self.require(not engine.offers and not engine.loads, "every offer and every load is reported")
            self.require(sorted(engine.free_blocks) == list(range(1, NUM_BLOCKS)), "all blocks are free")
            for rank in engine.ranks:
                self._require_empty(engine, rank)

    def finish_at_once(self) -> None:
        """Let every request arrive and get blocks, and check that each handoff ends although no time passes.

        Then no handoff waits for a deadline, such as the end of a lease: an order or a message ends it.
        """
        while self._is_busy():
            before = self._progress
            for index, engine in enumerate(self.engines.values()):
                if sizes := [
                    meeting.num_tokens for meeting in self._meetings if meeting.epoch == engine.epoch
                ]:
                    self.offer(index, _EARLY + sizes[0] // BLOCK_SIZE - 1)
                while self._pick_open(engine, 0):
                    self.compute(index, 0)
                for number in range(len(engine.claims)):
                    self.load(index, number, 0)
            self.settle()
            self.require(self._progress != before or not self._is_busy(), "no handoff waits for a deadline")

    @property
    def _progress(self) -> tuple[int, int]:
        """Numbers of which one grows whenever an offer is made, or a handoff ends."""
        return self._counters.total(), self.outcomes.total()

    def _is_busy(self) -> bool:
        engines = self.engines.values()
        return bool(self._meetings) or any(engine.offers or engine.claims for engine in engines)

    def _require_empty(self, engine: SimulatedEngine, rank: SimulatedRank) -> None:
        for request_id in engine.claims:
            self.do(rank, rank.protocol.consumer.drop(request_id, self.now))
        self.require(rank.protocol.producer.num_offers == 0, "the producer forgets what ended")
        self.require(rank.protocol.producer.num_announced == 0, "what was announced is offered or withdrawn")
        self.require(rank.protocol.producer.num_awaited == 0, "no claim waits for ever for its request")
        self.require(rank.protocol.consumer.num_loads == 0, "the consumer forgets what ended")
        self.require(not any(rank.guards), "guards are clear")

    # -- what must hold --------------------------------------------------------------------------------

    def offer_ended(self, rank: SimulatedRank, ended: OfferEnded) -> None:
        engine = rank.engine
        if ended.request_id in engine.preempted:
            return
        self.require(ended.request_id in engine.offers, "an offer ends once")
        offer = engine.offers[ended.request_id]
        self.require(rank.number not in offer.ended, "an offer ends once")
        self.require(offer.guard_value not in rank.guards, "the guard is cleared before blocks can be reused")
        name = (engine.address, engine.epoch, offer.lease)
        self.require(
            ended.outcome != "delivered" or self._is_loaded(name), "delivered means loaded by every rank"
        )
        self.outcomes[f"offer {ended.outcome}"] += 1
        offer.ended.add(rank.number)
        self._free_if_over(engine, ended.request_id, offer)

    def _free_if_over(self, engine: SimulatedEngine, request_id: str, offer: SimulatedOffer) -> None:
        is_owed = engine.offers.get(request_id) is offer  # an abort may come after the end
        if is_owed and len(offer.closed) == len(offer.ended) == len(engine.ranks):
            del engine.offers[request_id]
            engine.free(offer.block_ids, scribble=255)

    def load_ended(self, rank: SimulatedRank, ended: LoadEnded) -> None:
        engine = rank.engine
        self.require(ended.request_id in engine.loads, "a load is reported once")
        load = engine.loads[ended.request_id]
        self.require(rank.number not in load.ended, "a load is reported once")
        is_read = any(request_id == ended.request_id for request_id, _ in rank.reads)
        self.require(not is_read, "nothing writes into the blocks of a load that is over")
        self.require((ended.error is None) == (ended.outcome != "failed"), "a failure has a reason")
        if ended.outcome == "loaded":
            self._loaded[load.name].add((engine.address, rank.number))
            self.require(load.name in self._contents, "what was loaded had been offered")
            made = {(offer.engine_id, offer.epoch, offer.lease): offer.content for offer in self.made}
            self.require(load.content == made[load.name], "what was loaded was computed from the same prompt")
            is_alike = self._weights[load.name] == {rank.identity.digest}
            self.require(is_alike, "what was loaded was computed with the same weights")
            expected = self._contents[load.name][load.first_block_index :]
            self.require(rank.holds(load.block_ids, expected), "loaded bytes are the offered ones")
        self.outcomes[f"load {ended.outcome}"] += 1
        load.ended.add(rank.number)
        if len(load.ended) == len(engine.ranks):
            del engine.loads[ended.request_id], engine.claims[ended.request_id]
            engine.free(load.block_ids, scribble=254)

    def _is_loaded(self, name: OfferName) -> bool:
        ranks = Counter(address for address, _ in self._loaded[name])
        return any(count == self.engines[address].spread.num_ranks for address, count in ranks.items())

    # -- small things ----------------------------------------------------------------------------------

    def _new_engine(self, address: str, spread: Spread) -> SimulatedEngine:
        fields = _fields(weights=0)
        engine = SimulatedEngine(address, self.next_number("epoch"), spread)
        producer_class, consumer_class = self._classes
        for number in range(spread.num_ranks):
            layout = simulated_layout(spread, number, is_uniform=address != "sim://c")
            identity = Identity(address, engine.epoch, compatibility.digest(fields), fields, layout)
            if address == UPGRADED:
                identity = replace(identity, spoken=range(OLDEST_VERSION, PROTOCOL_VERSION + 2))
            protocol = NodeProtocol(
                producer_class(identity, self._config, NUM_GUARDS),
                consumer_class(identity, self._config, number, spread.num_ranks),
            )
            pool = np.zeros(layout.pool_bytes, np.uint8)
            engine.ranks.append(SimulatedRank(engine, number, identity, protocol, pool))
        return engine

    def _pick_open(self, engine: SimulatedEngine, which: int) -> tuple[str, SimulatedOffer] | None:
        """Pick an offer whose prompt is still being computed."""
        found = [(name, offer) for name, offer in sorted(engine.offers.items()) if not offer.is_finished]
        return found[which % len(found)] if found else None

    def _pick_engine(self, which: int) -> SimulatedEngine:
        return list(self.engines.values())[which % len(self.engines)]


def _fields(weights: int) -> dict[str, str | int]:
    return {"model": "simulated", "weights": weights}


def _table_so_far(offer: SimulatedOffer) -> tuple[int, ...]:
    """The block table of a prompt that is being computed: the blocks that are ready, and the one being
    computed.
    """
    return offer.block_ids[: offer.num_ready + 1]


def _words_of(order: Any) -> str:
    """Say what an order tells a rank to do."""
    names = [arg for arg in order.args if isinstance(arg, str) and arg]
    return " ".join([order.func.__name__.strip("_"), *names])


# -- schedules from seeds ------------------------------------------------------------------------------

#: An operation of `Simulation` and its arguments.
Choice = tuple[str, tuple[Any, ...]]
#: Operations, one after the other.
Schedule = tuple[Choice, ...]


def draw(simulation: Simulation, seed: int, num_steps: int = 60) -> Schedule:
    """Draw a schedule in which anything may happen."""
    chance = random.Random(seed)
    busy = max(1.0, len(simulation.ranks) / 3)  # more ranks, more messages
    weights = {
        "offer": 6, "carry_out": 24 * busy, "compute": 6, "preempt": 0.5, "abort": 1, "give_up": 0.3,
        "claim": 8, "meet": 3, "load": 8, "drop": 1, "deliver": 40 * busy, "copy": 20 * busy,
        "tick": 3, "change_weights": 0.4, "kill": 0.4, "kill_rank": 0.2, "sever": 0.4,
    }  # fmt: skip
    num_arguments = {"claim": 3, "meet": 3, "load": 3} | dict.fromkeys(
        ("carry_out", "deliver", "copy", "kill", "kill_rank", "sever"), 1
    )

    def drawn(name: str) -> Choice:
        if name == "tick":
            seconds = chance.choices((0.01, 0.2, 2.0, 6.0, 40.0), (8, 4, 2, 1, 1))[0]
            late = chance.randrange(1 << len(simulation.ranks)) if chance.random() < 0.3 else 0
            return name, (seconds, late)
        return name, tuple(chance.randrange(64) for _ in range(num_arguments.get(name, 2)))

    names = chance.choices(list(weights), list(weights.values()), k=num_steps)
    return tuple(map(drawn, names))


def draw_without_faults(simulation: Simulation, seed: int, num_steps: int = 60) -> Schedule:
    """Draw a schedule in which nothing breaks and no time passes.

    Every process lives and every message arrives, but each rank comes to its orders and messages in its own
    time. Requests are preempted and aborted.
    """
    chance = random.Random(seed)

    def number() -> int:
        return chance.randrange(64)

    # Requests of two nodes that load from each other could hold the blocks for which the other one's wait.
    producer, consumer = chance.choice(((0, 2), (2, 0)))
    busy = max(1.0, len(simulation.ranks) / 3)
    drawn: dict[Callable[[], Choice], float] = {
        lambda: ("meet", (consumer, producer, number())): 6,
        lambda: ("hand_over", (producer, chance.choice((1, consumer)), number())): 6,
        lambda: ("carry_out", (number(),)): 24 * busy,
        lambda: ("compute", (producer, number())): 10,
        lambda: ("preempt", (producer, number())): 0.5,
        lambda: ("abort", (producer, number())): 0.5,
        lambda: ("load", (number(), number(), number())): 10,
        lambda: ("drop", (number(), number())): 0.5,
        lambda: ("deliver", (number(),)): 40 * busy,
        lambda: ("copy", (number(),)): 20 * busy,
    }
    return tuple(each() for each in chance.choices(list(drawn), list(drawn.values()), k=num_steps))


def run(simulation: Simulation, schedule: Schedule, *, is_without_faults: bool = False) -> None:
    """Drive a simulation through a schedule, and check that it ends well.

    Args:
        is_without_faults: Whether every handoff must end although no time passes.

    Raises:
        PromiseBroken: a promise of the protocol does not hold in this schedule.
    """
    for name, args in schedule:
        checked(simulation, partial(getattr(simulation, name), *args))
    if is_without_faults:
        checked(simulation, simulation.finish_at_once)
    checked(simulation, simulation.finish)


def explore(simulation: Simulation, seed: int, num_steps: int = 60) -> None:
    """Drive a simulation through a schedule from a seed."""
    simulation.num_offered_loads = 1 + (seed % 3 == 0)
    run(simulation, draw(simulation, seed, num_steps))


def explore_without_faults(simulation: Simulation, seed: int, num_steps: int = 60) -> None:
    """Drive a simulation through a schedule from a seed in which nothing breaks, and check that no handoff
    waits for a deadline.
    """
    run(simulation, draw_without_faults(simulation, seed, num_steps), is_without_faults=True)


def checked(simulation: Simulation, operation: Callable[[], object]) -> None:
    """Run an operation; a change of state that is in no table counts as a broken promise.

    Raises:
        PromiseBroken: a promise of the protocol does not hold.
    """
    try:
        operation()
    except KVTransferStateError as error:
        promise = f"records change their states as their tables say ({error})"
        raise PromiseBroken(promise, simulation.states()) from error
