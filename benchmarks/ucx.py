"""Measure the `ucx` transport, and the settings that it was given a choice of, beside plain sockets and `zeromq`.

    python benchmarks/ucx.py [--rounds N] [--shape TEXT] [--json FILE] [--variant NAME=OPTIONS_AS_JSON ...]

Reader and owner are two processes; shapes, memcpy and the raw-socket twin are those of `benchmarks/zeromq.py`.
Everything is measured in turn in each round, and the medians of the ratios are printed. Of a busy machine, trust CPU
seconds first.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Mapping
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from zeromq import (
    GUARD,
    POOL_BYTES,
    SHAPES,
    TIMEOUT_S,
    TWIN,
    Contender,
    MemcpyReader,
    TwinReader,
    own_twin,
    row,
)
from zeromq import start as start_process

from kvferry.transports import Connected, Pool, RegionPairs, TransferEnded, Transport
from kvferry.transports.registry import create_transport

Options = Mapping[str, Any]

#: A reader says nothing while it is another's turn.
PATIENT: Options = {"peer_timeout_s": 600}

#: Scheme and options of what is compared.
VARIANTS: Mapping[str, tuple[str, Options]] = {
    "ucx": ("ucx", PATIENT),
    "zeromq, no checksums": ("zeromq", {"checksums": False}),
}


def make_transport(variant: tuple[str, Options]) -> tuple[Transport, memoryview]:
    transport = create_transport(*variant)
    arena = transport.allocate(POOL_BYTES)
    transport.register(Pool([arena.segment]))
    return transport, arena.buffer


def own(variant: tuple[str, Options], told: Connection) -> None:
    """The owner's process: serve until told to stop."""
    transport, buffer = make_transport(variant)
    np.frombuffer(buffer, dtype=np.int64)[:] = np.arange(POOL_BYTES // 8)
    transport.guards.set(GUARD.index, GUARD.value)
    told.send(transport.listen(""))
    while not told.poll():
        transport.wait_events(0.05)
    transport.close()


class Reader:
    """The reading end."""

    def __init__(self, variant: tuple[str, Options], address: str) -> None:
        self._transport, self._buffer = make_transport(variant)
        self._peer_id = self._transport.start_connect(address, timeout_s=TIMEOUT_S)
        self._wait(Connected)

    def _wait(self, wanted: type[Any]) -> Any:
        while True:
            for event in self._transport.wait_events(TIMEOUT_S):
                if isinstance(event, wanted):
                    return event
                raise SystemExit(f"unexpected: {event}")

    def read(self, pairs: RegionPairs) -> float:
        self._transport.start_read(self._peer_id, pairs, GUARD, timeout_s=TIMEOUT_S)
        ended = self._wait(TransferEnded)
        if ended.error is not None:
            raise SystemExit(f"a read failed: {ended.error!r}")
        return float(ended.seconds)

    def close(self) -> None:
        self._transport.close()


def measure(
    variants: Mapping[str, tuple[str, Options]], shape_name: str, rounds: int
) -> list[dict[str, Any]]:
    rows = []
    with ExitStack() as stack:
        pid, address = start_process(stack, own_twin, "")
        readers: dict[str, tuple[Any, int]] = {
            "memcpy": (MemcpyReader(), 0),
            TWIN: (TwinReader(address), pid),
        }
        for name, variant in variants.items():
            pid, address = start_process(stack, own, variant)
            readers[name] = (Reader(variant, address), pid)
        for reader, _ in readers.values():
            stack.callback(reader.close)
        for shape in (shape for shape in SHAPES if shape_name in shape.name):
            contenders = {name: Contender(*pair) for name, pair in readers.items()}
            for index in range(rounds * 10 if shape.num_regions == 1 else rounds):
                pairs = shape.pairs(index)
                for contender in contenders.values():
                    contender.read(pairs)
            rows += [row(shape, name, contenders) for name in contenders]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--shape", default="", help="only shapes whose name contains this")
    parser.add_argument("--json", metavar="FILE", help="write the rows there, one JSON object a line")
    parser.add_argument(
        "--variant", action="append", default=[], metavar="NAME=JSON", help="more options of ucx"
    )
    arguments = parser.parse_args()
    extra = {name: json.loads(text) for name, _, text in (v.partition("=") for v in arguments.variant)}
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    variants = {**VARIANTS, **{name: ("ucx", {**PATIENT, **options}) for name, options in extra.items()}}
    rows = measure(variants, arguments.shape, arguments.rounds)
    print(f"{platform.machine()}, Python {platform.python_version()}")
    print(f"{'shape':36}{'what':28}{'p50 ms':>9}{'GB/s':>7}{'x twin':>8}{'x memcpy':>10}{'CPU s/GB':>10}")
    for r in rows:
        figures = f"{r['p50_ms']:9.2f}{r['gb_per_s']:7.2f}{r['to_twin']:8.2f}{r['to_memcpy']:10.2f}"
        print(f"{r['shape']:36}{r['what']:28}{figures}{r['cpu_s_per_gb']:10.2f}")
    if arguments.json:
        with open(arguments.json, "w") as out:
            out.writelines(json.dumps(r) + "\n" for r in rows)


if __name__ == "__main__":
    main()
