"""What a user may set."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

from .._options import require_int
from ..base import MAX_MESSAGE_BYTES
from ..errors import ConfigurationError
from .copier import PIECE_BYTES


@dataclass(frozen=True)
class SharedMemoryOptions:
    """Options of the transport.

    Attributes:
        num_guards: Words in the guard table.
        copy_threads: Threads that copy. One reaches the bus on most machines; two may be faster on large ones.
        inline_bytes: A read of at most so many bytes is copied by the caller of `start_read`, which takes less time than
            to wake a copying thread; 0 turns this off.
        max_queued_bytes: Bytes of messages that wait for one peer, before `send` refuses more.
        max_connecting: Connections that may be in the making at a time. `start_connect` refuses more, and of those that
            others make, the one that has said nothing for the longest time is dropped.
        handshake_timeout_s: For how long one who connected may say nothing.
        socket_dir: Folder for sockets with a name in the file system, so that containers can share it. Empty: sockets
            have no file; they are found within one network namespace.
        allowed_uids: Users besides our own whose processes we talk to.
    """

    num_guards: int = 65536
    copy_threads: int = 1
    inline_bytes: int = 2 << 20
    max_queued_bytes: int = 8 << 20
    max_connecting: int = 128
    handshake_timeout_s: float = 5.0
    socket_dir: str = ""
    allowed_uids: Sequence[int] = ()

    def __post_init__(self) -> None:
        require_int("num_guards", self.num_guards, 1, 1 << 24)
        require_int("copy_threads", self.copy_threads, 1, 64)
        require_int("inline_bytes", self.inline_bytes, 0, PIECE_BYTES)
        require_int("max_queued_bytes", self.max_queued_bytes, MAX_MESSAGE_BYTES, 1 << 30)
        require_int("max_connecting", self.max_connecting, 1, 65536)
        _require("handshake_timeout_s", self.handshake_timeout_s, _is_positive(self.handshake_timeout_s))
        _require(
            "socket_dir", self.socket_dir, isinstance(self.socket_dir, str) and _is_folder(self.socket_dir)
        )
        _require("allowed_uids", self.allowed_uids, isinstance(self.allowed_uids, list | tuple))
        for uid in self.allowed_uids:
            require_int("allowed_uids", uid, 0, 2**32 - 2)


def _require(key: str, value: object, is_valid: bool) -> None:
    if not is_valid:
        raise ConfigurationError(f"{key} cannot be {value!r}", key=key, value=value)


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value > 0


def _is_folder(path: str) -> bool:
    return not path or os.path.isdir(path)
