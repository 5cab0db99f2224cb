"""Run everything that needs a GPU, and write one Markdown page of results: `make test-gpu`.

    python tests/gpu/report.py [--output build/gpu.md] [--seconds 480] [--only TEXT ...]

It needs one CUDA device and no network, and runs from a checkout without installing the project: it compiles
the C part with `gcc` if that is missing, and puts `src` on `PYTHONPATH`. Each step has a time limit, and some
time is kept for each step after it. The page is written after each step. The exit status is 1 if a step
failed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

import torch

ROOT = Path(__file__).resolve().parents[2]
#: A rehearsal is no measurement, so a busy machine may take longer over it.
REHEARSAL_FACTOR = 5

PACKAGES = (
    "torch",
    "transformers",
    "cuda-bindings",
    "ucxx-cu12",
    "ucxx-cu13",
    "nixl-cu12",
    "nixl-cu13",
    "flashinfer-python",
    "pyzmq",
)
#: A model whose cache is as large per token as that of Llama 3.2 1B, 32 KiB, and whose weights are a fifth of
#: that model's. Its tokens are bytes.
DEMO_MODEL = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 16384,
    "initializer_range": 0.02,
}
#: Prompts of the demo, as repeats of 27 tokens.
NUM_REPEATS = (12, 75, 300)
#: Steps that others need.
COMPILE, MAKE_MODEL = "compile the copy loop", "write a model with random weights"
VERDICTS = {True: "passed", False: "FAILED", None: "not run"}


@dataclass(frozen=True)
class Step:
    """A program to run.

    Attributes:
        at_most_s: Its time limit, in seconds.
        kept_s: Seconds that earlier steps leave for it.
        tests: Whether it is pytest, whose table of results goes on the page.
        shows_output: Whether its output goes on the page if it passed, too.
    """

    name: str
    command: Sequence[str]
    at_most_s: float
    kept_s: float
    tests: bool = False
    shows_output: bool = False


@dataclass(frozen=True)
class Result:
    """What one step did. `passed` is None if it was not run."""

    step: Step
    passed: bool | None
    seconds: float
    lines: Sequence[str]
    table: Sequence[str] = ()


def steps(device: str, folder: Path) -> list[Step]:
    """Return all steps. `folder` is for what they write."""
    python = sys.executable
    on_gpu = device == "cuda"

    def tests(name: str, *files: str, at_most_s: float, kept_s: float) -> Step:
        paths = [f"tests/gpu/{file}" for file in files]
        # A warning of another version of a library is no failure here. Without pytest-asyncio, which no test
        # of these needs, the options for it in pyproject.toml cause warnings, too.
        options = ["-m", "", "-v", "--tb=short", "-p", "no:cacheprovider", "-W", "default"]
        options += ["-o", "timeout=60", "-o", "junit_family=xunit1"]
        report = f"--junitxml={folder / name.replace(' ', '-')}.xml"
        return Step(name, [python, "-m", "pytest", *paths, *options, report], at_most_s, kept_s, tests=True)

    def demo(connector: str) -> Step:
        options = ["--device", device, "--model", model, "--connector", connector]
        for repeats in NUM_REPEATS if on_gpu else (12,):
            options += ["--prompt", "The ferry carries a cache. " * repeats]
        sizes = "--dtype bfloat16 --num-blocks 1200 --max-num-batched-tokens 2048"
        options += ["--serve-args", sizes if on_gpu else "--dtype float32"]
        command = [python, "examples/disagg_pair.py", *options]
        return Step(f"demo over {connector}", command, 75, 35, shows_output=True)

    model = str(folder / "model")
    make_model = (
        "import json, pathlib, sys; from tests.support.tiny_models import write_tiny_model; "
        "write_tiny_model(pathlib.Path(sys.argv[1]), **json.loads(sys.argv[2]))"
    )
    bench = ["--place", "cuda:0", "--seconds", "30"]
    if not on_gpu:
        bench = [
            "--place",
            "stand-in",
            "--seconds",
            "1",
            "--pool-mib",
            "64",
            "--blocks",
            "8",
        ]
    found = [
        tests("CUDA IPC", "test_cuda_ipc.py", at_most_s=60, kept_s=20),
        tests("pools of two processes", "test_between_processes.py", at_most_s=140, kept_s=60),
        tests("loads while kernels run", "test_loads_and_kernels.py", at_most_s=150, kept_s=40),
        tests("attention after a handoff", "test_attention_after_a_handoff.py", at_most_s=60, kept_s=20),
        tests("attention backends", "test_attention_backends.py", at_most_s=240, kept_s=15),
        Step("bench-gpu", [python, "-m", "tests.gpu.bench", *bench], 130, 90, shows_output=True),
        Step(MAKE_MODEL, [python, "-c", make_model, model, json.dumps(DEMO_MODEL if on_gpu else {})], 60, 20),
        demo("auto"),
        demo("tcp"),
        tests("engine and layouts", "test_engine.py", "test_layouts.py", at_most_s=110, kept_s=40),
    ]
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    native = ROOT / "transports" / f"_native{suffix}"
    if not native.exists() and shutil.which("gcc") is not None:
        include = sysconfig.get_paths()["include"]
        source = str(ROOT / "transports" / "_native.c")
        command = ["gcc", "-shared", "-fPIC", "-O3", f"-I{include}", source, "-o", str(native)]
        found.insert(0, Step(COMPILE, command, 60, 10))
    return found


def environment(device: str) -> dict[str, str]:
    """Return the environment of all steps."""
    found = dict(os.environ)
    path = [str(ROOT / "src"), str(ROOT), str(ROOT / "examples"), os.environ.get("PYTHONPATH", "")]
    found["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    if device == "cpu":
        found["KVFERRY_REHEARSE_GPU"] = "1"
    ucx = find_spec("libucx")
    if ucx is not None and ucx.origin is not None and find_spec("librmm") is None:
        # `libucxx` loads UCX's libraries only if `librmm` is installed, which it does not need otherwise.
        folders = [str(Path(ucx.origin).parent / "lib"), os.environ.get("LD_LIBRARY_PATH", "")]
        found["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, folders))
    return found


def run(step: Step, limit_s: float, environment: dict[str, str], folder: Path) -> Result:
    """Run a program for at most `limit_s` seconds; end it with all that it started."""
    if limit_s <= 0:
        return Result(step, None, 0.0, ["no time was left"])
    print(f"{step.name} (at most {limit_s:.0f} s)", flush=True)
    began = time.monotonic()
    # A file and not a pipe: a process that outlives the step must not keep us waiting for the pipe's end.
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            step.command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            passed, end = process.wait(limit_s) == 0, ""
        except subprocess.TimeoutExpired:
            passed, end = False, f"\nstopped after {limit_s:.0f} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        lines = (output.read().decode(errors="replace") + end).strip().splitlines()
    table = table_of_tests(folder / f"{step.name.replace(' ', '-')}.xml") if step.tests else []
    print(f"  {VERDICTS[passed]} after {time.monotonic() - began:.0f} s", flush=True)
    if not passed:
        print("\n".join(lines[-40:]), flush=True)
    return Result(step, passed, time.monotonic() - began, lines, table)


def machine() -> list[str]:
    """Describe the machine and the packages, as rows of a table."""
    rows = [("Python", platform.python_version()), ("CPU cores", str(os.cpu_count()))]
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        rows += [
            ("GPU", f"{torch.cuda.device_count()} x {properties.name}, {properties.total_memory >> 30} GiB"),
            ("CUDA of PyTorch", str(torch.version.cuda)),
            ("NVIDIA driver", driver_version()),
        ]
    for package in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            rows.append((package, importlib.metadata.version(package)))
    return ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]


def driver_version() -> str:
    """Return the version of the kernel module."""
    try:
        return Path("/proc/driver/nvidia/version").read_text().splitlines()[0].strip()
    except OSError:
        return "unknown"


def table_of_tests(report: Path) -> list[str]:
    """Return a table of the tests in a JUnit file; skipped ones with their reasons."""
    if not report.exists():
        return ["There is no report of the tests: they were stopped. The output says how far they came."]
    rows = ["| test | result | mechanism | seconds |", "|---|---|---|---|"]
    for case in ElementTree.parse(report).iter("testcase"):
        result = "passed"
        for kind in ("skipped", "failure", "error"):
            found = case.find(kind)
            if found is not None:
                lines = (found.get("message") or "").splitlines() or [""]
                result = f"{kind}: {lines[0][:200]}".replace("|", "\\|")
        values = [p.get("value", "") for p in case.iter("property") if p.get("name") == "mechanism"]
        name = str(case.get("name")).replace("|", "\\|")
        rows.append(f"| {name} | {result} | {' '.join(values)} | {float(case.get('time') or 0):.1f} |")
    return rows


def page(device: str, results: Sequence[Result]) -> str:
    """Return the page."""
    title = "Results on a GPU" if device == "cuda" else "Rehearsal without a GPU: no figure means anything"
    lines = [f"# {title}", "", *machine(), "", "| step | result | seconds |", "|---|---|---|"]
    lines += [f"| {r.step.name} | {VERDICTS[r.passed]} | {r.seconds:.0f} |" for r in results]
    for result in results:
        if result.table:
            lines += ["", f"## {result.step.name}", "", *result.table]
        if result.passed is False or (result.step.shows_output and result.passed):
            lines += ["", f"## Output: {result.step.name}", "", "```", *result.lines[-150:], "```"]
    return "\n".join(lines) + "\n"


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
    parser.add_argument(
        "--only",
        nargs="+",
        default=[""],
        metavar="TEXT",
        help="run the steps whose names contain one of these texts (default: all)",
    )
    arguments = parser.parse_args()
    factor = 1 if arguments.device == "cuda" else REHEARSAL_FACTOR
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("PyTorch finds no CUDA device here; `--device cpu` rehearses the steps without one")
    # So that a step does not outlive this program.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))
    until = time.monotonic() + arguments.seconds * factor
    results: list[Result] = []
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found = steps(arguments.device, folder)
        names = {step.name for step in found if any(text in step.name for text in arguments.only)}
        if any(name.startswith("demo") for name in names):
            names.add(MAKE_MODEL)
        wanted = [step for step in found if step.name in names or step.name == COMPILE]
        # With little time for everything, each step is kept its share of it, so that the first ones run as
        # well.
        share = min(1.0, 0.9 * arguments.seconds / sum(step.kept_s for step in wanted))
        for index, step in enumerate(wanted):
            kept_s = factor * share * sum(later.kept_s for later in wanted[index + 1 :])
            left_s = until - time.monotonic() - kept_s
            results.append(
                run(step, min(factor * step.at_most_s, left_s), environment(arguments.device), folder)
            )
            arguments.output.write_text(page(arguments.device, results), encoding="utf-8")
    print(f"wrote {arguments.output}")
    return int(any(result.passed is False for result in results))


if __name__ == "__main__":
    sys.exit(main())
