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
from collections.abc import Callable

from .._descriptors import remedy
from ..errors import (
    BackpressureError,
    ConfigurationError,
    PeerLostError,
    PeerRefusedError,
    ProtocolError,
)
from ..outside import outside
from ..streams import FrameSocket
from .hello import FRAME_LIMITS, FrameKind

_CREDENTIALS = struct.Struct("3i")
_DESCRIPTOR_BYTES = array.array("i").itemsize


def new_address(socket_dir: str) -> str:
    """Make up an address that is not in use: without a file, or with a new file in `socket_dir`."""
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
    """One socket to a peer.

    During the handshake it is read frame by frame, so that descriptors are taken only with the frame that may
    bring them, and no more of them than `expect_descriptors` allows. A hostile peer could otherwise fill this
    process's table of descriptors.

    Attributes:
        pid, uid: Of the peer, as the kernel reports them: when it connected, or when it began to listen.
    """

    def __init__(self, sock: socket.socket, max_queued_bytes: int) -> None:
        # Without sums: the kernel copies what a Unix socket carries, as it copies everything else in this
        # machine's memory.
        super().__init__(sock, FRAME_LIMITS, max_queued_bytes, has_sums=False)
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        self.pid, self.uid, _ = _CREDENTIALS.unpack(credentials)
        self._is_beginning = True
        self._num_expected = 0
        self._received: list[int] = []
        self._outgoing: list[int] = []  # descriptors to send after what is unsent
        self._later = bytearray()  # bytes to send after the descriptors

    def require_user(self, allowed_uids: frozenset[int]) -> None:
        """Raises PeerRefusedError: the peer runs as none of the users."""
        if self.uid not in allowed_uids:
            raise PeerRefusedError(
                f"process {self.pid} runs as user {self.uid}; allowed: {sorted(allowed_uids)}"
            )

    def send_hello(self, body: bytes, descriptors: list[int]) -> None:
        """Send a hello, and the descriptors after it.

        The caller keeps them open until this connection is closed.
        """
        self._unsent += self.frame(FrameKind.HELLO, body)
        self._outgoing = descriptors
        self.flush()

    def send(self, frame: bytes) -> None:
        if self._outgoing:
            self._later += frame
        else:
            self._unsent += frame
        self.flush()

    @property
    def num_unsent(self) -> int:
        return len(self._unsent) + len(self._outgoing) + len(self._later)

    def flush(self) -> None:
        super().flush()
        if self._outgoing and not self._unsent:
            self._send_descriptors()

    def _send_descriptors(self) -> None:
        frame = self.frame(FrameKind.DESCRIPTORS)
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", self._outgoing))
        try:
            sent = self._socket.sendmsg([frame], [rights])
        except BlockingIOError:
            return
        except Exception as error:  # noqa: BLE001 - whatever it is, it ends this peer alone
            self._outgoing = []
            self.give_up(error)
            return
        self._outgoing = []
        self._unsent += frame[sent:] + self._later
        self._later.clear()
        super().flush()

    def _receive_some(self) -> bytes:
        if not self._is_beginning:
            return super()._receive_some()
        num_left = self._num_expected - len(self._received)
        if num_left <= 0:
            # The kernel closes descriptors for which `recv` leaves no room.
            return self._socket.recv(self._reader.num_missing)
        # `CMSG_LEN` has no padding; with it there would be room for one more descriptor.
        room = socket.CMSG_LEN(num_left * _DESCRIPTOR_BYTES)
        data, ancillary, flags, _ = self._socket.recvmsg(
            self._reader.num_missing, room, socket.MSG_CMSG_CLOEXEC
        )
        for level, kind, payload in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                received = array.array("i")
                received.frombytes(payload[: len(payload) - len(payload) % received.itemsize])
                self._received += received
        if flags & socket.MSG_CTRUNC:
            if len(self._received) < self._num_expected:
                raise BackpressureError(f"cannot take the peer's descriptors; {remedy()}")
            raise ProtocolError(f"the peer sent more than the {self._num_expected} descriptors of its hello")
        return data

    def expect_descriptors(self, num: int) -> None:
        """Allow this many descriptors to come with the next frame."""
        self._num_expected = num

    def take_descriptors(self) -> list[int]:
        """Return the descriptors received so far, which the caller now owns. No more are taken after this."""
        self._is_beginning = False
        descriptors, self._received = self._received, []
        return descriptors

    def close(self) -> None:
        super().close()
        for descriptor in self.take_descriptors():
            os.close(descriptor)


def connect(address: str, wrap: Callable[[socket.socket], Connection]) -> Connection:
    """Connect to a listener, and return what `wrap` makes of the socket.

    Raises:
        ConfigurationError: the address is malformed.
        PeerLostError: no process listens there, or it has as many unanswered connections as the system
            allows.
        PeerRefusedError: we may not open the socket's file.
        BackpressureError: there is no descriptor left.
    """
    name = parse_address(address)
    what = f"cannot connect to {address}"
    with outside(what, PeerLostError):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            sock.connect(name)
            return wrap(sock)
        except BaseException as error:
            sock.close()
            if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM):
                raise PeerRefusedError(f"{what}: {error}") from error
            raise


class Listener(socket.socket):
    """A bound socket.

    If it has a file, only this user may connect, unless `is_shared`; `close` removes it.
    """

    def __init__(self, address: str, *, is_shared: bool) -> None:
        """Bind and listen.

        Raises:
            ConfigurationError: the address is malformed, taken, or not ours to bind.
        """
        self._path = parse_address(address)
        self._inode = 0
        with outside(f"cannot listen at {address}", ConfigurationError):
            super().__init__(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._inode = self._bind(is_shared)
            self.listen(4096)
        except OSError as error:
            self.close()
            why = "address in use" if error.errno == errno.EADDRINUSE else f"cannot listen: {error}"
            raise ConfigurationError(f"{why}: {address}", key="address", value=address) from error

    def _bind(self, is_shared: bool) -> int:
        if self._path[0] == "\0":
            self.bind(self._path)
            return 0
        folder = os.open(os.path.dirname(self._path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            # The lock keeps two processes that find the same dead socket from replacing it both.
            fcntl.flock(folder, fcntl.LOCK_EX)
            _remove_if_dead(self._path)
            self.bind(self._path)
            os.chmod(self._path, 0o666 if is_shared else 0o600)
            return os.stat(self._path).st_ino
        finally:
            os.close(folder)

    def close(self) -> None:
        """Stop listening, and remove the file if it is still ours."""
        super().close()
        if self._inode:
            try:
                if os.stat(self._path).st_ino == self._inode:
                    os.unlink(self._path)
            except FileNotFoundError:
                pass


def _remove_if_dead(path: str) -> None:
    """Remove a socket's file if no process listens at it. Anything else stays, and binding then fails."""
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
            probe.connect(path)
    except ConnectionRefusedError:
        os.unlink(path)
    except (FileNotFoundError, BlockingIOError):
        return
