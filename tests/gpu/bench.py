"""Measure how fast KV blocks move between two processes whose pools are on one GPU, and in and out of it.

    PYTHONPATH=src:. python -m tests.gpu.bench [--seconds N] [--place cuda:0] [--only TEXT ...]

Beside kvferry's transports there are plain copies within the GPU, from it and to it, and plain sockets:
staged as kvferry stages, and between pools in main memory. Contenders that cannot work here are left out,
with the reason. `--place stand-in` rehearses all of it without a GPU; its figures mean nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from kvferry.lab.moving.contender import Contender
from kvferry.lab.moving.field import MEMCPY, SOCKETS
from kvferry.lab.moving.others import SocketReader, own_sockets
from kvferry.lab.moving.report import results_of, table
from kvferry.lab.moving.rounds import measure
from kvferry.lab.moving.shapes import shapes_of

from .moving import CopyReader, PoolReader, StagedSocketReader, own_nothing, own_pool, own_staged_sockets

#: Timeouts for processes that are stopped while others are measured.
_PATIENT = {"handshake_timeout_s": 3600}
_PATIENT_OVER_NETWORK = {**_PATIENT, "peer_timeout_s": 3600}


def contenders_at(place: str) -> list[Contender]:
    """Return every contender, those that cannot work here as well."""
    on_gpu = {"owner": place, "reader": place}

    def copy(name: str, direction: str) -> Contender:
        return Contender(name, own_nothing, CopyReader, {**on_gpu, "direction": direction})

    def ours(name: str, scheme: str, places: Mapping[str, str] = on_gpu, **options: object) -> Contender:
        patient: Mapping[str, Any] = _PATIENT if scheme == "shm" else _PATIENT_OVER_NETWORK
        described = {**places, "scheme": scheme, "transport": {**patient, **options}}
        return Contender(name, own_pool, PoolReader, described)

    return [
        copy(MEMCPY, "within"),
        copy("copy from the GPU", "from"),
        copy("copy to the GPU", "to"),
        Contender(SOCKETS, own_staged_sockets, StagedSocketReader, on_gpu),
        Contender("plain sockets, no GPU", own_sockets, SocketReader, {}),
        ours("kvferry shm", "shm"),
        ours("kvferry tcp", "tcp"),
        ours("kvferry tcp, unchecked", "tcp", checksums=False),
        ours("kvferry tcp, GPU to CPU", "tcp", {"owner": place, "reader": "cpu"}),
        ours("kvferry tcp, CPU to GPU", "tcp", {"owner": "cpu", "reader": place}),
        ours("kvferry zeromq", "zeromq"),
        ours("kvferry ucx", "ucx"),
        ours("kvferry nixl", "nixl"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--seconds", type=float, default=30, help="duration of the measurements (default: %(default)s)"
    )
    parser.add_argument(
        "--place", default="cuda:0", help="the GPU, or stand-in for a rehearsal (default: %(default)s)"
    )
    parser.add_argument(
        "--pool-mib", type=int, default=256, help="pool of each process in MiB (default: %(default)s)"
    )
    parser.add_argument(
        "--blocks", type=int, default=64, help="blocks of the larger shapes (default: %(default)s)"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        default=[""],
        metavar="TEXT",
        help="measure contenders whose name contains one of these texts, and both baselines (default: all)",
    )
    arguments = parser.parse_args()
    pool_bytes = arguments.pool_mib << 20
    shapes = [shape for shape in shapes_of(arguments.blocks) if shape.model.startswith("llama")]
    contenders = [
        contender
        for contender in contenders_at(arguments.place)
        if contender.name in (MEMCPY, SOCKETS) or any(text in contender.name for text in arguments.only)
    ]
    measured = measure(contenders, shapes, pool_bytes, arguments.seconds, lambda what: None)
    print("\n".join(table(results_of(contenders, shapes, measured))), flush=True)
    for name, reason in measured.failures.items():
        print(f"not measured: {name}: {reason}", flush=True)


if __name__ == "__main__":
    main()
