"""Engines inside the process of a test: stepped by hand, in a thread of their own, or behind HTTP."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from aiohttp.test_utils import TestClient, TestServer

from kvferry.connector.config import KVTransferConfig
from kvferry.connector.stats import KVConnectorStats
from kvferry.lab.engine.core import EngineCore
from kvferry.lab.engine.engine import Engine
from kvferry.lab.engine.settings import EngineSettings
from kvferry.lab.engine.types import GenerationRequest, RequestMetrics, RequestOutput, SamplingParams
from kvferry.lab.node.app import NodeServer
from kvferry.runner_mixin import state
from tests.support.answers import Answer
from tests.support.patience import DEADLINE_S


class MakeNode(Protocol):
    """Make a node on the tiny model of a family."""

    def __call__(self, family: str = ..., **settings: Any) -> SteppedNode: ...


@dataclass
class SteppedNode:
    """An engine core that a test steps by hand, and all its outputs.

    A process has one slot for a connector. Each node puts its own connector there while it is at work.
    """

    core: EngineCore
    slot: Any
    handoffs: list[KVConnectorStats] = field(default_factory=list)
    outputs: dict[str, list[RequestOutput]] = field(default_factory=dict)

    @contextmanager
    def at_work(self) -> Iterator[EngineCore]:
        state._slot = self.slot
        try:
            yield self.core
        finally:
            state._slot = None

    def add(self, request_id: str, prompt: Sequence[int], **more: Any) -> None:
        """Add a request: `kv_transfer_params`, and sampling parameters (greedy, past the end token, with log
        probabilities).
        """
        params, salt = more.pop("kv_transfer_params", None), more.pop("cache_salt", "")
        known, move_as = more.pop("known_token_ids", ()), more.pop("move_as", "")
        sampling = SamplingParams(**{"temperature": 0.0, "ignore_eos": True, "num_logprobs": 0, **more})
        with self.at_work() as core:
            request = GenerationRequest(request_id, tuple(prompt), sampling, params, salt)
            core.add(replace(request, known_token_ids=tuple(known), move_as=move_as), time.monotonic())

    def step(self) -> None:
        """Run one step if there is anything to do."""
        with self.at_work() as core:
            if core.has_work:
                self._note(core.step()[1])
                core.parts.manager.check_integrity()

    def abort(self, request_id: str) -> None:
        with self.at_work() as core:
            self._note(core.abort(request_id))

    def move(self, name: str) -> None:
        """Stop the answer that may be moved by this name."""
        with self.at_work() as core:
            core.move(name)

    def _note(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            self.outputs.setdefault(output.request_id, []).append(output)

    @property
    def num_loads(self) -> tuple[int, int]:
        """Loads that succeeded, and loads that failed."""
        records = [record for stats in self.handoffs for record in stats.transfers]
        num_failed = sum(record.error != "" for record in records)
        return len(records) - num_failed, num_failed

    def last(self, request_id: str) -> RequestOutput:
        return self.outputs[request_id][-1]

    def is_over(self, request_id: str) -> bool:
        return request_id in self.outputs and self.last(request_id).finish_reason is not None

    def tokens(self, request_id: str) -> Answer:
        outputs = self.outputs[request_id]
        return Answer(
            (token for output in outputs for token in output.new_token_ids),
            (scores[0][1] for output in outputs for scores in output.logprobs),
        )

    def text(self, request_id: str) -> str:
        return "".join(output.text_delta for output in self.outputs[request_id])

    def run(self) -> None:
        """Step until there is nothing left to do."""
        drive(self, until=lambda: not self.core.has_work)

    def answer(self, prompt: Sequence[int], **sampling: Any) -> Answer:
        """Return what follows a prompt."""
        request_id = f"q{len(self.outputs)}"
        self.add(request_id, prompt, **sampling)
        self.run()
        return self.tokens(request_id)

    @property
    def metrics(self) -> RequestMetrics:
        """The figures of the newest request."""
        return self.last(next(reversed(self.outputs))).metrics

    @property
    def is_whole(self) -> bool:
        stats = self.core.stats()
        return stats.num_free_blocks == stats.num_blocks


def drive(*nodes: SteppedNode, until: Callable[[], bool]) -> None:
    """Step the nodes in turn until `until` holds.

    A test gives up after `DEADLINE_S` in which no step had an output.
    """
    num_outputs, deadline = -1, 0.0
    while not until():
        if (now := sum(len(outputs) for node in nodes for outputs in node.outputs.values())) != num_outputs:
            num_outputs, deadline = now, time.monotonic() + DEADLINE_S
        assert time.monotonic() < deadline, [node.core.parts.scheduler.live_requests for node in nodes]
        for node in nodes:
            node.step()


@contextmanager
def stepped_nodes(tiny_model: Callable[[str], Path], **defaults: Any) -> Iterator[MakeNode]:
    """Make nodes inside the block; they are closed when it ends.

    Args:
        tiny_model: Returns the folder of a family's tiny model.
        defaults: Engine settings of each node, which its own settings override. `connector`, `role` and
            `options` stand for a `KVTransferConfig`.
    """
    nodes: list[SteppedNode] = []

    def make(family: str = "llama", **settings: Any) -> SteppedNode:
        if "connector" in settings:
            options = settings.pop("options", {})
            settings["kv_transfer"] = KVTransferConfig(
                settings.pop("connector"), settings.pop("role"), **options
            )
        state._slot = None
        handoffs: list[KVConnectorStats] = []
        engine_settings = EngineSettings(**{"model": str(tiny_model(family)), **defaults, **settings})
        core = EngineCore(engine_settings, handoffs.append)
        node = SteppedNode(core, state._slot, handoffs)
        state._slot = None
        nodes.append(node)
        return node

    yield make
    for node in nodes:
        with node.at_work() as core:
            core.close()


@contextmanager
def running_engine(settings: EngineSettings, deaths: list[str] | None = None) -> Iterator[Engine]:
    """Run an engine inside the block.

    Args:
        deaths: Receives the engine's error when its step thread ends by itself.
    """
    engine = Engine(
        settings, on_death=lambda: None if deaths is None else deaths.append(engine.stats().error)
    )
    engine.start()
    try:
        yield engine
    finally:
        engine.close()


@asynccontextmanager
async def served_engine(
    settings: EngineSettings,
) -> AsyncIterator[tuple[Engine, NodeServer, TestClient[Any, Any]]]:
    """Run an engine behind its HTTP server inside the block, with a client of the server."""
    engine = Engine(settings)
    server = NodeServer(engine)
    await asyncio.to_thread(engine.start)
    try:
        server.engine_is_ready()
        async with TestClient(TestServer(server.application())) as client:
            yield engine, server, client
    finally:
        await asyncio.to_thread(engine.close)
