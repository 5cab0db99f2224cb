"""A prefill and a decode node on two hosts in miniature, and what the network between them can do to a handoff.

Each host is a network namespace with an address of its own on its loopback interface, `10.79.0.1` and `10.79.0.2`.
Two ways lead from one to the other, and a route chooses: a veth pair of limited rate, whose link is cut and mended, and
a pair of TUN interfaces with a relay in this process between them, which delays and loses packets.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import itertools
import json
import os
import random
import select
import shutil
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest

NODE_PROGRAM = Path(__file__).parent / "children" / "node.py"
HOSTS = ("p", "d")
ADDRESS = {"p": "10.79.0.1", "d": "10.79.0.2"}
LINK_ADDRESS = {"p": "10.77.0.1", "d": "10.77.0.2"}
OTHER = {"p": "d", "d": "p"}
RATE = "100mbit"  # a whole pool takes almost three seconds, so a test can act while it crosses
NUM_TOKENS = 24 * 16  # 24 MiB
NUM_BLOCKS = 32
PEER_TIMEOUT_S = 2.0
LEASE_S = 4.0
#: Whatever becomes of a peer, both sides know after this: what notices it, the lease, and a busy machine.
SETTLED_S = PEER_TIMEOUT_S + LEASE_S + 9.0
CONNECT = {"connect_timeout_s": 3.0, "claim_timeout_s": 4.0, "early_claim_wait_s": 2.0}
HANDOFF = {"lease_s": LEASE_S, "heartbeat_s": 0.5, "read_timeout_s": 15.0, **CONNECT}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


def ip(*arguments: str) -> None:
    """Run iproute2's `ip`."""
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


class Relay(threading.Thread):
    """The wire between the two TUN interfaces.

    Attributes:
        delay_s: Time that a packet is under way.
        loss: Share of the packets that never arrive.
    """

    def __init__(self, descriptors: tuple[int, int]) -> None:
        super().__init__(name="relay")
        self.delay_s = 0.0
        self.loss = 0.0
        self.num_lost = 0
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
        if self._random.random() < self.loss:
            self.num_lost += 1
            return
        due = time.monotonic() + self.delay_s
        heapq.heappush(self._under_way, (due, next(self._order), self._out[descriptor], packet))

    def _deliver(self, now: float) -> None:
        while self._under_way and self._under_way[0][0] <= now:
            _, _, descriptor, packet = heapq.heappop(self._under_way)
            with contextlib.suppress(OSError):  # an interface that is full or down loses packets, as in life
                os.write(descriptor, packet)

    def close(self) -> None:
        os.eventfd_write(self._stopped, 1)
        self.join()
        os.close(self._stopped)


class Network:
    """Two hosts and what joins them. Everything is in namespaces of this process's own, named after it."""

    def __init__(self, resources: ExitStack) -> None:
        self._resources = resources
        for host in HOSTS:
            ip("netns", "add", self.namespace(host))
            resources.callback(ip, "netns", "del", self.namespace(host))
            ip("-n", self.namespace(host), "addr", "add", f"{ADDRESS[host]}/32", "dev", "lo")
            ip("-n", self.namespace(host), "link", "set", "lo", "up")
        self._join()

    @staticmethod
    def namespace(host: str) -> str:
        return f"kvferry-{os.getpid()}-{host}"

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
        """Pull the cable."""
        ip("-n", self.namespace("p"), "link", "set", "veth", "down")

    def deafen(self, host: str) -> None:
        """Let nothing that the other host sends arrive here; what this one sends still does."""
        sender = self.namespace(OTHER[host])
        nowhere = ("lladdr", "02:00:00:00:00:99", "dev", "veth", "nud", "permanent")
        ip("-n", sender, "neigh", "replace", LINK_ADDRESS[host], *nowhere)

    def mend(self) -> None:
        """Undo whatever was done to the cable."""
        for host in HOSTS:
            namespace, neighbour = self.namespace(host), LINK_ADDRESS[OTHER[host]]
            ip("-n", namespace, "link", "set", "veth", "up")
            with contextlib.suppress(subprocess.CalledProcessError):  # there is none
                ip("-n", namespace, "neigh", "del", neighbour, "dev", "veth")
            route = (ADDRESS[OTHER[host]], "via", neighbour, "dev", "veth", "src", ADDRESS[host])
            ip("-n", namespace, "route", "replace", *route)

    def num_received(self, host: str) -> int:
        """Bytes that came over the cable."""
        counter = "/sys/class/net/veth/statistics/rx_bytes"
        command = ["ip", "netns", "exec", self.namespace(host), "cat", counter]
        return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    def use_relay(self) -> Relay:
        """Lead all traffic through a relay."""
        relay = Relay((self._add_tun("p"), self._add_tun("d")))
        relay.start()
        self._resources.callback(relay.close)
        return relay

    def _add_tun(self, host: str) -> int:
        name, flags = f"kvf{os.getpid()}{host}", 0x1001  # IFF_TUN | IFF_NO_PI
        descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._resources.callback(os.close, descriptor)
        fcntl.ioctl(descriptor, 0x400454CA, struct.pack("16sH22x", name.encode(), flags))  # TUNSETIFF
        ip("link", "set", name, "mtu", "8000", "netns", self.namespace(host))
        ip("-n", self.namespace(host), "link", "set", name, "up")
        ip(
            "-n",
            self.namespace(host),
            "route",
            "replace",
            ADDRESS[OTHER[host]],
            "dev",
            name,
            "src",
            ADDRESS[host],
        )
        return descriptor


class Host:
    """The node in one of the namespaces."""

    def __init__(self, host: str, secret: Path, connector: str) -> None:
        transport: dict[str, Any] = {
            "bind_host": ADDRESS[host],
            "shared_secret_file": str(secret),
            "peer_timeout_s": PEER_TIMEOUT_S,
            "slice_bytes": 256 << 10,  # so that a heartbeat never waits long behind what is under way
        }
        if connector == "auto":
            transport = {"network": "zeromq", "network_options": transport}
        self._pipe, theirs = Pipe()
        with theirs:
            options = json.dumps({**HANDOFF, "transport": transport})
            program = [sys.executable, str(NODE_PROGRAM), str(theirs.fileno()), connector, options]
            self._process = subprocess.Popen(
                ["ip", "netns", "exec", Network.namespace(host), *program],
                pass_fds=(theirs.fileno(),),
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"},
            )

    def wait_ready(self) -> None:
        assert self._pipe.poll(90), "the node did not start"
        self._pipe.recv()

    def ask(self, name: str, *arguments: Any) -> Any:
        """Call a method of the node's `Program`."""
        self._pipe.send((name, *arguments))
        assert self._pipe.poll(30), f"no answer to {name}"
        return self._pipe.recv()

    def close(self) -> None:
        self._pipe.close()
        try:
            self._process.wait(30)
        finally:
            self._process.kill()
            self._process.wait()


class Pair:
    """Two nodes, and handoffs from one to the other."""

    def __init__(self, prefill: Host, decode: Host) -> None:
        self.prefill, self.decode = prefill, decode
        self._ids = itertools.count()

    def start_load(self) -> tuple[str, str]:
        """Prefill a prompt and order its load; returns the request's id and a digest of its blocks."""
        request_id = f"r{next(self._ids)}"
        params, digest = self.prefill.ask("prefill", request_id, NUM_TOKENS)
        self.decode.ask("load", request_id, NUM_TOKENS, params)
        return request_id, digest

    def end_load(self, request_id: str, timeout_s: float) -> tuple[str, str]:
        """Wait for the one report of a load; returns why it failed, and a digest of the blocks."""
        wait_until(lambda: self.decode.ask("result", request_id)[0] > 0, timeout_s)
        num_reports, error, digest = self.decode.ask("result", request_id)
        assert num_reports == 1
        self.decode.ask("finish", request_id)
        return error, digest

    def assert_delivers(self, timeout_s: float = 30.0) -> None:
        request_id, expected = self.start_load()
        assert self.end_load(request_id, timeout_s) == ("", expected)
        self.assert_whole()

    def assert_recovers(self) -> None:
        """On a cable that was just mended a connection may still break, but soon handoffs succeed again."""
        deadline = time.monotonic() + 30
        while True:
            request_id, expected = self.start_load()
            error, digest = self.end_load(request_id, 30)
            self.assert_whole()
            if not error:
                assert digest == expected
                return
            assert time.monotonic() < deadline, error

    def assert_whole(self) -> None:
        """Nobody holds a block any more, at the latest when the lease has run out."""
        wait_until(lambda: self.prefill.ask("num_free") == NUM_BLOCKS, SETTLED_S)
        assert self.decode.ask("num_free") == NUM_BLOCKS


def wait_until(holds: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"not within {timeout_s} s"
        time.sleep(0.02)


def remove_leftovers() -> None:
    """Remove namespaces of test runs that were killed."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    for name in (line.split()[0] for line in listed.splitlines() if line.startswith("kvferry-")):
        if not Path(f"/proc/{name.split('-')[1]}").exists():
            ip("netns", "del", name)


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        pytest.skip("building network namespaces takes root, and iproute2's ip and tc")
    with ExitStack() as resources:
        try:
            remove_leftovers()
            made = Network(resources)
        except subprocess.CalledProcessError as error:
            pytest.skip(
                f"this machine builds no network namespaces, veth pairs and rate limits: {error.stderr}"
            )
        yield made


@contextlib.contextmanager
def started(folder: Path, connector: str) -> Iterator[Pair]:
    """A node on each host; both hold one secret."""
    secret = folder / "secret"
    secret.write_text("a secret that both hosts hold\n")
    secret.chmod(0o600)
    with ExitStack() as resources:
        hosts = [Host(host, secret, connector) for host in HOSTS]
        for host in hosts:
            resources.callback(host.close)
        for host in hosts:
            host.wait_ready()
        yield Pair(*hosts)


@pytest.fixture(scope="module")
def nodes(network: Network, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with started(tmp_path_factory.mktemp("secret"), "zeromq") as pair:
        yield pair


@pytest.fixture
def pair(network: Network, nodes: Pair) -> Iterator[Pair]:
    """The nodes, over the veth pair, and mended again when the test is over."""
    nodes.assert_whole()
    yield nodes
    network.mend()


def test_a_cache_crosses_from_one_host_to_the_other(pair: Pair) -> None:
    pair.assert_delivers()


def test_auto_goes_by_what_connects(network: Network, tmp_path: Path) -> None:
    with started(tmp_path, "auto") as pair:
        pair.assert_delivers()
        ((transport, reason),) = pair.decode.ask("routes")
    assert transport == "zeromq"
    assert "shared memory does not connect" in reason


def start_and_wait_until_half_way(network: Network, pair: Pair) -> tuple[str, str]:
    before = network.num_received("d")
    started = pair.start_load()
    wait_until(lambda: network.num_received("d") - before > 8 << 20, 20)
    return started


class TestTheCable:
    def test_cut_half_way_fails_the_load_in_time(self, network: Network, pair: Pair) -> None:
        request_id, _ = start_and_wait_until_half_way(network, pair)
        network.cut()
        error, _ = pair.end_load(request_id, SETTLED_S)
        assert error != ""
        pair.assert_whole()  # while it is still cut
        network.mend()
        pair.assert_recovers()

    def test_mended_in_time_delays_the_load(self, network: Network, pair: Pair) -> None:
        request_id, expected = start_and_wait_until_half_way(network, pair)
        network.cut()
        time.sleep(0.2)  # for how long it is cut; a tenth of what makes a peer count as lost
        network.mend()
        assert pair.end_load(request_id, 30) == ("", expected)
        pair.assert_whole()

    def test_cut_before_the_load_fails_it_in_time(self, network: Network, pair: Pair) -> None:
        network.cut()
        request_id, _ = pair.start_load()
        error, _ = pair.end_load(request_id, SETTLED_S)
        assert error != ""
        pair.assert_whole()
        network.mend()
        pair.assert_recovers()

    @pytest.mark.parametrize("deaf", HOSTS, ids=["prefill", "decode"])
    def test_one_way_only_fails_the_load_in_time(self, network: Network, pair: Pair, deaf: str) -> None:
        request_id, _ = start_and_wait_until_half_way(network, pair)
        network.deafen(deaf)
        error, _ = pair.end_load(request_id, SETTLED_S)
        assert error != ""
        pair.assert_whole()
        network.mend()
        pair.assert_recovers()


@pytest.fixture(scope="module")
def relay(network: Network) -> Relay:
    if not Path("/dev/net/tun").exists():
        pytest.skip("delaying and losing packets takes /dev/net/tun")
    return network.use_relay()


@pytest.mark.parametrize(("delay_s", "loss"), [(0.02, 0.0), (0.0, 0.01)], ids=["long", "lossy"])
def test_a_long_or_lossy_way_delivers_every_byte(
    relay: Relay, nodes: Pair, delay_s: float, loss: float
) -> None:
    relay.delay_s, relay.loss, relay.num_lost = delay_s, loss, 0
    nodes.assert_delivers(60)
    assert (relay.num_lost > 0) == (loss > 0)
