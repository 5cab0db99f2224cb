"""A model with windowed and full layers over real processes: the single node's tokens, and only visible blocks move."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest

from tests.support.client import assert_answers_like, wait_until
from tests.support.tiny_models import write_tiny_model

BLOCK, WINDOW = 16, 40


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    model = write_tiny_model(tmp_path_factory.mktemp("hybrid"), "gemma3", sliding_window=WINDOW)
    return (
        *("--model", str(model), "--threads", "1", "--num-blocks", "128", "--block-size", str(BLOCK)),
        *("--max-num-batched-tokens", "48", "--log-level", "warning"),
    )


@pytest.fixture(scope="module")
def single(start_single: Any, arguments: Sequence[str]) -> Any:
    return start_single(*arguments)


@pytest.fixture(scope="module")
def hybrid_fleet(start_fleet: Any, single: Any, arguments: Sequence[str]) -> Any:
    return start_fleet(single, *arguments)


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_hybrid_model_is_handed_over_between_processes(hybrid_fleet: Any) -> None:
    for length, fields in product((17, 41, 55, 129, 300), ({}, {"logprobs": 0})):
        prompt = [(index * 7919 + length + len(fields)) % 251 for index in range(length)]
        reply = hybrid_fleet.router.complete(prompt, max_tokens=24, **fields)
        assert_answers_like(hybrid_fleet.single, prompt, reply.answer, 24)
        num_loaded = reply.body["metrics"]["num_loaded_tokens"]
        assert num_loaded == length - 1, "the decode node computes the prompt's last token"
        num_blocks = -(-num_loaded // BLOCK)
        # The computed token is itself part of the window that it sees.
        num_in_window = num_blocks - max(0, num_loaded + 1 - WINDOW) // BLOCK
        assert reply.transfer["num_blocks"] == num_blocks + num_in_window
        assert reply.transfer["layout"] == "uniform"
        assert reply.transfer["num_regions_per_layer"] >= 2 * reply.transfer["num_regions"]
    wait_until(hybrid_fleet.prefill.is_whole)
    wait_until(hybrid_fleet.decode.is_whole)
