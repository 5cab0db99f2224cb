"""Services: processes that are restarted at the same address."""

from __future__ import annotations

import contextlib
import signal
import socket
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from kvferry.lab.servers import LaunchedProcess, Launcher, LaunchError, Spawn

#: Seconds from SIGTERM to a node's end: its drain, its engine's shutdown, and a reserve for busy machines.
END_TIMEOUT_S = 30.0
#: The two routers' health checks may each have a connection open.
NUM_PASSING_DESCRIPTORS = 2


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """Reserve a port inside the block: the system gives it to no other process, but a process can listen on
    it by number.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


@dataclass(frozen=True)
class Holdings:
    """The threads, descriptors and shared-memory mappings of a process."""

    num_threads: int
    num_descriptors: int
    num_segments: int

    def is_within(self, other: Self) -> bool:
        """Whether each count is at most the other's, apart from the descriptors of health checks."""
        return (
            self.num_threads <= other.num_threads
            and self.num_descriptors <= other.num_descriptors + NUM_PASSING_DESCRIPTORS
            and self.num_segments <= other.num_segments
        )


class Service:
    """A name, a command and a port in a fleet, and the process that runs there.

    It keeps its port until it is closed: `with Service(...) as service: ...`.

    Args:
        folder: The folder of its socket file, if it has one. It is renamed while the service is cut off.
        logs: The folder for whole logs. None: only their ends are kept.
    """

    process: LaunchedProcess

    def __init__(
        self,
        name: str,
        spawn: Spawn,
        script: str,
        arguments: Sequence[str],
        folder: Path,
        logs: Path | None = None,
    ) -> None:
        self.name = name
        self._resources = ExitStack()
        self.port = self._resources.enter_context(reserved_port())
        self._command = (script, *arguments, "--port", str(self.port))
        self._folder = folder
        self._launcher = self._resources.enter_context(Launcher(spawn, logs))
        self._num_lives = 0
        self._ended_logs: list[str] = []

    def start(self) -> None:
        """Start a process. Returns at once."""
        self._num_lives += 1
        name = f"{self.name} ({self._num_lives})"
        if self._num_lives == 1:
            self.process = self._launch(self._launcher, name)
        else:
            self._ended_logs.append(self._log_tail)
            self.process.restart(name)

    def _launch(self, launcher: Launcher, name: str) -> LaunchedProcess:
        return launcher.start(name, *self._command)

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until the process is ready.

        Raises:
            LaunchError: It failed, ended, or was not ready within `timeout_s`.
        """
        self.process.wait_ready(timeout_s)

    @property
    def logs(self) -> str:
        """The ends of the logs of all its processes."""
        return "\n".join((*self._ended_logs, self._log_tail))

    @property
    def _log_tail(self) -> str:
        return f"--- {self.process.name}\n{self.process.log_tail}"

    def require_alive(self) -> None:
        """Check that the process runs.

        Raises:
            LaunchError: It ended by itself.
        """
        if not self.process.is_running:
            raise LaunchError(f"{self.process.name} ended by itself; its log:\n{self.process.log_tail}")

    # -- faults ----------------------------------------------------------------------------------------

    def kill(self) -> None:
        self.process.kill()

    def terminate(self) -> None:
        """Send SIGTERM, as a service manager would."""
        self.process.terminate()

    def await_end(self) -> None:
        """Wait for the end of a process after `terminate`.

        Raises:
            LaunchError: It did not end, or ended with another status than 0.
        """
        status = self.process.wait(END_TIMEOUT_S)
        # Killed by the signal if it had not installed its handler yet, of which vLLM's own parent process
        # says 143.
        if status not in (0, -signal.SIGTERM, 128 + signal.SIGTERM):
            raise LaunchError(f"{self.process.name} ended with {status}; its log:\n{self.process.log_tail}")

    def pause(self) -> None:
        self.process.freeze()

    def go_on(self) -> None:
        self.process.thaw()

    def cut_off(self) -> None:
        """Rename its socket's folder, so that no peer can connect. Do nothing if it is not ready yet."""
        self.process.read_reports()
        if self.process.is_ready:
            self._folder.rename(self._cut_folder)

    def join_again(self) -> None:
        """Undo `cut_off`."""
        if self._cut_folder.exists():
            self._cut_folder.rename(self._folder)

    @property
    def _cut_folder(self) -> Path:
        return self._folder.with_name(f"{self._folder.name}-cut")

    # -- resources -------------------------------------------------------------------------------------

    def holdings(self) -> Holdings:
        """Count the resources of the process and of those that it has started."""
        roots = [Path(f"/proc/{pid}") for pid in self.process.pids]
        mapped = [line for root in roots for line in (root / "maps").read_text().splitlines()]
        return Holdings(
            num_threads=sum(1 for root in roots for _ in (root / "task").iterdir()),
            num_descriptors=sum(1 for root in roots for _ in (root / "fd").iterdir()),
            num_segments=sum("/memfd:" in line for line in mapped),
        )

    def inventory(self) -> str:
        """Say what `holdings` counts, and the end of the log: for a report of a leak."""
        lines = []
        for pid in self.process.pids:
            root = Path(f"/proc/{pid}")
            threads = [(each / "comm").read_text().strip() for each in (root / "task").iterdir()]
            sockets = _tcp_sockets(root)
            kinds = Counter[str]()
            for descriptor in (root / "fd").iterdir():
                with contextlib.suppress(FileNotFoundError):  # health checks come and go
                    target = str(descriptor.readlink())
                    kinds[sockets.get(target, target.partition(":[")[0])] += 1
            lines += [f"{self.name}, process {pid}, threads {threads}, descriptors:"]
            lines += [f"  {count} x {kind}" for kind, count in kinds.most_common()]
        return "\n".join([*lines, self.process.log_tail])

    def close(self) -> None:
        """End the process, with SIGTERM first."""
        self._resources.close()

    def __enter__(self) -> Self:
        """Start it."""
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _tcp_sockets(root: Path) -> dict[str, str]:
    """Return what a descriptor of a TCP socket leads to → its ports and state, as the kernel writes them."""
    found = {}
    for line in (root / "net" / "tcp").read_text().splitlines()[1:]:
        words = line.split()
        local, remote = (int(word.partition(":")[2], 16) for word in words[1:3])
        found[f"socket:[{words[9]}]"] = f"TCP {local} to {remote}, state {words[3]}"
    return found
