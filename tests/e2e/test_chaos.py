"""Inject faults from a seed into real nodes under load: no token is wrong, every request ends, nothing leaks.

`make soak` runs it for longer. SOAK_SECONDS is the time during which faults are injected; SOAK_SEED is their
seed, and SOAK_GAP_S the mean time between two. SOAK_SAMPLES is a file for what all services hold over time,
a line of JSON per sample.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.lab.servers import Launcher, Spawn
from tests.support.chaos.fleet import Fleet
from tests.support.chaos.sampling import num_loads, read
from tests.support.chaos.soak import Soak, reference_engine
from tests.support.client import Client
from tests.support.tiny_models import write_tiny_model

SECONDS = float(os.environ.get("SOAK_SECONDS", "15"))
GAP_S = float(os.environ.get("SOAK_GAP_S", "1"))
SEED = int(os.environ.get("SOAK_SEED", "1"))
#: Few enough blocks that requests are preempted now and then.
NODE = (
    "--threads", "1", "--num-blocks", "160", "--block-size", "16", "--max-num-batched-tokens", "64",
    "--log-level", "warning",
)  # fmt: skip

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(1.1 * SECONDS + 240),
    pytest.mark.skipif("CONNECTORS" not in os.environ, reason="a part of `make test-transports`"),
]


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Options of every node. Prompts for the model may have many chunks."""
    folder = tmp_path_factory.mktemp("models") / "deep"
    model = write_tiny_model(folder, num_hidden_layers=6, max_position_embeddings=2048)
    return ("--model", str(model), *NODE)


@pytest.fixture
def single(launcher: Launcher, arguments: tuple[str, ...]) -> Client:
    return Client(launcher.start_node("single", "single", *arguments).wait_ready(110))


@pytest.fixture
def fleet(spawn: Spawn, transport: str, arguments: tuple[str, ...], socket_dir: Path) -> Iterator[Fleet]:
    with Fleet(spawn, transport, arguments, socket_dir) as fleet:
        fleet.start()
        yield fleet


def test_random_faults(fleet: Fleet, single: Client, tmp_path: Path) -> None:
    samples = Path(os.environ.get("SOAK_SAMPLES", tmp_path / "samples.jsonl"))
    print(Soak(fleet, reference_engine(single), SEED, SECONDS, samples, GAP_S).run())
    found = read(samples)
    assert {sample.service for sample in found} == fleet.services.keys()
    assert num_loads(found) > 0
    of_nodes = [sample for sample in found if not sample.service.startswith("router")]
    assert sum(sample.blocks is not None for sample in of_nodes) > len(of_nodes) / 4
