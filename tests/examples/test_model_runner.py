"""`examples/model_runner.py` hands over a real cache between two nodes of one process; `docs/embedding.md`
explains it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from model_runner import BLOCK_SIZE, NUM_BLOCKS, Node, Request, Step

import kvferry.connector
import kvferry.runner_mixin

PROMPT = list(range(18))
PAGE = (Path(__file__).parents[2] / "docs" / "embedding.md").read_text()


@pytest.fixture(params=["shm", "zeromq"])
def nodes(request: pytest.FixtureRequest) -> Iterator[tuple[Node, Node]]:
    """Two nodes in one process."""
    with ExitStack() as stack:
        made = [Node(request.param), Node(request.param)]
        for node in made:
            stack.callback(node.close)
        yield made[0], made[1]


def answer_alone(node: Node, other: Node) -> list[int]:
    request = Request("alone", PROMPT)
    node.run(request, 12, other)
    return request.answer


def test_a_cache_that_was_handed_over_gives_the_same_answer(nodes: tuple[Node, Node]) -> None:
    prefill, decode = nodes
    offer = prefill.run(Request("p", PROMPT, {"do_remote_decode": True}), 1, decode)
    assert len(prefill.free) == NUM_BLOCKS - 1 - -(-(len(PROMPT)) // BLOCK_SIZE)
    request = Request("d", PROMPT, offer)
    decode.run(request, 12, prefill)
    assert request.num_loaded_tokens == len(PROMPT)
    assert request.answer == answer_alone(prefill, decode)
    assert not prefill.held
    assert len(prefill.free) == len(decode.free) == NUM_BLOCKS - 1


def test_a_prompt_whose_offer_cannot_be_loaded_is_computed(nodes: tuple[Node, Node]) -> None:
    prefill, decode = nodes
    offer = prefill.run(Request("p", PROMPT, {"do_remote_decode": True}), 1, decode)
    assert offer is not None
    request = Request("d", PROMPT, {**offer, "remote_lease": "1234abcd"})
    decode.run(request, 12, prefill)
    assert request.num_loaded_tokens == 0
    assert request.answer == answer_alone(decode, prefill)


def test_an_offer_that_is_released_frees_its_blocks(nodes: tuple[Node, Node]) -> None:
    prefill, decode = nodes
    offer = prefill.run(Request("p", PROMPT, {"do_remote_decode": True}), 1, decode)
    assert offer is not None
    prefill.run(Request("r", [0], {**offer, "do_remote_prefill": False, "do_release": True}), 0, decode)
    for _ in range(1000):
        if not prefill.held:
            break
        prefill.step(Step())
    assert len(prefill.free) == NUM_BLOCKS - 1


def test_the_page_names_only_what_exists() -> None:
    for module, name in re.findall(r"`(kv|rm)\.(\w+)", PAGE):
        assert hasattr({"kv": kvferry.connector, "rm": kvferry.runner_mixin}[module], name), name
