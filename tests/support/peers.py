"""Python programs at the other end of a transport, which print what a test has to know, and the node in the
test that reads.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import numpy as np

from kvferry.transports import Connected, Event, Guard, Pool, RegionPairs, TransferEnded
from kvferry.transports.base import Transport
from kvferry.transports.testing import connect_tcp
from tests.support.patience import DEADLINE_S

#: The guard that the programs hold.
HELD: Final = Guard(3, 9)

Kind = TypeVar("Kind", bound=Event)
Peer = subprocess.Popen[str]


@contextmanager
def peers(**settings: Any) -> Iterator[Callable[..., Peer]]:
    """Yield what starts a program with its arguments. What runs at the end of the block is killed.

    Args:
        settings: Further settings of `subprocess.Popen`.
    """
    started: list[Peer] = []

    def start(*words: str) -> Peer:
        pipe = subprocess.PIPE
        started.append(
            subprocess.Popen([sys.executable, *words], stdin=pipe, stdout=pipe, text=True, **settings)
        )
        return started[-1]

    try:
        yield start
    finally:
        for peer in started:
            peer.send_signal(signal.SIGCONT)
            peer.kill()
            peer.communicate()


def dial(address: str) -> socket.socket:
    """Connect to a listener of any transport, as a stranger does."""
    if not address.startswith("shm://"):
        return connect_tcp(address)
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(address.removeprefix("shm://").replace("@", "\0", 1))
    return sock


def said(peer: Peer) -> str:
    """Wait for the next line of a program, and return it."""
    assert peer.stdout is not None
    return peer.stdout.readline().strip()


class Node:
    """A node in this process: its transport, and the events that its endpoint has seen."""

    def __init__(self, transport: Transport, pool: Pool) -> None:
        self.transport = transport
        self.endpoint = transport.register(pool)
        self.seen: list[Event] = []

    def serve_for(self, duration_s: float) -> None:
        deadline = time.monotonic() + duration_s
        while time.monotonic() < deadline:
            self.seen += self.endpoint.wait_events(0.02)

    def until(self, is_done: Callable[[], bool], timeout_s: float = DEADLINE_S) -> None:
        """Serve until something has happened. Raises AssertionError: it did not happen in time."""
        deadline = time.monotonic() + timeout_s
        while not is_done():
            assert time.monotonic() < deadline, f"only {self.seen}"
            self.seen += self.endpoint.wait_events(0.02)

    def of(self, kind: type[Kind]) -> list[Kind]:
        """Return the events of one kind so far."""
        return [event for event in self.seen if isinstance(event, kind)]

    def ends(self) -> list[TransferEnded]:
        return self.of(TransferEnded)

    def end_of(self, transfer_id: int) -> TransferEnded:
        """Serve until a read has ended; return its end."""
        self.until(lambda: any(end.transfer_id == transfer_id for end in self.ends()))
        return next(end for end in self.ends() if end.transfer_id == transfer_id)

    def connect(self, address: str) -> int:
        """Connect; return the peer's id."""
        peer_id = self.endpoint.start_connect(address, timeout_s=DEADLINE_S)
        self.until(lambda: any(getattr(event, "peer_id", 0) == peer_id for event in self.seen))
        assert Connected(peer_id, incoming=False) in self.seen, f"cannot connect to {address!r}: {self.seen}"
        return peer_id


class Reader(Node):
    """A node with a pool in main memory."""

    def __init__(self, transport: Transport, num_bytes: int) -> None:
        self.arena = transport.allocate(num_bytes)
        self.memory = np.frombuffer(self.arena.buffer, dtype=np.uint8)
        super().__init__(transport, Pool([self.arena.segment]))

    def start_read(self, peer_id: int, timeout_s: float = 30) -> int:
        """Start to read the whole pool."""
        pairs = RegionPairs(np.array([(0, 0, len(self.memory))], dtype=np.int64))
        return self.endpoint.start_read(peer_id, pairs, HELD, timeout_s=timeout_s)

    def has_pattern(self, num_bytes: int) -> bool:
        """Whether the first bytes are those of the programs' pools."""
        pattern = np.resize((np.arange(251) * 7 % 251).astype(np.uint8), num_bytes)
        return bool(np.array_equal(self.memory[:num_bytes], pattern))
