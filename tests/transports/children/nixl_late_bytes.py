"""Bare NIXL over TCP: bytes land in memory whose read was released, and whose peer was removed.

Prints how many.

nixl_late_bytes.py release|remove|destroy    what the reader does before it calls the memory its own again
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from kvferry.transports.nixl.library import _library

NUM_BYTES = 8 << 20


def agent_over(name: str, memory: Any) -> Any:
    nixl = _library()
    agent = nixl.nixl_agent(name, nixl.nixl_agent_config(enable_prog_thread=False))
    agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
    return agent


def own(pipe: Connection) -> None:
    """Serve memory full of sevens."""
    memory = np.full(NUM_BYTES, 7, np.uint8)
    agent = agent_over("owner", memory)
    pipe.send((agent.get_agent_metadata(), memory.ctypes.data))
    while not pipe.poll(0.0005):
        agent.get_new_notifs()


def posted(agent: Any, peer: str, target: int, source: int, num_bytes: int) -> Any:
    sides = [agent.get_xfer_descs([(address, num_bytes, 0)], "DRAM") for address in (target, source)]
    handle = agent.initialize_xfer("READ", *sides, peer)
    agent.transfer(handle)
    return handle


def main() -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    owner = context.Process(target=own, args=(theirs,), daemon=True)
    owner.start()
    assert owner.pid is not None
    metadata, source = ours.recv()
    memory = np.zeros(NUM_BYTES, np.uint8)
    agent = agent_over("reader", memory)
    peer = agent.add_remote_agent(metadata)
    handle = posted(agent, peer, memory.ctypes.data, source, 4096)
    while agent.check_xfer_state(handle) == "PROC":
        pass
    os.kill(owner.pid, signal.SIGSTOP)
    handle = posted(agent, peer, memory.ctypes.data, source, NUM_BYTES)
    until = time.monotonic() + 0.3
    while time.monotonic() < until:
        assert agent.check_xfer_state(handle) == "PROC"
    agent.release_xfer_handle(handle)
    if sys.argv[1] == "remove":
        agent.remove_remote_agent(peer)
    if sys.argv[1] == "destroy":
        del agent, handle
    memory[:] = 0
    os.kill(owner.pid, signal.SIGCONT)
    until = time.monotonic() + 1.5
    while time.monotonic() < until:
        if sys.argv[1] != "destroy":
            agent.get_new_notifs()
    print(np.count_nonzero(memory), flush=True)
    owner.kill()


if __name__ == "__main__":
    main()
