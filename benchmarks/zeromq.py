"""Measure the `zeromq` transport beside a raw-socket twin: the same bytes over one loopback TCP connection.

    python benchmarks/zeromq.py [--rounds N] [--json FILE] [--congestion-control NAME] [--option KEY=VALUE ...]

Reader and owner are two processes. The twin is what plain sockets can do: the reader sends a list of offsets, the
owner answers with `sendmsg` from its pool, the reader takes the bytes with `recvmsg_into` into place; nothing is
checked. Everything is measured in turn in each round, and the medians of the ratios are printed. On a machine that has
other things to do, the best of all rounds and the processor time, of both processes, tell more.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import platform
import secrets
import socket
import statistics
import struct
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from kvferry.transports import Connected, Guard, Pool, RegionPairs, TransferEnded
from kvferry.transports.zeromq import ZeroMQTransport

POOL_BYTES = 320 << 20
GUARD = Guard(1, 7)
TIMEOUT_S = 60.0
IOV_MAX = 64
TWIN = "raw socket twin"

Options = Mapping[str, Any]


@dataclass(frozen=True)
class Shape:
    """`num_regions` regions of `num_bytes`, scattered at both ends."""

    name: str
    num_regions: int
    num_bytes: int

    def pairs(self, seed: int) -> RegionPairs:
        random = np.random.default_rng(seed)
        places = [random.permutation(POOL_BYTES // self.num_bytes)[: self.num_regions] for _ in range(2)]
        sizes = np.full(self.num_regions, self.num_bytes)
        return RegionPairs(np.stack([*(p * self.num_bytes for p in places), sizes], axis=1).astype(np.int64))


SHAPES = (
    Shape("llama-8b uniform: 64 x 2 MiB", 64, 2 << 20),
    Shape("llama-8b per-layer: 2048 x 64 KiB", 2048, 64 << 10),
    Shape("one block: 2 MiB", 1, 2 << 20),
    Shape("smollm2 uniform: 64 x 360 KiB", 64, 360 << 10),
    Shape("smollm2 per-layer: 1920 x 12 KiB", 1920, 12 << 10),
)


def make_transport(options: Options) -> tuple[ZeroMQTransport, memoryview]:
    transport = ZeroMQTransport(options)
    arena = transport.allocate(POOL_BYTES)
    transport.register(Pool([arena.segment]))
    return transport, arena.buffer


def filled_pool() -> memoryview:
    """Memory that was written: pages that never were are all one page of zeros, and quick to read."""
    return memoryview(np.arange(POOL_BYTES // 8)).cast("B")


def own(options: Options, told: Connection) -> None:
    """The owner's process: serve until told to stop."""
    transport, buffer = make_transport(options)
    np.frombuffer(buffer, dtype=np.int64)[:] = np.arange(POOL_BYTES // 8)
    transport.guards.set(GUARD.index, GUARD.value)
    told.send(transport.listen(""))
    while not told.poll():
        transport.wait_events(0.05)
    transport.close()


def own_twin(congestion_control: str, told: Connection) -> None:
    """The twin's owner."""
    pool = filled_pool()
    with socket.socket() as listener:
        if congestion_control:
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion_control.encode())
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        told.send(listener.getsockname())
        connection, _ = listener.accept()
    with connection:
        while head := connection.recv(16, socket.MSG_WAITALL):
            num_regions, num_bytes = struct.unpack("<QQ", head)
            offsets = struct.unpack(f"<{num_regions}Q", connection.recv(8 * num_regions, socket.MSG_WAITALL))
            move([pool[o : o + num_bytes] for o in offsets], lambda views: connection.sendmsg(views))


def move(views: list[memoryview], step: Callable[[list[memoryview]], int]) -> None:
    """Send or receive all of `views`, as many at a time as one call takes."""
    left = deque(views)
    while left:
        done = step([left[i] for i in range(min(IOV_MAX, len(left)))])
        while left and done >= len(left[0]):
            done -= len(left.popleft())
        if done:
            left[0] = left[0][done:]


class TwinReader:
    """The reading end of the plain-socket twin."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._pool = filled_pool()
        self._socket = socket.create_connection(address)

    def read(self, pairs: RegionPairs) -> float:
        started = time.perf_counter()
        num_bytes = int(pairs.lengths[0])
        offsets = struct.pack(f"<{len(pairs)}Q", *pairs.remote_offsets.tolist())
        self._socket.sendall(struct.pack("<QQ", len(pairs), num_bytes) + offsets)
        views = [self._pool[o : o + num_bytes] for o in pairs.local_offsets.tolist()]
        move(views, lambda views: self._socket.recvmsg_into(views)[0])
        return time.perf_counter() - started

    def close(self) -> None:
        self._socket.close()


class Reader:
    """The reading end of the transport."""

    def __init__(self, options: Options, address: str) -> None:
        self._transport, self._buffer = make_transport(options)
        self._peer_id = self._transport.start_connect(address, timeout_s=TIMEOUT_S)
        self._wait(Connected)

    def _wait(self, wanted: type[Any]) -> Any:
        while True:
            for event in self._transport.wait_events(TIMEOUT_S):
                if isinstance(event, wanted):
                    return event
                raise SystemExit(f"unexpected: {event}")

    def read(self, pairs: RegionPairs) -> float:
        started = time.perf_counter()
        self._transport.start_read(self._peer_id, pairs, GUARD, timeout_s=TIMEOUT_S)
        ended = self._wait(TransferEnded)
        if ended.error is not None:
            raise SystemExit(f"a read failed: {ended.error!r}")
        return time.perf_counter() - started

    def close(self) -> None:
        self._transport.close()


class MemcpyReader:
    """The same regions, between two pools of one process."""

    def __init__(self) -> None:
        self._local, self._remote = filled_pool(), filled_pool()

    def read(self, pairs: RegionPairs) -> float:
        started = time.perf_counter()
        for local, remote, num_bytes in pairs.table.tolist():
            self._local[local : local + num_bytes] = self._remote[remote : remote + num_bytes]
        return time.perf_counter() - started

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class Contender:
    """A reader, the process it reads from, and what its reads took."""

    reader: Any
    pid: int
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)

    def read(self, pairs: RegionPairs) -> None:
        began = self._cpu_seconds()
        self.seconds.append(self.reader.read(pairs))
        self.cpu_seconds.append(self._cpu_seconds() - began)

    def _cpu_seconds(self) -> float:
        """Of this process and the owner's; the latter in ticks of 10 ms, which add up over the rounds."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split() if self.pid else []
        return time.process_time() + sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def start(stack: ExitStack, target: Callable[..., None], argument: Any) -> tuple[int, Any]:
    """Start an owner; returns its process and what it says first."""
    ours, theirs = mp.Pipe()
    process = mp.get_context("spawn").Process(target=target, args=(argument, theirs), daemon=True)
    process.start()
    stack.callback(process.join, 10)
    stack.callback(ours.close)
    return process.pid or 0, ours.recv()


def measure(
    shapes: tuple[Shape, ...], rounds: int, variants: Mapping[str, Options], twin: str
) -> list[dict[str, Any]]:
    rows = []
    with ExitStack() as stack:
        pid, address = start(stack, own_twin, twin)
        readers: dict[str, tuple[Any, int]] = {
            "memcpy": (MemcpyReader(), 0),
            TWIN: (TwinReader(address), pid),
        }
        for name, options in variants.items():
            pid, address = start(stack, own, options)
            readers[name] = (Reader(options, address), pid)
        for reader, _ in readers.values():
            stack.callback(reader.close)
        for shape in shapes:
            contenders = {name: Contender(*pair) for name, pair in readers.items()}
            for index in range(rounds * 10 if shape.num_regions == 1 else rounds):
                pairs = shape.pairs(index)
                for contender in contenders.values():
                    contender.read(pairs)
            rows += [row(shape, name, contenders) for name in contenders]
    return rows


def row(shape: Shape, name: str, contenders: Mapping[str, Contender]) -> dict[str, Any]:
    """The medians of one contender, the first round left out."""
    own_seconds, cpu_seconds = contenders[name].seconds[1:], contenders[name].cpu_seconds[1:]

    def ratio(other: str) -> float:
        return statistics.median(
            o / s for o, s in zip(contenders[other].seconds[1:], own_seconds, strict=True)
        )

    p50 = statistics.median(own_seconds)
    num_bytes = shape.num_regions * shape.num_bytes
    return {
        "shape": shape.name,
        "what": name,
        "p50_ms": p50 * 1e3,
        "gb_per_s": num_bytes / p50 / 1e9,
        "best_ms": min(own_seconds) * 1e3,
        "to_twin": ratio(TWIN),
        "best_to_twin": min(contenders[TWIN].seconds[1:]) / min(own_seconds),
        "to_memcpy": ratio("memcpy"),
        "cpu_s_per_gb": statistics.mean(cpu_seconds) / num_bytes * 1e9,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--json", metavar="FILE", help="write the rows there, one JSON object a line")
    parser.add_argument(
        "--congestion-control", default="", help="for the twin and the transport; default: the system's"
    )
    parser.add_argument(
        "--option", action="append", default=[], metavar="KEY=JSON", help="an option of the transport"
    )
    parser.add_argument("--shape", default="", help="only shapes whose name contains this")
    arguments = parser.parse_args()
    common = {key: json.loads(value) for key, _, value in (o.partition("=") for o in arguments.option)}
    common["congestion_control"] = arguments.congestion_control
    with tempfile.NamedTemporaryFile("w") as secret:
        secret.write(secrets.token_hex(32))
        secret.flush()
        variants = {
            "zeromq, no checksums": {**common, "checksums": False},
            "zeromq": common,
            "zeromq, CURVE": {**common, "curve": "on", "shared_secret_file": secret.name},
        }
        print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
        shapes = tuple(shape for shape in SHAPES if arguments.shape in shape.name)
        rows = measure(shapes, arguments.rounds, variants, arguments.congestion_control)
    report(rows, arguments.json)


def report(rows: list[dict[str, Any]], json_file: str | None) -> None:
    print(
        f"{platform.machine()}, Python {platform.python_version()}, pyzmq {zmq.__version__}, libzmq {zmq.zmq_version()}"
    )
    print(
        f"{'shape':36}{'what':24}{'p50 ms':>9}{'GB/s':>7}{'x twin':>8}{'x memcpy':>10}{'best ms':>9}{'x twin':>8}{'CPU s/GB':>10}"
    )
    for r in rows:
        figures = f"{r['p50_ms']:9.2f}{r['gb_per_s']:7.2f}{r['to_twin']:8.2f}{r['to_memcpy']:10.2f}"
        figures += f"{r['best_ms']:9.2f}{r['best_to_twin']:8.2f}{r['cpu_s_per_gb']:10.2f}"
        print(f"{r['shape']:36}{r['what']:24}{figures}")
    if json_file:
        with open(json_file, "w") as out:
            out.writelines(json.dumps(r) + "\n" for r in rows)


if __name__ == "__main__":
    main()
