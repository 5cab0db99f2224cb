"""The interface of a transport: it sends control messages to peers, and reads their memory one-sidedly.

    transport = SomeTransport(options)              # what can be refused early is refused here
    arena = transport.allocate(num_bytes)           # or bring memory of your own
    endpoint = transport.register(Pool([arena.segment]))
    address = endpoint.listen("")                   # give it to other nodes
    peer_id = endpoint.start_connect(their_address, timeout_s=5)
    while ...:
        for event in endpoint.wait_events(timeout_s): ...
    transport.close()

A `Transport` is one mechanism with its options. It allocates memory that the mechanism serves well, and holds the table
of guards. `register` makes its memory known and returns the `Endpoint`: one end of connections to many *peers*, which
are endpoints of other transports of the same kind, mostly in other processes.

One thread owns a transport and its endpoint, and calls every method except `Endpoint.wake`, which any thread may call.
No method waits for a peer. What happens, from a peer that connects to a read that ends, is an event, and
`wait_events` returns it.

Events of one peer
    `Connected` comes first. Then messages come in the order in which they were sent. `PeerLost` comes last, once, and
    not after `disconnect`. A connection that we started may be lost without ever being connected; one that another node
    started, and that fails before it is connected, is never reported. Ids of peers and transfers are not used twice.

Events of one read
    Each read that `start_read` accepted ends with exactly one `TransferEnded`, whatever fails, and before the `PeerLost`
    of its peer. Only `close` ends reads without an event. Reads of one peer may end in any order.

Ownership of memory
    From `start_read` until its `TransferEnded`, the local regions belong to the endpoint: reading or reusing them is
    undefined. Remote regions stay their owner's. The owner may change them at any time, and clears their guard first.
    That is what guards are for: a read ends without an error only if the guard still held after the last byte was
    copied.

Failures
    Whatever a socket, a library or the system raises leaves a method as one of `transports.errors`. What goes wrong with
    one peer ends that peer with `PeerLost`, even if it is an exception that nothing documents; that one is logged with
    its traceback. `wait_events` never raises because of a peer. If file descriptors run out, the call that needed one
    raises a `BackpressureError` that names the limit and the remedy, and everything else goes on. Any method that opens
    something may raise it.

To write a transport, do not implement `Endpoint` directly: `transports.endpoint` implements it once, with all the
promises above, and needs a small backend.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from ._options import parse_options
from .errors import KVTransferError
from .regions import Guard, Pool, RegionPairs, Segment

#: A control message is never longer. `send` refuses longer ones, and a peer that announces one is dropped.
MAX_MESSAGE_BYTES = 4 << 20


# == what happens ==================================================================================


@dataclass(frozen=True)
class Connected:
    """The peer can be used. `incoming`: it connected to us."""

    peer_id: int
    incoming: bool


@dataclass(frozen=True)
class MessageReceived:
    """One whole control message; per peer in the order in which they were sent."""

    peer_id: int
    message: bytes


@dataclass(frozen=True)
class PeerLost:
    """The peer is gone, or never came. It is the last event of a `peer_id`."""

    peer_id: int
    error: KVTransferError


@dataclass(frozen=True)
class TransferEnded:
    """A read is over. Without an error, all bytes are in place and the guard held after the last of them was copied.

    Attributes:
        error: What went wrong, or None. With an error the content of the local regions is undefined.
        seconds: From `start_read` to the last byte.
        mechanism: What really moved the bytes, such as `"mapped"` or `"process_vm_readv"`.
    """

    transfer_id: int
    error: KVTransferError | None
    num_bytes: int
    seconds: float
    mechanism: str


Event = Connected | MessageReceived | PeerLost | TransferEnded


# == memory and guards =============================================================================


class Arena(ABC):
    """Memory that a transport can serve without a staging buffer. Zeroed, pre-faulted, page-aligned."""

    @property
    @abstractmethod
    def segment(self) -> Segment:
        """Where the memory is, in this process."""

    @property
    @abstractmethod
    def buffer(self) -> memoryview:
        """The memory as writable bytes, format `B`. It lives as long as the arena or any view of it."""


class GuardTable(ABC):
    """Words that peers check after they have read from us (see `Guard`). All are zero at first; zero is never valid.

    Stores are ordered: a peer that copies bytes written after `clear` returned also sees the cleared word.
    """

    num_guards: int

    @abstractmethod
    def set(self, index: int, value: int) -> None:
        """Make guard `index` hold `value`, 1 to 2**63 - 1."""

    @abstractmethod
    def clear(self, index: int) -> None:
        """Make every later check of guard `index` fail."""


# == the transport =================================================================================


class Transport(ABC):
    """One mechanism to move bytes between processes: its options, its guards, and memory for it."""

    # -- obligatory ------------------------------------------------------------------------------------

    #: Scheme of its addresses; also the name of the entry point and of the option.
    scheme: ClassVar[str]

    #: The words that peers check after they have read from this process.
    guards: GuardTable

    @abstractmethod
    def allocate(self, num_bytes: int) -> Arena:
        """Allocate memory that peers can read without a staging buffer.

        Raises:
            ConfigurationError: `num_bytes` is not positive, or more than this machine can give.
        """

    @abstractmethod
    def register(self, pool: Pool) -> Endpoint:
        """Make `pool` the memory that peers may read and that our reads write into. Once per transport.

        The caller keeps the memory alive until `close` has returned.

        Raises:
            KVTransferStateError: a pool is registered already.
            ConfigurationError: it is in memory that this transport cannot serve. Nothing was registered.
            BackendUnavailableError: serving that memory needs what is not installed here. Nothing was registered.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the endpoint, if there is one, and free everything. Idempotent.

        Afterwards every call raises `TransportClosedError`, except those that `Endpoint.close` names.
        """

    # -- optional --------------------------------------------------------------------------------------

    #: The dataclass of its options; None if only the constructor knows them. A subclass does not inherit it.
    options_type: ClassVar[type[object] | None] = None

    @classmethod
    def check_options(cls, options: Mapping[str, object]) -> None:
        """Refuse options that the constructor would refuse, as far as that is known without opening anything.

        Raises:
            ConfigurationError: an option is unknown or wrong.
        """
        kind = vars(cls).get("options_type")  # not an inherited one: a subclass may take more options
        if kind is not None:
            parse_options(kind, options, cls.scheme)


# == the endpoint ==================================================================================


@dataclass(frozen=True)
class Route:
    """How a peer is reached.

    Attributes:
        scheme: Of the transport that really serves it.
        reason: Why this one, in words; empty if there was no choice.
    """

    scheme: str
    reason: str


class Endpoint(ABC):
    """One end of connections to many peers. See the module for the order of events and for what may fail."""

    # -- obligatory: peers -----------------------------------------------------------------------------

    #: Of the transport that made it.
    scheme: str

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

        The name of a host is looked up in the background.

        Returns:
            The new peer's id.

        Raises:
            ConfigurationError: `address` is malformed or of another scheme. Nothing was opened, no event follows.
            BackpressureError: too many connections are being made (option `max_connecting`), or there are no file
                descriptors. Nothing was opened, no event follows.
        """

    @abstractmethod
    def disconnect(self, peer_id: int) -> None:
        """Drop a peer. Its reads end with `TransportClosedError`; no other event of it follows.

        Unknown ids are ignored.
        """

    @abstractmethod
    def send(self, peer_id: int, message: bytes) -> None:
        """Send one control message; returns as soon as it is queued or sent.

        Raises:
            PeerLostError: the peer is not connected, or not any more.
            BackpressureError: the peer does not drain; nothing was sent.
            ProtocolError: the message is longer than `MAX_MESSAGE_BYTES`; nothing was sent.
            TransportError: a library failed in a way that it does not document. The peer is of no more use.
        """

    # -- obligatory: reads -----------------------------------------------------------------------------

    @abstractmethod
    def start_read(self, peer_id: int, pairs: RegionPairs, guard: Guard, *, timeout_s: float) -> int:
        """Copy regions of the peer's pool into ours. Returns at once; `TransferEnded` follows.

        The event's error is `StaleRegionError` if the guard did not hold after the copy, `PeerLostError`,
        `TransferTimeoutError`, `ChecksumError`, or, after `disconnect`, `TransportClosedError`.

        Returns:
            The transfer's id.

        Raises:
            RegionError: a region is outside either pool, or the guard outside the peer's table. Nothing was
                copied, no event follows.
            PeerLostError: the peer is not connected, or not any more. Nothing was copied, no event follows.
        """

    # -- obligatory: the owner's loop ------------------------------------------------------------------

    @abstractmethod
    def wait_events(self, timeout_s: float) -> list[Event]:
        """Wait until something happens, `wake` is called, or `timeout_s` has passed; return what happened."""

    @abstractmethod
    def wake(self) -> None:
        """Make the current or the next `wait_events` return at once. Any thread may call it."""

    @abstractmethod
    def close(self) -> None:
        """Drop every peer and free everything. Waits for reads that cannot be interrupted. Idempotent.

        Afterwards `wake`, `disconnect` and `close` do nothing; every other call raises `TransportClosedError`.
        """

    # -- optional --------------------------------------------------------------------------------------

    def route_of(self, peer_id: int) -> Route:
        """Say how a peer is reached. An unknown id is answered as if there had been no choice."""
        return Route(self.scheme, "")
