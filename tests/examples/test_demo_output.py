"""What the demo prints besides its answers: table, explanations, blank prompts, elapsed time."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvferry.lab.client import Answer
from kvferry.lab.demo import run
from kvferry.lab.demo.cli import DEFAULT_PROMPTS, parse_arguments
from kvferry.lab.demo.near_tie import Comparison
from kvferry.lab.demo.report import (
    RequestReport,
    Way,
    explain_slower,
    format_table,
    report_of,
)
from kvferry.lab.engine import progress
from kvferry.lab.engine.progress import Elapsed
from kvferry.lab.servers import KVFERRY
from kvferry.router.http.serving import StartupError
from tests.support.client import wait_until

TRANSFER = {"num_bytes": 4096, "seconds": 0.1, "num_blocks": 3, "num_regions": 2, "transport": "shm"}


def answered(num_prompt_tokens: int, *, ttft_s: float = 0.1, **metrics: object) -> Answer:
    usage = {"prompt_tokens": num_prompt_tokens}
    return Answer("text", [7], times=[ttft_s], usage=usage, metrics=metrics)


def report(answer: Answer, reference_ttft_s: float = 0.1) -> RequestReport:
    return report_of(answer, answered(1, ttft_s=reference_ttft_s), Comparison(), "shm", "uniform")


class TestTable:
    @pytest.mark.parametrize(
        ("answer", "text"),
        [
            (answered(1), "none"),
            (answered(40, num_loaded_tokens=32), "32 tokens"),
            (answered(40, transfer={"error": "the producer is gone"}), "failed"),
            (Answer(error="HTTP 500"), "request failed"),
        ],
    )
    def test_a_request_without_a_transfer_shows_that_instead_of_zeros(
        self, answer: Answer, text: str
    ) -> None:
        moved = answered(40, transfer=TRANSFER)
        lines = format_table(["a", "b"], [answer, moved], [report(answer), report(moved)]).splitlines()
        assert f"  {text}  " in lines[3]
        assert "MB" not in lines[3]
        assert "3 blocks, 2 regions, 0.0 MB, 0.00 ms" in lines[4]
        assert lines[3].rindex("yes") == lines[4].rindex("yes")

    def test_what_a_store_does_not_count_is_not_shown_as_a_number(self) -> None:
        moved = answered(40, transfer={**TRANSFER, "num_regions": 0})
        assert "  3 blocks, 0.0 MB, " in format_table(["a"], [moved], [report(moved)])

    def test_what_moved_the_caches_is_named_once_for_all_requests(self) -> None:
        moved, again = (answered(40, transfer={**TRANSFER, "transport": "file", "mechanism": "read"}),) * 2
        idle = answered(1)

        def summary(*answers: Answer) -> str:
            table = format_table(["a"] * len(answers), answers, [report(answer) for answer in answers])
            return table.splitlines()[0]

        assert summary(moved, again, idle) == "transport file · mechanism read · layout uniform"
        assert summary(idle) == "transport none · mechanism none · layout uniform"

    def test_a_slower_pair_is_explained_and_a_faster_one_is_not(self) -> None:
        assert explain_slower([report(answered(40, ttft_s=0.05))]) == ""
        assert explain_slower([]) == ""
        assert "50 ms later than the single node's on average (50%)" in explain_slower(
            [report(answered(40, ttft_s=0.15))]
        )


class TestPrompts:
    def test_the_default_prompts_are_asked_each_way(self) -> None:
        options = parse_arguments([])
        assert options.requests == tuple((prompt, way) for prompt in DEFAULT_PROMPTS for way in Way)
        assert options.sent("Why?") == "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"

    @pytest.mark.parametrize(
        ("flags", "way"),
        [
            ([], Way.DEFAULT),
            (["--router", "vllm-router"], Way.IN_TURN),
        ],
    )
    def test_a_users_own_prompt_is_sent_unchanged_and_once(self, flags: list[str], way: Way) -> None:
        options = parse_arguments(["--prompt", "A {prompt}", *flags])
        assert options.requests == (("A {prompt}", way),)
        assert options.sent("A {prompt}") == "A {prompt}"

    def test_blank_lines_are_named(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = tmp_path / "prompts"
        path.write_text("one\n\n  \ntwo\n")
        assert parse_arguments(["--prompt-file", str(path)]).prompts == ("one", "two")
        assert [line.split(" of ")[0] for line in capsys.readouterr().err.splitlines()] == [
            "skipping line 2",
            "skipping line 3",
        ]

    @pytest.mark.parametrize("text", ["", "\n \n"])
    def test_a_file_without_a_prompt_is_an_error(self, text: str, tmp_path: Path) -> None:
        (tmp_path / "prompts").write_text(text)
        with pytest.raises(StartupError, match="has no prompt"):
            parse_arguments(["--prompt-file", str(tmp_path / "prompts")])


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class TestElapsed:
    def test_on_a_terminal_progress_is_one_line_that_is_erased(self, monkeypatch: pytest.MonkeyPatch) -> None:
        terminal = Terminal()
        monkeypatch.setattr(sys, "stderr", terminal)
        with Elapsed("starting the nodes") as elapsed:
            elapsed.say("the first is ready")
        written = terminal.getvalue()
        assert written.startswith("\r\x1b[K  starting the nodes: 0 s")
        assert written.endswith("\r\x1b[K")
        assert written.count("\n") == 1
        assert "\x1b[Kthe first is ready\n" in written

    def test_elsewhere_progress_is_a_plain_line_now_and_then(self, monkeypatch: pytest.MonkeyPatch) -> None:
        log = io.StringIO()
        monkeypatch.setattr(sys, "stderr", log)
        with Elapsed("starting the nodes"):
            pass
        assert log.getvalue() == ""
        monkeypatch.setattr(progress, "LINE_INTERVAL_S", 0.01)
        with Elapsed("starting the nodes"):
            wait_until(lambda: log.getvalue().count("\n") >= 2)
        assert set(log.getvalue().splitlines()) == {"  starting the nodes: 0 s"}


class FakeProcess:
    """A process that a launcher started, as far as `--keep` looks at it."""

    def __init__(self, port: int, *, is_running: bool = True) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.is_running = is_running
        self.calls: list[str] = []

    def hang_up(self) -> None:
        self.calls.append("hang_up")

    def terminate(self) -> None:
        self.calls.append("terminate")

    def describe_end(self) -> str:
        return f"{self.url} ended"


def test_a_pair_that_is_kept_says_how_to_use_it_and_which_process_ended(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prefill, decode, router, single = (
        FakeProcess(1),
        FakeProcess(2, is_running=False),
        FakeProcess(3),
        FakeProcess(4),
    )
    launcher = SimpleNamespace(processes=(prefill, decode, single, router))
    naps = iter([None, None])

    def nap(seconds: float) -> None:
        if next(naps, KeyboardInterrupt) is KeyboardInterrupt:
            raise KeyboardInterrupt

    monkeypatch.setattr(run.time, "sleep", nap)
    run._keep(launcher, {False: router}, single, parse_arguments(["--model", "some/model", "--keep"]))
    said = capsys.readouterr().err
    assert "curl http://127.0.0.1:3/v1/completions" in said
    assert "kvferry explain ID http://127.0.0.1:3\n" in said
    assert "\n  http://127.0.0.1:3/\n" in said
    assert said.count("ended") == 1
    assert "http://127.0.0.1:2 ended" in said
    assert single.calls == ["hang_up", "terminate"]
    assert not prefill.calls + decode.calls + router.calls


@pytest.mark.parametrize("words", ["--device cuda", "--connector-module m", "--concurrency 2"])
def test_with_vllm_an_option_that_would_do_nothing_is_refused(words: str) -> None:
    with pytest.raises(StartupError, match=f"cannot use {words.split()[0]} with --engine vllm"):
        parse_arguments(["--engine", "vllm", *words.split()])


def test_nodes_of_vllm_get_the_arguments_of_the_user_last() -> None:
    options = parse_arguments(["--engine", "vllm", "--serve-args", "--dtype bfloat16 --max-num-seqs 4"])
    assert options.node_arguments[-4:] == ("--dtype", "bfloat16", "--max-num-seqs", "4")
    assert options.dtype == "bfloat16"


def test_nodes_of_vllm_get_the_options_of_the_connector() -> None:
    words = ["--connector", "tcp", "--load-failure-policy", "fail", "--connector-option", "lease_s=7"]
    name, config = parse_arguments(["--engine", "vllm", *words]).pair_arguments
    assert name == "--kv-transfer-config"
    assert json.loads(config) == {
        **KVFERRY,
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {"transport": "tcp", "lease_s": 7},
    }
