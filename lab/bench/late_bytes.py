"""Count the bytes that land in a reader's memory after it was told, or decided, that its read is over.

    python -m kvferry.lab.bench.late_bytes [--repeats N] [--only TEXT ...] [--json FILE]

A reader that gives up on a read wants its memory back: the blocks are given to the next request. Bytes of the
old read that land after that are in another request's cache, and nothing reports them. So this program gives
up on reads in several ways, overwrites the memory at the moment at which it is the reader's own again, lets a
frozen owner continue, and counts the bytes that were written over it within a second.

kvferry's transports say when a read is over, by `TransferEnded`. NIXL alone has no such event: what it offers
is to release the request's handle, to deregister the memory, to remove the remote agent, and to destroy the
own agent, so each of them is a row. NIXL takes part if `nixl-cu12` or `nixl-cu13` is installed, and kvferry's
`ucx` if `ucxx-cu12` is.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from kvferry.lab.machine import about
from kvferry.lab.moving.contender import Contender, FailedError, Setup
from kvferry.lab.moving.ends import GUARD, End, wait_for
from kvferry.lab.moving.field import nixl_pair, ours
from kvferry.lab.moving.others import Agent
from kvferry.lab.moving.processes import Child, own
from kvferry.lab.moving.report import json_lines
from kvferry.transports import Connected, RegionPairs, TransferEnded

_POOL_BYTES = 24 << 20
_REGION_BYTES = 256 << 10

#: How long a read from a frozen owner is given, and how long it is then watched for late bytes.
_PATIENCE_S = 0.2
_WATCHED_S = 1.0

#: A step that takes longer than this many seconds has failed. Some ends of reads come only after
#: `_PEER_TIMEOUT_S`.
_TIMEOUT_S = 60.0

#: What a reader does. Frozen: the owner is stopped before the read begins, and continues after its end.
DEADLINE = "its deadline passes halfway"
FROZEN_DEADLINE = "owner frozen, its deadline passes"
FROZEN_DROP = "owner frozen, the peer is dropped"
_OURS = (DEADLINE, FROZEN_DEADLINE, FROZEN_DROP)

RELEASED_HALFWAY = "handle released halfway"
RELEASED = "owner frozen, handle released"
DEREGISTERED = "and memory deregistered"
REMOVED = "and remote agent removed"
DESTROYED = "owner frozen, own agent destroyed"
_NIXLS = (RELEASED_HALFWAY, RELEASED, DEREGISTERED, REMOVED, DESTROYED)


@dataclass(frozen=True)
class Late:
    """What was counted for one reader and one way to give up.

    Attributes:
        ends: How often each end was reported: an error's name, "done", or "let go" for NIXL alone.
        num_late: Times in which at least one late byte landed.
        most_bytes: The most late bytes of one time.
        num_owners_lost: Times in which the owner's process died.
    """

    reader: str
    version: str
    how: str
    num_times: int
    ends: Mapping[str, int]
    num_late: int
    most_bytes: int
    num_owners_lost: int


# -- in the processes --------------------------------------------------------------------------------


def _late_words(pool: Any) -> int:
    return int(np.count_nonzero(pool != -1) * pool.itemsize)


def _read_ours(
    contender: Contender, address: str, owner_pid: int, how: str, seed: int, parent: Connection
) -> None:
    """Read once to learn how long it takes, give up on a second read, and report its end and the late
    bytes.
    """
    os.environ.update(contender.environment)
    end = End(contender.options["path"], _POOL_BYTES)
    endpoint = end.endpoint
    starts = np.random.default_rng(seed).permutation(_POOL_BYTES // _REGION_BYTES) * _REGION_BYTES
    pairs = RegionPairs(np.stack([starts, starts, np.full_like(starts, _REGION_BYTES)], axis=1))

    def watch(seconds: float) -> TransferEnded | None:
        """Serve for some seconds; return the end of a read that came in this time, if one did."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for event in endpoint.wait_events(0.02):
                if isinstance(event, TransferEnded):
                    return event
        return None

    peer_id = endpoint.start_connect(address, timeout_s=_TIMEOUT_S)
    wait_for(endpoint, Connected, _TIMEOUT_S)
    endpoint.start_read(peer_id, pairs, GUARD, timeout_s=_TIMEOUT_S)
    whole = wait_for(endpoint, TransferEnded, _TIMEOUT_S)
    if whole.error is not None:
        raise whole.error
    timeout_s = _PATIENCE_S
    if how == DEADLINE:
        timeout_s = whole.seconds * random.Random(seed).uniform(0.1, 0.9)
    else:
        watch(0.3)  # a UCX that is frozen in the middle of its work may abort when it continues
        os.kill(owner_pid, signal.SIGSTOP)
    endpoint.start_read(peer_id, pairs, GUARD, timeout_s=_TIMEOUT_S if how == FROZEN_DROP else timeout_s)
    ended = None
    if how == FROZEN_DROP:
        ended = watch(_PATIENCE_S)
        endpoint.disconnect(peer_id)
    ended = ended or wait_for(endpoint, TransferEnded, _TIMEOUT_S)
    end.pool[:] = -1  # the reader's own again, from here on
    os.kill(owner_pid, signal.SIGCONT)
    watch(_WATCHED_S)
    name = "done" if ended.error is None else type(ended.error).__name__
    parent.send((name, _late_words(end.pool)))


def _read_nixl(
    contender: Contender, address: tuple[bytes, int], owner_pid: int, how: str, seed: int, parent: Connection
) -> None:
    """As `_read_ours`, with NIXL alone."""
    os.environ.update(contender.environment)
    node = Agent("reader", Setup(_POOL_BYTES, contender.options))
    agent, pool = node.agent, node.pool
    metadata, source = address
    remote = agent.add_remote_agent(metadata)

    def start(num_bytes: int) -> Any:
        sides = [agent.get_xfer_descs([(at, num_bytes, 0)], "DRAM") for at in (node.address, source)]
        handle = agent.initialize_xfer("READ", *sides, remote)
        agent.transfer(handle)
        return handle

    def watch(handle: Any, seconds: float) -> bool:
        """Return whether the read was done within this time."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if agent.check_xfer_state(handle) != "PROC":
                return True
        return False

    watch(start(4096), _TIMEOUT_S)
    began = time.monotonic()
    watch(start(_POOL_BYTES), _TIMEOUT_S)
    whole_s = time.monotonic() - began
    patience_s = _PATIENCE_S
    if how == RELEASED_HALFWAY:
        patience_s = whole_s * random.Random(seed).uniform(0.1, 0.9)
    else:
        time.sleep(0.3)
        os.kill(owner_pid, signal.SIGSTOP)
    handle = start(_POOL_BYTES)
    end = "done" if watch(handle, patience_s) else "let go"
    agent.release_xfer_handle(handle)
    if how in (DEREGISTERED, REMOVED):
        node.deregister()
    if how == REMOVED:
        agent.remove_remote_agent(remote)
    if how == DESTROYED:
        del agent, handle, node.agent
    pool[:] = -1
    os.kill(owner_pid, signal.SIGCONT)
    deadline = time.monotonic() + _WATCHED_S
    while time.monotonic() < deadline:
        if how != DESTROYED:
            agent.get_new_notifs()
    parent.send((end, _late_words(pool)))
    time.sleep(_TIMEOUT_S)  # until it is killed: to end an agent whose peer is gone can block


# -- the program -------------------------------------------------------------------------------------


#: Long enough for a busy machine, and the end of a read over UCX whose owner is frozen does not come before
#: it.
_PEER_TIMEOUT_S = 10


def contenders() -> Iterator[tuple[Contender, Sequence[str], Callable[..., None]]]:
    """Yield each reader, how it can give up, and what its process runs."""
    over_network: Mapping[str, Any] = {"peer_timeout_s": _PEER_TIMEOUT_S}
    chosen: Sequence[tuple[str, str, Mapping[str, Any]]] = (
        ("kvferry shm", "shm", {}),
        ("kvferry tcp", "tcp", over_network),
        ("kvferry zeromq", "zeromq", over_network),
        ("kvferry ucx, tcp", "ucx", {**over_network, "tls": "tcp"}),
    )
    for name, scheme, options in chosen:
        yield ours(name, scheme, options), _OURS, _read_ours
    for tls in ("tcp", "cma"):
        alone, guarded = nixl_pair(tls)
        yield guarded, _OURS, _read_ours
        yield alone, _NIXLS, _read_nixl


def count(contender: Contender, how: str, read: Callable[..., None], repeats: int) -> Late:
    """Give up on `repeats` reads, each with an owner and a reader of its own.

    Raises FailedError: one did not work.
    """
    contender.version  # noqa: B018 - it raises
    ends: Counter[str] = Counter()
    late, num_lost = [], 0
    for seed in range(repeats):
        with ExitStack() as stack:
            owner = Child(own, contender, Setup(_POOL_BYTES, contender.options))
            stack.callback(owner.kill)
            reader = Child(read, contender, owner.answer(), owner.pid, how, seed)
            stack.callback(reader.kill)
            end, num_bytes = reader.answer()
            num_lost += not owner.is_alive
        ends[end] += 1
        late.append(num_bytes)
    num_late = sum(num_bytes > 0 for num_bytes in late)
    return Late(contender.name, contender.version, how, repeats, dict(ends), num_late, max(late), num_lost)


#: The head of the table of results, in Markdown.
HEAD = f"| reader | how it gave up | end | late bytes, of {_POOL_BYTES:,} | owners that died |\n|---|---|---|---|---|"


def row(r: Late) -> str:
    """Return a row of the table."""
    ends = ", ".join(f"{num} × {end}" for end, num in r.ends.items())
    late = f"**{r.most_bytes:,}** ({r.num_late} of {r.num_times} times)" if r.num_late else "0"
    return f"| {r.reader} | {r.how} | {ends} | {late} | {r.num_owners_lost} of {r.num_times} |"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--repeats", type=int, default=5, help="times per reader and way (default: %(default)s)"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        default=[""],
        metavar="TEXT",
        help="readers whose name contains one of these texts (default: all)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there as JSON lines")
    arguments = parser.parse_args()
    if arguments.repeats < 1:
        parser.error("--repeats must be at least 1")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    machine = about()
    print(", ".join(f"{key} {value}" for key, value in machine.items()), flush=True)
    print(f"\n{HEAD}", flush=True)
    results: list[Late] = []
    left_out: dict[str, FailedError] = {}
    for contender, ways, read in contenders():
        if not any(text in contender.name for text in arguments.only):
            continue
        for how in ways:
            try:
                results.append(count(contender, how, read, arguments.repeats))
            except FailedError as error:
                left_out[f"{contender.name}, {how}"] = error
            else:
                print(row(results[-1]), flush=True)
    print("\n".join(["", *(f"not measured: {name}: {why}" for name, why in left_out.items())]))
    if arguments.json:
        arguments.json.write_text(json_lines(machine, left_out, [asdict(result) for result in results]))


if __name__ == "__main__":
    main()
