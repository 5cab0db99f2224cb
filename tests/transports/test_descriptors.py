"""A process with few file descriptors refuses connections with the reason.

It does not die or hang, or harm others.

Each test that runs out of descriptors does so in its own process.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from importlib.util import find_spec

import pytest

from kvferry.transports.testing import built_in

NEEDS_UCXX = pytest.mark.skipif(find_spec("ucxx") is None, reason="ucxx is not installed")
SCHEMES = built_in(without=("auto", "inproc"))

PRELUDE = """
import logging, os, resource, socket, sys, time
from kvferry.transports import Connected, PeerLost, Pool
from kvferry.transports.errors import BackpressureError, KVTransferError
from kvferry.transports.registry import create_transport
from kvferry.transports.testing.harness import World

logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
scheme = sys.argv[1]

def limit(soft):
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))

def take_all_but(num_left):
    taken = []
    try:
        while True:
            taken.append(os.dup(0))
    except OSError:
        pass
    for _ in range(num_left):
        os.close(taken.pop())
    return taken

def connect(client, address, timeout_s=5.0):
    "Return the last event of a connection, or the error with which it was refused."
    try:
        peer_id = client.endpoint.start_connect(address, timeout_s=timeout_s)
    except KVTransferError as error:
        return error
    mine = lambda: [e for e in client.history if isinstance(e, Connected | PeerLost) and e.peer_id == peer_id]
    world.serve(lambda: bool(mine()))
    client.endpoint.disconnect(peer_id)
    return mine()[-1]
"""


def run(scheme: str, code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(code), scheme],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def succeeds(scheme: str, code: str) -> str:
    done = run(scheme, code)
    assert done.returncode == 0, f"exit {done.returncode}: {done.stdout[-2000:]}{done.stderr[-6000:]}"
    return done.stderr


@pytest.mark.parametrize("scheme", SCHEMES)
def test_no_number_of_free_descriptors_kills_a_node(scheme: str) -> None:
    """Neither the node that connects nor the one that listens, which are in the same process here."""
    succeeds(
        scheme,
        """
        limit(256)
        world = World(lambda: create_transport(scheme, {"handshake_timeout_s": 0.4}))
        server, client = world.node(4096), world.node(4096)
        address = server.endpoint.listen("")
        assert isinstance(connect(client, address), Connected)
        for num_left in (0, 1, 2, 3, 4, 5, 6, 7, 9, 12, 16, 24, 40):
            taken = take_all_but(num_left)
            outcome = connect(client, address, timeout_s=0.4)
            for descriptor in taken:
                os.close(descriptor)
            print(num_left, outcome)
            error = getattr(outcome, "error", outcome)
            assert isinstance(error, Connected | KVTransferError)
            if num_left == 0:
                assert isinstance(error, BackpressureError) and "ulimit -n" in str(error), repr(error)
            if num_left == 40:
                assert isinstance(error, Connected)
        world.serve_quietly()
        assert isinstance(connect(client, address), Connected)
        world.close()
        """,
    )


@pytest.mark.parametrize("scheme", [*SCHEMES, "auto"])
def test_no_number_of_free_descriptors_kills_a_node_that_starts(scheme: str) -> None:
    """libzmq and UCX start threads with their first socket, and abort if there is no descriptor for them."""
    succeeds(
        scheme,
        """
        limit(256)
        world = World(lambda: create_transport(scheme, {}))
        create_transport(scheme, {}).close()  # import everything that is imported late
        for num_left in (*range(0, 16), 24, 48, 64):
            taken = take_all_but(num_left)
            error = None
            try:
                transport = create_transport(scheme, {})
                try:
                    arena = transport.allocate(4096)
                    transport.register(Pool([arena.segment])).listen("")
                finally:
                    transport.close()
            except KVTransferError as caught:
                error = caught
            for descriptor in taken:
                os.close(descriptor)
            print(num_left, repr(error))
        assert error is None
        """,
    )


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_low_limit_is_warned_about_once(scheme: str) -> None:
    said = succeeds(
        scheme,
        """
        limit(128)
        for _ in range(2):
            world = World(lambda: create_transport(scheme, {}))
            world.node(4096)
            world.close()
        """,
    )
    (warning,) = [line for line in said.splitlines() if line.startswith("WARNING")]
    for part in ("max_connecting=128", "may open 128", "ulimit -n", "LimitNOFILE"):
        assert part in warning


def test_libzmq_may_open_as_many_sockets_as_there_are_descriptors() -> None:
    """libzmq's default is 1023 sockets, which 340 connections use up."""
    succeeds(
        "zeromq",
        """
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if hard != resource.RLIM_INFINITY and hard < 4096:
            sys.exit(0)
        limit(4096)
        world = World(lambda: create_transport(scheme, {"max_connecting": 1000, "handshake_timeout_s": 60}))
        client = world.node(4096)
        mute = socket.create_server(("127.0.0.1", 0), backlog=4096)
        for _ in range(400):
            client.endpoint.start_connect(f"zeromq://127.0.0.1:{mute.getsockname()[1]}", timeout_s=60)
        world.serve_quietly()
        assert client.history == []
        world.close()
        """,
    )


@pytest.mark.parametrize("scheme", ["shm", pytest.param("ucx", marks=NEEDS_UCXX)])
def test_a_pending_connection_costs_no_processor_time_and_is_accepted_later(scheme: str) -> None:
    said = succeeds(
        scheme,
        """
        limit(256)
        world = World(lambda: create_transport(scheme, {}))
        server, client = world.node(4096), world.node(4096)
        peer_id = client.endpoint.start_connect(server.endpoint.listen(""), timeout_s=20)
        taken = take_all_but(0)
        began = time.process_time()
        assert server.endpoint.wait_events(1.0) == []
        assert time.process_time() - began < 0.25, time.process_time() - began
        for descriptor in taken:
            os.close(descriptor)
        world.serve(lambda: Connected(peer_id, incoming=False) in client.history and bool(server.history))
        world.close()
        """,
    )
    assert 1 <= said.count("cannot accept a peer") <= 5


def test_a_zeromq_listener_without_descriptors_neither_spins_nor_starves_its_peers() -> None:
    """libzmq accepts in its own thread, and would retry without a pause."""
    succeeds(
        "zeromq",
        """
        limit(256)
        world = World(lambda: create_transport(scheme, {}))
        server, client = world.node(4096), world.node(4096)
        link = world.link(server, client)
        address = server.endpoint.listen("")
        host, port = address.removeprefix("zeromq://").split(":")
        strangers = [socket.socket() for _ in range(20)]
        taken = take_all_but(0)
        began = time.process_time()
        for stranger in strangers:
            stranger.setblocking(False)
            try:
                stranger.connect((host, int(port)))
            except BlockingIOError:
                pass
        until = time.monotonic() + 1
        while time.monotonic() < until:
            for node in world.nodes:
                node.history += node.endpoint.wait_events(0.05)
        assert time.process_time() - began < 0.2, time.process_time() - began
        client.endpoint.send(link.producer_id, b"still here")
        world.serve(lambda: server.messages(link.consumer_id) == [b"still here"])
        for descriptor in taken:
            os.close(descriptor)
        world.serve_quietly()
        assert isinstance(connect(client, address), Connected)
        world.close()
        """,
    )
