"""`kvferry version`, and the frame of all commands."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvferry.cli.main import commands_of, main, make_parser

HEAVY = ("numpy", "torch", "zmq", "ucxx", "vllm", "kvferry.transports")


def test_the_versions_are_those_of_what_is_installed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["NumPy"] == np.__version__
    assert platform.python_version() in found["Python"]
    assert platform.release() in found["kernel"]
    assert found["kvferry"]
    assert main(["version"]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["NumPy"] == np.__version__


def test_a_command_starts_without_heavy_packages(tmp_path: Path) -> None:
    code = (
        "import sys; from kvferry.cli.main import main; main(['version']); "
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_the_package_itself_can_be_run(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvferry", "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for name in commands_of(make_parser()):
        assert f"\n  {name} " in done.stdout


def test_a_wrong_command_line_ends_with_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["version", "--no-such-option"])
    assert ended.value.code == 2
    assert "--no-such-option" in capsys.readouterr().err
