"""The systemd unit of the router: what systemd itself says about it, and its command as a real process."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.client import wait_until
from tests.support.deployments import ROOT, Host, free_address, ready_roles
from tests.support.tiny_models import write_tiny_model

FOLDER = ROOT / "deploy" / "systemd"
UNIT = FOLDER / "kvferry-router.service"
PROGRAM = "/opt/kvferry/bin/kvferry"
#: Exposure as systemd rates it, from 0 to 10.
EXPOSURE = 2.0
PORTS = {"prefill": 8100, "decode": 8200, "router": 8000}


def settings() -> list[tuple[str, str]]:
    """Return the settings of the unit, in order."""
    lines = UNIT.read_text().splitlines()
    return [(key, value) for line in lines if line[:1] not in "#[" for key, _, value in [line.partition("=")]]


def environment() -> dict[str, str]:
    """Return the variables of the unit, with those of `kvferry.env`."""
    words = [word for key, value in settings() if key == "Environment" for word in shlex.split(value)]
    lines = (FOLDER / "kvferry.env").read_text().splitlines()
    words += [shlex.join(shlex.split(line)) for line in lines if line and not line.startswith("#")]
    return dict(shlex.split(word)[0].partition("=")[::2] for word in words)


def command() -> list[str]:
    """Return the words of `ExecStart`, expanded as systemd does."""
    (line,) = [value for key, value in settings() if key == "ExecStart"]
    variables = environment()
    words: list[str] = []
    for word in shlex.split(line):
        if word.startswith("$") and not word.startswith("${"):
            words += variables[word[1:]].split()
        else:
            words.append(re.sub(r"\$\{(\w+)\}", lambda found: variables[found[1]], word))
    return words


@pytest.fixture
def analyzed(tmp_path: Path) -> Path:
    """The unit with a program that exists, because systemd looks for it."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace(PROGRAM, sys.executable))
    return unit


def test_systemd_accepts_the_unit(analyzed: Path) -> None:
    done = subprocess.run(["systemd-analyze", "verify", analyzed], capture_output=True, text=True, timeout=60)
    assert (done.returncode, [line for line in done.stderr.splitlines() if "kvferry" in line]) == (0, [])


def test_systemd_finds_the_unit_well_confined(analyzed: Path) -> None:
    limit = f"--threshold={EXPOSURE * 10:.0f}"
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", limit, analyzed],
        capture_output=True,
        text=True,
        timeout=60,
    )
    if "unrecognized option" in done.stderr:
        pytest.skip("this systemd-analyze cannot rate units that are not loaded")
    assert done.returncode == 0, done.stdout[-400:]


def test_the_unit_has_time_to_drain_and_is_restarted_unless_its_options_are_wrong() -> None:
    unit = dict(settings())
    (drain,) = [int(word.partition("=")[2]) for word in command() if word.startswith("--drain-timeout-s=")]
    assert drain >= 30  # a lease
    assert int(unit["TimeoutStopSec"]) >= drain + 12
    assert (unit["Restart"], unit["RestartPreventExitStatus"]) == ("on-failure", "2")


@pytest.mark.slow
def test_the_command_of_the_unit_answers_for_a_pair(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    small = f"--model={model} --threads=1 --num-blocks=128 --max-num-batched-tokens=64 --log-level=warning"
    address = free_address(*PORTS.values())
    with Host(tmp_path, {"127.0.0.1": address}) as host:
        for role, port in PORTS.items():
            words = command() if role == "router" else f"kvferry serve --role={role} --port={port}".split()
            more = [] if role == "router" else [f"--host={address}", *small.split()]
            probes = {
                "livenessProbe": f"http://{address}:{port}/health",
                "readinessProbe": f"http://{address}:{port}/ready",
            }
            variables = environment() | {"KVFERRY_CACHE": str(tmp_path), "OMP_WAIT_POLICY": "PASSIVE"}
            host.start(role, [*words, *more], variables, address, probes)
        prefill, decode, router = host.running
        for process in host.running:
            process.wait_for("readinessProbe", 100)
        wait_until(lambda: {"prefill", "decode"} <= ready_roles(router))
        answer = router.ask("/v1/completions", prompt="A box that holds a box. " * 4, max_tokens=4)
        assert answer["metrics"]["transfer"]["mechanism"] == "mapped"
        # As `systemctl stop` does it.
        assert [process.stop(60.0) for process in (router, decode, prefill)] == [0, 0, 0]
