"""No byte lands after `nixl` has reported the end of a read. With NIXL alone, bytes do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvferry.transports import PeerLost
from kvferry.transports.errors import PeerLostError, TransferTimeoutError
from kvferry.transports.registry import create_transport
from tests.support.peers import Peer, Reader, peers, said

if find_spec("nixl_cu12") is None and find_spec("nixl_cu13") is None:
    pytest.skip("NIXL is not installed", allow_module_level=True)

pytestmark = pytest.mark.slow

CHILDREN = Path(__file__).parent / "children"
POOL_BYTES = 24 << 20
TCP: dict[str, Any] = {"refuse_tcp": False, "tls": "tcp"}
DRAIN_S = 0.4

Start = Callable[..., Peer]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start `network_peer.py` with options and a task."""
    with peers() as start_peer:
        yield lambda options, *task: start_peer(
            str(CHILDREN / "network_peer.py"), "nixl", json.dumps(options), *task
        )


@pytest.fixture
def options() -> dict[str, Any]:
    return TCP


@pytest.fixture
def reader(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[Reader]:
    monkeypatch.setattr("kvferry.transports.nixl.transport.DRAIN_S", DRAIN_S)
    reader = Reader(create_transport("nixl", options), POOL_BYTES)
    yield reader
    reader.transport.close()


@pytest.mark.parametrize("how", ["release", "remove"])
def test_with_nixl_alone_bytes_land_after_the_read_was_let_go(how: str) -> None:
    assert int(_bare(how)) > 0


def test_with_nixl_alone_no_byte_lands_after_the_agent_was_destroyed() -> None:
    assert int(_bare("destroy")) == 0


def _bare(how: str) -> str:
    environment = {**os.environ, "UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo", "UCX_LOG_LEVEL": "fatal"}
    command = [sys.executable, str(CHILDREN / "nixl_late_bytes.py"), how]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()[-1]


def test_no_byte_lands_after_a_read_from_a_stopped_owner_has_ended(reader: Reader, start: Start) -> None:
    """The owner wakes up after the end was reported. It survives, and can be read again."""
    owner = start(TCP, "serve")
    address = said(owner)
    peer_id = reader.connect(address)
    assert reader.end_of(reader.start_read(peer_id, 20)).error is None
    # Until the owner sleeps on its sockets: stopped in the middle of UCX's work it may be aborted.
    reader.serve_for(0.5)
    owner.send_signal(signal.SIGSTOP)
    ended = reader.end_of(reader.start_read(peer_id, 0.2))
    assert isinstance(ended.error, TransferTimeoutError)
    assert ended.seconds >= 0.2 + DRAIN_S
    reader.memory[:] = 0
    owner.send_signal(signal.SIGCONT)
    reader.serve_for(1.5)
    assert not reader.memory.any()
    assert isinstance(reader.seen[-1], PeerLost)
    assert owner.poll() is None
    peer_id = reader.connect(address)
    assert reader.end_of(reader.start_read(peer_id, 20)).error is None
    assert reader.memory.any()


def test_no_byte_lands_after_a_peer_was_dropped(reader: Reader, start: Start) -> None:
    owner = start(TCP, "serve")
    peer_id = reader.connect(said(owner))
    assert reader.end_of(reader.start_read(peer_id, 20)).error is None
    owner.send_signal(signal.SIGSTOP)
    transfer_id = reader.start_read(peer_id, 20)
    reader.serve_for(0.1)
    reader.endpoint.disconnect(peer_id)
    assert reader.end_of(transfer_id).error is not None
    reader.memory[:] = 0
    owner.send_signal(signal.SIGCONT)
    reader.serve_for(1.0)
    assert not reader.memory.any()


@pytest.mark.parametrize("options", [{}], ids=["one-sided"])
def test_a_stopped_owner_is_read_where_the_path_is_one_sided(reader: Reader, start: Start) -> None:
    """On one host the kernel copies, and the owner's process takes no part."""
    owner = start({}, "serve")
    peer_id = reader.connect(said(owner))
    owner.send_signal(signal.SIGSTOP)
    assert reader.end_of(reader.start_read(peer_id, 20)).error is None
    assert np.array_equal(reader.memory, (np.arange(POOL_BYTES) * 7 % 251).astype(np.uint8))


def test_a_lost_owner_ends_its_reads(reader: Reader, start: Start) -> None:
    owner = start(TCP, "serve")
    peer_id = reader.connect(said(owner))
    owner.send_signal(signal.SIGSTOP)
    transfer_id = reader.start_read(peer_id, 20)
    owner.kill()
    assert isinstance(reader.end_of(transfer_id).error, PeerLostError)
    reader.until(lambda: isinstance(reader.seen[-1], PeerLost))
