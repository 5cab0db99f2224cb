"""Peers that do not keep to the protocol: what a suite needs for the capabilities of
`TransportConformance`.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import numpy as np
import pytest

from .._memory import require_guard
from ..errors import RegionError
from ..regions import AddressArray, Guard, Int64Array, Pool
from ..streams import FrameSocket
from .harness import DEADLINE_S, Link, pairs_of


def connect_tcp(address: str) -> socket.socket:
    """Connect a socket to `scheme://host:port`. For the capability `connect_raw`."""
    url = urlsplit(address)
    return socket.create_connection((url.hostname or "", url.port or 0))


def read_without_checks(link: Link, remote_offset: int, num_bytes: int, guard: Guard) -> None:
    """Start a read without the checks that `Pool.addresses` and `require_guard` make. For `read_unchecked`.

    Use it only where the owner of the memory copies. A reader that copies would crash.
    """
    addresses = Pool.addresses

    def any_addresses(pool: Pool, offsets: Int64Array, lengths: Int64Array) -> AddressArray:
        try:
            return addresses(pool, offsets, lengths)
        except RegionError:
            return np.zeros(len(offsets), dtype=np.uint64)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pool, "addresses", any_addresses)
        for module in list(sys.modules.values()):
            if getattr(module, "__dict__", {}).get("require_guard") is require_guard:
                patch.setattr(module, "require_guard", lambda guard, num_guards: None)
        pairs = pairs_of((0, remote_offset, num_bytes))
        link.consumer.endpoint.start_read(link.producer_id, pairs, guard, timeout_s=DEADLINE_S)


@contextmanager
def repeated_frames(times: int) -> Iterator[None]:
    """Send each frame of each `FrameSocket` this often, for the length of a `with`.

    A reader asks for one slice at a time.
    """
    send = FrameSocket.send

    def send_again(stream: FrameSocket, frame: bytes) -> None:
        for _ in range(times):
            send(stream, frame)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FrameSocket, "send", send_again)
        yield
