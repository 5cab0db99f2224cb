"""Change the code of handoffs, the router and sliced reads at places chosen by a seed, and see which of the
proofs notices.

Each mutant is one change: a condition is dropped, a bound is moved (a comparison, a limit, a flag, or what an
assignment adds to), two statements are swapped, or a message is dropped (a call whose result is not used, or
an action in a list of actions). Conditions and bounds are drawn twice as often, because tests miss them most
easily. It is made in a copy of the project. Then three suites run on it: the explorers of every state, the
simulators, and the other tests. A suite that fails, or that takes far longer than on unchanged code, has
killed it. What no suite kills is listed, to be explained or to be tested.

First each file of tests runs on unchanged code under coverage.py. The explorers and simulators are one
process, so one that does not come to the changed lines cannot notice and is left out. The tests that come to
them run first, the fastest before the others. The rest runs too, because tests may start processes that are
not measured.

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
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import islice, pairwise
from pathlib import Path
from queue import SimpleQueue
from threading import Lock
from typing import Literal

ROOT = Path(__file__).parents[2]
Kind = Literal["condition", "bound", "swap", "message"]
#: How often each kind is drawn, beside the others.
TURN: tuple[Kind, ...] = ("condition", "bound", "swap", "condition", "bound", "message")
#: What a comparison becomes if its bound moves by one, or if it is turned round.
OTHER_COMPARISON: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.In: "not in",
    ast.NotIn: "in",
}
#: Commands of the router, pages for people, and its HTTP server: what they do shows in tests that take
#: processes or a browser.
LEFT_OUT = frozenset({"main.py", "page.py", "__init__.py", "http"})


@dataclass(frozen=True)
class Suite:
    """Files of tests that run together, with an expression of their names and one of their marks.

    Attributes:
        is_one_process: Whether all that it runs is in the process of pytest.
    """

    name: str
    files: tuple[str, ...]
    names: str = ""
    marks: str = "not full and not slow"
    is_one_process: bool = True


EVERY_STATE = "tests/handoff/test_every_state.py"
SIMULATION = "tests/handoff/test_simulation.py"
STACK = "tests/stack/test_stack_simulation.py"
EVERY_EXCHANGE = "tests/routing/test_every_exchange.py"
FLEET = "tests/routing/test_fleet_simulation.py"
SLICED = "tests/transports/test_sliced.py"
#: Tests of connectors that take minutes, and try what is in the other files as well.
TAKE_LONG = tuple(f"tests/connector/test_{name}.py" for name in ("kit", "processes", "several_ranks"))


def _files_in(folder: str, *left_out: str) -> tuple[str, ...]:
    found = (str(path.relative_to(ROOT)) for path in sorted((ROOT / folder).glob("test_*.py")))
    return tuple(name for name in found if name not in left_out)


#: By folder: what runs on a mutant in it.
SUITES = {
    "connector/handoff": (
        Suite("explorer", (EVERY_STATE,), "promises_hold", "not full"),
        Suite("simulators", (SIMULATION, STACK), "promise or schedule"),
        Suite(
            "tests",
            (
                *_files_in("tests/handoff", EVERY_STATE, SIMULATION),
                *(
                    f"tests/connector/test_{name}.py"
                    for name in ("handoff", "halves", "scheduler_half", "worker_half", "faults")
                ),
            ),
            is_one_process=False,
        ),
    ),
    "connector/p2p": (
        Suite("simulators", (STACK,), "promise or schedule"),
        Suite("tests", _files_in("tests/connector", *TAKE_LONG)),
    ),
    "transports/sliced": (
        Suite("explorer", (SLICED,), "no_order", "not full"),
        Suite(
            "tests", (SLICED, *(f"tests/transports/test_{name}.py" for name in ("staging", "tcp", "zeromq")))
        ),
    ),
    "router": (
        Suite("explorer", (EVERY_EXCHANGE,), "promises_hold", "not full"),
        Suite("simulators", (STACK, "tests/routing/test_exchange.py", FLEET), "not planted"),
        Suite("tests", _files_in("tests/routing", EVERY_EXCHANGE, FLEET), is_one_process=False),
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
        """The one of `SUITES` that it is in."""
        return next(folder for folder in SUITES if self.path.startswith(f"{folder}/"))

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

    def visit_Compare(self, node: ast.Compare) -> None:
        if len(node.ops) == 1 and (other := OTHER_COMPARISON.get(type(node.ops[0]))) is not None:
            self._add("bound", node, f"{self._text(node.left)} {other} {self._text(node.comparators[0])}")
        self.generic_visit(node)

    def visit_keyword(self, node: ast.keyword) -> None:
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, bool):
            self._add("bound", node.value, str(not node.value.value))
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
            self._double(node.target, node.value)
            self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        self._double(node.targets[0], node.value)
        self.generic_visit(node)

    def _double(self, target: ast.expr, value: ast.expr) -> None:
        """Move a limit, which is a number with a name in capitals."""
        is_limit = isinstance(target, ast.Name) and target.id.isupper()
        if is_limit and isinstance(value, ast.Constant) and type(value.value) in (int, float):
            self._add("bound", value, f"2 * {self._text(value)}")

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call | ast.Await) and not _is_for_the_log(node.value):
            self._add("message", node, "pass")
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._add("message", node, "pass")
        self._add("bound", node, f"{self._text(node.target)} = {self._text(node.value)}")
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
    """Draw the same number of mutants per folder, in the proportions of `TURN`; fewer if the folder has
    fewer.
    """
    drawn = random.Random(seed)
    mutants: list[Mutant] = []
    for folder in SUITES:
        files = [path for path in sorted((ROOT / folder).rglob("*.py")) if not LEFT_OUT & {*path.parts}]
        found = [each for path in files for each in places_in(str(path.relative_to(ROOT)), path.read_bytes())]
        drawn.shuffle(found)
        mutants += islice(filter(_is_python, _in_turn(found)), num // len(SUITES))
    drawn.shuffle(mutants)  # so that a run that is stopped has seen some of everything
    return mutants


def _in_turn(found: Sequence[Mutant]) -> Iterator[Mutant]:
    of_kind = {kind: iter([each for each in found if each.kind == kind]) for kind in TURN}
    for _ in found:
        yield from (each for kind in TURN if (each := next(of_kind[kind], None)) is not None)


# -- trying --------------------------------------------------------------------------------------------


def copy_of_project(folder: Path) -> Path:
    """Copy the project, as git knows it, with the module in C that was built for it."""
    listed = subprocess.check_output(("git", "ls-files", "-co", "--exclude-standard"), cwd=ROOT, text=True)
    built = [str(path.relative_to(ROOT)) for path in (ROOT / "transports").glob("_native*.so")]
    for name in [*listed.splitlines(), *built]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name, follow_symlinks=False)
    return folder


@dataclass(frozen=True)
class Measured:
    """A file of a suite on unchanged code.

    Attributes:
        lines: By path: the numbers of the lines that were executed.
    """

    seconds: float
    lines: dict[str, list[int]]

    def comes_to(self, mutant: Mutant, source: bytes) -> bool:
        """Whether it executes a line of what the mutant changes, or of the statement with that in it."""
        first = source[: mutant.start].count(b"\n") + 1
        last = source[: mutant.end].count(b"\n") + 1
        statements = [each for each in ast.walk(ast.parse(source)) if isinstance(each, ast.stmt)]
        around = (each.lineno for each in statements if each.lineno <= first <= (each.end_lineno or 0))
        innermost = max(around, default=first)  # a decorator is above the first line of its statement
        return not {innermost, *range(first, last + 1)}.isdisjoint(self.lines.get(mutant.path, ()))


def measure(suite: Suite, file: str, folder: Path) -> Measured:
    """Run a file of a suite on unchanged code.

    Raises:
        SystemExit: it fails, so that it could tell nothing.
    """
    data = folder / ".coverage"
    parts = ",".join(f"{part}/*" for part in SUITES)
    measured = ("-m", "coverage", "run", f"--data-file={data}", f"--include={parts}")
    is_right, seconds = passes(suite, (file,), folder, 3600.0, measured)
    if not is_right:
        sys.exit(f"on unchanged code the suite {suite.name} fails: pytest -k '{suite.names}' {file}")
    report = (sys.executable, "-m", "coverage", "json", "-q", f"--data-file={data}", "-o", "-")
    told = subprocess.run(report, cwd=folder, stdout=subprocess.PIPE, text=True, check=False).stdout
    # Some tests of a folder come to none of the files that are changed.
    files = {} if told.startswith("No data to report") else json.loads(told)["files"]
    print(f"{suite.name}: {file} takes {seconds:.0f} s", flush=True)
    return Measured(seconds, {path: each["executed_lines"] for path, each in files.items()})


def passes(
    suite: Suite, files: Sequence[str], folder: Path, limit_s: float, before: Sequence[str] = ()
) -> tuple[bool, float]:
    """Whether files of a suite pass in time, and how long they took.

    Args:
        before: What the interpreter runs pytest with.
    """
    started = time.monotonic()
    options = ("-x", "-q", "-p", "no:cacheprovider", "-m", suite.marks, "-k", suite.names)
    command = (sys.executable, "-B", *before, "-m", "pytest", *options, *files)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join((str(folder / "src"), os.environ.get("PYTHONPATH", "")))
    }
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


class Trial:
    """Tries mutants, each in a copy of the project, with what is known of unchanged code.

    Args:
        num_copies: Mutants at a time.
        output: Gets a line of JSON per file that was measured and per mutant. What it has is not done again.
    """

    def __init__(self, folder: Path, num_copies: int, output: Path | None) -> None:
        self.results: dict[str, dict[str, bool]] = {}
        self._measured: dict[tuple[str, str, str], Measured] = {}
        self._output = output
        self._writing = Lock()  # a long line is written in parts, and those of two threads must not mix
        self._free: SimpleQueue[Path] = SimpleQueue()
        for number in range(num_copies):
            self._free.put(copy_of_project(folder / str(number)))
        if output is not None and output.exists():
            for line in map(json.loads, output.read_text().splitlines()):
                if "measured" in line:
                    self._measured[tuple(line["measured"])] = Measured(line["seconds"], line["lines"])
                else:
                    self.results[line["shown"]] = line["kills"]

    def measure(self, part: str, suite: Suite, file: str) -> None:
        key = (part, suite.name, file)
        if key not in self._measured:
            with self._copy() as folder:
                found = measure(suite, file, folder)
            self._measured[key] = found
            self._write({"measured": key, **asdict(found)})

    def kill(self, mutant: Mutant) -> None:
        """Find which suites notice a mutant."""
        source = (ROOT / mutant.path).read_bytes()
        shown = mutant.shown(source)
        if shown in self.results:
            return
        with self._copy() as folder:
            path = folder / mutant.path
            path.write_bytes(mutant.apply(source))
            try:
                found = {
                    suite.name: self._notices(suite, mutant, source, folder)
                    for suite in SUITES[mutant.folder]
                }
            finally:
                path.write_bytes(source)
        self.results[shown] = found
        by = ", ".join(name for name, has_killed in found.items() if has_killed) or "NOTHING"
        print(f"{len(self.results)} {shown}: killed by {by}", flush=True)
        self._write({"shown": shown, "kills": found, **asdict(mutant)})

    def _notices(self, suite: Suite, mutant: Mutant, source: bytes, folder: Path) -> bool:
        measured = {file: self._measured[mutant.folder, suite.name, file] for file in suite.files}
        comes = {file: each.comes_to(mutant, source) for file, each in measured.items()}
        files = [file for file in suite.files if comes[file] or not suite.is_one_process]
        files.sort(key=lambda file: (not comes[file], measured[file].seconds))
        # Coverage makes the measured times longer, so this is more than twice what unchanged code takes.
        limit_s = 60.0 + 2 * sum(measured[file].seconds for file in files)
        return bool(files) and not passes(suite, files, folder, limit_s)[0]

    @contextmanager
    def _copy(self) -> Iterator[Path]:
        folder = self._free.get()
        try:
            yield folder
        finally:
            self._free.put(folder)

    def _write(self, line: dict[str, object]) -> None:
        if self._output is not None:
            with self._writing, self._output.open("a") as file:
                file.write(json.dumps(line) + "\n")


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
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(args.jobs) as pool:
        trial = Trial(Path(temporary), args.jobs, args.output)
        files = [(part, suite, file) for part in SUITES for suite in SUITES[part] for file in suite.files]
        list(pool.map(lambda each: trial.measure(*each), files))

        def try_one(mutant: Mutant) -> None:
            if time.monotonic() - started < args.seconds:
                trial.kill(mutant)

        list(pool.map(try_one, mutants))
    print(table(mutants, trial.results))


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
