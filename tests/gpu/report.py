"""Run everything that needs a GPU, and write one Markdown page of results: `make test-gpu`.

It needs one CUDA device and no network, and compiles the C part with `gcc` if that is missing.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

import torch

from kvferry.lab.gpu.ready import compile_native
from kvferry.lab.gpu.report import REHEARSAL_FACTOR, OverLimitError, Step, machine, page, run_all

ROOT = Path(__file__).resolve().parents[2]
#: Lines of a program's output on the page.
OUTPUT_LINES = 150

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
#: What a step does with the environment of its program.
Run = Callable[[Mapping[str, str]], Iterator[str]]


def program(command: Sequence[str], tests: Path | None = None, *, shows_output: bool = False) -> Run:
    """Return a step that runs a program.

    Args:
        tests: The program is pytest, and writes its results there.
        shows_output: Its output goes on the page if it passed, too.
    """

    def run(environment: Mapping[str, str]) -> Iterator[str]:
        # A file and not a pipe: a process that outlives the step must not keep us waiting for the pipe's end.
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                status = process.wait()
                why = f"exit status {status}" if status else ""
            except OverLimitError as error:
                why = str(error)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            output.seek(0)
            lines = output.read().decode(errors="replace").strip().splitlines()[-OUTPUT_LINES:]
        yield from table_of_tests(tests) if tests is not None else ()
        if why:
            raise RuntimeError("\n".join((why, *lines)))
        yield from ("```", *lines, "```") if shows_output else ()

    return run


def steps(device: str, folder: Path) -> list[Step]:
    """Return all steps. `folder` is for what they write."""
    python = sys.executable
    on_gpu = device == "cuda"
    model = folder / "model"

    def tests(name: str, limit_s: float, *files: str) -> Step:
        paths = [f"tests/gpu/{file}" for file in files]
        # A warning of another version of a library is no failure here. Without pytest-asyncio, which no test
        # of these needs, the options for it in pyproject.toml cause warnings, too.
        options = ["-m", "", "-v", "--tb=short", "-p", "no:cacheprovider", "-W", "default"]
        options += ["-o", "timeout=60", "-o", "junit_family=xunit1"]
        report = folder / f"{name.replace(' ', '-')}.xml"
        command = [python, "-m", "pytest", *paths, *options, f"--junitxml={report}"]
        return Step(name, limit_s, ", ".join(files), program(command, report))

    def demo(connector: str) -> Step:
        options = ["--device", device, "--model", str(model), "--connector", connector]
        for repeats in NUM_REPEATS if on_gpu else (12,):
            options += ["--prompt", "The ferry carries a cache. " * repeats]
        sizes = "--dtype bfloat16 --num-blocks 1200 --max-num-batched-tokens 2048"
        options += ["--serve-args", sizes if on_gpu else "--dtype float32"]
        run = program([python, "examples/disagg_pair.py", *options], shows_output=True)

        def with_model(environment: Mapping[str, str]) -> Iterator[str]:
            if not model.exists():
                from tests.support.tiny_models import write_tiny_model  # needs more packages than the others

                write_tiny_model(model, **(DEMO_MODEL if on_gpu else {}))
            yield from run(environment)

        return Step(f"demo over {connector}", 75, "a pair beside a single node", with_model)

    bench = (
        "--place cuda:0 --seconds 30" if on_gpu else "--place stand-in --seconds 1 --pool-mib 64 --blocks 8"
    )
    command = [python, "-m", "tests.gpu.bench", *bench.split()]
    return [
        tests("CUDA IPC", 60, "test_cuda_ipc.py"),
        tests("pools of two processes", 140, "test_between_processes.py"),
        tests("loads while kernels run", 150, "test_loads_and_kernels.py"),
        tests("attention after a handoff", 60, "test_attention_after_a_handoff.py"),
        tests("attention backends", 240, "test_attention_backends.py"),
        Step("bench-gpu", 130, "each path beside plain copies", program(command, shows_output=True)),
        demo("auto"),
        demo("tcp"),
        tests("engine and layouts", 110, "test_engine.py", "test_layouts.py"),
    ]


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


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu.report",
        description="Run everything that needs a GPU. Each step has a time limit, and the page is written after "
        "each. The exit status is 1 if a step failed.",
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
    on_gpu = arguments.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        parser.error("PyTorch finds no CUDA device here; `--device cpu` rehearses the steps without one")
    # So that a step does not outlive this program.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))
    if shutil.which("gcc") is not None:
        compile_native()
    factor = 1 if on_gpu else REHEARSAL_FACTOR
    title = "Results on a GPU" if on_gpu else "Rehearsal without a GPU: no figure means anything"
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        wanted = [
            replace(step, limit_s=factor * step.limit_s)
            for step in steps(arguments.device, Path(name))
            if any(text in step.name for text in arguments.only)
        ]
        if not wanted:
            parser.error(f"--only: no step has {' or '.join(map(repr, arguments.only))} in its name")
        return run_all(
            wanted,
            environment(arguments.device),
            arguments.output,
            partial(page, title, machine(PACKAGES)),
            factor * arguments.seconds,
        )


if __name__ == "__main__":
    sys.exit(main())
