"""What the tests over RDMA have in common.

They run in the virtual machine of `make test-rdma`; see `guest_init`.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Only the guest has these devices. Elsewhere these tests are not collected.
collect_ignore_glob = [] if Path("/sys/class/infiniband/rxe1").exists() else ["test_*.py"]

OWNER, READER = "rxe0:1", "rxe1:1"
INTERFACES = ("v0", "v1")


def options_of(device: str, **others: Any) -> dict[str, Any]:
    """Return options with which a transport uses RDMA on one device and nothing else."""
    # In the guest a handshake takes seconds.
    return {
        "tls": "rc_v",
        "net_devices": device,
        "handshake_timeout_s": 60.0,
        **others,
    }


def num_packets(device: str) -> int:
    """Return the number of packets that an RDMA device has received."""
    name = device.partition(":")[0]
    return int(Path(f"/sys/class/infiniband/{name}/ports/1/hw_counters/rcvd_pkts").read_text())


class Wire:
    """The wire between the two RDMA devices."""

    def __init__(self) -> None:
        self._num_changes = 0

    def set(self, *netem: str) -> None:
        """Change the wire in both directions, as `netem` does; packets on the way are lost."""
        # Under a new handle the old queue is dropped with what is in it.
        self._num_changes += 1
        handle = f"{self._num_changes}:"
        for interface in INTERFACES:
            self._tc("replace", interface, "handle", handle, "netem", *netem, "limit", "100000")

    def limit(self) -> None:
        """Let 5 MB/s pass, so that a test can act during a read, and the queue is shorter than a peer
        timeout.
        """
        self.set("rate", "40mbit")

    def cut(self) -> None:
        """Lose every packet. (Interfaces that are down would break the devices, which is another fault.)"""
        self.set("loss", "100%")

    def mend(self) -> None:
        """Make the wire as fast as it was at first."""
        if self._num_changes:
            self._num_changes = 0
            for interface in INTERFACES:
                self._tc("del", interface)

    def num_dropped(self) -> int:
        """Return how many packets were lost since the last change."""
        total = 0
        for interface in INTERFACES:
            command = ["tc", "-json", "-statistics", "qdisc", "show", "dev", interface]
            shown = subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout
            total += sum(int(qdisc["drops"]) for qdisc in json.loads(shown))
        return total

    @staticmethod
    def _tc(change: str, interface: str, *settings: str) -> None:
        command = ["tc", "qdisc", change, "dev", interface, "root", *settings]
        subprocess.run(command, check=True, timeout=30)


@pytest.fixture
def wire() -> Iterator[Wire]:
    wire = Wire()
    yield wire
    wire.mend()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Print a failure at once: the guest may be ended before pytest prints its summary."""
    if report.failed:
        output = "\n".join(f"{title}:\n{text}" for title, text in report.sections)
        print(f"\n{report.nodeid}\n{report.longreprtext}\n{output}", flush=True)
    elif report.when == "call":
        print(f" {report.duration:.0f} s", end="", flush=True)
