"""Tiny models for the engine's tests, engines that run them, and the answers of transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from kvferry.lab.demo.near_tie import Expectation
from kvferry.lab.engine.weights import load_model
from tests.support.answers import Answer
from tests.support.engines import MakeNode, drive, stepped_nodes
from tests.support.same_answer import assert_same_answer
from tests.support.tiny_models import generate_greedily, tiny_models_in

#: Small pool, blocks and chunks.
SMALL = {"block_size": 4, "num_blocks": 120, "max_num_batched_tokens": 16, "max_num_seqs": 6}


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread.

    Tiny matrices gain nothing from more, and lose much when other processes need the cores.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder of a family's tiny random model, which is written once."""
    return tiny_models_in(tmp_path_factory.mktemp("models"))


@pytest.fixture
def make_node(tiny_model: Callable[[str], Path]) -> Iterator[MakeNode]:
    """Make engine cores with tiny models. They are closed at the end of the test."""
    with stepped_nodes(tiny_model, **SMALL) as make:
        yield make


@pytest.fixture(scope="module")
def make_module_node(tiny_model: Callable[[str], Path]) -> Iterator[MakeNode]:
    """The same as `make_node`, for nodes that the tests of a module share."""
    with stepped_nodes(tiny_model, **SMALL) as make:
        yield make


@pytest.fixture(scope="session")
def reference(tiny_model: Callable[[str], Path]) -> Callable[[str, Sequence[int], int], Answer]:
    """`(family, prompt, num_tokens)` → the greedy answer of transformers' own `generate`."""
    loaded: dict[str, Any] = {}

    def answer(family: str, prompt: Sequence[int], num_tokens: int) -> Answer:
        if family not in loaded:
            loaded[family] = load_model(tiny_model(family), torch.float32, torch.device("cpu"), "eager")
        return generate_greedily(loaded[family], prompt, num_tokens)

    return answer


@pytest.fixture(scope="session")
def assert_same(
    tiny_model: Callable[[str], Path], reference: Callable[[str, Sequence[int], int], Answer]
) -> Callable[..., None]:
    """`(answer, family, prompt, num_tokens)`: fail unless it is transformers' answer, apart from
    near-ties.
    """
    loaded: dict[str, Any] = {}

    def check(answer: Answer, family: str, prompt: Sequence[int], num_tokens: int) -> None:
        def ask(prompt: str | Sequence[int], max_tokens: int) -> Expectation:
            if family not in loaded:
                loaded[family] = load_model(tiny_model(family), torch.float32, torch.device("cpu"), "eager")
            ids = [int(token) for token in prompt]
            with torch.inference_mode():
                largest = loaded[family](torch.tensor([ids])).logits[0, -1].topk(2)
            pairs = zip(largest.indices.tolist(), largest.values.tolist(), strict=True)
            alone = reference(family, ids, max_tokens)
            return Expectation(ids, alone, list(pairs), alone.logprobs)

        assert len(answer.logprobs) == len(answer)
        expected = reference(family, prompt, num_tokens)
        assert_same_answer(
            prompt,
            answer,
            expected,
            ask,
            logprobs=answer.logprobs,
            expected_logprobs=expected.logprobs,
        )

    return check


@pytest.fixture(name="drive")
def drive_fixture() -> Callable[..., None]:
    """`drive(*nodes, until=…)`: step the nodes in turn until a condition holds."""
    return drive
