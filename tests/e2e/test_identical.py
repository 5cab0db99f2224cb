"""The main promise: a pair gives the same greedy tokens as a single node, and moves no more bytes than
necessary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tokenizers import Tokenizer

from kvferry.lab.engine.default_model import default_model_folder
from kvferry.lab.servers import Launcher, Spawn
from tests.support.client import Client, Reply, ask_alone, wait_until
from tests.support.same_answer import assert_same_answer

BLOCK = 16
CHUNK = 64
MAX_TOKENS = 4

TEXT = """The harbour office keeps a book for every ship. On the left page stands what came in: flour from the south,
lamp oil in tin boxes, a piano for the school, forty crates of oranges, and letters, always letters. On the right page
stands what went out: dried fish, wool, two calves, a clock to be repaired, and letters again. At the end of each month
the clerk adds up both pages and writes the difference in red. Most months the difference is small, because nobody on
an island can afford to lose anything. When it is large, he walks along the quay with a lantern and looks behind the
barrels. Once he found a whole crate of oranges there, and a boy asleep on top of it. The boy said that he had been
watching the crate. The clerk wrote: one crate, found; one boy, returned to his mother. Then he closed the book, wound
the clock, and went home through the rain, thinking that a ferry is a promise that is kept every day."""

QUESTIONS = (
    "The capital of France is",
    "Q: What is two plus three?\nA:",
    "def fibonacci(n):\n    ",
    "Dear Anna,\n\nthe storm has passed, and",
    "Ein Schiff fährt über den",
    "1, 1, 2, 3, 5, 8, 13,",
    "🚢⚓",
    "Once upon a time",
)


@pytest.fixture(scope="session")
def tokens() -> list[int]:
    """A text of a few hundred tokens."""
    tokenizer = Tokenizer.from_file(str(default_model_folder() / "tokenizer.json"))
    ids: list[int] = tokenizer.encode(TEXT).ids
    assert len(ids) > 200
    return ids


@pytest.fixture(scope="session")
def arguments() -> tuple[str, ...]:
    """The default model, in float32 on the CPU."""
    return (
        *("--num-blocks", "512", "--block-size", str(BLOCK), "--max-num-batched-tokens", str(CHUNK)),
        *("--max-num-seqs", "8", "--log-level", "warning", "--dtype", "float32"),
    )


@pytest.fixture(scope="session")
def single(spawn: Spawn, arguments: Sequence[str]) -> Iterator[Client]:
    """A single node with the real model."""
    with Launcher(spawn) as launcher:
        yield Client(launcher.start_node("single", "single", *arguments).wait_ready(110))


@pytest.fixture(scope="session")
def expected(single: Client, tokens: list[int]) -> list[Reply]:
    """The single node's answers to each prompt. It is asked once for all transports."""
    return complete_all(single, prompts(tokens), every=1)


@pytest.fixture(scope="module")
def smollm2(start_fleet: Any, tiny_single: Client, arguments: Sequence[str]) -> Any:
    """A pair with a real model."""
    return start_fleet(tiny_single, *arguments)


def lengths() -> list[int]:
    """Return prompt lengths: one token, blocks ± 1, chunks ± 1, and some more."""
    around = [edge + off for edge in (BLOCK, 2 * BLOCK, 3 * BLOCK, CHUNK, 2 * CHUNK) for off in (-1, 0, 1)]
    return [1, 2, 3, 7, *around, 72, 88, 100, 144, 150, 190]


def prompts(tokens: Sequence[int]) -> list[Any]:
    """Return texts, slices from different places of a text, and slices that share a prefix."""
    slices = [list(tokens[offset : offset + length]) for offset, length in enumerate(lengths())]
    shared = [
        list(tokens[: 3 * BLOCK]) + list(tokens[100 + tail : 100 + tail + 9 + tail]) for tail in range(10)
    ]
    again = [list(tokens[: 3 * BLOCK + 5]), list(tokens[: 3 * BLOCK + 5])]
    short = [list(tokens[at : at + 1]) for at in (40, 41, 42, 43, 44)]
    return [*QUESTIONS, *slices, *shared, *again, *short]


def complete_all(client: Client, prompts: Sequence[Any], *, every: int = 2) -> list[Reply]:
    """Return the answers, every second one with log probabilities."""

    def complete(index: int) -> Reply:
        fields = {} if index % every else {"logprobs": 0}
        return client.complete(prompts[index], max_tokens=MAX_TOKENS, **fields)

    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(complete, range(len(prompts))))


def assert_same(
    prompts: Sequence[Any], replies: Sequence[Reply], expected: Sequence[Reply], single: Client
) -> None:
    for prompt, reply, alone in zip(prompts, replies, expected, strict=True):
        assert reply.status == 200
        assert_same_answer(
            prompt,
            reply.token_ids,
            alone.token_ids,
            ask_alone(single),
            logprobs=reply.logprobs,
            expected_logprobs=alone.logprobs,
        )


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.full
def test_fifty_prompts_of_a_real_model_have_the_single_nodes_tokens(
    expected: list[Reply], single: Client, smollm2: Any, transport: str, tokens: list[int]
) -> None:
    asked = prompts(tokens)
    assert len(asked) >= 50
    replies = complete_all(smollm2.router, asked)
    assert_same(asked, replies, expected, single)
    assert_moved_as_promised(replies, transport, num_layers=30)
    wait_until(smollm2.prefill.is_whole)
    wait_until(smollm2.decode.is_whole)


@pytest.mark.slow
def test_blocks_that_the_decode_node_has_are_not_moved_again(smollm2: Any, tokens: list[int]) -> None:
    start = tokens[150:][: 3 * BLOCK]
    first = smollm2.router.complete(start + tokens[:BLOCK], max_tokens=1)
    second = smollm2.router.complete(start + tokens[60 : 60 + 2 * BLOCK], max_tokens=1)
    assert second.body["metrics"]["num_cached_tokens"] == 3 * BLOCK
    assert second.transfer["num_blocks"] == 2
    block_bytes = first.transfer["num_bytes"] // first.transfer["num_blocks"]
    assert second.transfer["num_bytes"] == 2 * block_bytes


@pytest.fixture(scope="module")
def per_layer_fleet(start_fleet: Any, tiny_single: Client, tiny_single_arguments: Any) -> Any:
    """A pair that runs the tiny model with one buffer per layer."""
    return start_fleet(tiny_single, *tiny_single_arguments, "--layout", "per-layer")


@pytest.mark.slow
@pytest.mark.every_transport
def test_a_small_model_in_the_uniform_layout(tiny_fleet: Any, transport: str) -> None:
    assert_identical(tiny_fleet, transport, "uniform", num_layers=1)


@pytest.mark.full
def test_a_small_model_in_the_per_layer_layout(per_layer_fleet: Any, transport: str) -> None:
    assert_identical(per_layer_fleet, transport, "per-layer", num_layers=3)


def assert_identical(fleet: Any, transport: str, layout: str, num_layers: int) -> None:
    ids = [(index * 7919 + 13) % 251 for index in range(400)]
    slices = [ids[offset : offset + length] for offset, length in enumerate(lengths())]
    asked = [*slices, ids[:300], ids[50:400]]
    replies = complete_all(fleet.router, asked)
    assert_same(asked, replies, complete_all(fleet.single, asked, every=1), fleet.single)
    assert {reply.transfer["layout"] for reply in replies if reply.transfer} == {layout}
    assert_moved_as_promised(replies, transport, num_layers)
    wait_until(fleet.prefill.is_whole)
    wait_until(fleet.decode.is_whole)


def assert_moved_as_promised(replies: Sequence[Reply], transport: str, num_layers: int) -> None:
    """Check that every prompt of two or more tokens was transferred, with at most one region per block and
    layer.
    """
    for reply in replies:
        metrics = reply.body["metrics"]
        if metrics["num_prompt_tokens"] == 1:
            continue
        missing = metrics["num_prompt_tokens"] - metrics["num_cached_tokens"]
        if missing > 1:
            assert reply.transfer["num_blocks"] == -(-missing // BLOCK)
            assert not reply.transfer["error"]
        if reply.transfer:
            assert reply.transfer["transport"] == transport
            assert transport != "shm" or reply.transfer["mechanism"] == "mapped"
            assert 1 <= reply.transfer["num_regions"] <= reply.transfer["num_blocks"] * num_layers
