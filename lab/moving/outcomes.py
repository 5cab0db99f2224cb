"""Measure paths on this machine or to another doctor, for `kvferry doctor` and `kvferry bench`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from .contender import FailedError
from .ends import contender_of
from .field import memcpy
from .paths import Path
from .processes import Running
from .remote import RemoteDoctor
from .report import Result, results_of
from .rounds import measure, show
from .shapes import Shape

#: `ok`: bytes arrived, and were right. `missing`: it needs what this machine lacks. `skipped`: it cannot lead
#: to this peer.
Status = Literal["ok", "missing", "failed", "skipped"]


@dataclass(frozen=True)
class Outcome:
    """The result of trying one path.

    Attributes:
        transport: The transport that served the peer; differs from the path's if that chooses.
        mechanism: What moved the bytes, e.g. `"mapped"`.
        reason: Why that transport, or why it did not work.
        connect_s: From the call to the end of the handshake.
    """

    path: str
    status: Status
    transport: str = ""
    mechanism: str = ""
    reason: str = ""
    connect_s: float = 0.0
    speeds: tuple[Result, ...] = ()

    @classmethod
    def of(cls, path: str, error: FailedError) -> Outcome:
        """The outcome of a path that does not work."""
        return cls(path, "missing" if error.is_missing else "failed", reason=str(error))

    def to_json(self) -> dict[str, object]:
        """The figures for programs, with units in the names."""
        return {
            "path": self.path,
            "status": self.status,
            "transport": self.transport,
            "mechanism": self.mechanism,
            "reason": self.reason,
            "connect_ms": round(self.connect_s * 1e3, 3),
            "speeds": [
                {
                    "shape": str(speed.shape),
                    "num_bytes": speed.shape.num_bytes,
                    "num_reads": speed.num_reads,
                    "microseconds": round(speed.p50_ms * 1e3, 1),
                    "gb_per_s": round(speed.gb_per_s, 3),
                    "memcpy_gb_per_s": round(speed.gb_per_s / speed.to_memcpy, 3),
                    "of_memcpy": round(speed.to_memcpy, 3),
                }
                for speed in self.speeds
            ],
        }


@dataclass(frozen=True)
class Measuring:
    """Measures paths one after the other, with a memcpy in the pauses between their reads.

    Attributes:
        seconds: Time for all paths together.
    """

    paths: Sequence[Path]
    shapes: Sequence[Shape]
    pool_bytes: int
    seconds: float

    def here(self) -> list[Outcome]:
        """Measure between two processes of this machine."""
        return [self._measure(path) for path in self.paths]

    def to(self, there: RemoteDoctor) -> list[Outcome]:
        """Measure to a doctor that listens. Raises NoDoctorError: it is gone."""
        return [self._measure_to(there, path) for path in self.paths]

    def _measure_to(self, there: RemoteDoctor, path: Path) -> Outcome:
        if path.scheme == "shm" and not there.is_same_host:
            return Outcome(path.name, "skipped", reason="the peer is on another host")
        if path.name not in there.paths:
            return Outcome(path.name, "skipped", reason=f"kvferry {there.version} there has no such path")
        try:
            with there.open(path.name, self.pool_bytes) as address:
                return self._measure(path, address)
        except FailedError as error:
            return Outcome.of(path.name, error)

    def _measure(self, path: Path, address: str = "") -> Outcome:
        at = f"{self.paths.index(path) + 1} of {len(self.paths)}"
        contenders = [memcpy(), contender_of(path)]
        measured = measure(
            contenders,
            self.shapes,
            self.pool_bytes,
            self.seconds / len(self.paths),
            lambda what: show(f"{at}: {what}"),
            {path.name: address},
        )
        show("")
        for error in measured.failures.values():
            return Outcome.of(path.name, error)
        speeds = results_of(contenders[1:], self.shapes, measured)
        route = measured.routes[path.name]
        by = speeds[-1].mechanism
        return Outcome(path.name, "ok", route.transport, by, route.reason, route.connect_s, tuple(speeds))


def connect(path: Path, address: str) -> Outcome:
    """Connect to a running node, and read nothing: its pool belongs to its requests."""
    try:
        with Running(contender_of(path), 1 << 20, address) as running:
            route = running.route
    except FailedError as error:
        return Outcome.of(path.name, error)
    return Outcome(path.name, "ok", route.transport, "", route.reason, route.connect_s)
