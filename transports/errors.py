"""The errors that kvferry raises, in one tree. The branch for requests is in `connector/errors.py`.

    KVTransferError
    ├─ ConfigurationError(ValueError)         a setting is wrong; names its key and value; nothing was started
    ├─ BackendUnavailableError(ImportError)   a backend cannot work on this machine; says why, and what would
    help ├─ KVTransferStateError(RuntimeError)     a call out of order, or from the wrong process ├─
    TransportError │  ├─ TransportClosedError                this side closed it │  ├─
    PeerLostError(ConnectionError)      the peer, or the path to it, is gone │  ├─
    PeerRefusedError(PermissionError)   the peer is not one we talk to (another user, no key) │  ├─
    TransferTimeoutError(TimeoutError)  a deadline passed │  ├─ BackpressureError                   the peer
    does not read its messages, or a limit of ours is reached │  ├─ ProtocolError                       bytes
    that the protocol forbids │  ├─ ChecksumError                       the bytes that arrived are not those
    that were sent │  ├─ RegionError(ValueError)             a region outside the registered memory │  └─
    StaleRegionError                    the guard changed while bytes were copied; the bytes are not valid ├─
    HandshakeError │  ├─ VersionMismatchError                local, oldest, remote, release │  ├─
    IncompatiblePeerError               field, local, remote │  └─ ForeignTransportError               the
    peer's address is of another transport: local, remote ├─ ConnectorError                         a handoff
    failed: see `connector/errors.py` └─ UnexpectedError                        a call raised what it does not
    document: a bug, or an unmapped library error

Errors also derive from the builtin exception that a caller would catch. Programs read the attributes;
messages are for people. Backends raise only these errors, and each maps its library's errors in one table
(`mapped`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager


class KVTransferError(Exception):
    """Base class of all errors that kvferry raises on purpose."""


class ConfigurationError(KVTransferError, ValueError):
    """A setting is wrong. Nothing was started.

    Attributes:
        key: Name of the setting, as the user writes it; empty if none is to blame.
        value: Its value.
    """

    def __init__(self, message: str, *, key: str = "", value: object = None) -> None:
        super().__init__(message)
        self.key = key
        self.value = value


class BackendUnavailableError(KVTransferError, ImportError):
    """A backend cannot work on this machine. The message says what would help."""


class KVTransferStateError(KVTransferError, RuntimeError):
    """A call came out of order, twice, or from a process that does not own the object."""


class TransportError(KVTransferError):
    """Something failed between two processes."""


class TransportClosedError(TransportError):
    """This side closed the transport. Nothing was sent or read."""


class PeerLostError(TransportError, ConnectionError):
    """The peer, or the path to it, is gone.

    A read may have written none, some or all of its bytes locally.
    """


class PeerRefusedError(TransportError, PermissionError):
    """The peer failed authentication. No byte of the pool was sent to it."""


class TransferTimeoutError(TransportError, TimeoutError):
    """A deadline passed.

    The operation was cancelled; the contents of a read's local regions are undefined.
    """


class BackpressureError(TransportError):
    """The peer does not read its messages, and this one was not sent.

    Also raised if a limit of this process is reached, such as that of file descriptors or of connections in
    progress. In that case the text names the limit and the remedy, and the operation was not started.
    """


class ProtocolError(TransportError):
    """Bytes that the protocol forbids.

    If a peer sent them, it was dropped. If they are ours, they were not sent.
    """


class ChecksumError(TransportError):
    """Bytes changed in transit and were not accepted.

    The contents of the read's local regions are undefined.
    """


class RegionError(TransportError, ValueError):
    """A region lies outside the memory it names. Nothing was copied."""


class StaleRegionError(TransportError):
    """The guard did not hold its value after the copy. The contents of the local regions are undefined."""


class HandshakeError(KVTransferError):
    """Two nodes connected but cannot work together. Nothing was transferred."""


class VersionMismatchError(HandshakeError):
    """The two nodes have no protocol version in common. The message says which of them to upgrade first.

    Attributes:
        local: The newest version that this node speaks.
        oldest: The oldest one.
        remote: The version nearest to ours that the peer speaks.
        release: The peer's release of kvferry; empty if it does not say.
    """

    def __init__(self, *, local: int, remote: int, oldest: int | None = None, release: str = "") -> None:
        self.local = local
        self.oldest = local if oldest is None else oldest
        self.remote = remote
        self.release = release
        ours = f"{local}" if self.oldest == local else f"{self.oldest} to {local}"
        theirs = f"{remote} (kvferry {release[:40]!r})" if release else f"{remote}"
        older = "this node" if local < remote else "the peer"
        super().__init__(f"protocol version differs: local {ours}, remote {theirs}; upgrade {older} first")


class IncompatiblePeerError(HandshakeError):
    """The peer's KV cache cannot be read into ours."""

    def __init__(self, *, field: str, local: object, remote: object) -> None:
        super().__init__(f"incompatible peer: {field} differs: local {local!r}, remote {remote!r}")
        self.field = field
        self.local = local
        self.remote = remote


class ForeignTransportError(HandshakeError):
    """The peer listens on a transport that this node does not run. No connection was tried.

    Attributes:
        local: This node's address.
        remote: The peer's.
    """

    def __init__(self, *, local: str, remote: str) -> None:
        super().__init__(
            f"cannot connect to {remote!r}: this node is at {local!r}, and both must run the same transport; "
            "use the same connector on both nodes, or 'auto' on both"
        )
        self.local = local
        self.remote = remote


class UnexpectedError(KVTransferError):
    """A call raised an exception that it does not document: a bug, or a library's error that no table maps.

    Only the request, peer or read that the call was about ends. `__cause__` is the exception; its traceback
    was logged and removed.
    """


@contextmanager
def mapped(table: Mapping[type[BaseException], type[KVTransferError]], what: str) -> Iterator[None]:
    """Turn a library's errors into ours by the first row of `table` whose key matches.

    Put specific rows before general ones: `TimeoutError` and `ConnectionError` are `OSError`s.
    """
    try:
        yield
    except tuple(table) as error:
        for theirs, ours in table.items():
            if isinstance(error, theirs):
                raise ours(f"{what}: {error}") from error
        raise
