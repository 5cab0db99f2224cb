"""The runs of every cell, in a JSON file that later calls extend, and their tables.

This module is pure but for the file.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path
from typing import Any, Final

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
_COLOURS: Final[Mapping[Outcome, str]] = {
    Outcome.RIGHT: "#d9f2d9",
    Outcome.ERROR: "#eef3d6",
    Outcome.LEAK: "#fbe3c0",
    Outcome.HANG: "#fbd0c0",
    Outcome.DEAD: "#f7b9b0",
    Outcome.WRONG: "#f08c8c",
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


def command_of(target: Target, row: str) -> str:
    """Return the command that repeats a row."""
    return f"{target.command} --only {row}"


# -- Markdown ----------------------------------------------------------------------------------------


def markdown(targets: Mapping[str, Target]) -> str:
    """Return all tables, with what is needed to read and to repeat them."""
    lines: list[str] = []
    if len(targets) > 1:
        lines += ["## All connectors", "", _line(["fault", *targets]), _line(["---"] * (len(targets) + 1))]
        for line in overview(targets):
            lines.append(_line([f"**{cell}**" if _is_loud(cell) else cell for cell in line]))
        lines.append("")
    for name, target in targets.items():
        lines += [f"## {name}", "", f"{target.about}.", ""]
        lines += [f"* {key}: {value}" for key, value in target.environment.items()]
        lines += [f"* {target.transfer_name}: `{json.dumps(target.transfer)}`"]
        lines += [f"* each row again: `{target.command} --only ROW`", ""]
        columns = _columns([target])
        lines += [_line(["fault", *columns]), _line(["---"] * (len(columns) + 1))]
        for row in _rows(target):
            if row in target.skipped and row not in target.cells:
                lines.append(_line([row, f"not tried: {target.skipped[row]}", *[""] * (len(columns) - 1)]))
                continue
            cells = [_markdown_cell(target.cells[row].get(stage, ())) for stage in columns]
            lines.append(_line([row, *cells]))
        lines.append("")
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
    return [
        *["## What the words mean", "", "| word | meaning |", "|---|---|"],
        *(f"| {_WORDS[outcome]} | {MEANINGS[outcome]} |" for outcome in Outcome),
        "| computed again | the right answer, but the decode server computed the prompt itself |",
        *["", "| column | meaning |", "|---|---|"],
        *(f"| {stage} | {meaning} |" for stage, meaning in STAGES.items()),
        *["", "| row | the fault |", "|---|---|"],
        *(f"| {row.name} | {row.about} |" for row in ROWS.values()),
        "",
    ]


def _is_loud(cell: str) -> bool:
    return any(_WORDS[outcome] in cell for outcome in BAD)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _markdown_cell(verdicts: Sequence[Verdict]) -> str:
    if not verdicts:
        return ""
    text = summary(verdicts)
    return f"**{text}**" if worst([each.outcome for each in verdicts]) in BAD else text


# -- HTML --------------------------------------------------------------------------------------------


def html(targets: Mapping[str, Target]) -> str:
    """Return all tables as one page that needs no other file. The reasons of a cell are its tooltip."""
    style = (
        "body{font:15px system-ui,sans-serif;margin:2em;max-width:75em}table{border-collapse:collapse;margin:1em 0}"
        "td,th{border:1px solid #999;padding:.3em .6em;text-align:left;vertical-align:top}code{font-size:90%}"
    )
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><title>kvferry prove</title>",
        f"<style>{style}</style>",
        "<h1>What faults did to vLLM connectors</h1>",
    ]
    if len(targets) > 1:
        heads = "".join(f"<th>{escape(name)}" for name in targets)
        parts.append(f"<h2>All connectors</h2><table><tr><th>fault{heads}")
        for line in overview(targets):
            shown = "".join(
                f"<td>{'<b>' * _is_loud(cell)}{escape(cell)}{'</b>' * _is_loud(cell)}" for cell in line[1:]
            )
            parts.append(f"<tr><th>{line[0]}{shown}")
        parts.append("</table>")
    for name, target in targets.items():
        parts.append(f"<h2>{escape(name)}</h2><p>{escape(target.about)}.</p><ul>")
        parts += [f"<li>{escape(key)}: {escape(value)}" for key, value in target.environment.items()]
        parts.append(f"<li>{target.transfer_name}: <code>{escape(json.dumps(target.transfer))}</code></ul>")
        columns = _columns([target])
        heads = "".join(f"<th title='{escape(STAGES[stage], quote=True)}'>{stage}" for stage in columns)
        parts.append(f"<table><tr><th>fault{heads}<th>again")
        for row in _rows(target):
            about = escape(ROWS[row].about, quote=True)
            if row in target.skipped and row not in target.cells:
                why = escape(target.skipped[row])
                parts.append(f"<tr><th title='{about}'>{row}<td colspan={len(columns) + 1}>not tried: {why}")
                continue
            cells = "".join(_html_cell(target.cells[row].get(stage, ())) for stage in columns)
            again = f"<td><code>{escape(command_of(target, row))}</code>"
            parts.append(f"<tr><th title='{about}'>{row}{cells}{again}")
        parts.append("</table>")
    for title, meanings in (
        ("word", {_WORDS[outcome]: text for outcome, text in MEANINGS.items()}),
        ("column", STAGES),
        ("row", {row.name: row.about for row in ROWS.values()}),
    ):
        parts.append(f"<table><tr><th>{title}<th>meaning")
        parts += [f"<tr><td>{escape(word)}<td>{escape(text)}" for word, text in meanings.items()]
        parts.append("</table>")
    return "\n".join(parts) + "</html>\n"


def _html_cell(verdicts: Sequence[Verdict]) -> str:
    if not verdicts:
        return "<td>"
    colour = _COLOURS[worst([each.outcome for each in verdicts])]
    reasons = Counter(each.why for each in verdicts if each.why)
    title = escape("\n".join(f"{number} × {why}" for why, number in reasons.most_common(12)), quote=True)
    return f"<td style='background:{colour}' title='{title}'>{escape(summary(verdicts))}"
