"""`kvferry prove` finds each class of fault, in servers that have it by design."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvferry.cli.main import main
from kvferry.lab.prove import lab
from tests.prove.fake_vllm import Behaviour, running_pair

ROWS = (
    "none",
    "used-for-another",
    "swapped",
    "reused",
    "forged",
    "malformed",
    "expired",
    "leave",
    "other-salt",
)


@pytest.fixture
def prove(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """Run the command on servers of a behaviour. Returns its exit status, and outcomes by row and stage."""
    monkeypatch.setattr(lab, "SLACK_S", 2.0)
    monkeypatch.setattr(lab, "POLL_S", 0.02)

    def run(behaviour: Behaviour, *words: str, only: tuple[str, ...] = ROWS) -> tuple[int, dict[str, Any]]:
        with running_pair(behaviour) as urls:
            given = ["--url", *(f"{side}={url}" for side, url in urls.items())]
            options = [
                "--lease-s",
                "0.2",
                "--deadline-s",
                "5",
                "--repeats",
                "1",
                "--out",
                str(tmp_path / "out"),
            ]
            status = main(["prove", *given, *options, "--only", *only, *words])
        (target,) = json.loads((tmp_path / "out" / "results.json").read_text())["targets"].values()
        told = {
            row: {stage: [run["outcome"] for run in runs] for stage, runs in cells.items()}
            for row, cells in target["cells"].items()
        }
        return status, told | {"skipped": target["skipped"]}

    return run


def test_a_connector_that_checks_has_no_bad_cell(prove, capsys) -> None:  # type: ignore[no-untyped-def]
    status, told = prove("checks")
    assert status == 0
    assert told["none"] == {"asked": ["right"], "afterwards": ["right"]}
    for row in ("used-for-another", "swapped", "reused", "expired", "forged"):
        assert told[row] == {"asked": ["error"], "afterwards": ["right"]}, row
    assert told["leave"] == {stage: ["right"] for stage in ("computing", "offered", "loading", "answering")}
    assert "vLLM 0.0-fake" in capsys.readouterr().out


def test_a_connector_that_trusts_its_params_gives_wrong_tokens(prove, capsys) -> None:  # type: ignore[no-untyped-def]
    status, told = prove("trusts", only=("none", "used-for-another", "swapped"))
    assert status == 1
    for row in ("used-for-another", "swapped"):
        assert told[row] == {"asked": ["wrong"], "afterwards": ["right"]}, row
    assert "**1 WRONG TOKENS**" in capsys.readouterr().out


def test_blocks_that_never_come_back_are_a_leak(prove) -> None:  # type: ignore[no-untyped-def]
    status, told = prove("leaks", only=("none",))
    assert (status, told["none"]) == (1, {"asked": ["right"], "afterwards": ["leak"]})


def test_an_answer_that_never_comes_is_a_hang(prove) -> None:  # type: ignore[no-untyped-def]
    status, told = prove("hangs", "--deadline-s", "0.3", only=("swapped",))
    assert (status, told["swapped"]) == (1, {"asked": ["hang"], "afterwards": ["right"]})


def test_a_server_whose_health_fails_is_dead(prove) -> None:  # type: ignore[no-untyped-def]
    status, told = prove("dies", only=("swapped",))
    assert (status, told["swapped"]) == (1, {"asked": ["error"], "afterwards": ["dead"]})


def test_only_the_stage_at_which_a_server_is_found_dead_is_blamed(prove) -> None:  # type: ignore[no-untyped-def]
    _, told = prove("dies", only=("swapped", "leave"))
    assert told["leave"] == {"computing": ["dead"]}


def test_rows_that_need_processes_are_left_out_with_a_reason(prove) -> None:  # type: ignore[no-untyped-def]
    status, told = prove("checks", only=("kill-prefill", "freeze-decode", "other-weights", "router"))
    assert status == 0
    assert set(told["skipped"]) == {"kill-prefill", "freeze-decode", "other-weights", "router"}
    assert "needs the process of the prefill server" in told["skipped"]["kill-prefill"]


def test_a_later_call_adds_what_is_missing(prove) -> None:  # type: ignore[no-untyped-def]
    prove("checks", only=("none",))
    _, told = prove("checks", "--repeats", "3", only=("none",))
    assert told["none"] == {"asked": ["right"] * 3, "afterwards": ["right"] * 3}
