"""Options of the transport."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from .._options import require_valid
from ..base import MAX_MESSAGE_BYTES
from ..checked import integer, integers, refuse, seconds, string
from .copier import PIECE_BYTES


def _folder(value: object) -> str:
    path = string(value)
    if path and not os.path.isdir(path):
        refuse("an existing folder", path)
    return path


@dataclass(frozen=True)
class SharedMemoryOptions:
    """Options of the transport.

    Attributes:
        num_guards: Words in the guard table.
        copy_threads: Threads that copy. One saturates the memory bus of most machines; two may be faster on large ones.
        inline_bytes: A read of at most this many bytes is copied within `start_read`, which takes less time than to wake
            a copying thread; 0 turns this off.
        max_queued_bytes: Maximum bytes of messages to one peer that wait here; `send` refuses more.
        max_connecting: Maximum handshakes at a time, in each direction. `start_connect` refuses more. Of incoming ones
            the oldest is dropped.
        handshake_timeout_s: Seconds an incoming connection has to complete the handshake.
        socket_dir: Folder for sockets with a name in the file system, so that containers can share it. Empty: sockets
            have no file, and are visible within one network namespace.
        allowed_uids: Users, in addition to our own, whose processes are accepted as peers.
    """

    num_guards: Annotated[int, integer(1, 1 << 24)] = 65536
    copy_threads: Annotated[int, integer(1, 64)] = 1
    inline_bytes: Annotated[int, integer(0, PIECE_BYTES)] = 2 << 20
    max_queued_bytes: Annotated[int, integer(MAX_MESSAGE_BYTES, 1 << 30)] = 8 << 20
    max_connecting: Annotated[int, integer(1, 65536)] = 128
    handshake_timeout_s: Annotated[float, seconds()] = 5.0
    socket_dir: Annotated[str, _folder] = ""
    allowed_uids: Annotated[Sequence[int], integers(0, 2**32 - 2, max_count=65536)] = ()

    def __post_init__(self) -> None:
        require_valid(self)
