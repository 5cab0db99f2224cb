"""The interface of a transport: it sends control messages to peers, and reads their memory one-sidedly.

    transport = SomeTransport(options)              # refuses everything that can be refused this early
    arena = transport.allocate(num_bytes)           # or bring memory of your own
    endpoint = transport.register(Pool([arena.segment]))
    address = endpoint.listen("")                   # give it to other nodes
    peer_id = endpoint.start_connect(their_address, timeout_s=5)
    while ...:
        for event in endpoint.wait_events(timeout_s): ...
    transport.close()

Words
    A *transport* is one mechanism with its options, such as shared memory or TCP. It allocates memory that
    the mechanism serves well. A *pool* is the memory that it was given to serve. A *region* is a run of bytes
    in a pool. An *endpoint* is one end of connections to many *peers*: endpoints of other transports of the
    same kind, mostly in other processes. A *guard* is a word that the owner of a pool sets while certain
    bytes keep their content, and clears before it changes them. `transports/regions.py` defines pools,
    regions and guards.

Threads and waiting
    One thread owns a transport and its endpoint. It calls every method except `Endpoint.wake`, which any
    thread may call. No method waits for a peer. Everything that happens is an event, from a peer that
    connects to a read that ends, and `wait_events` returns it.

Events of one peer
    `Connected` comes first. Then messages come in the order in which they were sent. `PeerLost` comes last
    and once; after `disconnect` it does not come. A connection that we started may be lost before it is
    connected. A connection that another node started is reported only once it is connected. Ids of peers and
    transfers are never used twice.

Events of one read
    Each read that `start_read` accepted ends with exactly one `TransferEnded`, whatever fails, and before the
    `PeerLost` of its peer. Only `close` ends reads without an event. Reads from one peer may end in any
    order.

Ownership of memory
    From `start_read` until its `TransferEnded` the local regions belong to the endpoint: do not read or reuse
    them. The remote regions stay their owner's, which may change them at any time, after it has cleared their
    guard. So a read checks the guard after it has copied the last byte, and ends without an error only if the
    guard still held.

Failures
    Every error is one of `transports.errors`, whatever a socket, a library or the system raised. What goes
    wrong with one peer ends that peer with `PeerLost`; if the exception was not an expected one, it is also
    logged with its traceback. `wait_events` never raises because of a peer. Any method that opens something
    may run out of file descriptors. Then it raises a `BackpressureError` that names the limit and the remedy,
    and everything else goes on.

What must never break: bytes that a read reports without an error are those that the guard vouched for, and
after its end nothing writes into its regions.

To write a transport, do not implement `Endpoint` directly. `transports.endpoint` implements it once, with all
promises about order and deadlines, and needs a small backend. `docs/writing-a-transport.md` shows how, step
by step.
"""

from __future__ import annotations

import fnmatch
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from .errors import KVTransferError
from .options import parse_options
from .regions import Extents, Guard, Pool, RegionPairs, Segment

#: The longest control message. `send` refuses longer ones, and a peer that announces one is dropped.
MAX_MESSAGE_BYTES = 4 << 20


# == events ========================================================================================


@dataclass(frozen=True)
class Connected:
    """The peer can be used.

    Attributes:
        incoming: Whether the peer connected to us; if not, we connected to it.
    """

    peer_id: int
    incoming: bool


@dataclass(frozen=True)
class MessageReceived:
    """One whole control message. Those of one peer come in the order in which it sent them."""

    peer_id: int
    message: bytes


@dataclass(frozen=True)
class PeerLost:
    """The peer is gone, or could not be reached. This is the last event of a `peer_id`."""

    peer_id: int
    error: KVTransferError


@dataclass(frozen=True)
class TransferEnded:
    """A read is over.

    Without an error, all bytes are in place, and the guard held after the last of them was copied.

    Attributes:
        error: What went wrong, or None. With an error, the content of the local regions is undefined.
        num_bytes: Size of the read.
        seconds: From `start_read` to the last byte.
        mechanism: What moved the bytes, such as `"mapped"` or `"process_vm_readv"`.
    """

    transfer_id: int
    error: KVTransferError | None
    num_bytes: int
    seconds: float
    mechanism: str


Event = Connected | MessageReceived | PeerLost | TransferEnded


# == memory and guards =============================================================================


class Arena(ABC):
    """Memory that a transport can serve without a staging buffer.

    It is zeroed, pre-faulted and page-aligned.
    """

    @property
    @abstractmethod
    def segment(self) -> Segment:
        """The address of the memory in this process."""

    @property
    @abstractmethod
    def buffer(self) -> memoryview:
        """The memory as writable bytes, format `B`. It lives as long as the arena or any view of it."""


class GuardTable(ABC):
    """Words that are checked after a peer has read from us (see `Guard`).

    All are zero at first; zero is never valid.

    Stores are ordered: if a peer copies bytes that were written after `clear` returned, it also sees the
    cleared word.
    """

    num_guards: int

    @abstractmethod
    def set(self, index: int, value: int) -> None:
        """Make guard `index` hold `value`, 1 to 2**63 - 1."""

    @abstractmethod
    def clear(self, index: int) -> None:
        """Make every later check of guard `index` fail. Call it before the guarded bytes change."""

    #: Whether the owner of the memory sends it, and so can keep peers to what `allow` says. Otherwise peers
    #: take the bytes themselves.
    checks_reads: bool = False

    def allow(self, index: int, extents_of: Callable[[], Extents]) -> None:  # noqa: B027 - optional
        """Let peers read only these bytes under guard `index`, until it is cleared.

        Before this they may read all.

        Call it before `set`, and again when there are more bytes. It does nothing if `checks_reads` is False.

        Args:
            extents_of: Called at most once, by the thread that answers the first read, because most guards
                are never used.
        """


# == the transport =================================================================================


class Transport(ABC):
    """One mechanism that moves bytes between processes: its options, its guards, and memory that it serves
    well.
    """

    # -- required --------------------------------------------------------------------------------------

    #: The first part of its addresses. Also the name of its entry point, and the value of the option
    #: `transport`.
    scheme: ClassVar[str]

    #: The guards of the registered pool.
    guards: GuardTable

    @abstractmethod
    def allocate(self, num_bytes: int) -> Arena:
        """Allocate memory that peers can read without a staging buffer.

        It stays mapped until `close`, and after that as long as the arena or a view of it exists.

        Raises:
            ConfigurationError: `num_bytes` is not positive, or more than this machine can give.
        """

    @abstractmethod
    def register(self, pool: Pool) -> Endpoint:
        """Make `pool` the memory that peers may read and that our reads write into.

        Call it once per transport.

        The caller keeps memory that did not come from `allocate` alive until `close` has returned.

        Raises:
            KVTransferStateError: a pool is registered already.
            ConfigurationError: this transport cannot serve the memory of the pool. Nothing was registered.
            BackendUnavailableError: serving that memory needs something that is not installed. Nothing was
                registered.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the endpoint, if there is one, and free everything. A second call does nothing.

        Afterwards `allocate` and `register` raise `TransportClosedError`. For the endpoint see
        `Endpoint.close`.
        """

    # -- optional --------------------------------------------------------------------------------------

    #: The dataclass of its options. If it is None, only the constructor checks options. A subclass does not
    #: inherit it.
    options_type: ClassVar[type[object] | None] = None

    @classmethod
    def check_options(cls, options: Mapping[str, object]) -> None:
        """Refuse options that the constructor would refuse, as far as it can tell without opening anything.

        Raises:
            ConfigurationError: an option is unknown or wrong.
        """
        kind = vars(cls).get("options_type")  # not an inherited one: a subclass may take more options
        if kind is not None:
            parse_options(kind, options, cls.scheme)

    def require_network(self) -> None:  # noqa: B027 - optional
        """Check that this transport reaches other hosts from here, as far as it can tell.

        Raises:
            BackendUnavailableError: it does not; the message says why.
        """


# == the endpoint ==================================================================================


@dataclass(frozen=True)
class Route:
    """The way in which a peer is reached.

    Attributes:
        scheme: The transport that serves it, for example the one that `auto` chose.
        reason: Why this one, for people; empty if there was no choice.
        mechanism: What moves the bytes below the transport, e.g. `"ucx:rc_mlx5"`; empty if there is no choice
            before a read.
        sums: What verifies the bytes in transit, `"xxh3"` or `"tls"`; empty if nothing does.
    """

    scheme: str
    reason: str
    mechanism: str = ""
    sums: str = ""

    def is_one_of(self, required: Sequence[str]) -> bool:
        """Whether this is a way that an operator allows, such as `["shm", "ucx:rc_mlx5+ud*"]`.

        A name without a colon allows a transport as a whole. After the colon stand the parts of a mechanism,
        each of which may be a pattern of the shell. All parts of the mechanism must be among them: if UCX has
        set up RDMA and TCP, it may move bytes by either.
        """
        parts = re.split("[:+,]", self.mechanism)[1:]
        for name in required:
            scheme, _, allowed = name.partition(":")
            if scheme != self.scheme:
                continue
            patterns = re.split("[:+,]", allowed) if allowed else ["*"]
            if all(any(fnmatch.fnmatchcase(part, pattern) for pattern in patterns) for part in parts):
                return bool(parts) or not allowed
        return False


class Endpoint(ABC):
    """One end of connections to many peers. The module states the order of events and what may fail."""

    # -- required: peers -------------------------------------------------------------------------------

    #: The scheme of the transport that made it.
    scheme: str

    @abstractmethod
    def listen(self, address: str) -> str:
        """Accept peers at `address`; an empty one lets the transport choose.

        Returns:
            The address that peers pass to `start_connect`.

        Raises:
            ConfigurationError: the address is malformed, taken, or not ours to bind.
        """

    @abstractmethod
    def start_connect(self, address: str, *, timeout_s: float) -> int:
        """Begin to connect; `Connected` or `PeerLost` follows within `timeout_s` seconds.

        A host name is looked up in the background.

        Returns:
            The new peer's id.

        Raises:
            ConfigurationError: `address` is malformed or of another scheme. Nothing was opened, no event
                follows.
            BackpressureError: too many handshakes are going on (option `max_connecting`), or no file
                descriptor is left. Nothing was opened, no event follows.
        """

    @abstractmethod
    def disconnect(self, peer_id: int) -> None:
        """Drop a peer. Its reads end with `TransportClosedError`; no other event about it follows.

        Ids that are unknown or no longer in use are ignored.
        """

    @abstractmethod
    def send(self, peer_id: int, message: bytes) -> None:
        """Send one control message. Return as soon as it is queued or sent.

        Raises:
            PeerLostError: the peer is not connected, or no longer. Nothing was sent.
            BackpressureError: too many bytes wait for the peer already. Nothing was sent; try again later.
            ProtocolError: the message is longer than `MAX_MESSAGE_BYTES`. Nothing was sent.
            TransportError: a library failed in a way that it does not document. Disconnect the peer.
        """

    # -- required: reads -------------------------------------------------------------------------------

    @abstractmethod
    def start_read(self, peer_id: int, pairs: RegionPairs, guard: Guard, *, timeout_s: float) -> int:
        """Begin to copy regions of the peer's pool into ours; `TransferEnded` follows.

        After `timeout_s` seconds the read is stopped. It ends a little later if a copy cannot be interrupted.
        The event's error is one of these: `StaleRegionError` if the guard did not hold after the copy,
        `PeerLostError`, `TransferTimeoutError`, `ChecksumError`, or `TransportClosedError` after
        `disconnect`.

        Returns:
            The transfer's id.

        Raises:
            RegionError: a region is outside either pool, or the guard outside the peer's table. Nothing was
                copied, no event follows.
            PeerLostError: the peer is not connected, or no longer. Nothing was copied, no event follows.
        """

    # -- required: the owner's loop --------------------------------------------------------------------

    @abstractmethod
    def wait_events(self, timeout_s: float) -> list[Event]:
        """Wait until something happens, `wake` is called, or `timeout_s` seconds have passed; return what
        happened.
        """

    @abstractmethod
    def wake(self) -> None:
        """Make the current or the next `wait_events` return at once. Any thread may call it."""

    @abstractmethod
    def close(self) -> None:
        """Drop every peer and free everything.

        Wait for reads that cannot be interrupted. A second call does nothing.

        Afterwards `wake`, `disconnect` and `close` do nothing; every other call raises
        `TransportClosedError`.
        """

    # -- optional --------------------------------------------------------------------------------------

    def route_of(self, peer_id: int) -> Route:
        """Return how a peer is reached. For an unknown id, return our own scheme and no reason."""
        return Route(self.scheme, "")
