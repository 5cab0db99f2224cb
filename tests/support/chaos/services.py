"""Processes that die and come back at the address that they had."""

from __future__ import annotations

import contextlib
import select
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from reference.demo.launcher import LaunchedProcess, Launcher, LaunchError, Spawn

#: A node ends within this after SIGTERM: what it lets its requests and its engine have, and a busy machine's share.
END_TIMEOUT_S = 30.0
#: Two routers ask a node for its health.
NUM_PASSING_DESCRIPTORS = 2


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """A port that only those get who ask for it by number; they can listen there while it is reserved."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


@dataclass(frozen=True)
class Holdings:
    """What a process holds of the machine: threads, descriptors, mappings of shared memory."""

    num_threads: int
    num_descriptors: int
    num_segments: int

    def is_within(self, other: Self) -> bool:
        """Whether it is no more than the other; but for descriptors of requests that are just then answered."""
        return (
            self.num_threads <= other.num_threads
            and self.num_descriptors <= other.num_descriptors + NUM_PASSING_DESCRIPTORS
            and self.num_segments <= other.num_segments
        )


class Service:
    """A process's service in a fleet: its name, its command, its port. Who fills it changes.

    Args:
        folder: Where its socket is, if it has one in the file system; moved away while the service is cut off.
    """

    def __init__(
        self, name: str, spawn: Spawn, script: str, arguments: tuple[str, ...], port: int, folder: Path
    ) -> None:
        self.name = name
        self.port = port
        self._spawn = spawn
        self._command = (script, *arguments, "--port", str(port))
        self._folder = folder
        self._life: Launcher
        self.process: LaunchedProcess
        self._num_lives = 0
        self._ended_logs: list[str] = []

    def start(self) -> None:
        """Fill the service. Returns at once."""
        self._life = Launcher(self._spawn)
        self._num_lives += 1
        self.process = self._life.start(f"{self.name} ({self._num_lives})", *self._command)

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until whoever fills it serves.

        Raises:
            LaunchError: it failed, ended, or did not within `timeout_s`.
        """
        self._life.wait_ready([self.process], timeout_s)

    @property
    def logs(self) -> str:
        """What all who filled it wrote at last."""
        return "\n".join((*self._ended_logs, self._last_words))

    @property
    def _last_words(self) -> str:
        return f"--- {self.process.name}\n{self.process.log_tail}"

    def require_alive(self) -> None:
        """See that nobody but us ended it.

        Raises:
            LaunchError: it has ended.
        """
        if not self.process.is_running:
            raise LaunchError(f"{self.process.name} ended by itself; its log:\n{self.process.log_tail}")

    # -- faults ----------------------------------------------------------------------------------------

    def kill(self) -> None:
        self.process.kill()
        self._note_end()

    def terminate(self) -> None:
        """Ask it to end, as a service manager would."""
        self.process.terminate()

    def await_end(self) -> None:
        """Wait for the end of what was asked to end.

        Raises:
            LaunchError: it did not end, or not as it should.
        """
        status = self.process.wait(END_TIMEOUT_S)
        if status not in (0, -signal.SIGTERM):  # the latter where it had hardly begun
            raise LaunchError(f"{self.process.name} ended with {status}; its log:\n{self.process.log_tail}")
        self._note_end()

    def pause(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def cut_off(self) -> None:
        """Let nobody connect to its socket; one that has not come up yet is spared."""
        if self._serves():
            self._folder.rename(self._cut_folder)

    def join_again(self) -> None:
        """Undo `cut_off`."""
        if self._cut_folder.exists():
            self._cut_folder.rename(self._folder)

    def _serves(self) -> bool:
        while select.select([self.process], [], [], 0)[0]:
            self.process.read_report()
        return self.process.is_ready

    @property
    def _cut_folder(self) -> Path:
        return self._folder.with_name(f"{self._folder.name}-cut")

    # -- what it holds ---------------------------------------------------------------------------------

    def holdings(self) -> Holdings:
        """What the process holds."""
        root = Path(f"/proc/{self.process.pid}")
        mapped = (root / "maps").read_text().splitlines()
        return Holdings(
            num_threads=sum(1 for _ in (root / "task").iterdir()),
            num_descriptors=sum(1 for _ in (root / "fd").iterdir()),
            num_segments=sum("/memfd:" in line for line in mapped),
        )

    def close(self) -> None:
        """End the process, politely at first."""
        self._life.close()

    def _note_end(self) -> None:
        self._ended_logs.append(self._last_words)
        self._life.close()
