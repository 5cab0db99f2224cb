"""`kvferry plan --measure` with real nodes, and a plan from what it finds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvferry.cli.main import main
from kvferry.lab.plan.costs import Costs, read_costs

pytestmark = pytest.mark.full


def test_a_pair_is_measured_and_planned_with(
    tiny_fleet: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    urls = [tiny_fleet.prefill.process.url, tiny_fleet.decode.process.url]
    file, trace = tmp_path / "costs.json", tmp_path / "trace.jsonl"
    trace.write_text(
        "".join(
            json.dumps({"timestamp": 100 * number, "input_length": 200, "output_length": 20}) + "\n"
            for number in range(50)
        )
    )
    chunk = ["--max-num-batched-tokens", "64"]
    assert main(["plan", "--measure", *urls, *chunk, "--costs", str(file), "--trace", str(trace)]) == 0
    told = capsys.readouterr()
    costs = read_costs(file)
    assert costs.chunk_tokens == 64
    assert 0 < costs.unloaded_itl_s < 1
    assert costs.handover_s + costs.handed_token_s != Costs().handover_s + Costs().handed_token_s
    assert "handover of 64 tokens: " in told.err
    assert "auto: 1 node keeps" in told.out


def test_a_node_without_a_connector_cannot_hand_over(
    tiny_fleet: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    urls = [tiny_fleet.single.process.url, tiny_fleet.decode.process.url]
    assert main(["plan", "--measure", *urls, "--max-num-batched-tokens", "64"]) == 1
    assert f"{urls[0]} offers no cache" in capsys.readouterr().err
