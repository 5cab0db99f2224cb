"""Fixtures of the tests on a GPU. Without a GPU the tests are skipped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from reference.engine.weights import load_model
from tests.support.engines import MakeNode, stepped_nodes
from tests.support.tiny_models import generate_greedily, tiny_models_in

PAGE = {"block_size": 16, "num_blocks": 60, "max_num_batched_tokens": 32, "max_num_seqs": 4}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True)
def exact_convolutions() -> Iterator[None]:
    """Compute convolutions in full float32, like matrix products. TF32 could change a recurrent model's tokens."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder of a family's tiny random model, which is written once."""
    return tiny_models_in(tmp_path_factory.mktemp("models"))


@pytest.fixture
def make_node(tiny_model: Callable[[str], Path]) -> Iterator[MakeNode]:
    """Make engine cores on the GPU. They are closed at the end of the test."""
    with stepped_nodes(tiny_model, device="cuda", dtype="float32", **PAGE) as make:
        yield make


@pytest.fixture
def reference(tiny_model: Callable[[str], Path]) -> Callable[[str, Sequence[int], int], list[int]]:
    """`(family, prompt, num_tokens)` → the greedy answer of transformers' own `generate`, on the GPU."""

    def answer(family: str, prompt: Sequence[int], num_tokens: int) -> list[int]:
        device = torch.device("cuda")
        model: Any = load_model(tiny_model(family), torch.float32, device, "eager")
        return generate_greedily(model, prompt, num_tokens)

    return answer
