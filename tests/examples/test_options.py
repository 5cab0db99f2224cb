"""What the programs' command lines promise."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvferry.lab.node.cli import parse_arguments
from tests.support.zygote import EXAMPLES

ROOT = EXAMPLES.parent
PROGRAMS = [
    [str(EXAMPLES / "serve.py"), "--rol", "prefill"],
    [str(EXAMPLES / "router.py"), "--prefill", "http://x", "--decode", "http://x", "--por", "0"],
    [str(EXAMPLES / "disagg_pair.py"), "--concurrenc", "2"],
    ["-m", "kvferry.lab.bench.transports", "--second", "1"],
]


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize("words", PROGRAMS, ids=lambda words: Path(words[0]).name)
def test_an_abbreviated_option_is_refused(words: list[str]) -> None:
    """An abbreviation of one option may become ambiguous later, or may be a typing error."""
    done = run(*words)
    assert done.returncode == 2
    assert f"unrecognized arguments: {words[-2]}" in done.stderr


@pytest.mark.parametrize(
    ("words", "port"),
    [
        ([], 8000),
        (["--role", "single"], 8000),
        (["--role", "prefill"], 8100),
        (["--role", "both"], 8100),
        (["--role", "decode"], 8200),
        (["--role", "decode", "--port", "1"], 1),
        (["--kv-transfer-config", '{"kv_connector": "shm", "kv_role": "kv_consumer"}'], 8200),
    ],
    ids=str,
)
def test_each_role_has_its_own_default_port(words: list[str], port: int) -> None:
    assert parse_arguments(words).port == port


def test_readme_and_help_agree_on_the_default_ports() -> None:
    readme = (ROOT / "README.md").read_text()
    for role, port in (("prefill", 8100), ("decode", 8200)):
        assert parse_arguments(["--role", role]).port == port
        assert f"--{role} http://127.0.0.1:{port}" in readme
    assert "http://127.0.0.1:8000/v1/completions" in readme
    assert "(default: 8000)" in run(str(EXAMPLES / "router.py"), "--help").stdout
    serve = " ".join(run(str(EXAMPLES / "serve.py"), "--help").stdout.split())
    assert "(default: 8100 for --role prefill or both, 8200 for decode, 8000 for single)" in serve
