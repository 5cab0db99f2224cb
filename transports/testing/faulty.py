"""`faulty`: a transport on which a script makes things go wrong.

Everything else is as the inner transport does it.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, TypeVar

from ..base import Endpoint, Event, GuardTable, MessageReceived, PeerLost, Route, TransferEnded
from ..errors import (
    ChecksumError,
    KVTransferError,
    PeerLostError,
    TransportClosedError,
)
from ..options import parse_options
from ..regions import Extents, Guard, Pool, RegionPairs
from ..registry import create_transport
from .faults import Fault, FaultOptions, Script
from .wrapping import RenamedEndpoint, WrappedTransport

T = TypeVar("T")


@dataclass
class _Transfer:
    """A read whose end was not reported to the owner yet.

    Attributes:
        reads_into: Its region pairs.
        ended: The end that the inner endpoint reported, if it did.
    """

    peer_id: int
    reads_into: RegionPairs
    deadline: float
    faults: list[Fault]
    ended: list[TransferEnded] = field(default_factory=list)


class _FaultyGuards(GuardTable):
    """The inner transport's guards. Their calls raise as the script says."""

    def __init__(self, inner: GuardTable, script: Script) -> None:
        self.num_guards = inner.num_guards
        self.checks_reads = inner.checks_reads
        self._inner = inner
        self._script = script

    def set(self, index: int, value: int) -> None:
        _call(self._script, "set_guard", lambda: self._inner.set(index, value))

    def clear(self, index: int) -> None:
        _call(self._script, "clear_guard", lambda: self._inner.clear(index))

    def allow(self, index: int, extents_of: Callable[[], Extents]) -> None:
        self._inner.allow(index, extents_of)


class FaultyTransport(WrappedTransport):
    """A transport with a `FaultyEndpoint`.

    `Fault` lists what can go wrong; `FaultOptions` holds the script.
    """

    scheme: ClassVar[str] = "faulty"

    def __init__(self, options: Mapping[str, object] = {}) -> None:
        parsed = parse_options(FaultOptions, options, self.scheme)
        self._script = Script(parsed)
        super().__init__(create_transport(parsed.inner, parsed.options))
        self.guards = _FaultyGuards(self._inner.guards, self._script)

    def _wrap(self, inner: Endpoint, pool: Pool) -> Endpoint:
        return FaultyEndpoint(inner, pool, self._script)


class FaultyEndpoint(RenamedEndpoint):
    """Pass every call on to the inner endpoint, with the faults of the script."""

    def __init__(self, inner: Endpoint, pool: Pool, script: Script) -> None:
        super().__init__(FaultyTransport.scheme, inner)
        self._pool = pool
        self._script = script
        self._transfers: dict[int, _Transfer] = {}
        self._stalled: set[int] = set()
        self._broken: set[int] = set()

    # -- peers ---------------------------------------------------------------------------------------

    def start_connect(self, address: str, *, timeout_s: float) -> int:
        connect = super().start_connect
        return _call(self._script, "start_connect", lambda: connect(address, timeout_s=timeout_s))

    def disconnect(self, peer_id: int) -> None:
        _call(self._script, "disconnect", lambda: self._disconnect(peer_id))

    def _disconnect(self, peer_id: int) -> None:
        super().disconnect(peer_id)
        self._stalled.discard(peer_id)
        self._broken.discard(peer_id)
        self._fail_all(peer_id, "TransportClosedError")

    def route_of(self, peer_id: int) -> Route:
        route_of = super().route_of
        return _call(self._script, "route_of", lambda: route_of(peer_id))

    def wake(self) -> None:
        _call(self._script, "wake", super().wake)

    def close(self) -> None:
        _call(self._script, "close", super().close)

    def send(self, peer_id: int, message: bytes) -> None:
        _call(self._script, "send", lambda: self._send(peer_id, message))

    def _send(self, peer_id: int, message: bytes) -> None:
        self._apply(self._script.take("message"), peer_id)
        if peer_id in self._broken:
            raise _broken_connection()
        if peer_id not in self._stalled:
            super().send(peer_id, message)

    def _apply(self, faults: list[Fault], peer_id: int) -> None:
        for fault in faults:
            if fault.kind == "stall":
                self._stalled.add(peer_id)
            elif fault.kind == "drop":
                self._broken.add(peer_id)
                super().disconnect(peer_id)
                super().wake()

    # -- transfers -----------------------------------------------------------------------------------

    def start_read(self, peer_id: int, pairs: RegionPairs, guard: Guard, *, timeout_s: float) -> int:
        def start() -> int:
            transfer_id = self._inner.start_read(peer_id, pairs, guard, timeout_s=timeout_s)
            self._begin(transfer_id, peer_id, pairs, timeout_s)
            return transfer_id

        return _call(self._script, "start_read", start)

    def _begin(self, transfer_id: int, peer_id: int, reads_into: RegionPairs, timeout_s: float) -> None:
        faults = self._script.take("transfer")
        deadline = time.monotonic() + timeout_s
        self._transfers[transfer_id] = _Transfer(peer_id, reads_into, deadline, faults)
        self._apply(faults, peer_id)

    # -- the owner's loop ----------------------------------------------------------------------------

    def wait_events(self, timeout_s: float) -> list[Event]:
        for fault in self._script.take("wait_events"):
            raise fault.make_exception()  # before any event is taken, so that none is lost
        held_s = min(self._deadlines(), default=math.inf) - time.monotonic()
        happened = super().wait_events(max(0.0, min(timeout_s, held_s)))
        reported = [event for event in happened if self._passes(event)]
        ends = list(self._take_ends(time.monotonic()))
        return [*ends, *reported, *self._take_losses()]

    def _deadlines(self) -> Iterator[float]:
        for transfer in self._transfers.values():
            if transfer.ended:
                yield transfer.deadline if transfer.peer_id in self._stalled else 0.0

    def _passes(self, event: Event) -> bool:
        """Return whether to report an event now and unchanged."""
        if isinstance(event, TransferEnded):
            self._transfers[event.transfer_id].ended.append(event)
            return False
        if isinstance(event, MessageReceived):
            self._apply(self._script.take("message"), event.peer_id)
        if isinstance(event, PeerLost) and event.peer_id in self._stalled:
            self._stalled.discard(event.peer_id)
            self._fail_all(event.peer_id, "PeerLostError")
        return event.peer_id not in self._broken | self._stalled

    def _fail_all(self, peer_id: int, error: str) -> None:
        for transfer in self._transfers.values():
            if transfer.peer_id == peer_id:
                transfer.faults.append(Fault("fail", error=error))

    def _take_ends(self, now: float) -> Iterator[TransferEnded]:
        for transfer_id, transfer in list(self._transfers.items()):
            for ended in transfer.ended:
                if transfer.peer_id in self._stalled:
                    if now < transfer.deadline:
                        continue
                    transfer.faults.append(Fault("fail", error="TransferTimeoutError"))
                del self._transfers[transfer_id]
                yield replace(ended, error=self._error_of(transfer, ended.error))

    def _error_of(self, transfer: _Transfer, error: KVTransferError | None) -> KVTransferError | None:
        """Return the error that the owner sees at the end of a read."""
        for fault in transfer.faults:
            if fault.kind == "fail":
                error = fault.make_error()
            elif fault.kind == "corrupt" and error is None:
                self._flip(transfer)
                error = ChecksumError("the script changed bytes of this read")
        if transfer.peer_id in self._broken and isinstance(error, TransportClosedError):
            error = _broken_connection()
        return error

    def _flip(self, transfer: _Transfer) -> None:
        """Change the first byte of every local region."""
        pairs = transfer.reads_into
        for address in self._pool.addresses(pairs.local_offsets, pairs.lengths).tolist():
            ctypes.c_ubyte.from_address(address).value ^= 255

    def _take_losses(self) -> list[Event]:
        """Return the losses of broken peers whose reads have all ended, and forget them."""
        busy = {transfer.peer_id for transfer in self._transfers.values()}
        gone = self._broken - busy
        self._broken &= busy
        return [PeerLost(peer_id, _broken_connection()) for peer_id in gone]


def _call(script: Script, name: str, call: Callable[[], T]) -> T:
    """Make a call. Raise before or after it if the script says so."""
    faults = script.take(name)
    for fault in faults:
        if fault.kind == "raise":
            raise fault.make_exception()
    result = call()
    for fault in faults:
        raise fault.make_exception()
    return result


def _broken_connection() -> PeerLostError:
    return PeerLostError("the script broke the connection")
