"""What the demo prints and refuses: its table, its prompts, its options."""

from __future__ import annotations

import json

import pytest

from kvferry.lab.client import Answer
from kvferry.lab.demo.cli import DEFAULT_PROMPTS, parse_arguments
from kvferry.lab.demo.near_tie import Comparison
from kvferry.lab.demo.report import (
    Report,
    Way,
    format_table,
    report_of,
)
from kvferry.lab.servers import KVFERRY
from kvferry.router.http.serving import StartupError

TRANSFER = {"num_bytes": 4096, "seconds": 0.1, "num_blocks": 3, "num_regions": 2, "transport": "shm"}


def answered(num_prompt_tokens: int, *, ttft_s: float = 0.1, **metrics: object) -> Answer:
    usage = {"prompt_tokens": num_prompt_tokens}
    return Answer("text", [7], times=[ttft_s], usage=usage, metrics=metrics)


def report(answer: Answer, reference_ttft_s: float = 0.1) -> Report:
    return report_of(answer, answered(1, ttft_s=reference_ttft_s), Comparison(), "shm", "uniform")


class TestTable:
    @pytest.mark.parametrize(
        ("answer", "text"),
        [
            (answered(1), "none"),
            (answered(40, num_loaded_tokens=32), "32 tokens"),
            (answered(40, transfer={"error": "the producer is gone"}), "failed"),
            (Answer(error="HTTP 500"), "request failed"),
        ],
    )
    def test_a_request_without_a_transfer_shows_that_instead_of_zeros(
        self, answer: Answer, text: str
    ) -> None:
        moved = answered(40, transfer=TRANSFER)
        lines = format_table(["a", "b"], [answer, moved], [report(answer), report(moved)]).splitlines()
        assert f"  {text}  " in lines[3]
        assert "MB" not in lines[3]
        assert "3 blocks, 2 regions, 0.0 MB, 0.00 ms" in lines[4]
        assert lines[3].rindex("yes") == lines[4].rindex("yes")


class TestPrompts:
    def test_the_default_prompts_are_asked_each_way(self) -> None:
        options = parse_arguments([])
        assert options.requests == tuple((prompt, way) for prompt in DEFAULT_PROMPTS for way in Way)
        assert options.sent("Why?") == "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"

    def test_an_empty_prompt_is_an_error(self) -> None:
        with pytest.raises(StartupError, match="a --prompt is empty"):
            parse_arguments(["--prompt", "a", "--prompt", ""])


@pytest.mark.parametrize("words", ["--device cuda", "--connector-module m"])
def test_with_vllm_an_option_that_would_do_nothing_is_refused(words: str) -> None:
    with pytest.raises(StartupError, match=f"cannot use {words.split()[0]} with --engine vllm"):
        parse_arguments(["--engine", "vllm", *words.split()])


def test_nodes_of_vllm_get_the_options_of_the_connector() -> None:
    words = ["--connector", "tcp", "--load-failure-policy", "fail", "--connector-option", "lease_s=7"]
    name, config = parse_arguments(["--engine", "vllm", *words]).pair_arguments
    assert name == "--kv-transfer-config"
    assert json.loads(config) == {
        **KVFERRY,
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {"transport": "tcp", "lease_s": 7},
    }
