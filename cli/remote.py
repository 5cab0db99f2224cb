"""The far end of `kvferry doctor --peer`: `kvferry doctor --listen` opens one path after another on request.

Both sides talk JSON, one object per line, over a TCP connection of their own:

    listener   {"doctor": 1, "kvferry": version, "host": this kernel, "paths": [names]}
    client     {"open": name, "pool_bytes": N}
    listener   {"address": …}, or {"status": …, "reason": …} if the path does not work there

The path stays open until the client closes the connection. A listener serves a pattern of numbers and nothing else, to any
client that reaches it, and bounds what clients may ask for.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from kvferry.transports.auto.address import this_host
from kvferry.transports.checked import Refused, json_of, shown
from kvferry.transports.network import listen_on

from .errors import CommandError, UsageError
from .path_table import PATHS, Path
from .paths import TIMEOUT_S, Source, at_host, outcome_of
from .version import versions

PROTOCOL: Final = 1
MAX_POOL_BYTES: Final = 256 << 20

#: The other side imports the transport first.
_OPEN_TIMEOUT_S: Final = 60.0

_MAX_CLIENTS: Final = 4
_MAX_LINE_BYTES: Final = 64 << 10

#: A client that keeps a path open for longer is cut off, so that it cannot keep others away.
_LONGEST_S: Final = 600.0


def parse_host_port(text: str, option: str) -> tuple[str, int]:
    """Read `HOST:PORT`, with brackets around an IPv6 address.

    Raises:
        UsageError: it is malformed.
    """
    host, colon, port = text.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not colon or not bare or not port.isdecimal() or int(port) > 65535 or (":" in bare and bare == host):
        raise UsageError(f"{option} must be HOST:PORT, with brackets around an IPv6 address; got {text!r}")
    return bare, int(port)


class _Lines:
    """JSON objects, one per line, over a socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._rest = b""

    def send(self, message: Mapping[str, object]) -> None:
        self._sock.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
        """Return the next object. Raises ValueError: the other side is no doctor. Raises OSError: it is gone."""
        until = time.monotonic() + timeout_s  # of the whole line, however its bytes drip in
        while b"\n" not in self._rest:
            if len(self._rest) > _MAX_LINE_BYTES:
                raise ValueError("the line is too long")
            left_s = until - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(f"timed out after {timeout_s:g} s waiting for the end of a line")
            self._sock.settimeout(left_s)
            data = self._sock.recv(4096)
            if not data:
                raise ConnectionError("the other side closed the connection")
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        try:
            message = json_of(line)
        except Refused as error:
            raise ValueError(error.text("the line")) from error
        if not isinstance(message, dict):
            raise ValueError("it is no JSON object")  # noqa: TRY004 - of the peer, not of the caller
        return message


# == the listener ==================================================================================


class Listener:
    """Serves clients until `close`, each in a thread of its own.

    Attributes:
        address: Where it listens, `(host, port)`.
    """

    def __init__(
        self,
        host: str,
        port: int,
        path_of: Callable[[str], Path],
        log: Callable[[str], None] = lambda _: None,
        port_range: str = "",
    ) -> None:
        """Listen.

        Args:
            path_of: Finds a path by its name.
            log: Called with a line about each path that a client opens.
            port_range: Ports for the paths themselves; empty lets the system choose.

        Raises:
            ConfigurationError: the host is not ours, or the port is taken.
        """
        self._path_of = path_of
        self._log = log
        self._port_range = port_range
        self._is_closed = threading.Event()
        self._serving = threading.Lock()
        self._free = threading.Semaphore(_MAX_CLIENTS)
        self._threads: list[threading.Thread] = []
        self._socket = listen_on(host, range(port, port + 1))
        self._socket.settimeout(0.1)
        self.address = self._socket.getsockname()[:2]

    def serve(self) -> None:
        """Accept clients until `close` is called from another thread, or an exception ends it."""
        with self._serving:
            while not self._is_closed.is_set():
                with contextlib.suppress(TimeoutError):
                    sock, peer = self._socket.accept()
                    self._start(sock, str(peer[0]))

    def _start(self, sock: socket.socket, peer: str) -> None:
        if not self._free.acquire(blocking=False):
            sock.close()
            return
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = threading.Thread(target=self._serve, args=(sock, peer), daemon=True)
        self._threads.append(thread)
        thread.start()

    def close(self) -> None:
        """Stop listening and close all paths."""
        self._is_closed.set()
        with self._serving:  # the socket's number must not be used again while `serve` still waits for it
            self._socket.close()
        for thread in self._threads:
            thread.join()

    def _serve(self, sock: socket.socket, peer: str) -> None:
        try:
            with sock, contextlib.suppress(OSError, ValueError):
                sock.settimeout(TIMEOUT_S)
                self._talk(sock, peer)
        finally:
            self._free.release()

    def _talk(self, sock: socket.socket, peer: str) -> None:
        lines = _Lines(sock)
        greeting = {
            "doctor": PROTOCOL,
            "kvferry": versions()["kvferry"],
            "host": this_host(),
            "paths": list(PATHS),
        }
        lines.send(greeting)
        question = lines.receive()
        name, pool_bytes = question.get("open"), question.get("pool_bytes")
        if (
            not isinstance(name, str)
            or name not in PATHS
            or not isinstance(pool_bytes, int)
            or not 4096 <= pool_bytes <= MAX_POOL_BYTES
        ):
            lines.send({"status": "failed", "reason": f"malformed request {shown(question)}"})
            return
        # The address at which this client reached us, so that a listener on every interface works as well.
        path = at_host(self._path_of(name), _plain(sock.getsockname()[0]), self._port_range)
        try:
            source = Source(path, pool_bytes)
        except Exception as error:  # noqa: BLE001 - the client reports it
            outcome = outcome_of(name, error)
            self._log(f"{peer}: {name}: {outcome.status}: {outcome.reason}")
            lines.send({"status": outcome.status, "reason": f"on the other side: {outcome.reason}"})
            return
        try:
            self._log(f"{peer}: {name}: serving at {source.address}")
            lines.send({"address": source.address})
            until = time.monotonic() + _LONGEST_S
            source.serve_until(
                lambda: self._is_closed.is_set() or _was_closed(sock) or time.monotonic() > until
            )
        finally:
            source.close()


def _plain(host: str) -> str:
    """Return an IPv4 address that came in IPv6's form as IPv4."""
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped) if mapped else host


def _was_closed(sock: socket.socket) -> bool:
    """Return whether the other side closed: a client sends nothing more, so whatever arrives is the end."""
    return bool(select.select([sock], [], [], 0)[0])


# == the client ====================================================================================


@dataclass(frozen=True)
class Opened:
    """A path that is open on the other side for as long as `connection` is.

    Attributes:
        address: Where it serves; empty if the path does not work there.
        status, reason: Then: why.
    """

    connection: socket.socket
    address: str
    status: str = ""
    reason: str = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()


@dataclass(frozen=True)
class RemoteDoctor:
    """A listener, as it introduced itself.

    Attributes:
        is_same_host: Whether it runs on the same kernel, for example in another container.
    """

    host: str
    port: int
    version: str
    is_same_host: bool
    paths: tuple[str, ...]

    @classmethod
    def find(cls, host: str, port: int) -> RemoteDoctor:
        """Read the greeting of a listener. Raises CommandError: none answers there."""
        sock, greeting = _dial(host, port)
        sock.close()
        paths = greeting.get("paths")
        if not isinstance(paths, list):
            raise CommandError(_gone(host, port, ValueError("it lists no paths")))
        is_same_host = greeting.get("host") == this_host()
        return cls(host, port, str(greeting.get("kvferry")), is_same_host, tuple(map(str, paths)))

    def open(self, name: str, pool_bytes: int) -> Opened:
        """Open a path there. Raises CommandError: the listener is gone."""
        sock, _ = _dial(self.host, self.port)
        try:
            lines = _Lines(sock)
            lines.send({"open": name, "pool_bytes": pool_bytes})
            answer = lines.receive(_OPEN_TIMEOUT_S)
        except (OSError, ValueError) as error:
            sock.close()
            raise CommandError(_gone(self.host, self.port, error)) from error
        return Opened(
            sock, str(answer.get("address", "")), str(answer.get("status", "")), str(answer.get("reason", ""))
        )


def _gone(host: str, port: int, error: Exception) -> str:
    return (
        f"cannot talk to a doctor at {host}:{port}: {error}; "
        f"run `kvferry doctor --listen {host}:{port}` there, and let the port through the firewall"
    )


def _dial(host: str, port: int) -> tuple[socket.socket, dict[str, Any]]:
    try:
        sock = socket.create_connection((host, port), timeout=TIMEOUT_S)
    except OSError as error:
        raise CommandError(_gone(host, port, error)) from error
    try:
        greeting = _Lines(sock).receive()
        if greeting.get("doctor") != PROTOCOL:
            raise ValueError(
                f"it speaks version {greeting.get('doctor')!r} of the doctor's protocol, not {PROTOCOL}"
            )
    except (OSError, ValueError) as error:
        sock.close()
        raise CommandError(_gone(host, port, error)) from error
    return sock, greeting
