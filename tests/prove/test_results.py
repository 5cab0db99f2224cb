"""The tables, and the file that later calls go on from."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.lab.prove.outcomes import Outcome, Verdict
from kvferry.lab.prove.results import Results, Target, markdown, overview, summary
from kvferry.transports.errors import ConfigurationError

RIGHT, AGAIN = Verdict(Outcome.RIGHT, loaded=True), Verdict(Outcome.RIGHT, loaded=False)
WRONG = Verdict(Outcome.WRONG, "a <mismatch> | at token 3")
ERROR = Verdict(Outcome.ERROR, "refused", near_ties=0)


def _target() -> Target:
    target = Target(
        "a connector", {"kv_connector": "Mine"}, {"versions": "vLLM 1"}, "kvferry prove --preset mine"
    )
    target.add("none", {"asked": RIGHT, "afterwards": RIGHT})
    target.add("none", {"asked": RIGHT, "afterwards": RIGHT})
    target.add("swapped", {"asked": WRONG, "afterwards": RIGHT})
    target.add("swapped", {"asked": ERROR, "afterwards": Verdict(Outcome.LEAK, "a leak")})
    target.skipped["expired"] = "the connector has no lease"
    return target


def test_a_cell_names_every_outcome_with_its_number_the_worst_first() -> None:
    assert summary([RIGHT, ERROR, WRONG, RIGHT]) == "1 WRONG TOKENS, 1 error, 2 right"
    assert (
        summary([RIGHT, AGAIN, Verdict(Outcome.RIGHT, near_ties=2)])
        == "3 right (1 computed again, 1 with near-ties)"
    )


def test_the_markdown_table_shows_every_cell_and_what_is_bad_in_bold() -> None:
    text = markdown({"mine": _target()})
    assert "| fault | asked | afterwards |" in text
    assert "| none | 2 right | 2 right |" in text
    assert "| swapped | **1 WRONG TOKENS, 1 error** | **1 LEAK, 1 right** |" in text
    assert "| expired | not tried: the connector has no lease |  |" in text
    assert "* swapped, asked: 1 × WRONG TOKENS: a <mismatch> | at token 3" in text
    assert "kvferry prove --preset mine --only ROW" in text


def test_several_connectors_are_set_side_by_side() -> None:
    other = Target()
    other.add("none", {"asked": ERROR, "afterwards": RIGHT})
    assert overview({"mine": _target(), "other": other}) == [
        ["none", "right (n = 2)", "error (n = 1)"],
        ["swapped", "1 of 2 WRONG TOKENS (asked), 1 of 2 LEAK (afterwards)", "not tried"],
    ]
    text = markdown({"mine": _target(), "other": other})
    assert "| swapped | **1 of 2 WRONG TOKENS (asked), 1 of 2 LEAK (afterwards)** | not tried |" in text


def test_a_later_call_goes_on_from_what_is_there(tmp_path: Path) -> None:
    results = Results(tmp_path)
    results.targets["mine"] = _target()
    results.save()
    again = Results(tmp_path)
    assert again.targets == results.targets
    target = again.targets["mine"]
    assert target.runs_of("none", ("asked", "afterwards")) == 2
    assert target.runs_of("none", ("asked", "loading")) == 0
    target.add("expired", {"asked": RIGHT})
    assert not target.skipped


def test_cells_that_no_fault_excuses_are_found() -> None:
    assert [(row, stage, outcome, number) for row, stage, outcome, number, _ in _target().bad] == [
        ("swapped", "asked", Outcome.WRONG, 1),
        ("swapped", "afterwards", Outcome.LEAK, 1),
    ]


@pytest.mark.parametrize(
    "content", ["", "{}", '{"format": 99, "targets": {}}', '{"format": 1, "targets": {"a": {"cells": 1}}}']
)
def test_a_file_of_something_else_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "results.json").write_text(content)
    with pytest.raises(
        ConfigurationError, match="--out names a folder whose results.json cannot be continued"
    ):
        Results(tmp_path)
