"""The two processes of a contender, because a library of the network that fails may abort its process."""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import Any, Final, Self

from kvferry.transports import RegionPairs

from .contender import Contender, FailedError, Reader, Route, Setup

#: Longest time in seconds in which a process imports a transport and opens it, or reads a batch.
ANSWER_TIMEOUT_S: Final = 60.0

_PR_SET_PDEATHSIG: Final = 1

#: Forks from a process that has imported what every end needs. No end inherits what libraries did in another
#: one.
_starting = multiprocessing.get_context("forkserver")
_starting.set_forkserver_preload(["kvferry.lab.moving.ends"])


@dataclass(frozen=True)
class Timing:
    """One read: elapsed time, processor time of both processes, and what moved the bytes."""

    seconds: float
    cpu_seconds: float
    mechanism: str


class Child:
    """A process that sends and receives messages, and ends when it receives None."""

    def __init__(self, work: Callable[..., None], *arguments: Any) -> None:
        """Start it. It calls `work` with the arguments and its end of the connection."""
        self._connection, theirs = _starting.Pipe()
        self._process: ForkServerProcess = _starting.Process(
            target=_run, args=(work, arguments, theirs), daemon=True
        )
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    def ask(self, question: Any, timeout_s: float = ANSWER_TIMEOUT_S) -> Any:
        """Send a question and wait for the answer. Raises FailedError: see `answer`."""
        with suppress(OSError):  # it ended; `answer` says how
            self._connection.send(question)
        return self.answer(timeout_s)

    def answer(self, timeout_s: float = ANSWER_TIMEOUT_S) -> Any:
        """Return what the process sends next.

        Raises:
            FailedError: it sent nothing in time, ended, or reported an error.
        """
        if not self._connection.poll(timeout_s):
            raise FailedError(f"timed out after {timeout_s:g} s waiting for its process")
        try:
            answer = self._connection.recv()
        except (OSError, EOFError):
            self._process.join(5)
            code = self._process.exitcode or 0
            how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
            raise FailedError(f"its process {how}") from None
        if isinstance(answer, FailedError):
            raise answer
        return answer

    def signal(self, number: int) -> None:
        if self.is_alive:
            os.kill(self.pid, number)

    def close(self) -> None:
        """Ask the process to end; if it does not, kill it."""
        self.signal(signal.SIGCONT)
        with suppress(OSError):
            self._connection.send(None)
        self._process.join(2)
        self.kill()

    def kill(self) -> None:
        """Kill the process, whatever it does."""
        self._process.kill()
        self._process.join()
        self._process.close()
        self._connection.close()


class Running:
    """The two processes of a contender, which run only during its batches.

    Attributes:
        route: How the reader reached the owner.
    """

    def __init__(self, contender: Contender, pool_bytes: int, address: str = "") -> None:
        """Start both, or only the reader if the owner serves at an address already.

        Raises:
            FailedError: one of them could not be started. Neither runs any more.
        """
        setup = Setup(pool_bytes, contender.options)
        with ExitStack() as stack:
            self._children: list[Child] = []
            for work in (read,) if address else (read, own):  # both import their libraries at the same time
                child = Child(work, contender, setup)
                stack.callback(child.close)
                self._children.append(child)
            self._reader, *owners = self._children
            found = (address, 0) if address else (owners[0].answer(), owners[0].pid)
            self.route: Route = self._reader.ask(found)
            self._signal(signal.SIGSTOP)
            self._stack = stack.pop_all()

    def _signal(self, number: int) -> None:
        for child in self._children:
            child.signal(number)

    def batch(self, reads: Sequence[RegionPairs]) -> list[Timing]:
        """Let both run, do the reads one after the other, and stop them again.

        Raises:
            FailedError: a read failed, took too long, or delivered wrong bytes.
        """
        self._signal(signal.SIGCONT)
        timings: list[Timing] = self._reader.ask([pairs.table for pairs in reads])
        self._signal(signal.SIGSTOP)
        return timings

    def close(self) -> None:
        """End both. Idempotent."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# -- in the processes --------------------------------------------------------------------------------


def _run(work: Callable[..., None], arguments: Sequence[Any], parent: Connection) -> None:
    """Be a child: end with the parent, even while stopped, and print nothing, since libraries write to our
    terminal.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.disable()
    silence = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(silence, stream.fileno())
    with suppress(EOFError, OSError):  # the parent has ended
        try:
            work(*arguments, parent)
        except Exception as error:  # noqa: BLE001 - the parent reports it
            parent.send(FailedError.of(error))


def own(contender: Contender, setup: Setup, parent: Connection) -> None:
    """Be the owner: send the address, and serve."""
    os.environ.update(contender.environment)
    contender.owner(setup, parent)


def read(contender: Contender, setup: Setup, parent: Connection) -> None:
    """Be the reader: receive the owner's address and process id, send the route, and answer reads with their
    timings.
    """
    os.environ.update(contender.environment)
    if (found := parent.recv()) is None:
        return
    address, owner_pid = found
    reader = contender.reader(setup, address)
    parent.send(reader.route)
    while (tables := parent.recv()) is not None:
        parent.send([_timed(reader, RegionPairs(table), owner_pid) for table in tables])
    reader.close()


def _timed(reader: Reader, pairs: RegionPairs, owner_pid: int) -> Timing:
    cpu_began, began = _cpu_seconds(owner_pid), time.perf_counter()
    mechanism = reader.read(pairs)
    seconds, cpu_seconds = time.perf_counter() - began, _cpu_seconds(owner_pid) - cpu_began
    reader.check(pairs)
    return Timing(seconds, cpu_seconds, mechanism)


def _cpu_seconds(owner_pid: int) -> float:
    """Return the processor time of this process and, if it is on this host, the owner's.

    Linux derives the id of a process's clock from its process id.
    """
    return time.process_time() + (time.clock_gettime((~owner_pid << 3) | 2) if owner_pid else 0.0)
