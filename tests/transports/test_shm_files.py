"""What `shm` creates in the system: sealed memory, and sockets with and without a file. Also its options."""

from __future__ import annotations

import mmap
import os
import socket
import stat
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from kvferry.transports import Pool
from kvferry.transports.errors import ConfigurationError, PeerLostError
from kvferry.transports.shm import SharedMemoryTransport
from kvferry.transports.shm.arena import SharedFile
from kvferry.transports.testing import World

PAGE = 4096


def listening(options: Mapping[str, object], address: str = "") -> tuple[SharedMemoryTransport, str]:
    transport = SharedMemoryTransport(options)
    try:
        endpoint = transport.register(Pool([transport.allocate(PAGE).segment]))
        return transport, endpoint.listen(address)
    except BaseException:
        transport.close()
        raise


def test_a_peer_cannot_write_resize_or_reopen_a_shared_file() -> None:
    file = SharedFile("test", PAGE)
    try:
        with pytest.raises(OSError, match="not permitted|Bad file|Invalid"):
            os.ftruncate(file.descriptor, 0)
        with pytest.raises(PermissionError):
            mmap.mmap(file.descriptor, PAGE)
        reopened = os.open(f"/proc/self/fd/{file.descriptor}", os.O_RDWR)
        try:
            for call in (
                lambda: os.ftruncate(reopened, 0),
                lambda: os.ftruncate(reopened, 2 * PAGE),
                lambda: mmap.mmap(reopened, PAGE),
                lambda: os.write(reopened, b"x"),
            ):
                with pytest.raises(PermissionError):
                    call()
        finally:
            os.close(reopened)
        np.frombuffer(file.mapping, dtype=np.uint8)[:] = 1  # its owner can write
    finally:
        file.close()


def test_memory_outlives_the_transport_while_it_is_referenced() -> None:
    transport = SharedMemoryTransport()
    view = np.frombuffer(transport.allocate(1 << 20).buffer, dtype=np.uint8)
    transport.close()
    view[:] = 3
    assert int(view.sum()) == 3 << 20


def test_closing_makes_every_guard_fail() -> None:
    """A peer that still has the guards mapped must not accept memory that its owner has taken back."""
    transport = SharedMemoryTransport()
    guards = transport.guards
    guards.set(7, 99)
    transport.close()
    assert not any(np.frombuffer(guards._mapping, dtype=np.int64))


def test_the_default_socket_has_no_file_and_ends_with_the_transport() -> None:
    transport, address = listening({})
    name = address.removeprefix("shm://")
    assert name.startswith(f"@kvferry-{os.getpid()}-")
    assert name in Path("/proc/net/unix").read_text()
    transport.close()
    assert name not in Path("/proc/net/unix").read_text()


def test_a_socket_file_is_private_and_is_removed_with_the_transport(socket_dir: Path) -> None:
    transport, address = listening({"socket_dir": str(socket_dir)})
    path = Path(address.removeprefix("shm://"))
    assert path.parent == socket_dir
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    transport.close()
    assert list(socket_dir.iterdir()) == []


def test_a_dead_socket_file_is_replaced_and_a_live_one_is_not(socket_dir: Path) -> None:
    path = socket_dir / "node.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    transport, address = listening({}, f"shm://{path}")
    try:
        with pytest.raises(ConfigurationError, match="address in use"):
            listening({}, address)
        assert path.exists()
    finally:
        transport.close()


def test_a_file_that_is_not_a_socket_is_not_touched(socket_dir: Path) -> None:
    path = socket_dir / "precious"
    path.write_text("data")
    with pytest.raises(ConfigurationError):
        listening({}, f"shm://{path}")
    assert path.read_text() == "data"


def test_a_socket_file_of_a_successor_is_not_removed(socket_dir: Path) -> None:
    path = socket_dir / "node.sock"
    transport, _ = listening({}, f"shm://{path}")
    path.rename(socket_dir / "moved.sock")
    path.write_text("another's")
    transport.close()
    assert path.read_text() == "another's"


@pytest.mark.parametrize(
    "address",
    ["shm://", "shm://@", "shm://relative", "shm:///" + "x" * 200, "shm:///no/such/folder/x", "tcp://a"],
)
def test_addresses_that_cannot_be_bound_are_named(address: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        listening({}, address)
    assert caught.value.value == address


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_guards", 0),
        ("num_guards", "many"),
        ("num_guards", True),
        ("copy_threads", 0),
        ("copy_threads", 1000),
        ("max_queued_bytes", 1),
        ("handshake_timeout_s", 0),
        ("handshake_timeout_s", float("nan")),
        ("socket_dir", "/no/such/folder"),
        ("socket_dir", 5),
        ("allowed_uids", 5),
        ("allowed_uids", ["root"]),
    ],
)
def test_wrong_options_are_named(key: str, value: object) -> None:
    with pytest.raises(ConfigurationError) as caught:
        SharedMemoryTransport({key: value})
    assert caught.value.key == key


def test_forty_connections_leave_nothing() -> None:
    world = World(SharedMemoryTransport)
    try:
        producer, consumer = world.node(PAGE), world.node(PAGE)
        world.link(producer, consumer)
        before = len(os.listdir("/proc/self/fd"))
        address = producer.endpoint.listen("")
        for _ in range(40):
            count = len(producer.history)
            peer_id = consumer.endpoint.start_connect(address, timeout_s=10)
            world.serve(lambda count=count: len(producer.history) > count)
            consumer.endpoint.disconnect(peer_id)
            world.serve(lambda count=count: len(producer.history) > count + 1)
        assert isinstance(producer.history[-1].error, PeerLostError)  # type: ignore[union-attr]
        assert len(os.listdir("/proc/self/fd")) == before + 1
    finally:
        world.close()
