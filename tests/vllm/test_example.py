"""`python examples/vllm_pair`: three vLLM servers, real text, with the router and with the proxy."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "vllm_pair"


@pytest.mark.parametrize(
    ("transport", "mechanism", "fronts"),
    [("shm", "mapped", ["router", "proxy"]), ("zeromq", "tcp", ["router"]), ("ucx", "ucx:", ["proxy"])],
)
def test_the_pair_answers_like_one_node(tmp_path, transport, mechanism, fronts):
    report = tmp_path / "report.json"
    command = [sys.executable, EXAMPLE, "--json", report, "--transport", transport, "--max-tokens", 8]
    for front in fronts:
        command += ["--front", front]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads(report.read_text())
    assert [request["front"] for request in content["requests"]] == [
        front for front in fronts for _ in range(2)
    ]
    assert all(request["identical"] for request in content["requests"])
    assert content["transfers"]["num_failures"] == 0
    (used,) = content["transfers"]["mechanisms"]
    assert used.startswith(mechanism)
