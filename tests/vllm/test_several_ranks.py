"""`vllm serve` with several ranks in a rendezvous, hundreds of times: no handoff waits until a deadline ends
it.
"""

from __future__ import annotations

import pytest

from kvferry.lab.servers import VLLM_ARGUMENTS, Launcher, start_vllm
from tests.support.many_handoffs import CHUNK_TOKENS, NUM_HANDOFFS, SHAPES, hand_over_many
from tests.support.vllm_servers import Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800 + 15 * NUM_HANDOFFS)]

START_S = 900.0


def _ranks(num):
    return ("--tensor-parallel-size", str(num), "--distributed-executor-backend", "mp") if num > 1 else ()


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_no_handoff_waits_for_a_deadline(shape, tmp_path):
    """The deadlines and the router's options are the defaults."""
    from tests.support.tiny_models import write_tiny_model

    size = {"hidden_size": 128, "head_dim": 32, "max_position_embeddings": 2048}
    model = str(write_tiny_model(tmp_path / "model", num_key_value_heads=4, **size))
    chunks = ("--max-num-batched-tokens", str(CHUNK_TOKENS))
    with Launcher() as launcher:
        nodes = [
            start_vllm(launcher, "prefill", model, (*VLLM_ARGUMENTS, *chunks, *_ranks(shape[0]))),
            start_vllm(launcher, "decode", model, (*VLLM_ARGUMENTS, *_ranks(shape[1]))),
        ]
        launcher.wait_ready(nodes, START_S)
        router = launcher.start_router("router", [nodes[0]], [nodes[1]]).wait_ready(START_S)
        hand_over_many(Server(router), Server(nodes[0]), Server(nodes[1]))
