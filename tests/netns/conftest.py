"""Two hosts in miniature: network namespaces, the links between them, and faults of these links.

Each host is a network namespace with its own address on its loopback interface, `10.79.0.1` and `10.79.0.2`.
There are two links between them, and a route selects one: a veth pair with a limited rate, which can be cut
and repaired, and a pair of TUN interfaces with a relay in this process, which delays and loses packets.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import itertools
import os
import random
import select
import shutil
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

HOSTS = ("p", "d")
ADDRESS = {"p": "10.79.0.1", "d": "10.79.0.2"}
LINK_ADDRESS = {"p": "10.77.0.1", "d": "10.77.0.2"}
OTHER = {"p": "d", "d": "p"}
OVERTAKEN_S = 0.005  # many packets fit into that
RATE = "100mbit"  # a pool of 32 MiB takes almost three seconds, so a test can act during a transfer


def ip(*arguments: str) -> None:
    """Run iproute2's `ip`."""
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


class Relay(threading.Thread):
    """Forwards packets between the two TUN interfaces.

    Attributes:
        delay_s: Delay of each packet.
        loss: Fraction of packets that are lost.
        reordered: Fraction of packets that later ones overtake.
        corrupted: Fraction of packets in which a byte differs.
        num_bad: Packets that were lost, overtaken or changed.
    """

    def __init__(self, descriptors: tuple[int, int]) -> None:
        super().__init__(name="relay")
        self.delay_s = 0.0
        self.loss = self.reordered = self.corrupted = 0.0
        self.num_bad = 0
        self._out = dict(zip(descriptors, reversed(descriptors), strict=True))
        self._stopped = os.eventfd(0)
        self._random = random.Random(1)
        self._under_way: list[tuple[float, int, int, bytes]] = []
        self._order = itertools.count()

    def run(self) -> None:
        while True:
            due = max(0.0, self._under_way[0][0] - time.monotonic()) if self._under_way else None
            ready = select.select([*self._out, self._stopped], [], [], due)[0]
            if self._stopped in ready:
                return
            for descriptor in ready:
                self._take(descriptor)
            self._deliver(time.monotonic())

    def _take(self, descriptor: int) -> None:
        packet = os.read(descriptor, 65536)
        due = time.monotonic() + self.delay_s
        drawn = self._random.random()
        if drawn < self.loss:
            self.num_bad += 1
            return
        if drawn < self.reordered:
            self.num_bad += 1
            due += OVERTAKEN_S
        elif drawn < self.corrupted:
            self.num_bad += 1
            at = self._random.randrange(len(packet))
            packet = packet[:at] + bytes([packet[at] ^ 0x10]) + packet[at + 1 :]
        heapq.heappush(self._under_way, (due, next(self._order), self._out[descriptor], packet))

    def _deliver(self, now: float) -> None:
        while self._under_way and self._under_way[0][0] <= now:
            _, _, descriptor, packet = heapq.heappop(self._under_way)
            with contextlib.suppress(OSError):  # an interface that is full or down loses packets
                os.write(descriptor, packet)

    def close(self) -> None:
        os.eventfd_write(self._stopped, 1)
        self.join()
        os.close(self._stopped)


class Network:
    """Two hosts and the links between them. Their namespaces are named after this process.

    Attributes:
        hosts: Names of the hosts.
        address: Host → its address.
    """

    hosts = HOSTS
    address = ADDRESS

    def __init__(self, resources: ExitStack) -> None:
        self._resources = resources
        for host in HOSTS:
            ip("netns", "add", self.namespace(host))
            resources.callback(ip, "netns", "del", self.namespace(host))
            ip("-n", self.namespace(host), "addr", "add", f"{ADDRESS[host]}/32", "dev", "lo")
            ip("-n", self.namespace(host), "link", "set", "lo", "up")
            self._let_ucx_use_lo(host)
        self._join()

    @staticmethod
    def namespace(host: str) -> str:
        return f"kvferry-{os.getpid()}-{host}"

    def inside(self, host: str) -> list[str]:
        """Return the prefix that runs a command on a host."""
        return ["ip", "netns", "exec", self.namespace(host)]

    def _let_ucx_use_lo(self, host: str) -> None:
        """Make UCX use the host's own address.

        UCX takes the first address of a device, and only if the device has a route to the other host. So add
        such a route, with a metric that keeps it unused.
        """
        for change in (
            ("addr", "del", "127.0.0.1/8"),
            ("addr", "add", "127.0.0.1/8", "scope", "global"),
            ("route", "add", ADDRESS[OTHER[host]], "metric", "9999"),
        ):
            ip("-n", self.namespace(host), *change, "dev", "lo")

    def _join(self) -> None:
        ends = [("name", "veth", "netns", self.namespace(host)) for host in HOSTS]
        ip("link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        for host in HOSTS:
            ip("-n", self.namespace(host), "addr", "add", f"{LINK_ADDRESS[host]}/24", "dev", "veth")
            limit = ["rate", RATE, "burst", "256kb", "latency", "200ms"]
            tc = ["tc", "-n", self.namespace(host), "qdisc", "add", "dev", "veth", "root", "tbf", *limit]
            subprocess.run(tc, check=True, capture_output=True)
        self.mend()

    def cut(self) -> None:
        """Set the veth link down, which drops all packets."""
        ip("-n", self.namespace("p"), "link", "set", "veth", "down")

    def deafen(self, host: str) -> None:
        """Drop all packets to this host. Packets from it still arrive."""
        sender = self.namespace(OTHER[host])
        nowhere = ("lladdr", "02:00:00:00:00:99", "dev", "veth", "nud", "permanent")
        ip("-n", sender, "neigh", "replace", LINK_ADDRESS[host], *nowhere)

    def mend(self) -> None:
        """Restore the veth link after `cut` or `deafen`, and route all traffic through it."""
        for host in HOSTS:
            namespace, neighbour = self.namespace(host), LINK_ADDRESS[OTHER[host]]
            ip("-n", namespace, "link", "set", "veth", "up")
            with contextlib.suppress(subprocess.CalledProcessError):  # no such entry
                ip("-n", namespace, "neigh", "del", neighbour, "dev", "veth")
            route = (ADDRESS[OTHER[host]], "via", neighbour, "dev", "veth", "src", ADDRESS[host])
            ip("-n", namespace, "route", "replace", *route)

    def add_relay(self) -> Relay:
        """Add the second link between the hosts. No traffic uses it yet."""
        relay = Relay((self._add_tun("p"), self._add_tun("d")))
        relay.start()
        self._resources.callback(relay.close)
        return relay

    def _add_tun(self, host: str) -> int:
        name, flags = self._tun(host), 0x1001  # IFF_TUN | IFF_NO_PI
        descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._resources.callback(os.close, descriptor)
        fcntl.ioctl(descriptor, 0x400454CA, struct.pack("16sH22x", name.encode(), flags))  # TUNSETIFF
        ip("link", "set", name, "mtu", "8000", "netns", self.namespace(host))
        ip("-n", self.namespace(host), "link", "set", name, "up")
        return descriptor

    def use_relay(self) -> None:
        """Route all traffic through the relay. `mend` routes it back."""
        for host in HOSTS:
            route = (ADDRESS[OTHER[host]], "dev", self._tun(host), "src", ADDRESS[host])
            ip("-n", self.namespace(host), "route", "replace", *route)

    @staticmethod
    def _tun(host: str) -> str:
        return f"kvf{os.getpid()}{host}"


def remove_leftovers() -> None:
    """Remove namespaces of test runs that were killed."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    for name in (line.split()[0] for line in listed.splitlines() if line.startswith("kvferry-")):
        if not Path(f"/proc/{name.split('-')[1]}").exists():
            ip("netns", "del", name)


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        pytest.skip("network namespaces need root, and iproute2's ip and tc")
    with ExitStack() as resources:
        try:
            remove_leftovers()
            made = Network(resources)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"cannot create network namespaces, veth pairs and rate limits: {error.stderr}")
        yield made
