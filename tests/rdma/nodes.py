"""An owner in a process of its own, and a reader in this one, on the two RDMA devices of the guest."""

from __future__ import annotations

import json
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import numpy as np

from kvferry.transports import Connected, Event, Guard, Pool, RegionPairs, TransferEnded
from kvferry.transports.registry import create_transport

from .conftest import OWNER, READER, options_of

PROGRAM = Path(__file__).parents[1] / "transports" / "children" / "network_peer.py"
POOL_BYTES = 24 << 20  # as in PROGRAM
HELD = Guard(3, 9)
EXPECTED = (np.arange(POOL_BYTES) * 7 % 251).astype(np.uint8)
#: A byte that the owner's pool does not contain.
BLANK = 0xFF
#: The control connection crosses the wire as well.
OWNER_HOST = {"bind_host": "10.9.0.1", "port_range": "5600-5699", "allow_plaintext": True}
SETTINGS = {
    # Few bytes in flight, so that control frames do not wait behind them for long on a slow wire.
    "slice_bytes": 1 << 20,
    "window_slices": 2,
    # A test that compares memory or changes the wire does not serve its node meanwhile, which takes seconds
    # in the guest.
    "peer_timeout_s": 6.0,
}
#: Seconds for what happens at once on a machine that is not emulated.
DEADLINE_S = 60.0


class OwnerProcess:
    """A node that serves a pool."""

    def __init__(self, scheme: str) -> None:
        options = options_of(OWNER, **OWNER_HOST, **SETTINGS)
        command = [sys.executable, str(PROGRAM), scheme, json.dumps(options), "serve"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        has_started = bool(select.select([self._process.stdout], [], [], DEADLINE_S)[0])
        self.address = self._process.stdout.readline().strip() if has_started else ""
        if not self.address:
            self.close()
        assert self.address, "the owner did not start"

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        self._process.send_signal(signal.SIGCONT)
        self._process.kill()
        self._process.communicate(timeout=DEADLINE_S)


class Reader:
    """A node that reads."""

    def __init__(self, scheme: str) -> None:
        self._transport = create_transport(scheme, options_of(READER, allow_plaintext=True, **SETTINGS))
        self._arena = self._transport.allocate(POOL_BYTES)
        self.memory = np.frombuffer(self._arena.buffer, dtype=np.uint8)
        self._endpoint = self._transport.register(Pool([self._arena.segment]))
        self.events: list[Event] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._transport.close()

    def until(self, is_done: Callable[[], object], timeout_s: float = DEADLINE_S) -> None:
        """Collect events until `is_done()`. Raises AssertionError: it did not happen in time."""
        deadline = time.monotonic() + timeout_s
        while not is_done():
            assert time.monotonic() < deadline, (
                f"not within {timeout_s} s; the last events: {self.events[-5:]}"
            )
            self.serve_for(0.02)

    def serve_for(self, duration_s: float) -> None:
        deadline = time.monotonic() + duration_s
        while (left := deadline - time.monotonic()) > 0:
            self.events += self._endpoint.wait_events(min(left, 0.02))

    def connect(self, owner: OwnerProcess) -> int:
        peer_id = self._endpoint.start_connect(owner.address, timeout_s=DEADLINE_S)
        self.until(lambda: Connected(peer_id, incoming=False) in self.events)
        return peer_id

    def disconnect(self, peer_id: int) -> None:
        self._endpoint.disconnect(peer_id)

    def start_read(self, peer_id: int, num_bytes: int, timeout_s: float = DEADLINE_S) -> int:
        """Blank our memory, and read the first bytes of the owner's pool."""
        self.memory[:] = BLANK
        pairs = RegionPairs(np.array([(0, 0, num_bytes)], dtype=np.int64))
        return self._endpoint.start_read(peer_id, pairs, HELD, timeout_s=timeout_s)

    def end_of(self, transfer_id: int) -> TransferEnded:
        def ends() -> list[Any]:
            return [
                event
                for event in self.events
                if isinstance(event, TransferEnded) and event.transfer_id == transfer_id
            ]

        self.until(ends)
        (ended,) = ends()
        assert isinstance(ended, TransferEnded)
        return ended

    def has_begun(self) -> bool:
        """Return whether a part of the first slice has arrived."""
        return bool((self.memory[: 1 << 20] != BLANK).any())

    def num_landed(self) -> int:
        """Return how many bytes of our memory were written since it was blanked."""
        return int(np.count_nonzero(self.memory != BLANK))

    def assert_right(self, num_bytes: int) -> None:
        """Check that exactly these bytes of the owner's pool are in our memory."""
        assert np.array_equal(self.memory[:num_bytes], EXPECTED[:num_bytes])
        assert bool((self.memory[num_bytes:] == BLANK).all())

    def assert_reads(self, peer_id: int, num_bytes: int = 4 << 20) -> TransferEnded:
        ended = self.end_of(self.start_read(peer_id, num_bytes))
        assert ended.error is None
        self.assert_right(num_bytes)
        return ended
