"""Pieces of memory that `tcp` sends and fills in part, whatever the socket takes at a time."""

from __future__ import annotations

import socket

import numpy as np
import pytest
import xxhash

from kvferry.transports.tcp.iovec import Iovec, Pieces


@pytest.mark.parametrize(
    "sizes", [[100], [1, 70_000, 3, 200_000, 1], [64] * 3000], ids=["one", "unlike", "many"]
)
def test_pieces_arrive_in_order_and_both_sides_hash_the_same_bytes(sizes: list[int]) -> None:
    """The sockets hold less than a slice, so calls end in the middle of pieces, and frames at both ends stay unhashed."""
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
