"""Bare NIXL over RDMA: a wire is cut in the middle of a READ, the reader lets go of it, and the wire is
mended.

For each way to let go, prints how many bytes landed afterwards in the memory that the reader took for its own
again:

    {"how": "release the handle", "late_bytes": 14680064, "seconds": 0.01}
"""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from kvferry.transports.nixl.library import _library

from .conftest import OWNER, READER, Wire
from .nodes import BLANK

NUM_BYTES = 16 << 20
LATE_S = 6.0

WAYS: Mapping[str, tuple[str, ...]] = {
    "release the handle": ("release",),
    "release the handle, deregister the memory": ("release", "deregister"),
    "release the handle, remove the remote agent": ("release", "remove"),
    "release the handle, deregister the memory, remove the remote agent": (
        "release",
        "deregister",
        "remove",
    ),
    "destroy the agent": (),
}


def agent_over(name: str, device: str, memory: Any) -> tuple[Any, Any]:
    os.environ["UCX_NET_DEVICES"] = device
    nixl = _library()
    agent = nixl.nixl_agent(name, nixl.nixl_agent_config(enable_prog_thread=False))
    return agent, agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")


def own(pipe: Connection) -> None:
    """Serve memory full of sevens."""
    memory = np.full(NUM_BYTES, 7, np.uint8)
    agent, _ = agent_over("owner", OWNER, memory)
    pipe.send((agent.get_agent_metadata(), memory.ctypes.data))
    while not pipe.poll(0.01):
        agent.get_new_notifs()


def posted(agent: Any, peer: str, target: int, source: int, num_bytes: int) -> Any:
    sides = [agent.get_xfer_descs([(address, num_bytes, 0)], "DRAM") for address in (target, source)]
    handle = agent.initialize_xfer("READ", *sides, peer)
    agent.transfer(handle)
    return handle


def num_written(memory: Any) -> int:
    return int(np.count_nonzero(memory != BLANK))


def wait_until_part_has_landed(agent: Any, handle: Any, memory: Any, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not num_written(memory):
        assert time.monotonic() < deadline, "nothing landed"
        assert agent.check_xfer_state(handle) == "PROC", "the read ended too early"


def count(name: str, ways: tuple[str, ...], metadata: bytes, source: int, wire: Wire) -> dict[str, Any]:
    memory = np.full(NUM_BYTES, BLANK, np.uint8)
    agent, registered = agent_over(name, READER, memory)
    peer = agent.add_remote_agent(metadata)
    handle = posted(agent, peer, memory.ctypes.data, source, 4096)
    while agent.check_xfer_state(handle) == "PROC":
        pass
    agent.release_xfer_handle(handle)
    memory[:] = BLANK
    wire.set("rate", "16mbit")
    handle = posted(agent, peer, memory.ctypes.data, source, NUM_BYTES)
    wait_until_part_has_landed(agent, handle, memory)
    wire.cut()
    began = time.monotonic()
    for way in ways:
        if way == "release":
            agent.release_xfer_handle(handle)
        elif way == "deregister":
            agent.deregister_memory(registered)
        else:
            agent.remove_remote_agent(peer)
    if not ways:
        del agent, handle
    seconds = time.monotonic() - began
    memory[:] = BLANK
    wire.mend()
    until = time.monotonic() + LATE_S
    while time.monotonic() < until:
        if ways:
            agent.get_new_notifs()
        time.sleep(0.01)
    return {"how": name, "late_bytes": num_written(memory), "seconds": round(seconds, 3)}


def main() -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    owner = context.Process(target=own, args=(theirs,), daemon=True)
    owner.start()
    assert ours.poll(60), "the owner did not start"
    metadata, source = ours.recv()
    wire = Wire()
    for name, ways in WAYS.items():
        print(json.dumps(count(name, ways, metadata, source, wire)), flush=True)
    owner.kill()


if __name__ == "__main__":
    main()
