"""`kvferry prove` on real vLLM servers: it tells right answers from wrong ones, and leaves no process
behind.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.client import children_of, is_alive, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def _prove(out: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "kvferry", "prove", "--out", str(out), "--seed", "7", *words]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0
    )


def test_two_cells_of_kvferry(tmp_path: Path) -> None:
    with _prove(tmp_path, "--repeats", "2", "--only", "none", "swapped") as process:
        told, log = process.communicate()
    assert process.returncode == 0, log
    assert "| none | 2 right | 2 right |" in told
    assert "| swapped | 2 error | 2 right |" in told
    found = json.loads((tmp_path / "results.json").read_text())["targets"]["shm"]["cells"]
    assert [run["loaded"] for run in found["none"]["asked"]] == [True, True]


def test_wrong_tokens_and_dead_servers_are_found(tmp_path: Path) -> None:
    """vLLM's ExampleConnector finds caches by the prompt's tokens alone, so it takes those of other weights.

    A prompt of one token, with which a router learns what a node is, ends an engine with it. The run goes on.
    """
    words = (
        "--preset",
        "example",
        "--repeats",
        "2",
        "--only",
        "none",
        "other-weights",
        "router-kill-prefill",
    )
    with _prove(tmp_path, *words) as process:
        told, log = process.communicate()
    assert process.returncode == 1, log
    assert "| none | 2 right | 2 right |" in told
    assert "| other-weights | **2 WRONG TOKENS** |" in told
    assert "**2 DEAD**" in told


def test_an_interruption_leaves_no_process_and_keeps_what_is_complete(tmp_path: Path) -> None:
    process = _prove(tmp_path, "--only", "none")
    assert process.stderr is not None
    with process:
        pids = []
        for line in process.stderr:
            if "none 1/20" in line:
                pids = _descendants(process.pid)
                process.send_signal(signal.SIGINT)
                break
        told, _ = process.communicate()
    assert len(pids) >= 6  # three servers, each below a process of the launcher
    assert process.returncode == 130
    assert "| none | " in told
    # The last processes of a server have been killed by now, but the kernel may need a moment to end them.
    wait_until(lambda: not any(map(is_alive, pids)), 5.0)


def test_killed_servers_leave_no_offloaded_memory(tmp_path: Path) -> None:
    before = set(Path("/dev/shm").iterdir())
    with _prove(
        tmp_path, "--preset", "shm+offloading", "--repeats", "1", "--only", "none", "kill-decode"
    ) as process:
        told, log = process.communicate()
    left = set(Path("/dev/shm").iterdir()) - before
    for path in left:
        if path.name.startswith(("psm_", "sem.mp-")):
            path.unlink()  # of vLLM's message queues, small
    assert process.returncode == 0, log
    assert not any(path.name.startswith("vllm_offload_") for path in left), told


def _descendants(pid: int) -> list[int]:
    return [each for child in children_of(pid) for each in (child, *_descendants(child))]
