"""`kvferry plan` as a user runs it, and the costs that it finds."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from kvferry.cli.main import main
from kvferry.lab.plan.costs import Costs
from kvferry.lab.plan.measuring import Measured, fit

COSTS = Costs(
    0.01, 1e-4, 2e-3, 512, 0.02, 1e-5, request_s=0.005, context_s=1e-7, answer_context_s=1e-6, mixed_s=0.02
)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    chance, at, lines = random.Random(7), 0.0, []
    for _ in range(150):
        at += chance.expovariate(1 / 150.0)
        row = {"timestamp": at, "input_length": chance.randrange(50, 1500), "output_length": 40}
        lines.append(json.dumps(row))
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_it_says_how_many_nodes_each_way_needs_and_plots_them(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plot = tmp_path / "plan.svg"
    arguments = ["plan", "--trace", str(trace), "--ttft-limit-ms", "3000", "--itl-limit-ms", "150"]
    assert main([*arguments, "--plot", str(plot)]) == 0
    told = capsys.readouterr().out
    assert told.startswith("150 requests in ")
    for way in ("plain", "pair", "auto"):
        assert any(line.startswith(way) and " keep" in line for line in told.splitlines()), told
    circles = [each for each in ElementTree.parse(plot).iter() if each.tag.endswith("circle")]
    assert len(circles) == sum(line.startswith("| ") and "%" in line for line in told.splitlines())
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["least_nodes"]) == {"plain", "pair", "auto"}
    fewest = min(each["nodes"] for each in found["tried"] if each["way"] == "auto" and each["share"] >= 0.95)
    assert found["least_nodes"]["auto"] == fewest


def test_limits_that_no_node_keeps_are_told_and_fail(
    trace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvferry.lab.plan.main.MAX_NODES", 2)

    def told(*options: str) -> str:
        assert main(["plan", "--trace", str(trace), "--ways", "plain", *options]) == 1
        said = capsys.readouterr()
        return said.out + said.err

    few = told("--ttft-limit-ms", "1500")
    assert "2 nodes do not keep a TTFT of 1500 ms" in few
    assert "give a lower --share, or a --ttft-limit-ms above 1," in told("--ttft-limit-ms", "50")
    assert "its ITL is 29.0 ms; give a higher --itl-limit-ms" in told("--itl-limit-ms", "20")


def test_twice_the_rate_needs_more_nodes(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    needed = []
    for rate in ("1", "4"):
        main(["plan", "--trace", str(trace), "--ways", "auto", "--rate", rate, "--json"])
        needed.append(json.loads(capsys.readouterr().out)["least_nodes"]["auto"])
    assert needed[0] < needed[1]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ([], "give --trace or --measure"),
        (["--trace", "/nowhere"], "No such file"),
        (["--trace", "t", "--rate", "0"], "--rate must be a number greater than 0; got 0.0"),
        (["--trace", "t", "--share", "95"], "--share must be greater than 0 and at most 1; got 95.0"),
        (["--measure", "http://a", "http://b", "http://c"], "takes one node"),
    ],
)
def test_a_wrong_command_line_names_the_option(
    arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *arguments]) == 2
    assert why in capsys.readouterr().err


def test_a_node_that_does_not_run_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--measure", "http://127.0.0.1:9"]) == 1
    assert "http://127.0.0.1:9/v1/models cannot be asked" in capsys.readouterr().err


def test_the_url_of_a_node_does_not_move_the_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--measure", "http://127.0.0.1:9/\x1b[2J"]) == 1
    error = capsys.readouterr().err
    assert "\x1b" not in error
    assert "\\x1b[2J" in error


def test_costs_are_found_from_what_they_sum_up_to() -> None:
    chance = random.Random(3)
    names = ("request_s", "step_s", "prompt_token_s", "context_s", "answer_s", "answer_context_s", "mixed_s")

    def measured(times: dict[str, float]) -> Measured:
        exact = Measured("", 0.0, times)
        return replace(exact, seconds=exact.predicted(COSTS) * chance.uniform(0.999, 1.001))

    prompts = [
        {"request_s": 1, "step_s": -(-n // 512), "prompt_token_s": n, "context_s": n * n / 2}
        for n in (16, 64, 256, 1024, 4096)
    ]
    answers = [
        {"step_s": 1, "answer_s": b, "answer_context_s": b * n}
        for b, n in [(1, 48), (2, 48), (4, 48), (8, 48), (16, 48), (1, 1056), (4, 1056)]
    ]
    mixed = [
        {"step_s": 5, "mixed_s": 5, "prompt_token_s": 2048, "context_s": 2048 * 1024, "answer_s": 5 * b}
        for b in (1, 4)
    ]
    found = fit(Costs(chunk_tokens=512), [measured(each) for each in prompts + answers + mixed], names)
    for name in names:
        assert getattr(found, name) == pytest.approx(getattr(COSTS, name), rel=0.1), name


def test_no_cost_is_negative() -> None:
    """Noise may make a longer answer look faster."""
    measured = [
        Measured("", 0.02, {"step_s": 1, "answer_s": 1}),
        Measured("", 0.01, {"step_s": 1, "answer_s": 8}),
    ]
    found = fit(Costs(), measured, ("step_s", "answer_s"))
    assert found.answer_s == 0.0
    assert 0.01 <= found.step_s <= 0.02
