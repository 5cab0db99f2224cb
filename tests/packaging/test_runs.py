"""A run of tests in several processes names the test that a process died of, and goes on with the others."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DYING = """
import os, signal
import pytest

@pytest.mark.parametrize("number", range(6))
def test_one_of_six(number):
    if number == 2:
        os.kill(os.getpid(), signal.SIGKILL)
"""
ROOT = Path(__file__).parents[2]


@pytest.mark.slow  # starts workers again and again
def test_each_test_that_ends_its_process_is_named_and_the_others_run(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / f"test_{name}.py").write_text(DYING)
    (tmp_path / "test_well.py").write_text("def test_well(): pass\n")
    options = [
        "-n2",
        "--dist=loadfile",
        "--no-loadscope-reorder",
        "-p",
        "tests.support.runs",
        "-p",
        "no:cacheprovider",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-c", "/dev/null", "--rootdir", str(tmp_path), *options, str(tmp_path)],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    failed = re.findall(r"^FAILED (\S+)", done.stdout, re.MULTILINE)
    assert sorted(failed) == [f"test_{name}.py::test_one_of_six[2]" for name in ("a", "b", "c")], done.stdout
    assert "3 failed, 16 passed" in done.stdout
    assert re.search(r"at most \d+\.\d GiB of memory were in use", done.stdout)
