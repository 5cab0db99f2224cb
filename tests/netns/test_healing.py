"""How long a transport takes, with its default options, to notice that a link is cut in the middle of a
handoff, and how long to hand over again after the link is mended.

The times are printed (`-s`); `docs/reliability.md` has them. Asserted is only that a load ends, and that the
pair heals.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import ExitStack
from typing import Any

import pytest

from .test_two_hosts import PACKAGES, Host, Pair, running, start_and_wait_until_half_way

#: No timeout of any transport is longer.
NOTICED_S = 60.0
#: A link that stays down for longer than this was mended by a person.
DOWN_S = 20.0
HEALED_S = 90.0
ROUNDS = int(os.environ.get("KVFERRY_CUTS", "1"))

OPTIONS: dict[str, dict[str, Any]] = {
    "tcp": {"tls": "off", "allow_plaintext": True},
    "zeromq": {"curve": "off", "allow_plaintext": True},
    "ucx": {"allow_plaintext": True, "tls": "tcp", "net_devices": "lo"},
    "nixl": {"allow_plaintext": True, "tls": "tcp", "net_devices": "lo", "refuse_tcp": False},
}

pytestmark = [pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(120 + 240 * ROUNDS)]


def require(transport: str) -> None:
    if package := PACKAGES.get(transport):
        pytest.importorskip(package, reason=f"{package} is not installed")


def report(what: str, noticed_s: float, healed_s: float, num_failed: int) -> None:
    found = {"noticed_s": round(noticed_s, 2), "healed_s": round(healed_s, 2), "failed_meanwhile": num_failed}
    print(f"\n{what}: {json.dumps(found)}")


@pytest.mark.parametrize("transport", OPTIONS)
def test_a_pair_heals_after_its_link_was_cut(network: Any, transport: str) -> None:
    require(transport)
    hosts = []
    with ExitStack() as started:
        for host in network.hosts:
            options = {"bind_host": network.address[host], **OPTIONS[transport]}
            hosts.append(Host(network.inside(host), transport, options, handoff={}))
            started.callback(hosts[-1].close)
        with running(*hosts) as pair:
            started.pop_all()
            pair.assert_delivers()
            for _ in range(ROUNDS):
                request_id, _ = start_and_wait_until_half_way(pair)
                cut_at = time.monotonic()
                network.cut()
                error, _ = pair.end_load(request_id, NOTICED_S)
                assert error != ""
                noticed_s = time.monotonic() - cut_at
                time.sleep(max(0.0, DOWN_S - noticed_s))
                mended_at = time.monotonic()
                network.mend()
                num_failed = deliver_at_last(pair)
                report(transport, noticed_s, time.monotonic() - mended_at, num_failed)


def deliver_at_last(pair: Pair) -> int:
    """Hand over until it succeeds. Returns how often it failed before."""
    deadline = time.monotonic() + HEALED_S
    num_failed = 0
    while True:
        assert time.monotonic() < deadline, "it does not heal"
        request_id, expected = pair.start_load()
        error, digest = pair.end_load(request_id, NOTICED_S)
        if not error:
            assert digest == expected
            return num_failed
        num_failed += 1
