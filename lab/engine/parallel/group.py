"""Start the worker processes of one engine, wait for their replies, notice when one dies, and stop them."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import TypeVar

from ....transports.errors import ConfigurationError
from ..errors import EngineDeadError
from ..types import TransferHealth
from .channel import Channel
from .messages import Failed, Stop

#: Seconds without progress after which sending to a worker, or receiving the rest of a message from it,
#: fails.
LINK_TIMEOUT_S = 30.0
#: Seconds that workers have to shut their connectors down before they are killed.
STOP_GRACE_S = 8.0
#: Seconds to wait for the exit status of a process whose link broke, because the status shows why.
EXIT_STATUS_WAIT_S = 1.0

Reply = TypeVar("Reply")


class WorkerProcess:
    """The process of one rank. It exits when this process ends, because that closes its link."""

    def __init__(self, rank: int, rendezvous_fd: int) -> None:
        self.rank = rank
        ours, theirs = socket.socketpair()
        self.channel = Channel(ours)
        self.channel.set_timeout(LINK_TIMEOUT_S)
        with theirs, contextlib.ExitStack() as on_failure:
            on_failure.callback(self.channel.close)
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "kvferry.lab.engine.parallel.worker",
                    str(theirs.fileno()),
                    str(rendezvous_fd),
                ],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), rendezvous_fd),
                env={
                    **os.environ,  # Whatever this process could import, such as a connector in the user's folder, the worker can.
                    "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                },
            )
            on_failure.pop_all()

    @property
    def pid(self) -> int:
        return self._process.pid

    def exit_status(self, within_s: float) -> int | None:
        """Wait at most `within_s` for the process to end.

        Returns:
            Its exit status, or the negative number of the signal that killed it. None if it still runs.
        """
        try:
            return self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            return None

    def describe_end(self, status: int) -> str:
        """Say how the process ended, for a message."""
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        return f"the worker process of rank {self.rank} ({self.pid}) {how}"

    def kill(self) -> None:
        """Kill the process and close its link. Idempotent."""
        self._process.kill()
        self._process.wait()
        self.channel.close()


class WorkerGroup:
    """The processes of all ranks of one engine. If one ends, the others are killed."""

    def __init__(self, num_ranks: int) -> None:
        rendezvous_fd = os.memfd_create("kvferry-rendezvous")
        self.workers: list[WorkerProcess] = []
        self._transfer_health: dict[int, TransferHealth] = {}  # by rank: the last report between steps
        try:
            for rank in range(num_ranks):
                self.workers.append(WorkerProcess(rank, rendezvous_fd))
        except OSError:
            self.kill()
            raise
        finally:
            os.close(rendezvous_fd)

    def ask(self, messages: Sequence[object], kind: type[Reply], timeout_s: float) -> list[Reply]:
        """Send each rank its message, and wait for all replies.

        Returns:
            The replies, by rank.

        Raises:
            ConfigurationError: a rank refused its settings. All ranks were killed.
            EngineDeadError: a rank ended, failed, or did not reply in time. All ranks were killed.
        """
        try:
            for worker, message in zip(self.workers, messages, strict=True):
                self._send(worker, message)
            return self._gather(kind, time.monotonic() + timeout_s)
        except (EngineDeadError, ConfigurationError):
            self.kill()
            raise

    def check(self) -> TransferHealth:
        """Check that all ranks still run. Call this only between steps, when no reply is due.

        Returns:
            The health of their connectors. If several ranks report a problem, the lowest rank's text is used.

        Raises:
            EngineDeadError: a rank has ended. All ranks were killed.
        """
        for worker in self.workers:
            if (status := worker.exit_status(within_s=0.0)) is not None:
                self.kill()
                raise EngineDeadError(worker.describe_end(status))
        try:
            self._receive_health()
        except EngineDeadError:
            self.kill()
            raise
        reports = [health for _, health in sorted(self._transfer_health.items())]
        errors, warnings = [health.error for health in reports], [health.warning for health in reports]
        return TransferHealth(next(filter(None, errors), ""), next(filter(None, warnings), ""))

    def _receive_health(self) -> None:
        """Receive the reports that ranks have sent between steps, without waiting for more."""
        with selectors.DefaultSelector() as selector:
            for worker in self.workers:
                selector.register(worker.channel, selectors.EVENT_READ, worker)
            while ready := selector.select(0):
                for key, _ in ready:
                    self._receive(key.data, TransferHealth)

    def stop(self) -> None:
        """Ask all ranks to shut down, and kill those that still run after `STOP_GRACE_S`. Idempotent."""
        # Ask all ranks before waiting for any, so that they shut down at the same time and share one
        # deadline.
        for worker in self.workers:
            with contextlib.suppress(EngineDeadError):
                self._send(worker, Stop())
        deadline = time.monotonic() + STOP_GRACE_S
        for worker in self.workers:
            worker.exit_status(max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """Kill all ranks. Idempotent."""
        for worker in self.workers:
            worker.kill()
        self.workers.clear()

    def _send(self, worker: WorkerProcess, message: object) -> None:
        try:
            worker.channel.send(message)
        except OSError as error:
            raise self._lost(worker, error) from error

    def _gather(self, kind: type[Reply], deadline: float) -> list[Reply]:
        replies: dict[int, Reply] = {}
        with selectors.DefaultSelector() as selector:
            for worker in self.workers:
                selector.register(worker.channel, selectors.EVENT_READ, worker)
            while len(replies) < len(self.workers):
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready and time.monotonic() >= deadline:
                    late = [worker.rank for worker in self.workers if worker.rank not in replies]
                    raise EngineDeadError(f"timed out waiting for the worker processes of ranks {late}")
                for key, _ in ready:
                    reply = self._receive(key.data, kind)
                    if reply is not None:
                        replies[key.data.rank] = reply
                        selector.unregister(key.fileobj)
        return [replies[worker.rank] for worker in self.workers]

    def _receive(self, worker: WorkerProcess, kind: type[Reply]) -> Reply | None:
        """Receive one message. Return None if it was a health report; the reply is then still to come."""
        try:
            reply = worker.channel.receive()
        except (EOFError, OSError, ValueError) as error:
            raise self._lost(worker, error) from error
        if isinstance(reply, Failed):
            raise self._failed(worker, reply)
        if isinstance(reply, TransferHealth):
            self._transfer_health[worker.rank] = reply
            return None
        assert isinstance(reply, kind), reply
        return reply

    def _lost(self, worker: WorkerProcess, error: Exception) -> EngineDeadError:
        status = worker.exit_status(EXIT_STATUS_WAIT_S)
        if status is not None:
            return EngineDeadError(worker.describe_end(status))
        return EngineDeadError(
            f"lost the link to the worker process of rank {worker.rank} ({worker.pid}): {error}"
        )

    def _failed(self, worker: WorkerProcess, failed: Failed) -> Exception:
        if failed.is_refusal:
            return ConfigurationError(failed.text, key=failed.key)
        # If one rank is killed, the others fail in their collective operations, and such a failure may arrive
        # first. The killed rank is the cause, so look for it and report it instead.
        for other in self.workers:
            status = other.exit_status(0.0 if other is worker else EXIT_STATUS_WAIT_S)
            if status is not None and status < 0:
                return EngineDeadError(other.describe_end(status))
        return EngineDeadError(f"the worker process of rank {worker.rank} failed: {failed.text}")
