"""The systemd units: what systemd itself says about them, and their commands as real processes."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.support.client import wait_until
from tests.support.deployments import ROOT, Host, free_address, ready_roles
from tests.support.tiny_models import write_tiny_model

UNITS = ROOT / "deploy" / "systemd"
ROLES = ("prefill", "decode", "router")
PROGRAM = "/opt/kvferry/bin/kvferry"
#: Exposure as systemd rates it, from 0 to 10. Nodes need devices, and memory that is writable and executable.
EXPOSURE = {"prefill": 2.5, "decode": 2.5, "router": 2.0}
PORTS = {"prefill": 8100, "decode": 8200, "router": 8000}


def settings(role: str) -> list[tuple[str, str]]:
    """Return the settings of a unit, in order."""
    lines = (UNITS / f"kvferry-{role}.service").read_text().splitlines()
    return [(key, value) for line in lines if line[:1] not in "#[" for key, _, value in [line.partition("=")]]


def environment(role: str) -> dict[str, str]:
    """Return the variables of a unit, with those of `kvferry.env`."""
    words = [word for key, value in settings(role) if key == "Environment" for word in shlex.split(value)]
    lines = (UNITS / "kvferry.env").read_text().splitlines()
    words += [shlex.join(shlex.split(line)) for line in lines if line and not line.startswith("#")]
    return dict(shlex.split(word)[0].partition("=")[::2] for word in words)


def command(role: str) -> list[str]:
    """Return the words of `ExecStart`, expanded as systemd does."""
    (line,) = [value for key, value in settings(role) if key == "ExecStart"]
    variables = environment(role)
    words: list[str] = []
    for word in shlex.split(line):
        if word.startswith("$") and not word.startswith("${"):
            words += variables[word[1:]].split()
        else:
            words.append(re.sub(r"\$\{(\w+)\}", lambda found: variables[found[1]], word))
    return words


@pytest.fixture
def analyzed(tmp_path: Path) -> Path:
    """The units with a program that exists, because systemd looks for it."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    for unit in UNITS.glob("*.service"):
        (tmp_path / unit.name).write_text(unit.read_text().replace(PROGRAM, sys.executable))
    return tmp_path


def test_systemd_accepts_the_units(analyzed: Path) -> None:
    units = [analyzed / f"kvferry-{role}.service" for role in ROLES]
    done = subprocess.run(["systemd-analyze", "verify", *units], capture_output=True, text=True, timeout=60)
    assert (done.returncode, [line for line in done.stderr.splitlines() if "kvferry" in line]) == (0, [])


@pytest.mark.parametrize("role", ROLES)
def test_systemd_finds_a_unit_well_confined(analyzed: Path, role: str) -> None:
    limit = f"--threshold={EXPOSURE[role] * 10:.0f}"
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", limit, analyzed / f"kvferry-{role}.service"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    if "unrecognized option" in done.stderr:
        pytest.skip("this systemd-analyze cannot rate units that are not loaded")
    assert done.returncode == 0, done.stdout[-400:]


@pytest.mark.parametrize("role", ROLES)
def test_a_unit_has_time_to_drain_and_is_restarted_unless_its_options_are_wrong(role: str) -> None:
    unit = dict(settings(role))
    (drain,) = [
        int(word.partition("=")[2]) for word in command(role) if word.startswith("--drain-timeout-s=")
    ]
    assert drain >= 30  # a lease
    assert int(unit["TimeoutStopSec"]) >= drain + 12
    assert unit["KillMode"] == "mixed"  # workers of a node get no signal while it drains
    assert (unit["Restart"], unit["RestartPreventExitStatus"]) == ("on-failure", "2")


@pytest.mark.slow
def test_the_commands_of_the_units_are_a_pair_that_answers(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    small = f"--model={model} --threads=1 --num-blocks=128 --max-num-batched-tokens=64 --log-level=warning"
    address = free_address(*PORTS.values())
    with tempfile.TemporaryDirectory(prefix="kvferry-") as sockets:
        places = {"127.0.0.1": address, "/run/kvferry": sockets, "/var/cache/kvferry": str(tmp_path)}
        with Host(tmp_path, places) as host:
            for role in ROLES:
                variables = environment(role)
                more = [] if role == "router" else small.split()
                probes = {
                    "livenessProbe": f"http://{address}:{PORTS[role]}/health",
                    "readinessProbe": f"http://{address}:{PORTS[role]}/ready",
                }
                host.start(role, [*command(role), *more], variables, address, probes)
            prefill, decode, router = host.running
            for process in host.running:
                process.wait_for("readinessProbe", 100)
            wait_until(lambda: {"prefill", "decode"} <= ready_roles(router))
            answer = router.ask("/v1/completions", prompt="A box that holds a box. " * 4, max_tokens=4)
            assert answer["metrics"]["transfer"]["mechanism"] == "mapped"
            # As `systemctl stop` does it.
            assert [process.stop() for process in (router, decode, prefill)] == [0, 0, 0]
