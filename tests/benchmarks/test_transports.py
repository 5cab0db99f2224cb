"""`lab/bench/transports.py` measures what it promises, and reports a table and JSON lines."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kvferry.lab.moving.contender import Contender
from kvferry.lab.moving.others import MemcpyReader, own_nothing
from kvferry.lab.moving.processes import Timing
from kvferry.lab.moving.report import results_of, table
from kvferry.lab.moving.rounds import Measured
from kvferry.lab.moving.shapes import Shape

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[dict[str, object]]]:
    """Run a tiny benchmark. Returns its table and its JSON lines."""
    json_file = tmp_path_factory.mktemp("benchmark") / "lines.json"
    tiny = ["--seconds", "0", "--blocks", "2", "--pool-mib", "4", "--shapes", "smollm2-135m, 2"]
    variant = [
        "--only",
        "tcp, TLS",
        "--variant",
        "kvferry, mapped",
        "shm",
        '{"num_guards": 64}',
    ]
    command = [sys.executable, "-m", "kvferry.lab.bench.transports", *tiny, *variant]
    ended = subprocess.run(
        [*command, "--json", str(json_file)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout, [json.loads(line) for line in json_file.read_text().splitlines()]


def test_the_first_json_line_describes_the_machine_and_each_other_one_a_result(run):
    _, lines = run
    assert lines[0]["record"] == "machine"
    assert {"processor", "cores", "load", "congestion_control", "huge_pages"} <= lines[0].keys()
    results = lines[1:]
    assert [(r["record"], r["contender"], r["layout"]) for r in results] == [
        ("result", contender, layout)
        for layout in ("uniform", "per-layer")
        for contender in ("memcpy", "plain sockets", "kvferry tcp, TLS", "kvferry, mapped")
    ]


def test_every_result_is_a_ratio_to_memcpy_and_to_plain_sockets(run):
    _, lines = run
    for result in lines[1:]:
        assert result["num_bytes"] == 2 * 30 * (12 << 10)
        assert result["num_regions"] == (2 if result["layout"] == "uniform" else 60)
        assert result["num_rounds"] >= 3
        low, high = result["to_memcpy_quartiles"]
        assert 0 < low <= result["to_memcpy"] <= high
        assert min(result[key] for key in ("p50_ms", "gb_per_s", "to_sockets", "cpu_s_per_gb")) > 0
        if result["contender"] == "memcpy":
            assert result["to_memcpy"] == 1


def test_the_mechanism_that_really_moved_the_bytes_is_named(run):
    _, lines = run
    mechanisms = {result["contender"]: result["mechanism"] for result in lines[1:]}
    assert mechanisms == {
        "memcpy": "memcpy",
        "plain sockets": "tcp",
        "kvferry tcp, TLS": "tcp+tls",
        "kvferry, mapped": "mapped",
    }


def test_a_contender_is_compared_with_its_twin_in_the_same_round():
    shape = Shape(1, 4096)
    twin = Contender("twin", own_nothing, MemcpyReader)
    contenders = [twin, replace(twin, name="one", twin="twin"), replace(twin, name="other", twin="missing")]
    rounds = {"twin": (2.0, 30.0, 4.0), "one": (1.0, 10.0, 1.0), "other": (1.0, 1.0, 1.0)}
    batches = {
        (name, shape): [[Timing(seconds, 0.0, "memcpy")] for seconds in times]
        for name, times in rounds.items()
    }
    _, one, other = results_of(contenders, [shape], Measured(batches))
    assert (one.twin, one.to_twin, one.to_twin_quartiles) == ("twin", 3.0, (2.5, 3.5))
    assert (other.twin, other.to_twin) == ("", 0.0)
    assert any(line.endswith("3.00 (2.50-3.50) of twin    memcpy") for line in table([one]))


def test_the_table_names_every_contender(run):
    table, lines = run
    assert all(result["contender"] in table for result in lines[1:])
