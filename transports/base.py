"""What a transport owes: control messages and one-sided reads of a peer's memory.

A transport belongs to one process and, in it, to one thread: its owner calls every method except
`wake`, which any thread may call. The owner's loop is

    for event in transport.wait_events(timeout_s): ...

and everything that happens, from a peer that connects to a read that ends, arrives there as one event.

Life of a transport: construct → `allocate` memory (or bring your own) → `register` it once → `listen`
and `start_connect` → `send`, `start_read` → `close`.

Failures
    Whatever a socket, a library or the system raises leaves a method as one of `transports.errors`. What goes wrong with
    one peer, even by an exception of a type that no one expected, ends that peer with `PeerLost` and is logged with its
    traceback; `wait_events` never raises because of a peer. Where file descriptors run out, what was asked for is
    refused with a `BackpressureError` that names the limit and the remedy, and everything that stands goes on.
    Any method that opens something may raise it.

Ownership of memory
    From `start_read` until its `TransferEnded` event, the local regions belong to the transport: reading
    or reusing them is undefined. The event always comes, exactly once, whatever fails, and it comes
    before `PeerLost` of the same peer; only `close`, after which no event comes, ends reads without it.
    Remote regions stay their owner's: he may change them at any
    time, and says so by clearing the guard first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from ._options import parse_options
from .errors import KVTransferError
from .regions import Guard, Pool, RegionPairs, Segment

#: A control message is never longer. Longer ones are refused by `send`, and a peer that announces one is dropped.
MAX_MESSAGE_BYTES = 4 << 20


@dataclass(frozen=True)
class Connected:
    """A peer can be talked to. `incoming` tells who connected to whom."""

    peer_id: int
    incoming: bool


@dataclass(frozen=True)
class MessageReceived:
    """One whole control message; per peer in the order in which they were sent."""

    peer_id: int
    message: bytes


@dataclass(frozen=True)
class PeerLost:
    """The peer is gone, or never came. Last event of a `peer_id`; the id is not used again."""

    peer_id: int
    error: KVTransferError


@dataclass(frozen=True)
class TransferEnded:
    """A read is over. Without an error, all bytes are in place and the guard held after the copy.

    Attributes:
        error: What went wrong, or None. With an error the local regions are undefined.
        seconds: From `start_read` to the last byte.
        mechanism: What really moved the bytes, e.g. `"mapped"` or `"process_vm_readv"`.
    """

    transfer_id: int
    error: KVTransferError | None
    num_bytes: int
    seconds: float
    mechanism: str


@dataclass(frozen=True)
class Route:
    """How a peer is reached.

    Attributes:
        scheme: Of the transport that really serves it.
        reason: Why this one, in words; empty where there was no choice.
    """

    scheme: str
    reason: str


Event = Connected | MessageReceived | PeerLost | TransferEnded


class Arena(ABC):
    """Memory that a transport can serve without a staging copy. Zeroed, pre-faulted, page-aligned."""

    @property
    @abstractmethod
    def segment(self) -> Segment:
        """Where the memory is, in this process."""

    @property
    @abstractmethod
    def buffer(self) -> memoryview:
        """The memory as writable bytes, format `B`. It lives as long as the arena or any view of it."""


class GuardTable(ABC):
    """Words that peers check after a copy (see `Guard`). All are zero at first; zero is never valid.

    Stores are ordered: a peer that copies bytes written after `clear` returned also sees the cleared word.
    """

    num_guards: int

    @abstractmethod
    def set(self, index: int, value: int) -> None:
        """Make guard `index` hold `value`, 1 to 2**63 - 1."""

    @abstractmethod
    def clear(self, index: int) -> None:
        """Make every later check of guard `index` fail."""


class Transport(ABC):
    """One mechanism to move bytes between processes. See the module for its rules."""

    #: Scheme of its addresses; also the file's, the entry point's and the option's name.
    scheme: ClassVar[str]

    #: The dataclass of its options; None: only its constructor knows them. A subclass names its own, or has none.
    options_type: ClassVar[type[object] | None] = None

    #: The words that peers check after they read from this process.
    guards: GuardTable

    @classmethod
    def check_options(cls, options: Mapping[str, object]) -> None:
        """Refuse options that the constructor would refuse, as far as that can be told without opening anything.

        Raises:
            ConfigurationError: an option is unknown or wrong.
        """
        kind = vars(cls).get("options_type")  # not an inherited one: a subclass may take more options
        if kind is not None:
            parse_options(kind, options, cls.scheme)

    # -- memory --------------------------------------------------------------------------------------

    @abstractmethod
    def allocate(self, num_bytes: int) -> Arena:
        """Allocate memory that peers can read without a staging copy.

        Raises:
            ConfigurationError: `num_bytes` is not positive, or more than this machine can give.
        """

    @abstractmethod
    def register(self, pool: Pool) -> None:
        """Make `pool` the memory that peers may read and that transfers write into. Once, before any peer.

        The caller keeps the memory alive until `close` has returned.

        Raises:
            KVTransferStateError: a pool is registered already.
            ConfigurationError: it is in memory that this transport cannot serve. Nothing was registered.
            BackendUnavailableError: serving that memory needs what is not installed here. Nothing was registered.
        """

    # -- peers ---------------------------------------------------------------------------------------

    @abstractmethod
    def listen(self, address: str) -> str:
        """Accept peers. An empty `address` lets the transport choose.

        Returns:
            The address that peers pass to `start_connect`.

        Raises:
            ConfigurationError: the address is malformed, taken, or not ours to bind.
        """

    @abstractmethod
    def start_connect(self, address: str, *, timeout_s: float) -> int:
        """Begin to connect; `Connected` or `PeerLost` follows within `timeout_s`.

        Returns:
            The new peer's id.

        A host's name is looked up meanwhile, not by this call.

        Raises:
            ConfigurationError: `address` is malformed or of another scheme. Nothing was opened.
            BackpressureError: too many connections are being made (option `max_connecting`), or there are no file
                descriptors. Nothing was opened, no event follows.
        """

    @abstractmethod
    def disconnect(self, peer_id: int) -> None:
        """Drop a peer. Its reads end with `TransportClosedError`; no `PeerLost` follows. Unknown ids are ignored."""

    @abstractmethod
    def send(self, peer_id: int, message: bytes) -> None:
        """Send one control message; returns once it is queued or sent.

        Raises:
            TransportError: the library failed in a way that no one expected. The peer is of no more use.
            PeerLostError: no such peer any more.
            BackpressureError: the peer does not drain; nothing was sent.
            ProtocolError: the message is longer than `MAX_MESSAGE_BYTES`; nothing was sent.
        """

    @abstractmethod
    def start_read(self, peer_id: int, pairs: RegionPairs, guard: Guard, *, timeout_s: float) -> int:
        """Copy regions of the peer's pool into ours. Returns at once; `TransferEnded` follows.

        The event's error is `StaleRegionError` if the guard did not hold after the copy, `PeerLostError`,
        `TransferTimeoutError`, or `TransportClosedError` (see `disconnect`).

        Returns:
            The transfer's id.

        Raises:
            RegionError: a region is outside either pool, or the guard outside the peer's table. Nothing was
                copied, no event follows.
            PeerLostError: no such peer. Nothing was copied, no event follows.
        """

    def route_of(self, peer_id: int) -> Route:
        """How a peer is reached. An unknown id is answered as if there had been no choice."""
        return Route(self.scheme, "")

    # -- the owner's loop ----------------------------------------------------------------------------

    @abstractmethod
    def wait_events(self, timeout_s: float) -> list[Event]:
        """Wait until something happened, `wake` was called, or `timeout_s` passed; return what happened.

        It does not raise because of a peer, whatever that peer does or the system does to it: see the module.
        """

    @abstractmethod
    def wake(self) -> None:
        """Make the current or the next `wait_events` return at once. Any thread may call it."""

    @abstractmethod
    def close(self) -> None:
        """Drop every peer and free everything. Waits for reads that cannot be interrupted. Idempotent.

        Afterwards `wake`, `disconnect` and `close` do nothing; every other call raises `TransportClosedError`.
        """
