"""Change the code of the handoff and the router at places chosen by a seed, and see which of the proofs notices.

Each mutant is one change: a condition is dropped, two statements are swapped, or a message is dropped (a call whose result is
not used, or an action in a list of actions). It is made in a copy of the project. Then three suites run on it: the explorers of
every state, the simulators, and the other tests. A suite that fails, or that takes far longer than on unchanged code, has killed
it. What no suite kills is listed, to be explained or to be tested.

    python -m tests.support.mutants --num 200 --seed 1 --output mutants.jsonl

With `--output`, a run that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import islice, pairwise
from pathlib import Path
from queue import SimpleQueue
from typing import Literal

ROOT = Path(__file__).parents[2]
Kind = Literal["condition", "swap", "message"]
#: Commands of the router, and pages for people: what they do shows in tests that take processes or a browser.
LEFT_OUT = frozenset({"main.py", "page.py", "__init__.py"})


@dataclass(frozen=True)
class Suite:
    """Tests that run together, as arguments of pytest, and an expression of their marks."""

    name: str
    args: tuple[str, ...]
    marks: str = "not full and not slow"


EVERY_STATE = "tests/handoff/test_every_state.py"
EVERY_EXCHANGE = "tests/routing/test_every_exchange.py"
#: By folder: what runs on a mutant in it.
SUITES = {
    "connector/handoff": (
        Suite("explorer", (EVERY_STATE, "-k", "promises_hold"), "not full"),
        Suite("simulators", ("tests/handoff/test_simulation.py", "tests/stack", "-k", "promise or schedule")),
        Suite(
            "tests",
            (
                "tests/handoff",
                *(
                    f"tests/connector/test_{name}.py"
                    for name in ("handoff", "halves", "scheduler_half", "worker_half", "faults")
                ),
                f"--ignore={EVERY_STATE}",
                "--ignore=tests/handoff/test_simulation.py",
            ),
        ),
    ),
    "router": (
        Suite("explorer", (EVERY_EXCHANGE, "-k", "promises_hold"), "not full"),
        Suite(
            "simulators",
            (
                "tests/stack",
                "tests/routing/test_exchange.py",
                "tests/routing/test_fleet_simulation.py",
                "-k",
                "not planted",
            ),
        ),
        Suite(
            "tests",
            (
                "tests/routing",
                f"--ignore={EVERY_EXCHANGE}",
                "--ignore=tests/routing/test_fleet_simulation.py",
            ),
        ),
    ),
}


@dataclass(frozen=True)
class Mutant:
    """One change of one file.

    Attributes:
        start, end: Of the replaced text, as offsets in the file's bytes.
    """

    path: str
    line: int
    kind: Kind
    start: int
    end: int
    new: str

    @property
    def folder(self) -> str:
        return str(Path(self.path).parent)

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.new.encode() + source[self.end :]

    def shown(self, source: bytes) -> str:
        """Show what is changed, in one line."""
        old = " ".join(source[self.start : self.end].decode().split())
        return f"{self.path}:{self.line} {self.kind}: {old[:100]} → {' '.join(self.new.split())[:100]}"


# -- places --------------------------------------------------------------------------------------------


class _Places(ast.NodeVisitor):
    """Finds what can be changed in a file."""

    def __init__(self, path: str, source: bytes) -> None:
        self.found: list[Mutant] = []
        self._path, self._source = path, source
        self._starts = [0]
        for line in source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = self._starts[node.lineno - 1] + node.col_offset
        return start, self._starts[node.end_lineno - 1] + node.end_col_offset

    def _text(self, node: ast.expr | ast.stmt) -> str:
        start, end = self._span(node)
        return self._source[start:end].decode()

    def _add(self, kind: Kind, node: ast.expr | ast.stmt, new: str) -> None:
        self.found.append(Mutant(self._path, node.lineno, kind, *self._span(node), new))

    def _drop_condition(self, test: ast.expr, *values: str) -> None:
        for value in values:
            self._add("condition", test, value)

    def visit_If(self, node: ast.If) -> None:
        if not (isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"):
            self._drop_condition(node.test, "True", "False")
            self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._drop_condition(node.test, "True", "False")
        self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        self._drop_condition(node.test, "False")
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        word = " and " if isinstance(node.op, ast.And) else " or "
        for index in range(len(node.values)):
            rest = [f"({self._text(each)})" for at, each in enumerate(node.values) if at != index]
            self._add("condition", node, word.join(rest))
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self._drop_condition(test, "True")
        self.generic_visit(node)

    def visit_Assert(self, node: ast.Assert) -> None:
        """An assertion is a proof of its own."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call | ast.Await) and not _is_for_the_log(node.value):
            self._add("message", node, "pass")
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._add("message", node, "pass")
        self.generic_visit(node)

    def visit_List(self, node: ast.List) -> None:
        for index, each in enumerate(node.elts):
            call = each.value if isinstance(each, ast.Starred) else each
            if isinstance(call, ast.Call):
                rest = [self._text(one) for at, one in enumerate(node.elts) if at != index]
                self._add("message", node, f"[{', '.join(rest)}]")
        self.generic_visit(node)

    def generic_visit(self, node: ast.AST) -> None:
        for body in (getattr(node, name, None) for name in ("body", "orelse", "finalbody")):
            if isinstance(body, list) and not isinstance(node, ast.Module | ast.ClassDef):
                self._swap(body)
        super().generic_visit(node)

    def _swap(self, body: Sequence[ast.stmt]) -> None:
        simple = (ast.Assign, ast.AugAssign, ast.Expr, ast.Delete)
        for one, other in pairwise(body):
            if isinstance(one, simple) and isinstance(other, simple) and not _is_text(one):
                start, end = self._span(one)[0], self._span(other)[1]
                between = self._source[self._span(one)[1] : self._span(other)[0]].decode()
                new = self._text(other) + between + self._text(one)
                self.found.append(Mutant(self._path, one.lineno, "swap", start, end, new))


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_for_the_log(node: ast.expr) -> bool:
    return any(isinstance(each, ast.Name) and each.id in ("logger", "log") for each in ast.walk(node))


def places_in(path: str, source: bytes) -> list[Mutant]:
    """Everything that can be changed in a file."""
    places = _Places(path, source)
    places.visit(ast.parse(source))
    return places.found


def _is_python(mutant: Mutant) -> bool:
    try:
        ast.parse(mutant.apply((ROOT / mutant.path).read_bytes()))
    except SyntaxError:
        return False
    return True


def chosen(num: int, seed: int) -> list[Mutant]:
    """As many mutants of each folder, and in a folder as many of each kind as far as there are so many."""
    drawn = random.Random(seed)
    mutants: list[Mutant] = []
    for folder in SUITES:
        files = [path for path in sorted((ROOT / folder).glob("*.py")) if path.name not in LEFT_OUT]
        found = [each for path in files for each in places_in(f"{folder}/{path.name}", path.read_bytes())]
        drawn.shuffle(found)
        by_kind = [[each for each in found if each.kind == kind] for kind in ("condition", "swap", "message")]
        mutants += islice(filter(_is_python, _in_turn(by_kind)), num // len(SUITES))
    drawn.shuffle(mutants)  # so that a run that is stopped has seen some of everything
    return mutants


def _in_turn(rows: list[list[Mutant]]) -> Iterator[Mutant]:
    for index in range(max(map(len, rows))):
        yield from (row[index] for row in rows if index < len(row))


# -- trying --------------------------------------------------------------------------------------------


def copy_of_project(folder: Path) -> Path:
    """Copy the project, as git knows it, with the module in C that was built for it."""
    listed = subprocess.check_output(("git", "ls-files", "-co", "--exclude-standard"), cwd=ROOT, text=True)
    built = [str(path.relative_to(ROOT)) for path in (ROOT / "transports").glob("_native*.so")]
    for name in [*listed.splitlines(), *built]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name, follow_symlinks=False)
    return folder


def passes(suite: Suite, folder: Path, limit_s: float) -> tuple[bool, float]:
    """Whether a suite passes in time, and how long it took."""
    started = time.monotonic()
    command = [
        sys.executable,
        "-B",
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        suite.marks,
        *suite.args,
    ]
    environment = os.environ | {"PYTHONPATH": str(folder / "src")}
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        status = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        status = -1
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)  # with all that it may have started
        except ProcessLookupError:
            pass
        process.wait()
    return status == 0, time.monotonic() - started


def limits_in(folder: Path) -> dict[tuple[str, str], float]:
    """Run all suites on unchanged code; each then has three times as long.

    Raises:
        SystemExit: one fails, so that it could tell nothing.
    """
    limits = {}
    for part, suites in SUITES.items():
        for suite in suites:
            is_right, seconds = passes(suite, folder, 1800.0)
            if not is_right:
                sys.exit(
                    f"on unchanged code the suite {suite.name} of {part} fails: pytest {' '.join(suite.args)}"
                )
            print(f"{part}: {suite.name} takes {seconds:.0f} s", flush=True)
            limits[part, suite.name] = 60.0 + 3 * seconds
    return limits


def kills(mutant: Mutant, folder: Path, limits: dict[tuple[str, str], float]) -> dict[str, bool]:
    """Which suites notice a mutant."""
    path = folder / mutant.path
    source = path.read_bytes()
    path.write_bytes(mutant.apply(source))
    try:
        return {
            suite.name: not passes(suite, folder, limits[mutant.folder, suite.name])[0]
            for suite in SUITES[mutant.folder]
        }
    finally:
        path.write_bytes(source)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Change the code at random places, and see which of the proofs notices."
    )
    parser.add_argument("--num", type=int, default=200, help="mutants; default: 200")
    parser.add_argument("--seed", type=int, default=1, help="of the places; default: 1")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time; default: 1")
    parser.add_argument("--output", type=Path, help="a file that gets a line of JSON per mutant")
    parser.add_argument(
        "--seconds", type=float, default=1e9, help="begin no further mutant after that; default: never"
    )
    args = parser.parse_args()
    mutants = chosen(args.num, args.seed)
    results: dict[str, dict[str, bool]] = {}
    if args.output is not None and args.output.exists():
        lines = [json.loads(line) for line in args.output.read_text().splitlines()]
        results = {line["shown"]: line["kills"] for line in lines}
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        free: SimpleQueue[Path] = SimpleQueue()
        for number in range(args.jobs):
            free.put(copy_of_project(Path(temporary) / str(number)))
        first = free.get()
        limits = limits_in(first)
        free.put(first)

        def try_one(mutant: Mutant) -> None:
            shown = mutant.shown((ROOT / mutant.path).read_bytes())
            if shown in results or time.monotonic() - started > args.seconds:
                return
            folder = free.get()
            try:
                found = kills(mutant, folder, limits)
            finally:
                free.put(folder)
            results[shown] = found
            by = ", ".join(name for name, has_killed in found.items() if has_killed) or "NOTHING"
            print(f"{len(results)}/{len(mutants)} {shown}: killed by {by}", flush=True)
            if args.output is not None:
                with args.output.open("a") as file:
                    file.write(json.dumps({"shown": shown, "kills": found, **asdict(mutant)}) + "\n")

        with ThreadPoolExecutor(args.jobs) as pool:
            list(pool.map(try_one, mutants))
    print(table(mutants, results))


def table(mutants: Sequence[Mutant], results: dict[str, dict[str, bool]]) -> str:
    """Count what was killed by what, per folder and kind of change."""
    counts: dict[tuple[str, str], Counter[str]] = {}
    for mutant in mutants:
        found = results.get(mutant.shown((ROOT / mutant.path).read_bytes()))
        if found is None:
            continue
        row = counts.setdefault((mutant.folder, mutant.kind), Counter())
        row.update(["mutants", *(name for name, has_killed in found.items() if has_killed)])
        row["survivors"] += not any(found.values())
    columns = ("mutants", "explorer", "simulators", "tests", "survivors")
    lines = [f"| folder | change | {' | '.join(columns)} |", "|---" * (len(columns) + 2) + "|"]
    for (folder, kind), row in sorted(counts.items()):
        lines.append(f"| {folder} | {kind} | {' | '.join(str(row[name]) for name in columns)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
