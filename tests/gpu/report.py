"""Run everything that needs a GPU, and write one Markdown page of results: `make test-gpu`.

    python tests/gpu/report.py [--output build/gpu.md] [--seconds 480]

It needs one CUDA device and no network, and runs from a checkout without installing the project: it compiles the C part
with `gcc` if that is missing, and puts `src` on `PYTHONPATH`. Each step has a part of the time; a step that has none left
is reported as not run. The exit status is 1 if a step failed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import torch

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    "torch",
    "cuda-bindings",
    "ucxx-cu12",
    "ucxx-cu13",
    "nixl-cu12",
    "nixl-cu13",
    "flashinfer-python",
    "pyzmq",
)

#: Seconds that are kept for the steps after one.
RESERVE_S = 20.0


@dataclass(frozen=True)
class Result:
    """What one step did. `passed` is None if it was not run."""

    name: str
    passed: bool | None
    seconds: float
    lines: Sequence[str]


class Runner:
    """Runs programs from the checkout, until the time is over."""

    def __init__(self, seconds: float) -> None:
        self._until = time.monotonic() + seconds
        path = os.pathsep.join([str(ROOT / "src"), str(ROOT), str(ROOT / "examples")])
        self._environment = {
            **os.environ,
            "PYTHONPATH": f"{path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        }
        self.results: list[Result] = []

    def run(self, name: str, command: Sequence[str], *, at_most_s: float) -> Result:
        """Run a program; its output is kept, and the last lines of it are shown if it fails."""
        left = min(at_most_s, self._until - time.monotonic() - RESERVE_S)
        if left <= 0:
            return self._add(Result(name, None, 0.0, ["no time was left"]))
        print(f"{name} (at most {left:.0f} s)", flush=True)
        start = time.monotonic()
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                env=self._environment,
                timeout=left,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            passed, output = done.returncode == 0, done.stdout
        except subprocess.TimeoutExpired as error:
            text = error.stdout or b""
            output = text.decode(errors="replace") if isinstance(text, bytes) else text
            passed, output = False, f"{output}\nstopped after {left:.0f} s"
        return self._add(Result(name, passed, time.monotonic() - start, output.strip().splitlines()))

    def _add(self, result: Result) -> Result:
        self.results.append(result)
        verdict = {True: "passed", False: "FAILED", None: "not run"}[result.passed]
        print(f"  {verdict} after {result.seconds:.0f} s", flush=True)
        if result.passed is False:
            print("\n".join(result.lines[-40:]), flush=True)
        return result


def compile_native(runner: Runner) -> None:
    """Compile the copy loop for this Python, if it cannot be imported."""
    target = ROOT / "transports" / f"_native{sysconfig.get_config_var('EXT_SUFFIX')}"
    if target.exists() or shutil.which("gcc") is None:
        return
    include = sysconfig.get_paths()["include"]
    source = str(ROOT / "transports" / "_native.c")
    command = ["gcc", "-shared", "-fPIC", "-O3", f"-I{include}", source, "-o", str(target)]
    runner.run("compile the copy loop", command, at_most_s=60)


def machine() -> list[str]:
    """Describe the machine and the packages, as rows of a table."""
    rows = [("Python", platform.python_version()), ("CPU cores", str(os.cpu_count()))]
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        rows.append(
            ("GPU", f"{torch.cuda.device_count()} x {properties.name}, {properties.total_memory >> 30} GiB")
        )
        rows.append(("CUDA of PyTorch", str(torch.version.cuda)))
    for package in PACKAGES:
        try:
            rows.append((package, importlib.metadata.version(package)))
        except importlib.metadata.PackageNotFoundError:
            continue
    return ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]


def table_of_tests(report: Path) -> list[str]:
    """Return a table of the tests in a JUnit file; skipped ones with their reasons."""
    if not report.exists():
        return ["There is no report of the tests."]
    rows = ["| test | result | seconds |", "|---|---|---|"]
    for case in ElementTree.parse(report).iter("testcase"):
        result = "passed"
        for kind in ("skipped", "failure", "error"):
            found = case.find(kind)
            if found is not None:
                result = f"{kind}: {(found.get('message') or '').splitlines()[0][:160]}"
        rows.append(
            f"| {case.get('classname', '').rpartition('.')[2]}: {case.get('name')} | {result} | {case.get('time')} |"
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output", type=Path, default=ROOT / "build" / "gpu.md", help="the page (default: %(default)s)"
    )
    parser.add_argument(
        "--seconds", type=float, default=480, help="time for everything (default: %(default)s)"
    )
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda", help="cpu: a rehearsal without a GPU"
    )
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("PyTorch finds no CUDA device here; `--device cpu` rehearses the steps without one")
    runner = Runner(arguments.seconds)
    compile_native(runner)
    with tempfile.TemporaryDirectory() as folder:
        junit = Path(folder, "tests.xml")
        tests = ["-m", "pytest", "tests/gpu", "-m", "", "-q", "-p", "no:cacheprovider", f"--junitxml={junit}"]
        runner.run("tests", [sys.executable, *tests], at_most_s=300)
        make_model = "import sys, pathlib; from tests.support.tiny_models import write_tiny_model; write_tiny_model(pathlib.Path(sys.argv[1]))"
        model = str(Path(folder, "model"))
        runner.run(
            "write a model with random weights", [sys.executable, "-c", make_model, model], at_most_s=60
        )
        demo = [
            "examples/disagg_pair.py",
            "--device",
            arguments.device,
            "--model",
            model,
            "--num-blocks",
            "500",
        ]
        runner.run("demo", [sys.executable, *demo], at_most_s=120)
        rows = table_of_tests(junit)
    lines = ["# Results on a GPU", "", *machine(), "", "| step | result | seconds |", "|---|---|---|"]
    for result in runner.results:
        verdict = {True: "passed", False: "failed", None: "not run"}[result.passed]
        lines.append(f"| {result.name} | {verdict} | {result.seconds:.0f} |")
    lines += ["", "## Tests", "", *rows]
    for result in runner.results:
        if result.passed is False or result.name.startswith(("demo", "bench")):
            lines += ["", f"## Output: {result.name}", "", "```", *result.lines[-80:], "```"]
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text("\n".join(lines) + "\n")
    print(f"wrote {arguments.output}")
    return int(any(result.passed is False for result in runner.results))


if __name__ == "__main__":
    sys.exit(main())
