"""A server process: its exit status, output that cannot be written, and its limit of open files."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.zygote import EXAMPLES

PROGRAM = """
import logging, sys
from kvferry.router.http.serving import BrokenError, StartupError, exit_status_of, leave_now, say

def run():
    from kvferry.router.http.logs import set_up_logging

    set_up_logging("info", "test")
    say("ready")
    logging.getLogger("test").error("an error with its traceback", exc_info=ValueError("why"))
    say("and the last line")
    {end}

sys.exit(exit_status_of("test.py", run))
"""
ENDS = {
    "return": 0,
    "raise BrokenError('the engine ended')": 1,
    "raise StartupError('the port is taken')": 2,
    "leave_now(3)": 3,
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("output", ["/dev/full", "closed"])
def test_output_that_cannot_be_written_changes_nothing(output: str, end: str) -> None:
    program = [sys.executable, "-c", PROGRAM.format(end=end)]
    if output == "closed":
        program = ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", *program]
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        done = subprocess.run(program, stdout=full, stderr=full, cwd=EXAMPLES, timeout=60)
    finally:
        os.close(full)
    assert done.returncode == ENDS[end]


@pytest.mark.parametrize("end", ENDS)
def test_output_that_can_be_written_is_complete(end: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(end=end)],
        capture_output=True,
        text=True,
        cwd=EXAMPLES,
        timeout=60,
    )
    assert done.returncode == ENDS[end]
    assert done.stdout == "ready\nand the last line\n"
    assert "an error with its traceback" in done.stderr
    if "raise" in end:
        assert done.stderr.endswith(f"test.py: error: {end.split(chr(39))[1]}\n")


def test_a_program_may_open_as_many_files_as_its_hard_limit_allows() -> None:
    program = (
        "import resource\n"
        "from kvferry.router.http.serving import exit_status_of\n"
        "exit_status_of('serve.py', lambda: print(resource.getrlimit(resource.RLIMIT_NOFILE)))\n"
    )
    limited = ("sh", "-c", 'ulimit -S -n 300 && ulimit -H -n 700 && exec "$@"', "sh")
    command = [*limited, sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, cwd=EXAMPLES, check=True, timeout=60)
    assert done.stdout.strip() == "(700, 700)"
