"""Serve one port with several processes: a parent that forks workers, and the frames by which they talk.

The parent has no event loop and no thread, so it can fork at any time. It starts a worker again that has
ended, passes a stop on to all of them, and forwards their frames. It reads no frame of theirs but reports
and metrics. `workers` is the other end.

What must never break: one worker that is stuck or ends takes nothing from the others, and none outlives the
parent.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import os
import selectors
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple

import orjson

from .http.launcher_link import Link
from .http.serving import SHUTDOWN_DEADLINE_S, StartupError, leave_now
from .seen.merged import merged_metrics

#: Processes that a router may have.
MAX_PROCESSES: Final = 64
#: Bytes of one frame, and bytes that wait for a worker. One that does not take them is stuck.
MAX_FRAME: Final = 16 << 20
MAX_UNREAD: Final = 64 << 20
#: Seconds before a worker is started again that ended within `LIVED_S`: doubled each time.
FIRST_DELAY_S, LONGEST_DELAY_S, LIVED_S = 0.1, 5.0, 10.0

_HEAD: Final = struct.Struct("!IBII")
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)

logger = logging.getLogger(__name__)


class Kind(enum.IntEnum):
    """What a frame is. The comment says where it goes, and what `Frame.worker` is there."""

    TELL = 1  # to all other workers; the sender
    ASK = 2  # as TELL
    ANSWER = 3  # to the worker that it names; the sender
    STATE = 4  # as ANSWER: what a worker that has just started has to know
    REPORT = 5  # to the parent: what the launcher's link would be told
    METRICS = 6  # to the parent: what is kept if this worker ends
    DRAIN = 7  # from a worker to the parent, and from the parent to all workers
    STOP = 8  # from the parent
    STARTED = 9  # from the parent: a worker can be talked to
    ENDED = 10  # from the parent: a worker has ended; the metrics of all that have


class Frame(NamedTuple):
    """A message.

    Attributes:
        worker: The number of the worker that it is about, or that sends or receives it; see `Kind`.
        question: Which question an answer answers.
    """

    kind: Kind
    payload: bytes = b""
    worker: int = 0
    question: int = 0

    def encoded(self) -> bytes:
        """Return its bytes.

        Raises:
            ValueError: It is too large.
        """
        if len(self.payload) > MAX_FRAME:
            raise ValueError(f"a frame of {len(self.payload)} bytes; at most {MAX_FRAME}")
        return _HEAD.pack(len(self.payload), self.kind, self.worker, self.question) + self.payload


class Frames:
    """Cuts received bytes into frames."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yield the frames that are complete.

        Raises:
            ValueError: A frame is too large, or of no kind.
        """
        self._bytes += data
        while len(self._bytes) >= _HEAD.size:
            length, kind, worker, question = _HEAD.unpack_from(self._bytes)
            if length > MAX_FRAME:
                raise ValueError(f"a frame of {length} bytes; at most {MAX_FRAME}")
            if len(self._bytes) < (end := _HEAD.size + length):
                return
            payload = bytes(memoryview(self._bytes)[_HEAD.size : end])
            del self._bytes[:end]
            yield Frame(Kind(kind), payload, worker, question)


class Seat(NamedTuple):
    """What a worker is given.

    Attributes:
        number: Never given twice.
        socket: To the parent.
        ended_metrics: Of the workers that have ended.
    """

    number: int
    socket: socket.socket
    ended_metrics: bytes


@dataclass(eq=False)
class _Worker:
    number: int
    pid: int
    socket: socket.socket
    frames: Frames = field(default_factory=Frames)
    unread: bytearray = field(default_factory=bytearray)
    began: float = field(default_factory=time.monotonic)
    facts: dict[str, Any] = field(default_factory=dict)  # that it has reported
    metrics: bytes = b""
    is_there: bool = False  # it can be talked to


class _IsWorker(BaseException):
    """Leaves the parent's code in a process that was just forked."""


def run_workers(
    num: int, listeners: Sequence[socket.socket], link: Link, announce: Callable[[], None]
) -> Seat | None:
    """Fork workers, and care for them until all have ended. Returns in each worker as well.

    Args:
        listeners: Closed here when the workers drain: a port is free as soon as they have closed theirs.
        announce: Called as soon as all workers accept connections.

    Returns:
        The worker's seat; None in the parent, after the end of all workers.

    Raises:
        StartupError: A worker could not start.
    """
    parent = _Parent(num, listeners, link, announce)
    try:
        parent.run()
    except _IsWorker as forked:
        seat: Seat = forked.args[0]
        return seat
    return None


class _Parent:
    def __init__(
        self, num: int, listeners: Sequence[socket.socket], link: Link, announce: Callable[[], None]
    ) -> None:
        self._num, self._listeners, self._link, self._announce = num, listeners, link, announce
        self._workers: dict[int, _Worker] = {}
        self._last_number = 0
        self._starts: list[float] = []  # when workers are to be started again
        self._delay_s = 0.0
        self._ended_metrics = b""
        self._is_announced = self._is_ready = self._is_draining = False
        self._failure = ""
        self._num_signals = 0
        self._kill_at: float | None = None
        self._selector = selectors.DefaultSelector()
        self._woken, self._wakes = socket.socketpair()

    def run(self) -> None:
        self._woken.setblocking(False)
        self._wakes.setblocking(False)
        signal.set_wakeup_fd(self._wakes.fileno(), warn_on_full_buffer=False)
        for number in _SIGNALS:
            signal.signal(number, lambda *_: None)  # the byte at the wake-up descriptor says which
        self._selector.register(self._woken, selectors.EVENT_READ, lambda events: self._on_signals())
        if (launcher := self._link.fileno()) >= 0:
            self._selector.register(launcher, selectors.EVENT_READ, partial(self._on_launcher, launcher))
        self._starts = [0.0] * self._num
        while self._workers or self._starts:
            self._start_due()
            for key, events in self._selector.select(self._wait_s()):
                key.data(events)
        if self._failure:
            raise StartupError(self._failure)

    def _wait_s(self) -> float | None:
        times = [*self._starts, *([] if self._kill_at is None else [self._kill_at])]
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _start_due(self) -> None:
        now = time.monotonic()
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_at = None
            for worker in self._workers.values():
                self._kill(worker, f"it did not stop within {SHUTDOWN_DEADLINE_S:g} s")
        for at in [at for at in self._starts if at <= now]:
            self._starts.remove(at)
            self._start()

    # -- workers -------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._last_number += 1
        ours, theirs = socket.socketpair()
        # Until the child has its own handlers, a signal there must not wake the parent.
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        pid = os.fork()
        if pid == 0:
            self._become_worker(ours)
            raise _IsWorker(Seat(self._last_number, theirs, self._ended_metrics))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        theirs.close()
        ours.setblocking(False)
        worker = self._workers[self._last_number] = _Worker(self._last_number, pid, ours)
        self._selector.register(ours, selectors.EVENT_READ, partial(self._on_events, worker))

    def _become_worker(self, ours: socket.socket) -> None:
        signal.set_wakeup_fd(-1)
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        # Another worker would not see the parent's end while this one holds the parent's side.
        for each in (ours, self._woken, self._wakes, *(worker.socket for worker in self._workers.values())):
            each.close()
        self._selector.close()
        self._link.close()

    def _on_events(self, worker: _Worker, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._flush(worker)
        if events & selectors.EVENT_READ:
            self._read(worker)

    def _read(self, worker: _Worker) -> bool:
        """Take in what a worker has sent; return whether there may be more."""
        try:
            data = worker.socket.recv(1 << 18)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:  # it is about to end, as SIGCHLD will say
            with contextlib.suppress(KeyError):
                self._selector.unregister(worker.socket)
            worker.is_there = False
            return False
        try:
            for frame in worker.frames.feed(data):
                self._take(worker, frame)
        except ValueError as error:
            self._kill(worker, str(error))
        return True

    def _take(self, worker: _Worker, frame: Frame) -> None:
        match frame.kind:
            case Kind.TELL | Kind.ASK:
                self._send_all(frame._replace(worker=worker.number), but=worker)
            case Kind.ANSWER | Kind.STATE:
                if (to := self._workers.get(frame.worker)) is not None and to.is_there:
                    self._send(to, frame._replace(worker=worker.number).encoded())
            case Kind.METRICS:
                worker.metrics = frame.payload
            case Kind.DRAIN:
                self._drain()
            case Kind.REPORT:
                worker.facts |= orjson.loads(frame.payload)
                self._reported(worker)
            case _:
                raise ValueError(f"a frame of kind {frame.kind.name} from a worker")

    def _reported(self, worker: _Worker) -> None:
        if (why := worker.facts.get("failed")) is not None and not self._is_announced:
            self._fail(str(why))
        if "listening" in worker.facts and not worker.is_there:
            for other in self._workers.values():
                if other.is_there:
                    self._send(other, Frame(Kind.STARTED, worker=worker.number).encoded())
                    self._send(worker, Frame(Kind.STARTED, worker=other.number).encoded())
            worker.is_there = True
            if self._is_draining:
                self._send(worker, Frame(Kind.DRAIN).encoded())
        there = [each for each in self._workers.values() if each.is_there]
        if not self._is_announced and len(there) == self._num:
            self._is_announced = True
            self._announce()
        if not self._is_ready and len(there) == self._num and all(each.facts.get("ready") for each in there):
            self._is_ready = True
            self._link.report(ready=True)
        if self._is_draining:
            self._stop_if_drained()
        elif worker.facts.get("drained"):  # only this worker got a signal: another one takes its place
            self._send(worker, Frame(Kind.STOP).encoded())

    def _send_all(self, frame: Frame, but: _Worker | None = None) -> None:
        encoded = frame.encoded()
        for worker in list(self._workers.values()):
            if worker is not but and worker.is_there:
                self._send(worker, encoded)

    def _send(self, worker: _Worker, encoded: bytes) -> None:
        worker.unread += encoded
        self._flush(worker)
        if len(worker.unread) > MAX_UNREAD:
            self._kill(worker, f"it has left {len(worker.unread)} bytes unread")

    def _flush(self, worker: _Worker) -> None:
        try:
            while worker.unread:
                del worker.unread[: worker.socket.send(memoryview(worker.unread)[: 1 << 18])]
        except BlockingIOError:
            pass
        except OSError:
            worker.unread.clear()  # it is about to end
        key = self._selector.get_map().get(worker.socket)
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.unread else 0)
        if key is not None and key.events != events:
            self._selector.modify(worker.socket, events, key.data)

    def _kill(self, worker: _Worker, why: str) -> None:
        logger.error("ending worker process %d: %s", worker.pid, why)
        worker.is_there = False
        worker.unread.clear()
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.pid, signal.SIGKILL)

    # -- ends ----------------------------------------------------------------------------------------

    def _on_signals(self) -> None:
        numbers = self._woken.recv(4096)
        if signal.SIGCHLD in numbers:
            for worker in list(self._workers.values()):
                pid, status = os.waitpid(worker.pid, os.WNOHANG)
                if pid:
                    self._ended(worker, os.waitstatus_to_exitcode(status))
        for number in numbers:
            if number != signal.SIGCHLD:
                self._on_stop_signal(number)

    def _on_stop_signal(self, number: int) -> None:
        self._num_signals += 1
        if self._num_signals > 2:
            for worker in self._workers.values():
                self._kill(worker, "a third signal ends the router")
            leave_now(128 + number)
        if self._num_signals == 1:
            self._drain()
        else:
            self._stop()

    def _on_launcher(self, launcher: int, events: int) -> None:
        self._selector.unregister(launcher)
        self._stop()

    def _drain(self) -> None:
        if not self._is_draining:
            self._is_draining = True
            self._starts.clear()
            for listener in self._listeners:
                listener.close()
            self._send_all(Frame(Kind.DRAIN))

    def _stop_if_drained(self) -> None:
        """Stop the workers as soon as none has anything to do."""
        if self._workers and all(worker.facts.get("drained") for worker in self._workers.values()):
            self._stop()

    def _stop(self) -> None:
        self._drain()
        self._kill_at = time.monotonic() + SHUTDOWN_DEADLINE_S
        for worker in self._workers.values():
            self._send(worker, Frame(Kind.STOP).encoded())

    def _fail(self, why: str) -> None:
        self._failure = self._failure or why
        self._stop()

    def _ended(self, worker: _Worker, status: int) -> None:
        while self._read(worker):  # what it sent before, such as the counts that a scrape has just shown
            pass
        del self._workers[worker.number]
        with contextlib.suppress(KeyError):
            self._selector.unregister(worker.socket)
        worker.socket.close()
        if self._is_draining:
            self._stop_if_drained()
            return
        if not self._is_announced:
            self._fail(
                worker.facts.get("failed") or f"a worker process ended with status {status} at its start"
            )
            return
        # What a scrape has shown must not be taken back: Prometheus would take that for a restart.
        self._ended_metrics = merged_metrics([self._ended_metrics, worker.metrics], only_counts=True)
        self._send_all(Frame(Kind.ENDED, self._ended_metrics, worker.number))
        is_early = time.monotonic() - worker.began < LIVED_S
        self._delay_s = min(LONGEST_DELAY_S, max(FIRST_DELAY_S, 2 * self._delay_s)) if is_early else 0.0
        logger.error(
            "worker process %d ended with status %d, and its requests with it; starting another one in %g s",
            *(worker.pid, status, self._delay_s),
        )
        self._starts.append(time.monotonic() + self._delay_s)
