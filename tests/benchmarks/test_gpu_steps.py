"""The steps of `make test-gpu-vllm`: table, time limits, page, and what is made ready before."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import closing
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest

from kvferry.lab.client import Answer
from kvferry.lab.gpu import ready
from kvferry.lab.gpu.report import Result, SkippedError, Step, Verdict, page, run, run_all
from kvferry.lab.gpu.servers import PairKind, Servers
from kvferry.lab.gpu.table import STEPS, Compared, row_of
from kvferry.lab.servers import Launcher

ROOT = Path(__file__).parents[2]


def step(run, limit_s=20.0):
    return Step("a step", limit_s, "does something", run)


def failing(context):
    yield "one line"
    raise ValueError("two\nlines | and a bar")


def skipped(context):
    yield from ()
    raise SkippedError("no GPU")


class TestOneStep:
    def test_a_failure_keeps_what_was_known_and_has_the_logs(self):
        result = run(step(failing), None, 20.0, lambda: "the end of a log")
        assert (result.verdict, result.lines) == (Verdict.FAILED, ["one line"])
        assert result.why == "ValueError: two\nlines | and a bar"
        assert result.logs == "the end of a log"

    def test_one_that_hangs_is_ended_and_leaves_no_process(self, tmp_path):
        """It hangs while a server is starting, which is where a real step hangs most."""
        started = []

        def hanging(context):
            with Launcher(logs=tmp_path) as launcher:
                command = [sys.executable, "-c", "import time; print('alive', flush=True); time.sleep(600)"]
                started.append(launcher.start_server("server", command, 1, "/health"))
                yield "began"
                launcher.wait_ready(started, 600.0)

        began = time.monotonic()
        result = run(step(hanging), None, 1.0, str)
        assert time.monotonic() - began < 30
        assert (result.verdict, result.lines) == (Verdict.FAILED, ["began"])
        assert result.why == "OverLimitError: stopped at its limit of 1 s"
        assert not started[0].pids


class TestAllSteps:
    def test_the_page_is_written_after_each_step_and_the_next_one_runs(self, tmp_path):
        output, seen = tmp_path / "page.md", []

        def reading(context):
            seen.append(output.read_text())
            yield "last"

        steps = [
            Step("first", 5.0, "", failing),
            Step("second", 5.0, "", reading),
            Step("third", 5.0, "", skipped),
        ]
        end_servers = Mock()
        assert run_all(steps, None, output, partial(page, "Title", []), 60.0, on_failure=end_servers) == 1
        end_servers.assert_called_once_with()
        assert "| first | FAILED: ValueError: two | 0 |\n| second | not run | 0 |" in seen[0]
        text = output.read_text()
        assert "| second | passed | 0 |" in text
        assert "| third | skipped: no GPU | 0 |" in text

    def test_without_time_nothing_begins(self, tmp_path):
        output = tmp_path / "page.md"
        assert run_all([Step("first", 5.0, "", failing)], None, output, partial(page, "Title", []), 0.0) == 0
        assert "| first | not run: no time was left | 0 |" in output.read_text()

    def test_the_first_leave_time_to_those_after_them(self, tmp_path):
        def hanging(context):
            time.sleep(60)
            yield "too late"

        steps = [Step("first", 50.0, "", hanging), Step("second", 50.0, "", lambda context: iter(["b"]))]
        output = tmp_path / "page.md"
        assert run_all(steps, None, output, partial(page, "Title", []), 4.0) == 1
        assert "| first | FAILED: OverLimitError: stopped at its limit of 3 s | 3 |" in output.read_text()
        assert "| second | passed | 0 |" in output.read_text()

    def test_their_names_and_limits(self):
        names = [each.name for each in STEPS]
        assert len(set(names)) == len(names)
        assert all(each.about and 0 < each.limit_s <= 720 for each in STEPS)

    def test_those_for_a_gpu_only_say_so_without_one(self, tmp_path):
        with closing(Servers("cpu", tmp_path)) as servers:
            found = {
                name: run(next(each for each in STEPS if each.name == name), servers, 20.0, str)
                for name in ("mla", "sleep", "two-gpus", "two-ranks")
            }
        assert {name: each.verdict for name, each in found.items()} == dict.fromkeys(found, Verdict.SKIPPED)
        assert found["sleep"].why == "vLLM's CPU build cannot sleep"
        assert found["two-gpus"].why == "needs 2 GPUs, and 0 are here"

    def test_the_newest_logs_are_shown_without_routes(self, tmp_path):
        for number in range(4):
            path = tmp_path / f"{number}-decode.log"
            path.write_text("".join(f"line {line}\nRoute: /a INFO Route: /b\n" for line in range(50)))
            os.utime(path, (number, number))
        lines = Servers("cpu", tmp_path).logs().splitlines()
        assert [line for line in lines if line.startswith("--")] == [
            f"-- {number}-decode.log" for number in (1, 2, 3)
        ]
        assert lines[1:3] == ["line 10", "line 11"]
        assert len(lines) == 3 * 41

    def test_the_command_refuses_others_and_names_them(self):
        command = [sys.executable, "-m", "kvferry.lab.gpu", "--only", "single", "pears"]
        variables = {**os.environ, ready.READY: "1"}
        refused = subprocess.run(
            command, env=variables, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
        assert refused.returncode == 2
        names = ", ".join(each.name for each in STEPS)
        assert f"no step is called pears; there are {names}" in refused.stderr


class TestThePage:
    def test_a_row_has_the_medians_of_right_answers(self):
        def answer(ttft_s, **metrics):
            return Answer(sent=1.0, times=[1.0 + ttft_s, 1.01 + ttft_s], metrics=metrics)

        load = {"seconds": 0.002, "exposed_seconds": 0.001, "num_bytes": 8_000_000, "mechanism": "cuda_ipc"}
        found = [Compared(answer(0.2, transfer=load), answer(0.1), 128, ties) for ties in (0, 1)]
        assert row_of(128, found) == (
            "| 128 | 2 equal apart from 1 near-ties | 128 tokens | cuda_ipc | 2.0 ms | 1.0 ms | 4.0 | 200.0 ms | 100.0 ms "
            "| 10.0 ms | 10.0 ms |"
        )

    def test_what_was_measured_and_the_ends_of_logs_are_on_it(self):
        results = [
            Result("single", Verdict.PASSED, "", 12.3, ["| a table |"]),
            Result("sleep", Verdict.SKIPPED, "vLLM before 0.33"),
            Result(
                "mla", Verdict.FAILED, "WrongAnswerError: a mismatch", 3.0, [], "-- 04-decode.log\nTraceback"
            ),
        ]
        text = page("Title", ["| GPU | one |"], results)
        assert text.startswith("# Title\n\n| GPU | one |\n")
        assert "| single | passed | 12 |" in text
        assert "## single\n\n| a table |" in text
        assert "## sleep" not in text
        assert "## mla\n\n\n```\nWrongAnswerError: a mismatch\n-- 04-decode.log\nTraceback\n```" in text


class TestWhatIsMadeReady:
    def test_an_installed_vllm_needs_no_kit(self, monkeypatch, tmp_path):
        monkeypatch.setattr(ready, "find_spec", lambda name: object())
        assert ready.unpack(tmp_path / "kit", tmp_path / "site") == []

    def test_the_kit_is_unpacked_once(self, monkeypatch, tmp_path):
        monkeypatch.setattr(ready, "find_spec", lambda name: None)
        (tmp_path / "vllm").mkdir()
        (tmp_path / "vllm" / "__init__.py").write_text("")
        kit, site = tmp_path / "kit.tar.xz", tmp_path / "site"
        subprocess.run(["tar", "-cJf", str(kit), "-C", str(tmp_path), "vllm"], check=True)
        assert ready.unpack(kit, site) == [str(site)]
        assert (site / "vllm" / "__init__.py").exists()
        kit.unlink()
        assert ready.unpack(kit, site) == [str(site)]

    def test_without_either_the_command_says_what_to_do(self, monkeypatch, tmp_path):
        monkeypatch.setattr(ready, "find_spec", lambda name: None)
        with pytest.raises(ready.NotReadyError, match="run make gpu-kit where there is a network"):
            ready.unpack(tmp_path / "kit", tmp_path / "site")

    def test_the_servers_configurations(self):
        nixl = PairKind("").transfer("cuda")
        assert (nixl["kv_connector"], nixl["kv_buffer_device"]) == ("NixlConnector", "cuda")
        ours = PairKind("shm", cross_layer=True).transfer("cuda")["kv_connector_extra_config"]
        assert ours == {"transport": "shm", "cross_layer_blocks": True}
