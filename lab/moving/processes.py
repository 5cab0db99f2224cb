"""The two processes of a contender, which are stopped while others are measured."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

from kvferry.transports import RegionPairs

from .contender import TIMEOUT_S, Contender, Reader, Setup

_PR_SET_PDEATHSIG = 1

_spawning = multiprocessing.get_context("spawn")


class FailedError(Exception):
    """A contender could not be started, or failed. The others continue without it."""


@dataclass(frozen=True)
class Timing:
    """One read: elapsed time, processor time of both processes, and what moved the bytes."""

    seconds: float
    cpu_seconds: float
    mechanism: str


class Child:
    """A process that sends a message when it is ready, and ends when it receives anything but work."""

    def __init__(self, work: Callable[..., None], *arguments: Any) -> None:
        self._connection, theirs = _spawning.Pipe()
        self._process: SpawnProcess = _spawning.Process(target=work, args=(*arguments, theirs), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    def ask(self, question: Any) -> Any:
        """Send a question and wait for the answer. Raises FailedError: see `answer`."""
        try:
            self._connection.send(question)
        except OSError as error:
            raise FailedError("its process ended") from error
        return self.answer()

    def answer(self) -> Any:
        """Return what the process sends next.

        Raises:
            FailedError: it sent nothing within twice `TIMEOUT_S`, ended, or reported an error.
        """
        if not self._connection.poll(2 * TIMEOUT_S):
            raise FailedError(f"timed out after {2 * TIMEOUT_S:g} s waiting for its process")
        try:
            answer = self._connection.recv()
        except EOFError:
            raise FailedError("its process ended") from None
        if isinstance(answer, Exception):
            raise FailedError(f"{type(answer).__name__}: {answer}") from answer
        return answer

    def signal(self, number: int) -> None:
        if self._process.is_alive():
            os.kill(self.pid, number)

    def close(self) -> None:
        """Ask the process to end; if it does not, kill it."""
        self.signal(signal.SIGCONT)
        try:
            self._connection.send(None)
        except OSError:
            pass
        self._process.join(5)
        self.kill()

    def kill(self) -> None:
        """Kill the process, whatever it does."""
        self._process.kill()
        self._process.join()
        self._process.close()
        self._connection.close()


class Running:
    """The two processes of a contender. They run only during its batches."""

    def __init__(self, contender: Contender, pool_bytes: int) -> None:
        """Start both.

        Raises:
            FailedError: one of them could not be started. Neither runs any more.
        """
        setup = Setup(pool_bytes, contender.options)
        with ExitStack() as stack:
            self._owner = Child(_own, contender, setup)
            stack.callback(self._owner.close)
            address = self._owner.answer()
            self._reader = Child(_read, contender, setup, address, self._owner.pid)
            stack.callback(self._reader.close)
            self._reader.answer()
            self._signal(signal.SIGSTOP)
            self._stack = stack.pop_all()

    def _signal(self, number: int) -> None:
        for child in (self._owner, self._reader):
            child.signal(number)

    def batch(self, reads: Sequence[RegionPairs]) -> list[Timing]:
        """Let both run, do the reads one after the other, and stop them again.

        Raises:
            FailedError: a read failed, took longer than `TIMEOUT_S`, or delivered wrong bytes.
        """
        self._signal(signal.SIGCONT)
        timings: list[Timing] = self._reader.ask([pairs.table for pairs in reads])
        self._signal(signal.SIGSTOP)
        return timings

    def close(self) -> None:
        """End both. Idempotent."""
        self._stack.close()


# -- in the processes --------------------------------------------------------------------------------


def begin(contender: Contender) -> None:
    """Make sure that this process ends with its parent, even while it is stopped, and prints nothing."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.update(contender.environment)
    silence = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(silence, stream.fileno())


def _own(contender: Contender, setup: Setup, parent: Connection) -> None:
    begin(contender)
    try:
        contender.owner(setup, parent)
    except Exception as error:  # noqa: BLE001 - the parent reports it
        parent.send(RuntimeError(repr(error)))


def _read(contender: Contender, setup: Setup, address: Any, owner_pid: int, parent: Connection) -> None:
    begin(contender)
    try:
        reader = contender.reader(setup, address)
        parent.send("ready")
        while (tables := parent.recv()) is not None:
            parent.send([_timed(reader, RegionPairs(table), owner_pid) for table in tables])
        reader.close()
    except Exception as error:  # noqa: BLE001 - the parent reports it
        parent.send(RuntimeError(repr(error)))


def _timed(reader: Reader, pairs: RegionPairs, owner_pid: int) -> Timing:
    cpu_began, began = _cpu_seconds(owner_pid), time.perf_counter()
    mechanism = reader.read(pairs)
    seconds, cpu_seconds = time.perf_counter() - began, _cpu_seconds(owner_pid) - cpu_began
    reader.check(pairs)
    return Timing(seconds, cpu_seconds, mechanism)


def _cpu_seconds(owner_pid: int) -> float:
    """Return the processor time of this process and the owner's. Linux derives the id of a process's clock from its pid."""
    return time.process_time() + time.clock_gettime((~owner_pid << 3) | 2)
