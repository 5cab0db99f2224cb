"""Settings that cannot work end a program with one line that says why, and nothing is left over."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvferry.lab.servers import LaunchedProcess, Launcher, LaunchError
from tests.support.client import DO_REMOTE_DECODE, Client, wait_until
from tests.support.patience import DEADLINE_S
from tests.support.zygote import EXAMPLES

PROMPT = "The dtype of a ferry is wood, its block is a box. " * 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--role", "prefill", "--connector-option", "lease_s"], "KEY=VALUE"),
        (["--connector", "shm"], "--role"),
        (["--role", "prefill", "--kv-transfer-config", "{}"], "exclude each other"),
        (["--kv-transfer-config", "nonsense"], "is no JSON"),
        (["--kv-transfer-config", '{"kv_connector": "shm", "kv_role": "kv_chef"}'], "kv_role"),
        (["--kv-transfer-config", '{"kv_connector": "shm"}'], "kv_role"),
        (["--kv-transfer-config", '{"kv_connector": "shm", "kv_role": "kv_both", "x": 1}'], "'x'"),
        (["--block-size", "0"], "block_size"),
        (["--num-blocks", "1"], "num_blocks"),
        (["--port", "70000"], "70000"),
        (["--host", "no.such.host.invalid"], "no.such.host.invalid"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_options_that_cannot_work_end_with_one_line_and_status_2(
    launcher: Launcher, arguments: list[str], words: str
) -> None:
    node = launcher.start("node", "serve.py", *arguments)
    assert node.wait(DEADLINE_S) == 2
    assert words in node.log_tail
    assert len(node.log_tail.strip().splitlines()) == 1


@pytest.mark.parametrize("script", ["serve.py", "router.py"])
def test_a_port_in_use(script: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        nodes = (
            ["--prefill", "http://127.0.0.1:1", "--decode", "http://127.0.0.1:1"]
            if script == "router.py"
            else []
        )
        done = run_script(script, "--port", port, *nodes)
    assert done.returncode == 2
    assert port in done.stderr
    assert "in use" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.full
def test_models_and_connectors_that_are_not_there(
    launcher: Launcher, tiny_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "broken").mkdir()
    for file in tiny_model.iterdir():
        (tmp_path / "broken" / file.name).write_bytes(file.read_bytes()[:100])
    tiny = ("--model", str(tiny_model), "--num-blocks", "64", "--threads", "1")
    cases = {
        "neither a folder": ("--model", str(tmp_path / "nowhere")),
        "no config.json": ("--model", str(tmp_path)),
        "broken": ("--model", str(tmp_path / "broken")),
        "carrier_pigeon": (*tiny, "--role", "prefill", "--connector", "carrier_pigeon"),
        "wings": (*tiny, "--role", "prefill", "--connector-option", "wings=2"),
        "no_such_module": (
            *tiny,
            "--role",
            "decode",
            "--connector",
            "X",
            "--connector-module",
            "no_such_module",
        ),
        "max_model_len": (*tiny, "--max-model-len", "100000"),
    }
    processes = {words: start(launcher, words, arguments) for words, arguments in cases.items()}
    for words, process in processes.items():
        with pytest.raises(LaunchError, match=words):
            launcher.wait_ready([process], 110)
        assert process.wait(DEADLINE_S) == 2


@pytest.mark.full
def test_a_peer_with_another_cache_is_refused_with_the_name_of_the_field_that_differs(
    launcher: Launcher, tiny_fleet: Any, tiny_arguments: Sequence[str], other_model: Path
) -> None:
    differing = {
        "block_size": ("--block-size", "24"),  # neither of 16 and 24 divides the other
        "dtype": ("--dtype", "bfloat16"),
        "weights": ("--model", str(other_model)),
    }
    nodes = {
        field: launcher.start_node(
            f"decode/{field}", "decode", "--load-failure-policy", "fail", *tiny_arguments, *arguments
        )
        for field, arguments in differing.items()
    }
    launcher.wait_ready(nodes.values(), 110)
    for field, node in nodes.items():
        decode = Client(node)
        prompt = f"{field}: {PROMPT}"
        params = tiny_fleet.prefill.complete(prompt, max_tokens=1, kv_transfer_params=DO_REMOTE_DECODE).body
        reply = decode.complete(prompt, max_tokens=2, kv_transfer_params=params["kv_transfer_params"])
        assert reply.status == 500
        assert field in reply.error
        assert decode.complete(prompt, max_tokens=2).status == 200
        wait_until(decode.is_whole)
    wait_until(tiny_fleet.prefill.is_whole, timeout_s=60)
    assert tiny_fleet.router.complete(PROMPT, max_tokens=2).status == 200


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_node_ends_quickly_and_cleanly_at_a_second_signal_and_with_its_launcher(
    number: signal.Signals, launcher: Launcher, tiny_arguments: Sequence[str]
) -> None:
    told, left = (launcher.start_node("decode", "decode", *tiny_arguments) for _ in range(2))
    launcher.wait_ready([told, left], 110)
    left.hang_up()
    client, long = Client(told), {"max_tokens": 400, "ignore_eos": True}
    with ThreadPoolExecutor(1) as background, client.streaming("A long answer", **long) as events:
        next(events)
        whole = background.submit(client.complete, "Another one", **long)
        wait_until(lambda: client.metric("kvferry_engine_running_requests") == 2)
        told.terminate()
        wait_until(lambda: client.get("/ready")[0] == 503)
        told.send_signal(number)
        assert "error" in list(events)[-1]
        # No byte of this answer was sent yet, so a router can have another node answer the request.
        assert whole.result().status == 503
    assert (told.wait(15), left.wait(15)) == (0, 0)


def start(launcher: Launcher, name: str, arguments: Sequence[str]) -> LaunchedProcess:
    return launcher.start(name, "serve.py", "--port", "0", *arguments)


def run_script(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(EXAMPLES / script), *arguments], capture_output=True, text=True, timeout=60
    )
