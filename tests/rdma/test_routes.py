"""The mechanism that a transport reports is the one that moved the bytes; a node without TCP refuses it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from kvferry.transports import PeerLost
from kvferry.transports.errors import PeerRefusedError
from kvferry.transports.registry import create_transport
from kvferry.transports.testing.harness import HELD, Node, World, pairs_of

from .conftest import OWNER, READER, num_packets, options_of

NUM_BYTES = 2 << 20
PACKET_BYTES = 4096  # RoCE's largest payload

TCP = {"tls": "tcp", "net_devices": "lo"}
#: Without this `nixl` refuses TCP, whatever `tls` says.
WITH_TCP = {"ucx": TCP, "nixl": {**TCP, "refuse_tcp": False}}

pytestmark = pytest.mark.timeout(240)

Make = Callable[..., Node]


@pytest.fixture
def world() -> Iterator[World]:
    world = World(lambda: pytest.fail("each node has options of its own"), deadline_s=60.0)
    yield world
    world.close()


@pytest.fixture
def make(world: World) -> Make:
    """Make nodes of `world`."""

    def make_one(scheme: str, options: dict[str, Any]) -> Node:
        with ExitStack() as made:
            transport = create_transport(scheme, options)
            made.callback(transport.close)
            node = world.add(transport, [transport.allocate(NUM_BYTES)])
            made.pop_all()
            return node

    return make_one


@pytest.mark.parametrize(
    ("scheme", "changes", "mechanism", "is_rdma"),
    [
        ("ucx", {}, "ucx:rc_verbs+ud_verbs", True),
        (
            "ucx",
            {"tls": "", "allow_plaintext": True},
            "ucx:rc_verbs+ud_verbs",
            True,
        ),
        ("ucx", WITH_TCP["ucx"], "ucx:tcp", False),
        ("nixl", {}, "nixl:UCX:rc_v", True),
        ("nixl", WITH_TCP["nixl"], "nixl:UCX:tcp", False),
    ],
    ids=["ucx_rc", "ucx_any", "ucx_tcp", "nixl_rc", "nixl_tcp"],
)
def test_the_mechanism_is_what_moves_the_bytes(
    world: World,
    make: Make,
    record_property: Callable[[str, object], None],
    scheme: str,
    changes: dict[str, Any],
    mechanism: str,
    is_rdma: bool,
) -> None:
    # An interface for TCP is there as well.
    owner, reader = (make(scheme, {**options_of(f"{device},v0"), **changes}) for device in (OWNER, READER))
    link = world.link(owner, reader)
    link.producer.transport.guards.set(HELD.index, HELD.value)
    before = num_packets(READER) + num_packets(OWNER)
    ended = world.read(link, pairs_of((0, 0, NUM_BYTES)), HELD)
    num_received = num_packets(READER) + num_packets(OWNER) - before
    record_property("outcome", f"{ended.mechanism}; {num_received} RDMA packets")
    assert ended.error is None
    assert ended.mechanism == mechanism
    assert (num_received >= NUM_BYTES // PACKET_BYTES) == is_rdma


@pytest.mark.parametrize("scheme", ["ucx", "nixl"])
@pytest.mark.parametrize("refuses", ["owner", "reader"])
def test_a_peer_that_only_tcp_reaches_is_refused(world: World, make: Make, scheme: str, refuses: str) -> None:
    options = {"owner": options_of(OWNER), "reader": options_of(READER)}
    willing = "reader" if refuses == "owner" else "owner"
    options[willing].update(WITH_TCP[scheme])
    owner, reader = make(scheme, options["owner"]), make(scheme, options["reader"])
    reader.endpoint.start_connect(owner.endpoint.listen(""), timeout_s=30)
    world.serve(lambda: bool(reader.history))
    (lost,) = reader.history
    assert isinstance(lost, PeerLost)
    assert isinstance(lost.error, PeerRefusedError)
    assert {"ucx": "change tls or net_devices", "nixl": "refuse_tcp"}[scheme] in str(lost.error)
