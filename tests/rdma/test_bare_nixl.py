"""For comparison: how many bytes land with NIXL alone after a reader has let go of a read.

Nothing is promised here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from .bare_nixl import WAYS


@pytest.mark.timeout(240)
def test_bytes_that_land_with_nixl_alone(record_property: Callable[[str, object], None]) -> None:
    command = [sys.executable, "-m", "tests.rdma.bare_nixl"]
    environment = {**os.environ, "UCX_TLS": "rc_v", "UCX_LOG_LEVEL": "fatal"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    found = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
    for row in found:
        record_property(f"bare NIXL: {row['how']}", row["late_bytes"])
    assert len(found) == len(WAYS), ended.stderr
