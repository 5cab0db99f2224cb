"""The time of day jumps in every process, as after a correction by NTP or a resumed virtual machine.

No deadline depends on it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator

import pytest

from kvferry.lab.servers import Launcher, run_program
from tests.e2e.conftest import Fleet, launch_fleet
from tests.support import jumping_clock
from tests.support.client import DO_REMOTE_DECODE, Client, assert_answers_like, wait_until

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]

LEASE_S = 6.0


@pytest.fixture
def fleet(tiny_single: Client, tiny_arguments: tuple[str, ...]) -> Iterator[Fleet]:
    (folder,) = jumping_clock.__path__
    with pytest.MonkeyPatch.context() as environment, Launcher(run_program) as launcher:
        environment.setenv("PYTHONPATH", folder, prepend=os.pathsep)
        yield launch_fleet(launcher, tiny_single, *tiny_arguments)


@pytest.mark.every_transport
def test_a_clock_that_jumps_changes_nothing(fleet: Fleet) -> None:
    told = [json.loads(fleet.router.get("/page/state")[1])["now"] for _ in range(20)]
    assert max(told) - min(told) > 3600, "the time of day does not jump"
    for number in range(4):
        prompt = f"{number} What is the time? " * 8
        reply = fleet.router.complete(prompt, max_tokens=8, logprobs=0)
        assert (reply.status, reply.headers["X-KV-Transfer"]) == (200, "loaded"), reply.body
        assert_answers_like(fleet.single, prompt, reply.answer, 8)
    # A lease ends when it should: neither with the first jump nor a day later.
    fleet.prefill.complete("This is not fetched. " * 8, max_tokens=1, kv_transfer_params=DO_REMOTE_DECODE)
    began = time.monotonic()
    assert not fleet.prefill.is_whole()
    wait_until(fleet.prefill.is_whole, 3 * LEASE_S)
    assert time.monotonic() - began > LEASE_S / 2
