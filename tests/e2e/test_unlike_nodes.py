"""Two nodes whose caches have different layouts hand over in both directions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvferry.lab.demo.near_tie import assert_same_answer
from kvferry.lab.servers import Launcher, Spawn
from tests.support.client import DO_REMOTE_DECODE, Client, ask_alone, wait_until

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]

TEXT = "A ferry takes what others have packed; it does not open the boxes. " * 4
SMALL_BLOCKS = ("--block-size", "16", "--layout", "uniform")
LARGE_BLOCKS = ("--block-size", "32", "--layout", "per-layer")
#: `kvferry serve`, whose pages have heads first.
HEADS_FIRST = str(Path(__file__).parent / "children" / "heads_first.py")
MODELS = {
    "tiny": ("--threads", "1", "--num-blocks", "128"),
    "smollm2": ("--dtype", "float32", "--num-blocks", "128"),
}
#: The vectors of a token: layers × keys and values × heads. Each vector has its own place.
VECTORS_PER_TOKEN = {"tiny": 3 * 2 * 2, "smollm2": 30 * 2 * 3}


@pytest.fixture(scope="module", params=["tiny", pytest.param("smollm2", marks=pytest.mark.full)])
def model(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def nodes(spawn: Spawn, model: str, tiny_model: Any, transport: str) -> Iterator[tuple[Client, Client]]:
    """A node with small blocks, tokens first, uniform; and a node with large blocks, heads first, per layer."""
    arguments = [*MODELS[model], "--connector", transport]
    arguments += ["--no-prefix-caching", "--max-num-batched-tokens", "64", "--log-level", "warning"]
    if model == "tiny":
        arguments += ["--model", str(tiny_model)]
    with Launcher(spawn) as launcher:
        started = [
            launcher.start(name, program, "--role", "both", "--port", "0", *arguments, *shape)
            for name, program, shape in (
                ("small", "serve", SMALL_BLOCKS),
                ("large", HEADS_FIRST, LARGE_BLOCKS),
            )
        ]
        launcher.wait_ready(started, 110)
        small, large = map(Client, started)
        yield small, large


def test_each_node_loads_prompts_that_the_other_computed(nodes: tuple[Client, Client], model: str) -> None:
    small, large = nodes
    single = ask_alone(small)  # without an offer it acts as a single node, and it has no prefix cache
    expected = single(TEXT, 8)
    for prefill, decode, layout in ((small, large, "per-layer"), (large, small, "uniform")):
        offer = ask(prefill, TEXT, max_tokens=1, kv_transfer_params=DO_REMOTE_DECODE)
        reply = ask(decode, TEXT, logprobs=0, kv_transfer_params=offer.body["kv_transfer_params"])
        assert_same_answer(
            TEXT,
            reply.token_ids,
            expected.token_ids,
            single,
            logprobs=reply.logprobs,
            expected_logprobs=expected.logprobs,
        )
        transfer, metrics = reply.transfer, reply.body["metrics"]
        assert (transfer["error"], transfer["layout"]) == ("", layout)
        assert metrics["num_loaded_tokens"] == metrics["num_prompt_tokens"] > 32
        assert transfer["num_regions"] == metrics["num_prompt_tokens"] * VECTORS_PER_TOKEN[model]
        for node in nodes:
            wait_until(node.is_whole)


def ask(node: Client, prompt: str | Sequence[int], **fields: Any) -> Any:
    return node.complete(prompt, **{"max_tokens": 8, **fields})
