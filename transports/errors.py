"""Errors between nodes, processes and libraries: one tree, whose branch for requests is in `connector/errors.py`.

    KVTransferError
    ├─ ConfigurationError(ValueError)         wrong before anything started; names key and value
    ├─ BackendUnavailableError(ImportError)   a backend cannot work here; says why, and what would help
    ├─ KVTransferStateError(RuntimeError)     a call out of order, or from the wrong process
    ├─ TransportError
    │  ├─ TransportClosedError                this side closed it
    │  ├─ PeerLostError(ConnectionError)      the peer, or the path to it, is gone
    │  ├─ PeerRefusedError(PermissionError)   the peer is not one we talk to (another user, no key)
    │  ├─ TransferTimeoutError(TimeoutError)  a deadline passed
    │  ├─ BackpressureError                   the peer does not drain what is sent to it; or a limit of ours is reached
    │  ├─ ProtocolError                       bytes that the protocol forbids
    │  ├─ ChecksumError                       bytes arrived that are not those that were sent
    │  ├─ RegionError(ValueError)             a region outside the registered memory
    │  └─ StaleRegionError                    the guard changed while bytes were copied: they are not valid
    ├─ HandshakeError
    │  ├─ VersionMismatchError                local, remote
    │  ├─ IncompatiblePeerError               field, local, remote
    │  └─ ForeignTransportError               the peer's address is of another transport: local, remote
    ├─ ConnectorError                         a handoff failed: see `connector/errors.py`
    └─ UnexpectedError                        a call raised what it does not document: a bug, or an unmapped library error

Each error also derives from the builtin that a caller would try. Attributes carry the data; the
message is for people. Backends raise only these, by one mapping table each (`mapped`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager


class KVTransferError(Exception):
    """Root of everything that kvferry raises on purpose."""


class ConfigurationError(KVTransferError, ValueError):
    """A setting is wrong. Nothing was started.

    Attributes:
        key: The setting, as the user writes it.
        value: What it was set to.
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
    """Something went wrong between two processes."""


class TransportClosedError(TransportError):
    """This side closed the transport. Nothing was sent or read."""


class PeerLostError(TransportError, ConnectionError):
    """The peer, or the path to it, is gone. Of a read, none, some or all bytes were written locally."""


class PeerRefusedError(TransportError, PermissionError):
    """The peer failed authentication. It received no byte."""


class TransferTimeoutError(TransportError, TimeoutError):
    """A deadline passed. The operation was cancelled; local regions of a read are undefined."""


class BackpressureError(TransportError):
    """The peer does not drain its messages. The message was not sent.

    Also: a limit of this process is reached, such as that of connections being made or of file descriptors. The
    message names the limit and the remedy; what was asked for was not begun.
    """


class ProtocolError(TransportError):
    """Bytes that the protocol forbids. A peer that sent them was dropped; if they are ours, they were not sent."""


class ChecksumError(TransportError):
    """Bytes changed on their way. They were not accepted: local regions of the read are undefined."""


class RegionError(TransportError, ValueError):
    """A region lies outside the memory it names. Nothing was copied."""


class StaleRegionError(TransportError):
    """The guard no longer held its value after the copy: the local regions are undefined."""


class HandshakeError(KVTransferError):
    """Two nodes met and cannot work together. Nothing was transferred."""


class VersionMismatchError(HandshakeError):
    """The peer speaks another protocol version."""

    def __init__(self, *, local: int, remote: int) -> None:
        super().__init__(f"protocol version differs: local {local}, remote {remote}")
        self.local = local
        self.remote = remote


class IncompatiblePeerError(HandshakeError):
    """The peer's KV cache cannot be read into ours."""

    def __init__(self, *, field: str, local: object, remote: object) -> None:
        super().__init__(f"incompatible peer: {field} differs: local {local!r}, remote {remote!r}")
        self.field = field
        self.local = local
        self.remote = remote


class ForeignTransportError(HandshakeError):
    """The peer listens on another transport than this node runs. No connection was tried.

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

    Only what the call was about ends. `__cause__` is the exception, without its traceback, which was logged.
    """


@contextmanager
def mapped(table: Mapping[type[BaseException], type[KVTransferError]], what: str) -> Iterator[None]:
    """Turn a library's errors into ours: the first row whose key matches wins.

    Rows go from specific to general (`TimeoutError` and `ConnectionError` are `OSError`s).
    """
    try:
        yield
    except tuple(table) as error:
        for theirs, ours in table.items():
            if isinstance(error, theirs):
                raise ours(f"{what}: {error}") from error
        raise
