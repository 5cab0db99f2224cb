"""NIXL alone on one of two hosts: an owner of memory, or a reader that takes orders over a pipe.

Usage: bare_nixl.py FD    the pipe's descriptor. The first message that it receives is the owner's metadata
and address, or None for an owner.
"""

from __future__ import annotations

import os
import sys
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

NUM_BYTES = 24 << 20


def agent_over(name: str, memory: Any) -> Any:
    from kvferry.transports.nixl.library import _library

    nixl = _library()
    agent = nixl.nixl_agent(name, nixl.nixl_agent_config(enable_prog_thread=True))
    agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
    return agent


def own(pipe: Connection) -> None:
    memory = np.full(NUM_BYTES, 7, np.uint8)
    agent = agent_over("owner", memory)
    pipe.send((agent.get_agent_metadata(), memory.ctypes.data))
    while not pipe.poll(0.01):
        agent.get_new_notifs()


class Reader:
    """Reads the owner's memory."""

    def __init__(self, metadata: bytes, source: int) -> None:
        self._metadata, self._source = metadata, source
        self._memory = np.zeros(NUM_BYTES, np.uint8)
        self._agent = agent_over(f"reader {os.getpid()}", self._memory)
        self._peer = self._agent.add_remote_agent(metadata)
        self._handle: Any = None

    def begin(self) -> str:
        """Post a read of everything. Returns the error if NIXL raises one; otherwise empty."""
        self._memory[:] = 0
        addresses = (self._memory.ctypes.data, self._source)
        try:
            sides = [self._agent.get_xfer_descs([(address, NUM_BYTES, 0)], "DRAM") for address in addresses]
            self._handle = self._agent.initialize_xfer("READ", *sides, self._peer)
            self._agent.transfer(self._handle)
        except Exception as error:  # noqa: BLE001 - exceptions of NIXL have no common base
            self._handle = None
            return f"{type(error).__name__}: {error}"
        return ""

    def state(self) -> str:
        """Return NIXL's state of the read: `PROC`, `DONE` or `ERR`."""
        if self._handle is None:
            return "ERR"
        try:
            state: str = self._agent.check_xfer_state(self._handle)
        except Exception:  # noqa: BLE001 - as above
            return "ERR"
        return "wrong bytes" if state == "DONE" and not np.all(self._memory == 7) else state

    def let_go(self) -> None:
        """Release the handle of a read that is over or given up."""
        if self._handle is not None:
            self._agent.release_xfer_handle(self._handle)
            self._handle = None

    def meet_again(self) -> None:
        """Forget the owner, and add it again."""
        self._agent.remove_remote_agent(self._peer)
        self._peer = self._agent.add_remote_agent(self._metadata)


def main() -> None:
    pipe = Connection(int(sys.argv[1]))
    with pipe:
        if (owner := pipe.recv()) is None:
            own(pipe)
            return
        reader = Reader(*owner)
        pipe.send(None)
        while True:
            try:
                name, *arguments = pipe.recv()
            except EOFError:
                return
            pipe.send(getattr(reader, name)(*arguments))


if __name__ == "__main__":
    main()
