"""`lab/bench/late_bytes.py` counts the bytes that land after the end of a read, for every way of
giving up.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow  # it waits a second per way for bytes that never arrive
@pytest.mark.full
def test_no_byte_lands_after_the_end_of_a_read_over_tcp(tmp_path: Path) -> None:
    json_file = tmp_path / "lines.json"
    command = [
        sys.executable,
        "-m",
        "kvferry.lab.bench.late_bytes",
        "--repeats",
        "1",
        "--only",
        "kvferry tcp",
    ]
    ended = subprocess.run(
        [*command, "--json", str(json_file)], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert ended.returncode == 0, ended.stderr
    about, *counted = (json.loads(line) for line in json_file.read_text().splitlines())
    assert about["record"] == "machine"
    ends = {result["how"]: list(result["ends"]) for result in counted}
    assert ends["owner frozen, its deadline passes"] == ["TransferTimeoutError"]
    assert ends["owner frozen, the peer is dropped"] == ["TransportClosedError"]
    assert len(ends) == 3
    for result in counted:
        assert result["most_bytes"] == result["num_late"] == result["num_owners_lost"] == 0
        assert f"| {result['reader']} | {result['how']} |" in ended.stdout
