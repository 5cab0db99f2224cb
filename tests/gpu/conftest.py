"""Fixtures of the tests on a GPU.

Without a GPU they are skipped. With `KVFERRY_REHEARSE_GPU=1` those that need no kernels of a GPU are
rehearsed instead: pools are in the memory of a stand-in for CUDA's driver, and what PyTorch computes is
computed on the CPU. Tests that are marked `rehearsed` do so always, which keeps the rehearsal itself working.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from kvferry.lab.engine.weights import load_model
from kvferry.transports.testing.leaks import Leaks
from tests.support.answers import Answer
from tests.support.engines import MakeNode, stepped_nodes
from tests.support.gpu_memory import StartChild, stand_in_driver
from tests.support.peers import Peer, peers, said
from tests.support.tiny_models import generate_greedily, tiny_models_in

PAGE = {"block_size": 16, "num_blocks": 60, "max_num_batched_tokens": 32, "max_num_seqs": 4}
ROOT = Path(__file__).parents[2]
CHILDREN = Path(__file__).parent / "children"

HAS_GPU = torch.cuda.is_available()
IS_REHEARSAL = os.environ.get("KVFERRY_REHEARSE_GPU") == "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if not item.path.is_relative_to(here):
            continue
        item.add_marker(pytest.mark.gpu)
        can_be_rehearsed = {"gpu_place", "torch_device"} & set(getattr(item, "fixturenames", ()))
        is_rehearsed = can_be_rehearsed and (IS_REHEARSAL or item.get_closest_marker("rehearsed"))
        if not HAS_GPU and not is_rehearsed:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True)
def nothing_is_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Check for leaks in a rehearsal only: CUDA and its libraries open descriptors at any first use, and keep
    them.
    """
    leaks = None if HAS_GPU else Leaks()
    yield
    if leaks is not None:
        request.node.funcargs.clear()
        left = leaks.wait(10.0, after_failure=hasattr(sys, "last_value"))
        assert not left, left


@pytest.fixture(autouse=True, scope="session")
def _context_stays() -> None:
    """Have PyTorch hold the GPU's context, as in an engine.

    Otherwise each test would make and destroy one.
    """
    if HAS_GPU:
        torch.zeros(1, device="cuda")


@pytest.fixture(scope="module")
def gpu_place() -> str:
    """Where a pool on a GPU is; see `tests/support/gpu_memory.py`.

    A test that makes one here needs `gpu_driver` as well.
    """
    return "cuda:0" if HAS_GPU else "stand-in"


@pytest.fixture
def gpu_driver() -> Iterator[None]:
    """Have a driver: the GPU's, or in a rehearsal the stand-in."""
    with nullcontext() if HAS_GPU else stand_in_driver():
        yield


@pytest.fixture
def torch_device() -> torch.device:
    """Where PyTorch computes."""
    return torch.device("cuda:0" if HAS_GPU else "cpu")


@contextmanager
def children_started() -> Iterator[StartChild]:
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    with peers(env={**os.environ, "PYTHONPATH": path}) as start_peer:

        def start(program: str, *arguments: str) -> tuple[Peer, dict[str, Any]]:
            child = start_peer(str(CHILDREN / program), *arguments)
            told: dict[str, Any] = json.loads(said(child) or '{"failed": true}')
            assert "failed" not in told, "the child failed; its error is in the output"
            if "unavailable" in told:
                pytest.skip(told["unavailable"])
            return child, told

        yield start


@pytest.fixture
def start_child() -> Iterator[StartChild]:
    """See `StartChild`. The processes end with the test. Skips if the child says that it cannot work here."""
    with children_started() as start:
        yield start


@pytest.fixture(scope="module")
def start_lasting_child() -> Iterator[StartChild]:
    """Likewise, but the processes end with the last test of the file."""
    with children_started() as start:
        yield start


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder of a family's tiny random model, which is written once."""
    return tiny_models_in(tmp_path_factory.mktemp("models"))


@pytest.fixture
def make_node(tiny_model: Callable[[str], Path], torch_device: torch.device) -> Iterator[MakeNode]:
    """Make engine cores on the GPU. They are closed at the end of the test."""
    with stepped_nodes(tiny_model, device=torch_device.type, dtype="float32", **PAGE) as make:
        yield make


@pytest.fixture
def reference(
    tiny_model: Callable[[str], Path], torch_device: torch.device
) -> Callable[[str, Sequence[int], int], Answer]:
    """`(family, prompt, num_tokens)` → the greedy answer of transformers' own `generate`, on the GPU."""

    def answer(family: str, prompt: Sequence[int], num_tokens: int) -> Answer:
        model: Any = load_model(tiny_model(family), torch.float32, torch_device, "eager")
        return generate_greedily(model, prompt, num_tokens)

    return answer
