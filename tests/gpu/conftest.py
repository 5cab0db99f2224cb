"""What is tested on a GPU: skipped, with the reason, where there is none."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from kvferry.runner_mixin import state
from reference.engine.core import EngineCore
from reference.engine.settings import EngineSettings
from reference.engine.types import GenerationRequest, SamplingParams
from reference.engine.weights import load_model
from tests.support.tiny_models import generate_greedily, write_tiny_model

PAGE = {"block_size": 16, "num_blocks": 60, "max_num_batched_tokens": 32, "max_num_seqs": 4}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


class Node:
    """An engine core on the GPU. Its connector, if it has one, is in the process's slot while it works."""

    def __init__(self, settings: EngineSettings) -> None:
        state._slot = None
        self.core = EngineCore(settings)
        self._slot, state._slot = state._slot, None

    @contextmanager
    def at_work(self) -> Iterator[EngineCore]:
        state._slot = self._slot
        try:
            yield self.core
        finally:
            state._slot = None

    def answer(self, prompt: Sequence[int], num_tokens: int) -> tuple[list[int], Any]:
        """The greedy answer, and the last output's figures."""
        sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        outputs = []
        with self.at_work() as core:
            core.add(GenerationRequest("a", tuple(prompt), sampling), arrival_s=0.0)
            while core.has_work:
                outputs += core.step()[1]
        return [token for output in outputs for token in output.new_token_ids], outputs[-1].metrics


@pytest.fixture(autouse=True)
def exact_convolutions() -> Iterator[None]:
    """float32 is float32, as it is in matrix products: TF32 could turn the greedy choice of a recurrent model."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Family → folder of a tiny random model of it, written once."""
    root = tmp_path_factory.mktemp("models")

    def folder(family: str) -> Path:
        path: Path = root / family
        return path if path.exists() else write_tiny_model(path, family)

    return folder


@pytest.fixture
def make_node(tiny_model: Callable[[str], Path]) -> Iterator[Callable[..., Node]]:
    """Make engine cores on the GPU; closed at the end of the test."""
    nodes: list[Node] = []

    def make(family: str, **settings: Any) -> Node:
        small = {"model": str(tiny_model(family)), "device": "cuda", "dtype": "float32", **PAGE}
        nodes.append(Node(EngineSettings(**{**small, **settings})))
        return nodes[-1]

    yield make
    for node in nodes:
        with node.at_work() as core:
            core.close()


@pytest.fixture
def reference(tiny_model: Callable[[str], Path]) -> Callable[[str, Sequence[int], int], list[int]]:
    """`(family, prompt, num_tokens)` → the greedy answer of transformers' own generate, on the GPU."""

    def answer(family: str, prompt: Sequence[int], num_tokens: int) -> list[int]:
        device = torch.device("cuda")
        model: Any = load_model(tiny_model(family), torch.float32, device, "eager")
        return generate_greedily(model, prompt, num_tokens)

    return answer
