"""Unix sockets that carry frames and descriptors. Nothing here blocks."""

from __future__ import annotations

import array
import errno
import fcntl
import os
import secrets
import socket
import stat
import struct

from .._frames import RECEIVE_BYTES, FrameSocket, encode_frame
from ..errors import (
    ConfigurationError,
    PeerLostError,
    PeerRefusedError,
    ProtocolError,
)
from .hello import FRAME_LIMITS, MAX_FILES, FrameKind

__all__ = ["Connection", "Listener", "connect", "new_address", "parse_address"]

_CREDENTIALS = struct.Struct("3i")
_ANCILLARY_BYTES = socket.CMSG_SPACE((1 + MAX_FILES) * array.array("i").itemsize)


def new_address(socket_dir: str) -> str:
    """An address that nobody has: without a name in the file system, or a new file in `socket_dir`."""
    name = f"kvferry-{os.getpid()}-{secrets.token_hex(8)}"
    return f"shm://{os.path.abspath(socket_dir)}/{name}.sock" if socket_dir else f"shm://@{name}"


def parse_address(address: str) -> str:
    """Turn `shm://@name` or `shm:///absolute/path` into what the socket calls take.

    Raises:
        ConfigurationError: it is neither, or longer than a socket's name can be.
    """
    scheme, separator, name = address.partition("://")
    if scheme != "shm" or not separator or name[:1] not in ("@", "/") or len(name) < 2 or "\0" in name:
        raise ConfigurationError(
            f"not a shm address: {address!r}; they look like shm://@name or shm:///folder/name.sock",
            key="address",
            value=address,
        )
    if len(os.fsencode(name)) > 107:
        raise ConfigurationError(
            f"a socket's name has at most 107 bytes: {name!r}", key="address", value=address
        )
    return "\0" + name[1:] if name[0] == "@" else name


class Connection(FrameSocket):
    """One socket to a peer, which brings descriptors with its first frame.

    Attributes:
        pid, uid: The peer, as the kernel says: when it connected, or when it began to listen.
    """

    def __init__(self, sock: socket.socket, max_queued_bytes: int) -> None:
        super().__init__(sock, FRAME_LIMITS, max_queued_bytes)
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        self.pid, self.uid, _ = _CREDENTIALS.unpack(credentials)
        self._takes_descriptors = True
        self._descriptors: list[int] = []

    def require_user(self, allowed_uids: frozenset[int]) -> None:
        """Raises PeerRefusedError: the peer runs as none of the users."""
        if self.uid not in allowed_uids:
            raise PeerRefusedError(
                f"process {self.pid} runs as user {self.uid}; allowed: {sorted(allowed_uids)}"
            )

    def send_hello(self, body: bytes, descriptors: list[int]) -> None:
        """Send the first frame, with descriptors. Raises PeerLostError: the peer is gone."""
        frame = encode_frame(FrameKind.HELLO, body)
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
        try:
            sent = self._socket.sendmsg([frame], [rights])
        except OSError as error:
            raise PeerLostError(f"the peer closed the connection: {error}") from error
        self._unsent += frame[sent:]

    def _receive_some(self) -> bytes:
        if not self._takes_descriptors:
            return super()._receive_some()  # the kernel closes descriptors that nobody asked for
        data, ancillary, flags, _ = self._socket.recvmsg(
            RECEIVE_BYTES, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
        )
        for level, kind, payload in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                received = array.array("i")
                received.frombytes(payload[: len(payload) - len(payload) % received.itemsize])
                self._descriptors += received
        if flags & socket.MSG_CTRUNC or len(self._descriptors) > 1 + MAX_FILES:
            raise ProtocolError("the peer sent more descriptors than a hello has")
        return data

    def take_descriptors(self) -> list[int]:
        """The descriptors received so far, which the caller now owns; later ones are refused."""
        self._takes_descriptors = False
        descriptors, self._descriptors = self._descriptors, []
        return descriptors

    def close(self) -> None:
        super().close()
        for descriptor in self.take_descriptors():
            os.close(descriptor)


def connect(address: str, max_queued_bytes: int) -> Connection:
    """Connect to a listener.

    Raises:
        ConfigurationError: the address is malformed.
        PeerLostError: nobody listens there, or it has as many unanswered connections as the system allows.
        PeerRefusedError: the socket's file may not be opened by us.
    """
    name = parse_address(address)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        sock.connect(name)
        return Connection(sock, max_queued_bytes)
    except OSError as error:
        sock.close()
        kind = PeerRefusedError if error.errno in (errno.EACCES, errno.EPERM) else PeerLostError
        raise kind(f"cannot connect to {address}: {error}") from error


class Listener:
    """A bound socket. If it has a file, only this user may connect, unless `is_shared`; `close` removes it."""

    def __init__(self, address: str, max_queued_bytes: int, *, is_shared: bool) -> None:
        """Bind and listen.

        Raises:
            ConfigurationError: the address is malformed, taken, or not ours to bind.
        """
        self.address = address
        self._max_queued_bytes = max_queued_bytes
        self._path = parse_address(address)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            self._inode = self._bind(is_shared)
            self._socket.listen(4096)
        except OSError as error:
            self._socket.close()
            why = "address in use" if error.errno == errno.EADDRINUSE else f"cannot listen: {error}"
            raise ConfigurationError(f"{why}: {address}", key="address", value=address) from error

    def _bind(self, is_shared: bool) -> int:
        if self._path[0] == "\0":
            self._socket.bind(self._path)
            return 0
        folder = os.open(os.path.dirname(self._path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            # Two that find the same dead socket must not both replace it.
            fcntl.flock(folder, fcntl.LOCK_EX)
            _remove_if_dead(self._path)
            self._socket.bind(self._path)
            os.chmod(self._path, 0o666 if is_shared else 0o600)
            return os.stat(self._path).st_ino
        finally:
            os.close(folder)

    def fileno(self) -> int:
        return self._socket.fileno()

    def accept(self) -> Connection:
        """See `_accepting.Listening`."""
        sock, _ = self._socket.accept()
        return Connection(sock, self._max_queued_bytes)

    def close(self) -> None:
        """Stop listening, and remove the file if it is still ours."""
        self._socket.close()
        if self._inode:
            try:
                if os.stat(self._path).st_ino == self._inode:
                    os.unlink(self._path)
            except FileNotFoundError:
                pass


def _remove_if_dead(path: str) -> None:
    """Remove a socket's file that nobody listens at. Anything else stays, and binding says so."""
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
            probe.connect(path)
    except ConnectionRefusedError:
        os.unlink(path)
    except (FileNotFoundError, BlockingIOError):
        return
