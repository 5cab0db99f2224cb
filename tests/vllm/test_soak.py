"""Inject faults from a seed into `vllm serve` processes under load: no token is wrong, every request ends,
nothing leaks.

As `tests/e2e/test_chaos.py` does with reference nodes, and with the same variables. CONNECTORS names the
transport.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvferry.lab.demo.near_tie import ask_alone
from kvferry.lab.servers import KVFERRY, run_program
from tests.support.chaos.fleet import TIMING, Fleet
from tests.support.chaos.sampling import num_loads, read
from tests.support.chaos.soak import Engine, Soak
from tests.support.client import Client
from tests.support.vllm_servers import LOADS, Server, VllmService

SECONDS = float(os.environ.get("SOAK_SECONDS", "60"))
GAP_S = float(os.environ.get("SOAK_GAP_S", "20"))
SEED = int(os.environ.get("SOAK_SEED", "1"))
START_S = 400.0
ARGUMENTS = (
    *("--dtype", "float32", "--block-size", "32", "--max-model-len", "2048", "--max-num-seqs", "4"),
    *("--enforce-eager", "--num-gpu-blocks-override", "96", "--max-num-batched-tokens", "256"),
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.full,
    pytest.mark.timeout(1.1 * SECONDS + 3 * START_S),
]


class VllmFleet(Fleet):
    """The same with vLLM. A start takes half a minute, so most faults are pauses."""

    def __init__(self, model, transport, folder):
        self._model = model
        super().__init__(run_program, transport, (), folder)

    @property
    def ours(self):
        return self.routers

    @property
    def kinds(self):
        nodes = {node.name: (*["pause"] * 6, "kill", "terminate") for node in self.nodes}
        return nodes | {router.name: ("kill", "terminate") for router in self.routers}

    def wait_ready(self):
        for service in self.services.values():
            service.wait_ready(START_S)
            service.require_alive()

    def _node(self, name, role, arguments):
        options = {"transport": self._transport, **TIMING}
        transfer = {**KVFERRY, "kv_load_failure_policy": "recompute", "kv_connector_extra_config": options}
        return VllmService(name, self._model, ARGUMENTS, transfer)


def hands_over(prefill, decode, prompt):
    server = Server(decode.process)
    before = server.metric(LOADS)
    reply = server.complete(prompt, 4, kv_transfer_params=Server(prefill.process).offer(prompt))
    return reply.status == 200 and server.metric(LOADS) > before


@pytest.fixture
def single(model, tmp_path):
    with VllmService("single", model, ARGUMENTS, None) as service:
        yield service


@pytest.fixture
def fleet(model, single, tmp_path):
    (transport,) = os.environ.get("CONNECTORS", "shm").split()
    with pytest.MonkeyPatch.context() as environment, VllmFleet(model, transport, tmp_path) as fleet:
        environment.setenv("OMP_NUM_THREADS", "1")
        fleet.start()
        single.wait_ready(START_S)
        yield fleet


def test_random_faults(fleet, single, tmp_path):
    samples = Path(os.environ.get("SOAK_SAMPLES", tmp_path / "samples.jsonl"))
    engine = Engine(Client(single.process), ask_alone(single.process.port, ignore_eos=True), hands_over)
    print(Soak(fleet, engine, SEED, SECONDS, samples, GAP_S).run())
    print(f"at least {num_loads(read(samples)):6} loads")
