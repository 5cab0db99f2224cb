"""The far end of `kvferry doctor --peer`: `kvferry doctor --listen` opens one path after another on request.

Both sides talk JSON, one object per line, over a TCP connection of their own:

    listener   {"doctor": 1, "kvferry": version, "host": this kernel, "paths": [names]}
    client     {"open": name, "pool_bytes": N}
    listener   {"address": …}, or {"status": …, "reason": …} if the path does not work there

The path stays open until the client closes the connection. A listener serves a pattern of numbers and nothing
else, to any client that reaches it, and bounds what clients may ask for.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvferry.lab.versions import versions
from kvferry.transports.auto.address import this_host
from kvferry.transports.checked import Refused, json_of, shown
from kvferry.transports.network import listen_on

from .contender import TIMEOUT_S, FailedError
from .ends import Source
from .paths import PATHS, Path, at_host
from .processes import ANSWER_TIMEOUT_S

PROTOCOL: Final = 1
MAX_POOL_BYTES: Final = 256 << 20

_MAX_CLIENTS: Final = 4
_MAX_LINE_BYTES: Final = 64 << 10

#: A client that keeps a path open for longer is cut off, so that it cannot keep others away.
_LONGEST_S: Final = 600.0


class NoDoctorError(Exception):
    """No doctor answers where one should listen."""


class _Lines:
    """JSON objects, one per line, over a socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._rest = b""

    def send(self, message: Mapping[str, object]) -> None:
        self._sock.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
        """Return the next object.

        Raises ValueError: the other side is no doctor. Raises OSError: it is gone.
        """
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
        self._free = threading.Semaphore(_MAX_CLIENTS)
        self._socket = listen_on(host, range(port, port + 1))
        self._socket.settimeout(0.1)
        self.address = self._socket.getsockname()[:2]

    def serve(self) -> None:
        """Accept clients until `close` is called from another thread, or an exception ends it.

        Then all paths are closed.
        """
        threads: list[threading.Thread] = []
        try:
            while not self._is_closed.is_set():
                with contextlib.suppress(TimeoutError):
                    sock, peer = self._socket.accept()
                    if not self._free.acquire(blocking=False):
                        sock.close()
                        continue
                    threads = [thread for thread in threads if thread.is_alive()]
                    threads.append(
                        threading.Thread(target=self._serve, args=(sock, str(peer[0])), daemon=True)
                    )
                    threads[-1].start()
        finally:
            self._is_closed.set()
            self._socket.close()
            for thread in threads:
                thread.join()

    def close(self) -> None:
        """Have `serve` end."""
        self._is_closed.set()

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
            why = FailedError.of(error)
            status = "missing" if why.is_missing else "failed"
            self._log(f"{peer}: {name}: {status}: {why}")
            lines.send({"status": status, "reason": f"on the other side: {why}"})
            return
        with contextlib.closing(source):
            self._log(f"{peer}: {name}: serving at {source.address}")
            lines.send({"address": source.address})
            until = time.monotonic() + _LONGEST_S
            # A client sends nothing more, so whatever arrives is the end.
            source.serve_until(
                lambda: (
                    self._is_closed.is_set()
                    or bool(select.select([sock], [], [], 0)[0])
                    or time.monotonic() > until
                )
            )


def _plain(host: str) -> str:
    """Return an IPv4 address that came in IPv6's form as IPv4."""
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped) if mapped else host


# == the client ====================================================================================


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
        """Read the greeting of a listener. Raises NoDoctorError: none answers there."""
        sock, _, greeting = _dial(host, port)
        sock.close()
        paths = greeting.get("paths")
        if not isinstance(paths, list):
            raise _gone(host, port, ValueError("it lists no paths"))
        is_same_host = greeting.get("host") == this_host()
        return cls(host, port, str(greeting.get("kvferry")), is_same_host, tuple(map(str, paths)))

    @contextlib.contextmanager
    def open(self, name: str, pool_bytes: int) -> Iterator[str]:
        """Open a path there; within the context it serves at the address that this yields.

        Raises:
            NoDoctorError: the listener is gone.
            FailedError: the path does not work there.
        """
        sock, lines, _ = _dial(self.host, self.port)
        with sock:
            try:
                lines.send({"open": name, "pool_bytes": pool_bytes})
                answer = lines.receive(ANSWER_TIMEOUT_S)
            except (OSError, ValueError) as error:
                raise _gone(self.host, self.port, error) from error
            if not answer.get("address"):
                raise FailedError(str(answer.get("reason", "")), answer.get("status") == "missing")
            yield str(answer["address"])


def _gone(host: str, port: int, error: Exception) -> NoDoctorError:
    return NoDoctorError(
        f"cannot talk to a doctor at {host}:{port}: {error}; "
        f"run `kvferry doctor --listen {host}:{port}` there, and let the port through the firewall"
    )


def _dial(host: str, port: int) -> tuple[socket.socket, _Lines, dict[str, Any]]:
    with contextlib.ExitStack() as opened:
        try:
            sock = opened.enter_context(socket.create_connection((host, port), timeout=TIMEOUT_S))
            lines = _Lines(sock)
            greeting = lines.receive()
            if greeting.get("doctor") != PROTOCOL:
                raise ValueError(
                    f"it speaks version {greeting.get('doctor')!r} of the doctor's protocol, not {PROTOCOL}"
                )
        except (OSError, ValueError) as error:
            raise _gone(host, port, error) from error
        opened.pop_all()
        return sock, lines, greeting
