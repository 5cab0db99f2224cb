"""A prefill and a decode node on two hosts in miniature: handoffs while the network between them fails."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest

from tests.support.client import wait_until

NODE_PROGRAM = Path(__file__).parent / "children" / "node.py"
RDMA_NODE_PROGRAM = NODE_PROGRAM.with_name("rdma_node.py")
NUM_TOKENS = 24 * 16  # 24 MiB
NUM_BLOCKS = 32
PEER_TIMEOUT_S = 2.0
LEASE_S = 4.0
#: Seconds after which both sides have noticed the loss of a peer: the peer timeout, the lease, and a reserve.
SETTLED_S = PEER_TIMEOUT_S + LEASE_S + 9.0
CONNECT = {"connect_timeout_s": 3.0, "claim_timeout_s": 4.0}
HANDOFF = {"lease_s": LEASE_S, "read_timeout_s": 15.0, **CONNECT}

pytestmark = [pytest.mark.full, pytest.mark.timeout(180)]


class Program:
    """A Python program on a host, which takes orders over a pipe.

    Args:
        prefix: What runs a command on that host.
        variables: For its environment.
    """

    def __init__(self, prefix: Sequence[str], program: Path, *words: str, **variables: str) -> None:
        self.pipe, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [*prefix, sys.executable, str(program), str(theirs.fileno()), *words],
                pass_fds=(theirs.fileno(),),
                env={**os.environ, **variables},
            )

    def receive(self, timeout_s: float) -> Any:
        assert self.pipe.poll(timeout_s), f"no answer within {timeout_s:g} s"
        return self.pipe.recv()

    def ask(self, name: str, *arguments: Any) -> Any:
        """Call a method of the program."""
        self.pipe.send((name, *arguments))
        return self.receive(30)

    def num_received(self) -> int:
        """Return the number of bytes that arrived over the veth link."""
        lines = Path(f"/proc/{self._process.pid}/net/dev").read_text().splitlines()
        (counters,) = [line.partition(":")[2] for line in lines if line.strip().startswith("veth:")]
        return int(counters.split()[0])

    def close(self) -> None:
        self.pipe.close()
        try:
            self._process.wait(30)
        finally:
            self._process.kill()
            self._process.wait()


class Host(Program):
    """The node on one of the hosts."""

    def __init__(
        self,
        prefix: Sequence[str],
        connector: str,
        transport: Mapping[str, Any],
        node_program: Path = NODE_PROGRAM,
        handoff: Mapping[str, float] = HANDOFF,
    ) -> None:
        options = json.dumps({**handoff, "transport_options": transport})
        super().__init__(prefix, node_program, connector, options, OMP_NUM_THREADS="1", PYTHONHASHSEED="0")

    def wait_ready(self) -> None:
        self.receive(90)


class Pair:
    """Two nodes that hand over from one to the other."""

    def __init__(self, prefill: Host, decode: Host) -> None:
        self.prefill, self.decode = prefill, decode
        self._ids = itertools.count()

    def start_load(self) -> tuple[str, str]:
        """Prefill a prompt and order its load. Returns the request's id and a digest of its blocks."""
        request_id = f"r{next(self._ids)}"
        params, digest = self.prefill.ask("prefill", request_id, NUM_TOKENS)
        self.decode.ask("load", request_id, NUM_TOKENS, params)
        return request_id, digest

    def end_load(self, request_id: str, timeout_s: float) -> tuple[str, str]:
        """Wait for the one report of a load. Returns why it failed, and a digest of the blocks."""
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
        """Check that the next handoff over the repaired link succeeds, or the one after it if the machine is
        too busy.

        Both nodes have dropped the old connection: the load failed on the decode node, and the prefill node
        freed its blocks. So if a handoff fails now, its new connection must have been silent for the peer
        timeout.
        """
        began = time.monotonic()
        request_id, expected = self.start_load()
        error, digest = self.end_load(request_id, 30)
        self.assert_whole()
        if error:
            assert time.monotonic() - began > PEER_TIMEOUT_S / 2, f"failed without a silence: {error}"
            self.assert_delivers()
        else:
            assert digest == expected

    def assert_whole(self) -> None:
        """Check that all blocks are free once the lease has expired."""
        wait_until(lambda: self.prefill.ask("num_free") == NUM_BLOCKS, SETTLED_S)
        assert self.decode.ask("num_free") == NUM_BLOCKS


@contextlib.contextmanager
def running(*hosts: Host) -> Iterator[Pair]:
    """Wait for a prefill and a decode node that were just started, and close them when the block ends."""
    with ExitStack() as resources:
        for host in hosts:
            resources.callback(host.close)
        for host in hosts:
            host.wait_ready()
        yield Pair(*hosts)


def zeromq_options(network: Any, host: str, folder: Path) -> dict[str, Any]:
    """Return the options of a node. All nodes of a folder share one secret."""
    secret = folder / "secret"
    secret.write_text("a secret that both hosts hold\n")
    secret.chmod(0o600)
    return {
        "bind_host": network.address[host],
        "shared_secret_file": str(secret),
        "peer_timeout_s": PEER_TIMEOUT_S,
        "slice_bytes": 256 << 10,  # small slices, so that a heartbeat never waits long for data in flight
    }


def ucx_options(network: Any, host: str, folder: Path) -> dict[str, Any]:
    """Return the options of a node.

    UCX neither encrypts nor authenticates. The host's own address is on `lo`.
    """
    return {
        "bind_host": network.address[host],
        "allow_plaintext": True,
        "tls": "tcp",
        "net_devices": "lo",
        "peer_timeout_s": PEER_TIMEOUT_S,
    }


def nixl_options(network: Any, host: str, folder: Path) -> dict[str, Any]:
    return {**ucx_options(network, host, folder), "refuse_tcp": False}


def tcp_options(network: Any, host: str, folder: Path) -> dict[str, Any]:
    return {
        "bind_host": network.address[host],
        "tls": "off",
        "allow_plaintext": True,
        "peer_timeout_s": PEER_TIMEOUT_S,
        "slice_bytes": 256 << 10,
    }


OPTIONS = {"zeromq": zeromq_options, "tcp": tcp_options, "ucx": ucx_options, "nixl": nixl_options}
PACKAGES = {"ucx": "ucxx", "nixl": "nixl_cu12"}

#: For promises that other tests check for the other transports.
one_is_enough = pytest.mark.parametrize("nodes", ["zeromq"], indirect=True)


@pytest.fixture(
    scope="module",
    params=["zeromq", *(pytest.param(name, marks=pytest.mark.full) for name in ("tcp", "ucx", "nixl"))],
)
def nodes(
    request: pytest.FixtureRequest, network: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    if package := PACKAGES.get(request.param):
        pytest.importorskip(package, reason=f"{package} is not installed")
    folder = tmp_path_factory.mktemp("secret")
    hosts = [
        Host(network.inside(host), request.param, OPTIONS[request.param](network, host, folder))
        for host in network.hosts
    ]
    with running(*hosts) as pair:
        yield pair


@pytest.fixture
def pair(network: Any, nodes: Pair) -> Iterator[Pair]:
    """The nodes, connected by the veth pair, which is repaired after the test."""
    nodes.assert_whole()
    yield nodes
    network.mend()


def test_auto_uses_the_transport_that_connects(network: Any, tmp_path: Path) -> None:
    options = [
        {"network": "zeromq", "network_options": zeromq_options(network, host, tmp_path)}
        for host in network.hosts
    ]
    hosts = [Host(network.inside(host), "auto", options[at]) for at, host in enumerate(network.hosts)]
    with running(*hosts) as pair:
        pair.assert_delivers()
        ((transport, reason),) = pair.decode.ask("routes")
    assert transport == "zeromq"
    assert "shared memory does not connect" in reason


#: The namespaces of a container besides its network: processes, shared memory, mounts, host name.
CONTAINER = ("unshare", "--pid", "--ipc", "--mount", "--uts", "--fork", "--kill-child", "--mount-proc")


@pytest.fixture
def socket_dir() -> Iterator[Path]:
    """A folder with a short path, because socket paths have at most 107 bytes and `tmp_path` may be long."""
    with tempfile.TemporaryDirectory(prefix="kvferry-") as folder:
        yield Path(folder)


def test_shared_memory_between_containers_needs_only_a_shared_folder(network: Any, socket_dir: Path) -> None:
    options = {"socket_dir": str(socket_dir)}
    hosts = [Host([*network.inside(host), *CONTAINER], "shm", options) for host in network.hosts]
    with running(*hosts) as pair:
        pair.assert_delivers()
        ((transport, _),) = pair.decode.ask("routes")
    assert transport == "shm"
    assert list(socket_dir.iterdir()) == []


@pytest.mark.full
def test_a_host_that_only_tcp_reaches_is_refused_by_name_and_both_nodes_stay_up(
    network: Any, tmp_path: Path
) -> None:
    pytest.importorskip("ucxx", reason="ucxx is not installed")
    willing = Host(network.inside("p"), "ucx", ucx_options(network, "p", tmp_path))
    options = {**ucx_options(network, "d", tmp_path), "tls": "^tcp"}
    refusing = Host(network.inside("d"), "ucx", options, RDMA_NODE_PROGRAM)
    with running(willing, refusing) as pair:
        for _ in range(2):
            request_id, _ = pair.start_load()
            error, _ = pair.end_load(request_id, SETTLED_S)
            assert "change tls or net_devices" in error
        pair.assert_whole()


def start_and_wait_until_half_way(pair: Pair) -> tuple[str, str]:
    before = pair.decode.num_received()
    started = pair.start_load()
    wait_until(lambda: pair.decode.num_received() - before > 8 << 20, 20)
    return started


class TestTheCable:
    def test_cut_half_way_fails_the_load_in_time(self, network: Any, pair: Pair) -> None:
        request_id, _ = start_and_wait_until_half_way(pair)
        network.cut()
        error, _ = pair.end_load(request_id, SETTLED_S)
        assert error != ""
        pair.assert_whole()  # while the link is still cut
        network.mend()
        pair.assert_recovers()

    def test_repaired_in_time_delays_the_load(self, network: Any, pair: Pair) -> None:
        request_id, expected = start_and_wait_until_half_way(pair)
        network.cut()
        time.sleep(0.2)  # the link is cut for a tenth of the peer timeout
        network.mend()
        assert pair.end_load(request_id, 30) == ("", expected)
        pair.assert_whole()

    @one_is_enough
    @pytest.mark.full
    def test_cut_before_the_load_fails_it_in_time(self, network: Any, pair: Pair) -> None:
        network.cut()
        request_id, _ = pair.start_load()
        error, _ = pair.end_load(request_id, SETTLED_S)
        assert error != ""
        pair.assert_whole()
        network.mend()
        pair.assert_recovers()

    @pytest.mark.parametrize(
        "deaf", [pytest.param("p", marks=pytest.mark.full, id="prefill"), pytest.param("d", id="decode")]
    )
    def test_broken_in_one_direction_fails_the_load_in_time(
        self, network: Any, pair: Pair, deaf: str
    ) -> None:
        request_id, _ = start_and_wait_until_half_way(pair)
        network.deafen(deaf)
        error, _ = pair.end_load(request_id, SETTLED_S)
        assert error != ""
        pair.assert_whole()
        network.mend()
        pair.assert_recovers()


@pytest.fixture(scope="module")
def laid_relay(network: Any) -> Any:
    if not Path("/dev/net/tun").exists():
        pytest.skip("delaying and losing packets needs /dev/net/tun")
    return network.add_relay()


@pytest.fixture
def relay(network: Any, laid_relay: Any) -> Iterator[Any]:
    """The relay, through which all traffic goes until the test is over."""
    network.use_relay()
    yield laid_relay
    network.mend()


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param({"delay_s": 0.02}, marks=pytest.mark.full, id="long"),
        pytest.param({"loss": 0.01}, id="lossy"),
        pytest.param({"reordered": 0.05}, id="reordering"),
        pytest.param({"corrupted": 0.01}, id="corrupting"),
    ],
)
def test_a_bad_link_delivers_every_byte(relay: Any, nodes: Pair, fault: Mapping[str, float]) -> None:
    none = {"delay_s": 0.0, "loss": 0.0, "reordered": 0.0, "corrupted": 0.0}
    for name, value in {**none, "num_bad": 0, **fault}.items():
        setattr(relay, name, value)
    nodes.assert_delivers(60)
    assert (relay.num_bad > 0) == ("delay_s" not in fault)
