"""Measure what many idle peers cost a node: processor time while nothing happens, and the time of a small read.

The measuring process has two nodes per transport. Both are connected to the owner of a pool. Many idle peers are connected
to one of them, from a few processes that do only what their transport needs. The node with the idle peers first waits for
events that do not come. Then the two nodes alternate: each reads the same blocks of 256 KiB, a few at a time, so that a
disturbance of the machine affects both.
"""

from __future__ import annotations

import resource
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from kvferry.transports import Connected, PeerLost, RegionPairs

from .contender import TIMEOUT_S, Contender, Setup
from .field import ours
from .ours import Node, OurReader, own_ours
from .processes import Child, FailedError, begin
from .rounds import Progress, require_installed

#: Each transport with its default options, so that the work it does for idle peers, such as pings, is measured.
_TRANSPORTS: Mapping[str, Mapping[str, Any]] = {"shm": {}, "tcp": {}, "zeromq": {}, "ucx": {"tls": "tcp"}}

_POOL_BYTES = 8 << 20
_READ_BYTES = 256 << 10
_REGION_BYTES = 64 << 10

_NUM_PROCESSES = 2
#: Endpoints per process. Each has its own thread, so that pings are as independent as those of as many nodes.
_MAX_ENDPOINTS = 10

_IDLE_S = 2.0
_READS_S = 2.0

#: Reads per batch. The first ones are not counted, because the caches still hold the other node's data.
_READS_PER_BATCH = 20
_NUM_WARM_UP = 4


@dataclass(frozen=True)
class IdlePeers:
    """The figures of one transport.

    Attributes:
        cpu_percent: Processor time of the process with the idle peers, in percent of a core, while nothing happens.
        ms_alone, ms_with_peers: Median time of a read by the node without and with idle peers.
        ratio: `ms_with_peers` to `ms_alone` in the same batch; median over batches.
        ms_alone_quartiles, ms_with_peers_quartiles, ratio_quartiles: First and third quartile.
    """

    transport: str
    version: str
    num_peers: int
    num_reads: int
    cpu_percent: float
    ms_alone: float
    ms_alone_quartiles: tuple[float, float]
    ms_with_peers: float
    ms_with_peers_quartiles: tuple[float, float]
    ratio: float
    ratio_quartiles: tuple[float, float]


@dataclass(frozen=True)
class _Seen:
    """The measurements: processor time as a share of a core, and the seconds of each read, batch by batch."""

    cpu: float
    alone: list[list[float]]
    with_peers: list[list[float]]


def contenders(texts: Sequence[str]) -> list[Contender]:
    """Return the transports to measure: those whose name contains one of the texts."""
    chosen = [(f"kvferry {scheme}", scheme) for scheme in _TRANSPORTS]
    return [
        ours(name, scheme, _TRANSPORTS[scheme], is_patient=False)
        for name, scheme in chosen
        if any(text in name for text in texts)
    ]


def measure_idle_peers(
    chosen: Sequence[Contender], num_peers: int, say: Progress
) -> tuple[list[IdlePeers], dict[str, str]]:
    """Measure each transport for less than ten seconds.

    Returns:
        The results, and by name the reasons why transports were not measured.
    """
    results, left_out = [], {}
    for contender in chosen:
        say(f"{contender.name} with {num_peers} idle peers")
        try:
            require_installed(contender)
            results.append(_measure(contender, num_peers))
        except FailedError as error:
            left_out[contender.name] = str(error)
    return results, left_out


def _measure(contender: Contender, num_peers: int) -> IdlePeers:
    setup = Setup(_POOL_BYTES, contender.options)
    with ExitStack() as stack:

        def start(work: Callable[..., None], *arguments: Any) -> Child:
            child = Child(_guarded, contender, work, setup, *arguments)
            stack.callback(child.close)
            return child

        owner = start(_own)
        measuring = start(_read, owner.answer(), num_peers)
        address = measuring.answer()
        for share in _shares(num_peers, _NUM_PROCESSES):
            start(_be_idle, address, share)
        seen: _Seen = measuring.answer()
    alone, with_peers = (np.concatenate(batches) * 1e3 for batches in (seen.alone, seen.with_peers))
    ratios = [
        statistics.median(b) / statistics.median(a) for a, b in zip(seen.alone, seen.with_peers, strict=True)
    ]
    return IdlePeers(
        transport=contender.name,
        version=contender.version,
        num_peers=num_peers,
        num_reads=len(alone),
        cpu_percent=100 * seen.cpu,
        ms_alone=float(np.median(alone)),
        ms_alone_quartiles=_quartiles(alone),
        ms_with_peers=float(np.median(with_peers)),
        ms_with_peers_quartiles=_quartiles(with_peers),
        ratio=statistics.median(ratios),
        ratio_quartiles=_quartiles(ratios),
    )


def _quartiles(values: Any) -> tuple[float, float]:
    low, high = np.percentile(values, [25, 75])
    return float(low), float(high)


def _shares(total: int, num_shares: int) -> list[int]:
    """Divide a number into `num_shares` almost equal ones, or fewer if it is too small."""
    return [len(part) for part in np.array_split(np.arange(total), num_shares) if len(part)]


def table_of_idle_peers(results: Sequence[IdlePeers]) -> Iterator[str]:
    """Yield a table, line by line."""
    if not results:
        return
    yield ""
    yield (
        f"{results[0].num_peers} idle peers: processor time while nothing happens; reads of {_READ_BYTES >> 10} KiB "
        "without and with them"
    )
    yield (
        f"  {'':27}{'idle CPU':>9}{'ms alone':>10}  {'(quartiles)':15}{'ms with':>8}  {'(quartiles)':15}"
        f"{'ratio':>6}  (quartiles)"
    )
    for r in results:
        alone, many, ratio = (
            f"({low:.{digits}f}-{high:.{digits}f})"
            for (low, high), digits in (
                (r.ms_alone_quartiles, 3),
                (r.ms_with_peers_quartiles, 3),
                (r.ratio_quartiles, 2),
            )
        )
        yield (
            f"  {r.transport:27}{r.cpu_percent:>7.1f} %{r.ms_alone:>10.3f}  {alone:15}{r.ms_with_peers:>8.3f}  {many:15}"
            f"{r.ratio:>6.2f}  {ratio}"
        )


# -- in the processes --------------------------------------------------------------------------------


def _guarded(contender: Contender, work: Callable[..., None], *arguments: Any) -> None:
    """Run a process, and report to the parent why it fails."""
    begin(contender)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    parent: Connection = arguments[-1]
    try:
        work(*arguments)
    except Exception as error:  # noqa: BLE001 - the parent prints it
        parent.send(RuntimeError(repr(error)))


def _own(setup: Setup, parent: Connection) -> None:
    own_ours(setup, parent)


def _be_idle(setup: Setup, address: str, num_peers: int, parent: Connection) -> None:
    """Connect `num_peers` times, from several endpoints, and then leave everything to the transport."""
    shares = _shares(num_peers, _MAX_ENDPOINTS)
    threads = [threading.Thread(target=_stay, args=(setup, address, n), daemon=True) for n in shares]
    for thread in threads:
        thread.start()
    parent.recv()  # the parent asks this process to end; nothing has to be closed


def _stay(setup: Setup, address: str, num_peers: int) -> None:
    endpoint = Node(Setup(4096, setup.options)).endpoint
    connected: set[int] = set()
    connecting = 0
    while True:
        # Connect one peer at a time. Connect again if one is lost: on a busy machine a peer may be silent for too long.
        if not connecting and len(connected) < num_peers:
            connecting = endpoint.start_connect(address, timeout_s=TIMEOUT_S)
        for event in endpoint.wait_events(TIMEOUT_S):
            if isinstance(event, Connected):
                connected.add(event.peer_id)
                connecting = 0
            elif isinstance(event, PeerLost):
                connected.discard(event.peer_id)
                connecting = 0 if event.peer_id == connecting else connecting


def _read(setup: Setup, owner: str, num_peers: int, parent: Connection) -> None:
    busy = OurReader(setup, owner)
    parent.send(busy.listen())
    deadline = time.monotonic() + TIMEOUT_S
    num_connected = 0
    while num_connected < num_peers:
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"timed out after {TIMEOUT_S:g} s waiting for {num_peers - num_connected} of {num_peers} peers to connect"
            )
        num_connected += busy.num_connected(1.0)
    busy.wait(0.5)  # so that the work that follows connecting is not measured
    began, cpu_began = time.monotonic(), time.process_time()
    busy.wait(_IDLE_S)
    cpu = (time.process_time() - cpu_began) / (time.monotonic() - began)

    alone = OurReader(setup, owner)
    seen = _Seen(cpu, alone=[], with_peers=[])
    blocks = [_block(at) for at in range(0, _POOL_BYTES, _READ_BYTES)]
    until = time.monotonic() + _READS_S
    while time.monotonic() < until:
        for reader, batches in ((alone, seen.alone), (busy, seen.with_peers)):
            seconds = [_timed(reader, blocks[index % len(blocks)]) for index in range(_READS_PER_BATCH)]
            batches.append(seconds[_NUM_WARM_UP:])
    parent.send(seen)


def _block(at: int) -> RegionPairs:
    starts = np.arange(at, at + _READ_BYTES, _REGION_BYTES)
    return RegionPairs(np.stack([starts, starts, np.full_like(starts, _REGION_BYTES)], axis=1))


def _timed(reader: OurReader, pairs: RegionPairs) -> float:
    began = time.perf_counter()
    reader.read(pairs)
    return time.perf_counter() - began
