"""Fuzz decoders with Atheris, which finds its inputs by what code they reach.

    python -m tests.fuzz [--inputs N] [DECODER ...]

Each decoder runs in a process of its own, begins with its saved corpus, and leaves what it finds in
`build/fuzz/DECODER`. An input that breaks a promise is written there as well, and its bytes are printed.
Atheris must be importable.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
CORPUS = Path(__file__).parent / "corpus"
#: Of libFuzzer: an input that takes longer, or more memory, is a defect.
LIMITS = ("-max_len=4096", "-timeout=10", "-rss_limit_mb=2048")


def fuzz_one(name: str, arguments: list[str]) -> None:
    """Fuzz one decoder in this process, which ends here."""
    import atheris

    with atheris.instrument_imports(include=["kvferry"]):
        from .decoders import try_decoder

    atheris.Setup([sys.argv[0], *arguments], lambda data: try_decoder(name, data))
    atheris.Fuzz()


def fuzz(name: str, num_inputs: int) -> str:
    """Fuzz one decoder in a process of its own, and return a row of the table.

    Raises:
        SystemExit: it breaks a promise.
    """
    folder = ROOT / "build" / "fuzz" / name
    folder.mkdir(parents=True, exist_ok=True)
    limits = [*LIMITS, f"-runs={num_inputs}", f"-artifact_prefix={folder}/crash-", "-print_final_stats=1"]
    command = [
        sys.executable,
        "-m",
        "tests.fuzz",
        "--child",
        name,
        "--",
        *limits,
        str(folder),
        str(CORPUS / name),
    ]
    started = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    seconds = time.monotonic() - started
    if done.returncode != 0:
        sys.exit(f"{name} breaks a promise:\n{done.stdout[-3000:]}{done.stderr[-6000:]}")
    tried = re.findall(r"stat::number_of_executed_units: (\d+)", done.stderr)
    covered = re.findall(r"cov: (\d+)", done.stderr)
    return f"| {name} | {int(tried[-1]):,} | {covered[-1]} | {seconds:,.0f} s |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--inputs", type=int, default=10_000_000, help="inputs per decoder; default: ten million"
    )
    parser.add_argument("--child", metavar="DECODER", help=argparse.SUPPRESS)
    parser.add_argument("decoders", nargs="*", metavar="DECODER", help="default: all")
    args = parser.parse_args()
    if args.child:
        fuzz_one(args.child, args.decoders)
        return
    from .decoders import DECODERS

    if unknown := [name for name in args.decoders if name not in DECODERS]:
        parser.error(f"no decoder is called {unknown[0]!r}; there are {', '.join(DECODERS)}")
    print("| decoder | inputs | edges reached | time |\n|---|---|---|---|")
    for name in args.decoders or DECODERS:
        print(fuzz(name, args.inputs), flush=True)


if __name__ == "__main__":
    main()
