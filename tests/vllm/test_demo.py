"""`kvferry demo --engine vllm`: three vLLM servers, real text, and both ways of our router."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize(("connector", "mechanism"), [("shm", "mapped"), ("zeromq", "tcp"), ("ucx", "ucx:")])
def test_the_pair_answers_like_one_node(tmp_path, connector, mechanism):
    report = tmp_path / "report.json"
    options = ("--engine", "vllm", "--connector", connector, "--max-tokens", "8", "--json", str(report))
    command = [sys.executable, "-m", "kvferry", "demo", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    requests = json.loads(report.read_text())["requests"]
    assert [request["way"] for request in requests] == ["default", "in turn"] * 2
    assert all(request["kv_bytes"] and request["loaded_tokens"] for request in requests)
    assert f"mechanism {mechanism}" in done.stdout
