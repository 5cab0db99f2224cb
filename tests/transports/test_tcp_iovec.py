"""Pieces of memory that `tcp` sends and fills in part, whatever the socket takes at a time."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Callable

import numpy as np
import pytest
import xxhash

from kvferry.transports import _copy_python, copying
from kvferry.transports.tcp import iovec
from kvferry.transports.tcp.iovec import Iovec, Pieces, Wait

needs_native = pytest.mark.skipif(
    not copying.IS_COMPILED, reason="kvferry was installed without a C compiler"
)


@pytest.mark.parametrize("functions", [copying, _copy_python], ids=["chosen", "python"])
@pytest.mark.parametrize(
    "sizes", [[100], [1, 70_000, 3, 200_000, 1], [64] * 3000], ids=["one", "unlike", "many"]
)
def test_pieces_arrive_in_order_and_both_sides_hash_the_same_bytes(
    sizes: list[int], functions: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sockets hold less than a slice, so calls end in the middle of pieces, and frames at both ends stay
    unhashed.
    """
    for name in ("send_pieces", "receive_pieces"):
        monkeypatch.setattr(iovec, name, getattr(functions, name))
    num_bytes = sum(sizes)
    source = np.random.default_rng(len(sizes)).integers(0, 256, num_bytes, dtype=np.uint8)
    target = np.zeros(num_bytes, dtype=np.uint8)
    lengths = np.array(sizes)
    offsets = (lengths.cumsum() - lengths).astype(np.uint64)
    head, end = bytearray(b"before"), bytearray(5)
    digests = [xxhash.xxh3_64(), xxhash.xxh3_64()]
    ours = Pieces(offsets + np.uint64(source.ctypes.data), lengths, num_bytes, digests[0])
    theirs = Pieces(offsets + np.uint64(target.ctypes.data), lengths, num_bytes, digests[1])
    sending, receiving = Iovec(ours, before=head), Iovec(theirs, after=end)
    one, other = socket.socketpair()
    with one, other:
        one.setblocking(False)
        other.setblocking(False)
        num_before = filled_up(one)
        with pytest.raises(BlockingIOError):
            sending.send(one)  # a call that sends nothing hashes nothing
        while num_before:
            num_before -= len(other.recv(num_before))
        sending.send(one)
        assert other.recv(len(head)) == head
        while sending.num_left:
            try:
                sending.send(one)
            except BlockingIOError:
                receiving.receive(other)
        one.send(b"after")
        while receiving.num_left:
            receiving.receive(other)
    assert bytes(end) == b"after"
    assert np.array_equal(source, target)
    assert digests[0].digest() == digests[1].digest() == xxhash.xxh3_64(source.tobytes()).digest()


def filled_up(sock: socket.socket) -> int:
    """Send until the socket takes no more; return how many bytes that was."""
    num_bytes = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            num_bytes += sock.send(bytes(4096))
    return num_bytes


def filled(target: np.ndarray, digest: xxhash.xxh3_64 | None = None) -> Iovec:
    address = np.array([target.ctypes.data], dtype=np.uint64)
    return Iovec(Pieces(address, np.array([len(target)]), len(target), digest))


@needs_native
def test_one_call_waits_for_the_rest_as_long_as_nothing_else_happens() -> None:
    data = bytes(range(256)) * 4096
    target = np.zeros(len(data), dtype=np.uint8)
    one, other = socket.socketpair()
    third, fourth = socket.socketpair()
    with one, other, third, fourth, select.epoll() as epoll:
        epoll.register(other, select.EPOLLIN)
        epoll.register(fourth, select.EPOLLIN)
        other.setblocking(False)
        wait = Wait(epoll.fileno(), 20, 0)
        sending = threading.Thread(target=one.sendall, args=(data,))
        sending.start()
        digest = xxhash.xxh3_64()
        assert filled(target, digest).receive(other, wait) == len(data)
        sending.join()
        assert target.tobytes() == data
        assert digest.digest() == xxhash.xxh3_64(data).digest()

        pieces = filled(target)
        one.send(b"first")
        third.send(b"something else")
        assert pieces.receive(other, wait) == 5
        with pytest.raises(BlockingIOError):
            pieces.receive(other, wait)
        one.close()
        assert pieces.receive(other, wait) == 0


@needs_native
def test_one_call_does_not_wait_for_longer_than_it_may() -> None:
    pieces = filled(np.zeros(100, dtype=np.uint8))
    one, other = socket.socketpair()
    with one, other, select.epoll() as epoll:
        epoll.register(other, select.EPOLLIN)
        one.send(b"first")
        assert pieces.receive(other, Wait(epoll.fileno(), 0.001, 0.0005)) == 5


@pytest.mark.parametrize("poll", [copying.busy_poll, _copy_python.busy_poll], ids=["chosen", "python"])
def test_busy_polling_ends_with_an_event_or_with_its_time(poll: Callable[[int, float, float], int]) -> None:
    one, other = socket.socketpair()
    with one, other, select.epoll() as epoll:
        epoll.register(other, select.EPOLLIN)
        assert poll(epoll.fileno(), 0.001, 30) == 0
        assert poll(epoll.fileno(), 30, 0) == -1
        one.send(b"x")
        assert poll(epoll.fileno(), 30, 30) == 1
