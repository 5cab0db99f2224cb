"""Options of the transport."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

from ..checked import integer, integers, refuse, string
from ..options import INTERNAL
from ..serving import HandshakeOptions
from .copier import PIECE_BYTES


def _folder(value: object) -> str:
    path = string(value)
    if path and not os.path.isdir(path):
        refuse("an existing folder", path)
    return path


@dataclass(frozen=True, kw_only=True)
class SharedMemoryOptions(HandshakeOptions):
    """Options of the transport, in addition to those of `HandshakeOptions`.

    Attributes:
        copy_threads: Threads that copy, because one core does not saturate the memory bus of most machines. A
            read of at most 8 MiB is copied by one of them.
        inline_bytes: A read of at most this many bytes is copied within `start_read`, which takes less time
            than to wake a copying thread; 0 turns this off.
        socket_dir: Folder for sockets with a name in the file system, so that containers can share it. Empty:
            sockets have no file, and are visible within one network namespace.
        allowed_uids: Users, in addition to our own, whose processes are accepted as peers.
    """

    copy_threads: Annotated[int, integer(1, 64)] = 2
    inline_bytes: Annotated[int, integer(0, PIECE_BYTES)] = field(default=2 << 20, metadata=INTERNAL)
    socket_dir: Annotated[str, _folder] = ""
    allowed_uids: Annotated[Sequence[int], integers(0, 2**32 - 2, max_count=65536)] = ()
