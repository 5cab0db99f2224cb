"""`examples/two_nodes.py` hands over a cache between two processes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.zygote import EXAMPLES


@pytest.mark.parametrize("connector", ["shm", "tcp"])
def test_the_blocks_arrive_as_they_were_sent(connector: str) -> None:
    command = [sys.executable, str(EXAMPLES / "two_nodes.py"), connector]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"5 blocks came over {connector}, and are as they were sent: True\n"
