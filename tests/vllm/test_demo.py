"""`kvferry demo --engine vllm`: three vLLM servers, real text, and both ways of our router."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvferry.lab.servers import VLLM_ENVIRONMENT
from tests.support.tiny_models import write_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_the_pair_answers_like_one_node(tmp_path):
    report = tmp_path / "report.json"
    options = ("--engine", "vllm", "--connector", "zeromq", "--max-tokens", "8", "--json", str(report))
    command = [sys.executable, "-m", "kvferry", "demo", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    requests = json.loads(report.read_text())["requests"]
    assert [request["way"] for request in requests] == ["default", "in turn"] * 2
    assert all(request["kv_bytes"] and request["loaded_tokens"] for request in requests)
    assert "mechanism tcp" in done.stdout


def test_the_example_of_two_servers_and_a_router_answers(tmp_path):
    model = write_tiny_model(tmp_path / "model", hidden_size=128, head_dim=32, max_position_embeddings=2048)
    example = Path(__file__).parents[2] / "examples" / "vllm_pair.py"
    options = ("--dtype", "float32", "--max-model-len", "1024", "--enforce-eager")
    done = subprocess.run(
        [sys.executable, example, str(model), *options],
        env={**os.environ, **VLLM_ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(
        r"^[\d,]{4,} bytes of its KV cache came from the first server$", done.stdout, re.MULTILINE
    )
