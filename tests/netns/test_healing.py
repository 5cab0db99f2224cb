"""How long a transport takes, with its default options, to notice that a link is cut in the middle of a
handoff, and how long to hand over again after the link is mended. NIXL alone is measured beside it.

The times are printed (`-s`); `docs/reliability.md` has them. Asserted is only that a load ends, and that the
pair heals.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from .test_two_hosts import PACKAGES, Host, Pair, Program, running, start_and_wait_until_half_way, wait_until

BARE_NIXL = Path(__file__).parent / "children" / "bare_nixl.py"
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


class BareNixl(Program):
    """NIXL's agent on the host that reads."""

    def __init__(self, network: Any, host: str) -> None:
        variables = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo", "UCX_LOG_LEVEL": "fatal"}
        super().__init__(network.inside(host), BARE_NIXL, **variables)

    def close(self) -> None:
        self._process.kill()  # it may wait for the other host without an end
        super().close()

    def read(self, timeout_s: float) -> str:
        """Read everything. Returns NIXL's last state."""
        if self.ask("begin"):
            return "ERR"
        state = self.end(timeout_s)
        self.ask("let_go")
        return state

    def end(self, timeout_s: float) -> str:
        deadline = time.monotonic() + timeout_s
        while (state := str(self.ask("state"))) == "PROC" and time.monotonic() < deadline:
            time.sleep(0.02)
        return state


@pytest.fixture
def bare_nixl(network: Any) -> Iterator[BareNixl]:
    require("nixl")
    with closing(BareNixl(network, "p")) as owner, closing(BareNixl(network, "d")) as reader:
        owner.pipe.send(None)
        reader.pipe.send(owner.receive(60))
        reader.receive(60)
        yield reader
        network.mend()


def test_nixl_alone_is_measured_beside_it(network: Any, bare_nixl: BareNixl) -> None:
    """Nothing is promised of NIXL."""
    assert bare_nixl.read(30) == "DONE"
    for _ in range(ROUNDS):
        before = bare_nixl.num_received()
        assert bare_nixl.ask("begin") == ""
        wait_until(lambda before=before: bare_nixl.num_received() - before > 8 << 20, 20)
        cut_at = time.monotonic()
        network.cut()
        state = bare_nixl.end(NOTICED_S)
        noticed_s = time.monotonic() - cut_at
        print(f"\nNIXL alone: the read is {state} {noticed_s:.1f} s after the cut")
        time.sleep(max(0.0, DOWN_S - noticed_s))
        mended_at = time.monotonic()
        network.mend()
        if state == "PROC":
            state = bare_nixl.end(HEALED_S)
            print(f"it is {state} {time.monotonic() - mended_at:.1f} s after the link was mended")
        bare_nixl.ask("let_go")
        ends: list[Callable[[], Any]] = [lambda: None, lambda: bare_nixl.ask("meet_again")]
        for name, prepare in zip(("the same agents", "with the owner added again"), ends, strict=True):
            prepare()
            state = bare_nixl.read(HEALED_S)
            print(f"{name}: the next read is {state} {time.monotonic() - mended_at:.1f} s after that")
            if state == "DONE":
                break
