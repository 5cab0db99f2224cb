"""Tiny models that the engine's tests share, engines on top of them, and transformers' own answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch

from kvferry.connector.config import KVTransferConfig
from kvferry.connector.stats import KVConnectorStats
from kvferry.runner_mixin import state
from reference.demo.near_tie import Expectation, assert_same_answer
from reference.engine.core import EngineCore
from reference.engine.settings import EngineSettings
from reference.engine.types import GenerationRequest, RequestOutput, SamplingParams
from reference.engine.weights import load_model
from tests.support.tiny_models import generate_greedily, write_tiny_model

#: Steps after which a test gives up waiting for what should have happened.
DEADLINE_S = 20.0


class MakeNode(Protocol):
    def __call__(self, family: str = ..., **settings: Any) -> Node: ...


@dataclass
class Node:
    """An engine core that is stepped by hand, and all that it has answered.

    A process has one slot for a connector; each node puts its own there while it is at work.
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
        """Add a request: `kv_transfer_params`, and sampling parameters (greedy, past the end token)."""
        params, salt = more.pop("kv_transfer_params", None), more.pop("cache_salt", "")
        lora_name, items = more.pop("lora_name", ""), more.pop("items", ())
        sampling = SamplingParams(**{"temperature": 0.0, "ignore_eos": True, **more})
        with self.at_work() as core:
            request = GenerationRequest(request_id, tuple(prompt), sampling, params, salt, lora_name, items)
            core.add(request, time.monotonic())

    def step(self) -> None:
        """One step, if there is anything to do."""
        with self.at_work() as core:
            if core.has_work:
                self._note(core.step()[1])
                core.parts.manager.check_integrity()

    def abort(self, request_id: str) -> None:
        with self.at_work() as core:
            self._note(core.abort(request_id))

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

    def tokens(self, request_id: str) -> list[int]:
        return [token for output in self.outputs[request_id] for token in output.new_token_ids]

    def text(self, request_id: str) -> str:
        return "".join(output.text_delta for output in self.outputs[request_id])

    def run(self) -> None:
        """Step until there is nothing left to do."""
        drive(self, until=lambda: not self.core.has_work)

    def answer(self, prompt: Sequence[int], **sampling: Any) -> list[int]:
        """Tokens that follow a prompt."""
        request_id = f"q{len(self.outputs)}"
        self.add(request_id, prompt, **sampling)
        self.run()
        return self.tokens(request_id)

    @property
    def is_whole(self) -> bool:
        stats = self.core.stats()
        return stats.num_free_blocks == stats.num_blocks


def drive(*nodes: Node, until: Callable[[], bool]) -> None:
    """Step the nodes in turn until something holds."""
    deadline = time.monotonic() + DEADLINE_S
    while not until():
        assert time.monotonic() < deadline, [node.core.parts.scheduler.live_requests for node in nodes]
        for node in nodes:
            node.step()


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny matrices gain nothing from several threads, and lose much when other processes want the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Family → folder of a tiny random model of it, written once."""
    root = tmp_path_factory.mktemp("models")

    def folder(family: str) -> Path:
        path: Path = root / family
        return path if path.exists() else write_tiny_model(path, family)

    return folder


@contextmanager
def _nodes(tiny_model: Callable[[str], Path]) -> Iterator[MakeNode]:
    nodes: list[Node] = []

    def make(family: str = "llama", **settings: Any) -> Node:
        small = {
            "model": str(tiny_model(family)),
            "block_size": 4,
            "num_blocks": 120,
            "max_num_batched_tokens": 16,
            "max_num_seqs": 6,
        }
        if "connector" in settings:
            options = settings.pop("options", {})
            settings["kv_transfer"] = KVTransferConfig(
                settings.pop("connector"), settings.pop("role"), **options
            )
        state._slot = None
        handoffs: list[KVConnectorStats] = []
        core = EngineCore(EngineSettings(**{**small, **settings}), handoffs.append)
        node = Node(core, state._slot, handoffs)
        state._slot = None
        nodes.append(node)
        return node

    yield make
    for node in nodes:
        with node.at_work() as core:
            core.close()


@pytest.fixture
def make_node(tiny_model: Callable[[str], Path]) -> Iterator[MakeNode]:
    """Make engine cores on tiny models: small pool, small blocks, small chunks; closed at the end of the test."""
    with _nodes(tiny_model) as make:
        yield make


@pytest.fixture(scope="module")
def make_module_node(tiny_model: Callable[[str], Path]) -> Iterator[MakeNode]:
    """As `make_node`, for nodes that the tests of a module share."""
    with _nodes(tiny_model) as make:
        yield make


@pytest.fixture(scope="session")
def reference(tiny_model: Callable[[str], Path]) -> Callable[[str, Sequence[int], int], list[int]]:
    """`(family, prompt, num_tokens)` → the greedy answer of transformers' own generate."""
    loaded: dict[str, Any] = {}

    def answer(family: str, prompt: Sequence[int], num_tokens: int) -> list[int]:
        if family not in loaded:
            loaded[family] = load_model(tiny_model(family), torch.float32, torch.device("cpu"), "eager")
        return generate_greedily(loaded[family], prompt, num_tokens)

    return answer


@pytest.fixture(scope="session")
def assert_same(
    tiny_model: Callable[[str], Path], reference: Callable[[str, Sequence[int], int], list[int]]
) -> Callable[..., None]:
    """`(tokens, family, prompt, num_tokens)`: fail unless these are transformers' own tokens, near-ties of logits apart."""
    loaded: dict[str, Any] = {}

    def check(tokens: Sequence[int], family: str, prompt: Sequence[int], num_tokens: int) -> None:
        def ask(prompt: str | Sequence[int], max_tokens: int) -> Expectation:
            if family not in loaded:
                loaded[family] = load_model(tiny_model(family), torch.float32, torch.device("cpu"), "eager")
            ids = [int(token) for token in prompt]
            with torch.inference_mode():
                largest = loaded[family](torch.tensor([ids])).logits[0, -1].topk(2)
            pairs = zip(largest.indices.tolist(), largest.values.tolist(), strict=True)
            return Expectation(ids, reference(family, ids, max_tokens), list(pairs))

        assert_same_answer(prompt, tokens, reference(family, prompt, num_tokens), ask)

    return check


@pytest.fixture(name="drive")
def drive_fixture() -> Callable[..., None]:
    """`drive(*nodes, until=…)`: step the nodes in turn until something holds."""
    return drive
