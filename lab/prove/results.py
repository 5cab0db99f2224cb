"""The runs of every cell, in a JSON file that later calls extend, and their tables.

This module is pure but for the file.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from kvferry.lab.load import markdown as table
from kvferry.transports.errors import ConfigurationError

from .outcomes import BAD, MEANINGS, Outcome, Verdict, worst
from .rows import AFTERWARDS, ROWS, STAGES

FORMAT: Final = 1
_WORDS: Final[Mapping[Outcome, str]] = {
    Outcome.RIGHT: "right",
    Outcome.ERROR: "error",
    Outcome.LEAK: "LEAK",
    Outcome.HANG: "HANG",
    Outcome.DEAD: "DEAD",
    Outcome.WRONG: "WRONG TOKENS",
}


@dataclass
class Target:
    """All runs of one connector.

    Attributes:
        about: What the connector is.
        transfer: Its `kv_transfer_config` or `ec_transfer_config`.
        environment: Versions and hardware: name → text.
        command: The command that repeats a cell, without `--only`.
        cells: Row → stage → its runs.
        skipped: Row → why it was not tried.
    """

    about: str = ""
    transfer: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    command: str = ""
    cells: dict[str, dict[str, list[Verdict]]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    @property
    def transfer_name(self) -> str:
        """What vLLM calls `transfer`."""
        return "ec_transfer_config" if "ec_connector" in self.transfer else "kv_transfer_config"

    def add(self, row: str, verdicts: Mapping[str, Verdict]) -> None:
        """Add one run of a row."""
        for stage, verdict in verdicts.items():
            self.cells.setdefault(row, {}).setdefault(stage, []).append(verdict)
        self.skipped.pop(row, None)

    def runs_of(self, row: str, stages: Iterable[str]) -> int:
        """Return how often each of these stages was tried at least."""
        cells = self.cells.get(row, {})
        return min((len(cells.get(stage, ())) for stage in stages), default=0)

    @property
    def bad(self) -> list[tuple[str, str, Outcome, int, str]]:
        """Cells with a run that no fault excuses: row, stage, outcome, number of such runs, why of
        the first.
        """
        found = []
        for row, cells in self.cells.items():
            for stage, verdicts in cells.items():
                for outcome in sorted(BAD):
                    such = [each for each in verdicts if each.outcome is outcome]
                    if such:
                        found.append((row, stage, outcome, len(such), such[0].why))
        return found


class Results:
    """The results in a folder.

    Raises:
        ConfigurationError: the file there is none of ours.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "results.json"
        self.targets: dict[str, Target] = {}
        if self._path.exists():
            self._read()

    def _read(self) -> None:
        try:
            found = json.loads(self._path.read_text())
            if found["format"] != FORMAT:
                raise ValueError(f"its format is {found['format']}, not {FORMAT}")
            for name, target in found["targets"].items():
                cells = {
                    row: {
                        stage: [Verdict(**{**run, "outcome": Outcome(run["outcome"])}) for run in runs]
                        for stage, runs in stages.items()
                    }
                    for row, stages in target["cells"].items()
                }
                self.targets[name] = Target(**{**target, "cells": cells})
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise ConfigurationError(
                f"--out names a folder whose {self._path.name} cannot be continued: {error}; name another folder",
                key="--out",
                value=str(self._path.parent),
            ) from error

    def save(self) -> None:
        """Write everything. An interruption leaves the file of before."""
        told = {
            "format": FORMAT,
            "targets": {name: asdict(target) for name, target in self.targets.items()},
        }
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps(told, indent=1))
        os.replace(new, self._path)


# -- cells -------------------------------------------------------------------------------------------


def summary(verdicts: Sequence[Verdict]) -> str:
    """Say in a few words what the runs of a cell were, the worst first."""
    counts = Counter(each.outcome for each in verdicts)
    parts = [f"{counts[outcome]} {_WORDS[outcome]}" for outcome in reversed(Outcome) if counts[outcome]]
    told = [each for each in verdicts if each.loaded is not None and each.outcome is Outcome.RIGHT]
    computed = sum(not each.loaded for each in told)
    notes = []
    if computed:
        notes.append(f"{computed} computed again")
    if ties := sum(bool(each.near_ties) for each in verdicts):
        notes.append(f"{ties} with near-ties")
    return ", ".join(parts) + (f" ({', '.join(notes)})" if notes else "")


def overview(targets: Mapping[str, Target]) -> list[list[str]]:
    """Return one line per row, with a cell per connector."""
    return [
        [row, *(_all_of(target.cells.get(row, {})) for target in targets.values())]
        for row in ROWS
        if any(row in target.cells for target in targets.values())
    ]


def _all_of(cells: Mapping[str, Sequence[Verdict]]) -> str:
    """Say in a few words what became of a row: what is bad in each of its cells; otherwise what there was."""
    if not cells:
        return "not tried"
    bad = [
        f"{number} of {len(verdicts)} {_WORDS[outcome]} ({stage})"
        for stage, verdicts in cells.items()
        for outcome in reversed(Outcome)
        if outcome in BAD and (number := sum(each.outcome is outcome for each in verdicts))
    ]
    if bad:
        return ", ".join(bad)
    found = {each.outcome for stage, verdicts in cells.items() if stage != AFTERWARDS for each in verdicts}
    words = " or ".join(_WORDS[outcome] for outcome in Outcome if outcome in found) or "right"
    return f"{words} (n = {max(map(len, cells.values()))})"


def _columns(targets: Iterable[Target]) -> list[str]:
    used = {stage for target in targets for cells in target.cells.values() for stage in cells}
    return [stage for stage in STAGES if stage in used]


def _rows(target: Target) -> list[str]:
    return [row for row in ROWS if row in target.cells or row in target.skipped]


# -- Markdown ----------------------------------------------------------------------------------------


def markdown(targets: Mapping[str, Target]) -> str:
    """Return all tables, with what is needed to read and to repeat them."""
    lines: list[str] = []
    if len(targets) > 1:
        shown = [[f"**{cell}**" if _is_loud(cell) else cell for cell in line] for line in overview(targets)]
        lines += ["## All connectors", "", table(["fault", *targets], shown), ""]
    for name, target in targets.items():
        lines += [f"## {name}", "", f"{target.about}.", ""]
        lines += [f"* {key}: {value}" for key, value in target.environment.items()]
        lines += [f"* {target.transfer_name}: `{json.dumps(target.transfer)}`"]
        lines += [f"* each row again: `{target.command} --only ROW`", ""]
        columns = _columns([target])
        rows = []
        for row in _rows(target):
            if row in target.skipped and row not in target.cells:
                rows.append([row, f"not tried: {target.skipped[row]}", *[""] * (len(columns) - 1)])
            else:
                rows.append([row, *(_cell(target.cells[row].get(stage, ())) for stage in columns)])
        lines += [table(["fault", *columns], rows), ""]
        if bad := target.bad:
            lines += ["What is bold, and the first reason of each:", ""]
            lines += [
                f"* {row}, {stage}: {number} × {_WORDS[outcome]}: {why}"
                for row, stage, outcome, number, why in bad
            ]
            lines.append("")
    return "\n".join([*lines, *legend()])


def legend() -> list[str]:
    """Return what rows, columns and words mean, as Markdown."""
    words = [(_WORDS[outcome], MEANINGS[outcome]) for outcome in Outcome]
    words.append(("computed again", "the right answer, but the decode server computed the prompt itself"))
    return [
        *["## What the words mean", "", table(["word", "meaning"], words), ""],
        *[table(["column", "meaning"], STAGES.items()), ""],
        *[table(["row", "the fault"], [(row.name, row.about) for row in ROWS.values()]), ""],
    ]


def _is_loud(cell: str) -> bool:
    return any(_WORDS[outcome] in cell for outcome in BAD)


def _cell(verdicts: Sequence[Verdict]) -> str:
    if not verdicts:
        return ""
    text = summary(verdicts)
    return f"**{text}**" if worst([each.outcome for each in verdicts]) in BAD else text
