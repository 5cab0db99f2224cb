"""A node: the reference engine's scheduler, the connector's scheduler half and the handoff driver over
simulated memory.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from kvferry.connector.config import CacheConfig, EngineConfig, KVTransferConfig, ModelConfig, SchedulerConfig
from kvferry.connector.errors import ConnectorError
from kvferry.connector.handoff.config import HandoffConfig
from kvferry.connector.handoff.consumer import ConsumerProtocol
from kvferry.connector.handoff.events import Identity, LoadEnded, OfferEnded
from kvferry.connector.handoff.messages import PROTOCOL_VERSION
from kvferry.connector.handoff.node import NodeProtocol
from kvferry.connector.handoff.producer import ProducerProtocol
from kvferry.connector.kv_cache_specs import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from kvferry.connector.output import KVConnectorOutput
from kvferry.connector.p2p.loop import HandoffDriver
from kvferry.connector.p2p.orders import HandoffMetadata, WorkerAddress
from kvferry.connector.p2p.outcomes import Outcomes
from kvferry.connector.p2p.params import CONTINUES, MOVE, MOVE_AS, MOVED
from kvferry.connector.p2p.scheduler import HandoffScheduler
from kvferry.connector.planning import compatibility
from kvferry.connector.planning.layout import KVLayout, LayerLayout
from kvferry.lab.engine.request import BlockHasher, Request
from kvferry.lab.engine.scheduler import Scheduler
from kvferry.lab.engine.step import ScheduledRequest, StepPlan
from kvferry.lab.engine.types import FinishReason, GenerationRequest, SamplingParams
from kvferry.router.nodes.states import Abilities
from kvferry.runner_mixin.kv_cache import KVCacheManager, get_request_block_hasher, sha256
from kvferry.runner_mixin.outputs import ModelRunnerOutput

from .network import Clock, Guards, Network, SimulatedEndpoint, require

BLOCK_SIZE = 4
NUM_GROUPS = 2
VOCABULARY = 50_021
MODEL = "simulated"
_MASK = (1 << 64) - 1
_PAGE_BYTES = 8 * BLOCK_SIZE
#: How long a node that has nothing to compute waits for news before it looks again, and what a step without
#: tokens takes.
_IDLE_S, _EMPTY_STEP_S = 1.0, 0.0005
#: The handoff thread gets the processor this long after something has happened.
_THREAD_S = 0.00005
_WEIGHTS = np.array([(0x9E3779B97F4A7C15 * (2 * i + 1)) & _MASK | 1 for i in range(1 << 16)], np.uint64)


def mix(number: int, more: int) -> int:
    """Return 64 bits that depend on all bits of both numbers."""
    value = (number ^ (more + 0x9E3779B97F4A7C15)) * 0xBF58476D1CE4E5B9 & _MASK
    return (value ^ value >> 31) * 0x94D049BB133111EB & _MASK


class Text:
    """The fingerprints of a sequence of tokens: one per group and token, of all tokens up to it."""

    def __init__(self, salt: str = "") -> None:
        self._chain = sum(salt.encode())
        self._known = 0
        self.prints = np.zeros((NUM_GROUPS, 64), np.uint64)

    def extend(self, tokens: Sequence[int]) -> None:
        """Take in the tokens after those that are known."""
        if len(tokens) > self.prints.shape[1]:
            larger = np.zeros((NUM_GROUPS, 2 * len(tokens)), np.uint64)
            larger[:, : self._known] = self.prints[:, : self._known]
            self.prints = larger
        for place in range(self._known, len(tokens)):
            self._chain = chain = mix(self._chain, tokens[place])
            for group in range(NUM_GROUPS):
                self.prints[group, place] = mix(chain, group)
        self._known = len(tokens)


def next_token(prints: Sequence[np.ndarray[Any, np.dtype[np.uint64]]]) -> int:
    """Return the token that follows what attention reads: per group, the fingerprints of all tokens
    so far.
    """
    total = sum(
        int((each * _WEIGHTS[: len(each)]).sum()) * (2 * group + 1) for group, each in enumerate(prints)
    )
    return (total & _MASK) % VOCABULARY


def answer_to(prompt: Sequence[int], num_tokens: int, salt: str = "") -> list[int]:
    """Return what a node without any cache answers."""
    text, tokens = Text(salt), list(prompt)
    for _ in range(num_tokens):
        text.extend(tokens)
        tokens.append(next_token([text.prints[group, : len(tokens)] for group in range(NUM_GROUPS)]))
    return tokens[len(prompt) :]


@dataclass(frozen=True)
class Shape:
    """What all nodes of a fleet have in common.

    Attributes:
        step_s, prompt_token_s, answer_s: The line of a step's time over its prompt tokens and its answers.
    """

    num_blocks: int = 64
    max_num_seqs: int = 8
    chunk_tokens: int = 32
    num_guards: int = 16
    step_s: float = 0.024
    prompt_token_s: float = 0.0009
    answer_s: float = 0.005
    handoff: HandoffConfig = field(default_factory=HandoffConfig)


@dataclass(frozen=True)
class Parts:
    """The classes that a fleet is made of; the tests plant bugs by other ones."""

    producer: type[ProducerProtocol] = ProducerProtocol
    consumer: type[ConsumerProtocol] = ConsumerProtocol
    half: type[HandoffScheduler] = HandoffScheduler
    scheduler: type[Scheduler] = Scheduler
    manager: type[KVCacheManager] = KVCacheManager
    outcomes: type[Outcomes] = Outcomes
    endpoint: type[SimulatedEndpoint] = SimulatedEndpoint
    hasher: BlockHasher = field(default_factory=lambda: get_request_block_hasher(BLOCK_SIZE, sha256))
    exchange: Any = None
    retracts: bool = True


class _Sorted(set[str]):
    """A set that is walked in one order in every process."""

    def __iter__(self) -> Any:
        return iter(sorted(super().__iter__()))


@dataclass(eq=False)
class Call:
    """A request to a node, as its HTTP server sees it.

    The caller learns by the callbacks, after the network's delay.

    Attributes:
        on_events: Called with events of a stream, and what became of the load.
        on_whole: Called with an answer that is no stream: status and body.
        on_end: Called at the end of a stream.
        on_lost: Called when the connection broke.
    """

    body: Mapping[str, Any]
    on_events: Callable[[list[bytes], str, str], None]
    on_whole: Callable[[int, dict[str, Any]], None]
    on_end: Callable[[], None]
    on_lost: Callable[[], None]
    request: Request | None = None
    text: Text = field(default_factory=Text)
    is_to_move: bool = False
    is_over: bool = False
    num_sent: int = 0


class SimulatedNode:
    """One start of a node.

    Attributes:
        calls: Those that have not ended, by request.
        is_draining: It takes no new requests, and its process ends when it has none.
        counts: Ends of offers and loads by outcome, and steps.
    """

    def __init__(
        self,
        clock: Clock,
        network: Network,
        name: str,
        epoch: int,
        role: str,
        shape: Shape,
        parts: Parts,
        counts: Counter[str],
    ) -> None:
        self.clock, self.network, self.name, self.url = clock, network, name, f"http://{name}"
        self.epoch, self.role, self.shape, self.parts, self.counts = epoch, role, shape, parts, counts
        self.abilities = Abilities(continues_answers=MODEL)
        self.is_draining = self.is_dead = False
        # What the router knows of it.
        self.in_flight = self.num_at_once = 0
        self.calls: dict[str, Call] = {}
        self._inbox: list[Callable[[], None]] = []
        self._arrived: dict[Call, None] = {}  # calls whose requests the engine's thread does not have yet
        self._is_stepping = False
        self._is_planned = False
        self._idle_version = 0
        self._num_added = 0
        transfer = KVTransferConfig("simulated", role, engine_id=name)  # type: ignore[arg-type]
        config = EngineConfig(
            ModelConfig(MODEL, "float32", (shape.num_blocks // NUM_GROUPS - 1) * BLOCK_SIZE),
            CacheConfig(BLOCK_SIZE),
            SchedulerConfig(shape.chunk_tokens, shape.max_num_seqs),
            kv_transfer=transfer,
        )
        spec = FullAttentionSpec(BLOCK_SIZE, 1, 1, torch.int32)
        groups = tuple(KVCacheGroupSpec((f"layer.{group}",), spec) for group in range(NUM_GROUPS))
        tensor = KVCacheTensor(
            shape.num_blocks * _PAGE_BYTES, tuple(f"layer.{each}" for each in range(NUM_GROUPS))
        )
        pool = KVCacheConfig(shape.num_blocks, (tensor,), groups)
        self.memory = np.zeros((shape.num_blocks, BLOCK_SIZE), np.uint64)
        self.guards = Guards(shape.num_guards)
        address = f"sim:{name}"
        raw = self.memory.reshape(-1).view(np.uint8)
        self.endpoint = parts.endpoint(network, address, raw, self.guards, self._plan_driver)
        fields: dict[str, str | int] = {"model": MODEL}
        layers = tuple(
            LayerLayout(f"layer.{group}", group, "uint64", 0, _PAGE_BYTES, ((0, _PAGE_BYTES),), BLOCK_SIZE)
            for group in range(NUM_GROUPS)
        )
        layout = KVLayout(shape.num_blocks, raw.nbytes, layers)
        identity = Identity(name, epoch, compatibility.digest(fields), fields, layout)
        self.protocol = PROTOCOL_VERSION
        self.handoffs = NodeProtocol(
            parts.producer(identity, shape.handoff, shape.num_guards), parts.consumer(identity, shape.handoff)
        )
        self.outcomes = parts.outcomes("sim", "uniform")
        place = WorkerAddress(address, epoch, 0)
        transport: Any = SimpleNamespace(guards=self.guards)
        self.driver = HandoffDriver(transport, self.endpoint, self.handoffs, self.outcomes, identity, place)
        self._driver_due = float("inf")
        self.half = parts.half(transfer, pool)
        self.half.set_handshake_metadata({0: place})
        self.place = self.half.describe()
        self.manager = parts.manager(pool, config.model.max_model_len)
        self.scheduler = parts.scheduler(config, self.manager, self.half)
        self._watch_ends()

    def __repr__(self) -> str:
        return f"<{self.name}, start {self.epoch}>"

    @property
    def is_ready(self) -> bool:
        return not (self.is_dead or self.is_draining)

    def _watch_ends(self) -> None:
        """Count how offers and loads end, and let the engine's thread know at once."""
        offer_ended, load_ended = self.outcomes.offer_ended, self.outcomes.load_ended
        take_open = self.outcomes.take_open

        def note_offer(ended: OfferEnded) -> None:
            self.counts[f"offers {ended.outcome}"] += 1
            offer_ended(ended)
            self._wake()

        def note_load(ended: LoadEnded, now: float) -> None:
            self.counts[f"loads {ended.outcome}"] += 1
            load_ended(ended, now)
            self._wake()

        self.outcomes.take_open = lambda request_ids: _Sorted(take_open(request_ids))  # type: ignore[method-assign]
        self.outcomes.offer_ended = note_offer  # type: ignore[method-assign]
        self.outcomes.load_ended = note_load  # type: ignore[method-assign]

    # -- the handoff thread ----------------------------------------------------------------------------

    def _plan_driver(self) -> None:
        if self._driver_due > self.clock.now + _THREAD_S:
            self._driver_due = self.clock.now + _THREAD_S
            self.clock.after(_THREAD_S, self._drive, self._driver_due)

    def _drive(self, due: float) -> None:
        if self.is_dead or due != self._driver_due:
            return
        self._driver_due = float("inf")
        self.driver.run_once(0.0)
        deadline = self.handoffs.next_deadline()
        if deadline < self._driver_due:
            self._driver_due = max(deadline, self.clock.now + 1e-6)
            self.clock.after(self._driver_due - self.clock.now, self._drive, self._driver_due)

    # -- what the server hands to the engine's thread ----------------------------------------------------

    def receive(self, call: Call) -> None:
        """Take in a request that has arrived."""
        if self.is_dead:
            self.clock.after(self.network.delay(), partial(_lost, call))
            return
        self._arrived[call] = None
        self._tell(lambda: self._add(call))

    def abort(self, call: Call) -> None:
        """End a request whose client has left."""
        if not self.is_dead:
            self._tell(lambda: self._abort(call))

    def _tell(self, command: Callable[[], None]) -> None:
        self._inbox.append(command)
        self._wake()

    def _add(self, call: Call) -> None:
        del self._arrived[call]
        body = call.body
        params = dict(body.get("kv_transfer_params") or {})
        if (name := params.get(MOVE)) is not None:
            self._move(name)
            return
        known = params.get(CONTINUES) or {}
        self._num_added += 1
        source = GenerationRequest(
            f"{self.name}.{self.epoch}.{self._num_added}",
            tuple(body["prompt"]),
            SamplingParams(max_tokens=body["max_tokens"], temperature=0.0),
            params or None,
            cache_salt=body.get("cache_salt", ""),
            known_token_ids=tuple(known.get("token_ids") or ()),
            move_as=known.get(MOVE_AS) or "",
        )
        request = call.request = Request(source.request_id, source, self.parts.hasher, self.clock.now)
        call.text = Text(source.cache_salt)
        if params.get("do_release"):
            self.scheduler.add(request)
            self._finish(call, "abort")
            return
        try:
            self.scheduler.add(request)
        except ConnectorError as error:
            self._answer_whole(call, 400, {"error": {"message": str(error)}})
            return
        self.calls[request.request_id] = call

    def _abort(self, call: Call) -> None:
        if call.request is not None and call.request.request_id in self.calls:
            self._finish(call, "abort")

    def _move(self, name: str) -> None:
        for call in self.calls.values():
            if call.request is not None and call.request.source.move_as == name and not call.is_to_move:
                self.scheduler.handoffs.on_stopping(call.request)
                call.is_to_move = True

    def _finish(self, call: Call, reason: FinishReason) -> Mapping[str, Any] | None:
        assert call.request is not None
        self.calls.pop(call.request.request_id, None)
        call.is_over = True
        return self.scheduler.finish(call.request, reason)

    # -- steps -----------------------------------------------------------------------------------------

    def _wake(self) -> None:
        if not (self._is_stepping or self._is_planned or self.is_dead):
            self._is_planned = True
            self.clock.after(0.0, self._begin_step)

    def _begin_step(self) -> None:
        self._is_planned = False
        if self._is_stepping or self.is_dead:
            return
        commands, self._inbox = self._inbox, []
        for command in commands:
            command()
        if not self.scheduler.has_work:
            return
        self._is_stepping = True
        plan = self.scheduler.plan()
        require(not plan.error, "the connector gives orders for each step", plan.error)
        self._prepare(plan)
        num_prompt = num_answers = 0
        for item in plan.scheduled_requests:
            self._write(item)
            num_answers += item.num_scheduled_tokens == 1
            num_prompt += item.num_scheduled_tokens if item.num_scheduled_tokens > 1 else 0
        shape = self.shape
        line = shape.step_s + num_prompt * shape.prompt_token_s + num_answers * shape.answer_s
        self.counts["steps"] += 1
        self.clock.after(line if plan.scheduled_requests else _EMPTY_STEP_S, self._end_step, plan)

    def _prepare(self, plan: StepPlan) -> None:
        """Do what the worker half does before a step."""
        if plan.preempted_req_ids and self.parts.retracts:
            self.driver.retract(plan.preempted_req_ids)
        self.counts["preemptions"] += len(plan.preempted_req_ids)
        orders = plan.kv_connector_metadata
        if isinstance(orders, HandoffMetadata) and not orders.is_empty():
            self.driver.submit(orders)

    def _write(self, item: ScheduledRequest) -> None:
        """Write the fingerprints of the tokens that a step computes, at its start: a block that is used too
        early shows.
        """
        text = self.calls[item.request_id].text
        text.extend(item.request.all_token_ids)
        first, end = item.num_computed_tokens, item.num_computed_tokens + item.num_scheduled_tokens
        for group, table in enumerate(item.block_ids):
            places = np.arange(first, end)
            blocks = np.asarray(table)[places // BLOCK_SIZE]
            self.memory[blocks, places % BLOCK_SIZE] = text.prints[group, first:end]

    def _read(self, item: ScheduledRequest) -> list[np.ndarray[Any, np.dtype[np.uint64]]]:
        """Return what attention reads, per group."""
        end = item.num_computed_tokens + item.num_scheduled_tokens
        num_blocks = -(-end // BLOCK_SIZE)
        return [self.memory[table[:num_blocks]].reshape(-1)[:end] for table in item.block_ids]

    def _end_step(self, plan: StepPlan) -> None:
        self._is_stepping = False
        if self.is_dead:
            return
        names, tokens = [], []
        for item in plan.scheduled_requests:
            prints = self._read(item)
            expected = self.calls[item.request_id].text.prints
            for group, each in enumerate(prints):
                wrong = np.flatnonzero(each != expected[group, : len(each)])
                require(not wrong.size, "a step reads only right blocks", (item.request, self, wrong[:4]))
            names.append(item.request_id)
            tokens.append((next_token(prints),) if item.yields_token else ())
        report = self.outcomes.take_report()
        report.finished_sending = _Sorted(report.finished_sending)
        report.finished_recving = _Sorted(report.finished_recving)
        self._check_loads(report)
        outcome = self.scheduler.update(plan, ModelRunnerOutput(tuple(names), tuple(tokens), report))
        for request in outcome.new_tokens:
            self._answer(self.calls[request.request_id])
        for request, why in outcome.failed:
            if (call := self.calls.get(request.request_id)) is not None:
                self._finish(call, "error")
                self._answer_whole(call, 500, {"error": {"message": why}})
        if plan.scheduled_requests or outcome.failed or self._inbox or not report.is_empty():
            self._wake()
        elif self.scheduler.has_work:
            self._idle_version += 1
            self.clock.after(_IDLE_S, self._look_again, self._idle_version)

    def _look_again(self, version: int) -> None:
        if version == self._idle_version:
            self._wake()

    def _check_loads(self, report: KVConnectorOutput) -> None:
        """Check that nothing writes any more into the blocks of a load that is over."""
        for request_id in report.finished_recving:
            is_read = request_id in self.driver.loads_in_transfer
            require(not is_read, "a load ends after the last byte", request_id)

    # -- answers ---------------------------------------------------------------------------------------

    def _answer(self, call: Call) -> None:
        request = call.request
        assert request is not None
        num_left = request.source.sampling.max_tokens - request.num_output_tokens
        reason: FinishReason | None = "length" if num_left <= 0 else (MOVED if call.is_to_move else None)
        params = None if reason is None else self._finish(call, reason)
        token = request.all_token_ids[-1]
        if not call.body.get("stream"):
            if reason is not None:
                self._answer_whole(call, 200, self._whole(call, token, params))
            return
        error = request.figures.transfer.error if request.figures.transfer is not None else ""
        result = "failed" if error else ("loaded" if request.figures.num_loaded_tokens else "none")
        more = "" if reason != MOVED else f', "kv_transfer_params": {json.dumps(params)}, "metrics": {{}}'
        event = _event(token, reason, more, is_told=bool(call.body.get("return_token_ids")))
        self.clock.after(self.network.latency_s, lambda: call.on_events([event], result, error))
        if reason is not None:
            self.clock.after(self.network.latency_s, lambda: call.on_end())

    def _whole(self, call: Call, token: int, params: Mapping[str, Any] | None) -> dict[str, Any]:
        return {
            "object": "text_completion",
            "created": 1,
            "choices": [{"index": 0, "text": f"{token} ", "finish_reason": "length"}],
            "kv_transfer_params": params,
        }

    def _answer_whole(self, call: Call, status: int, body: dict[str, Any]) -> None:
        self.clock.after(self.network.latency_s, lambda: call.on_whole(status, body))

    # -- the end ---------------------------------------------------------------------------------------

    def kill(self) -> None:
        """End the process at once."""
        self.is_dead = True
        self.endpoint.close()
        for call in [*self._arrived, *self.calls.values()]:
            self.clock.after(self.network.delay(), partial(_lost, call))

    @property
    def is_empty(self) -> bool:
        """Whether nothing is under way, so that a node that drains may end."""
        return not (self.calls or self._inbox or self._is_stepping or self.scheduler.has_work)

    def check_empty(self) -> None:
        """Check that nothing is left."""
        for promise, kept in {
            "each request ends": not self.calls,
            "each transfer ends": not self.scheduler.handoffs.is_pending,
            "the scheduler half forgets what ended": self.half.num_requests == 0,
            "the producer forgets what ended": not self.handoffs.producer.offers,
            "the consumer forgets what ended": self.handoffs.consumer.num_loads == 0,
            "each read ends": not self.endpoint.reads and not self.driver.loads_in_transfer,
            "guards are clear": not any(self.guards.words),
            "no block stays pinned": not self.manager.pinned_request_ids,
            "all blocks are free": self.manager.num_free_blocks == self.shape.num_blocks - 1,
        }.items():
            require(kept, promise, self)


def _lost(call: Call) -> None:
    # Whoever has hung up meanwhile is called no more.
    call.on_lost()


def _event(token: int, reason: str | None, more: str, *, is_told: bool) -> bytes:
    """Write an event as a reference node does."""
    ids = f', "token_ids": [{token}]' if is_told else ""
    ends = "null" if reason is None else f'"{reason}"'
    choice = f'{{"index": 0, "text": "{token} ", "finish_reason": {ends}{ids}}}'
    head = '"id": "a", "object": "text_completion", "created": 1, "model": "m"'
    return f'data: {{{head}, "choices": [{choice}]{more}}}\n\n'.encode()
