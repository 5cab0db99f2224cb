"""What the handoff thread does for the protocol: its actions into the transport, and the ends of what they began."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TypeVar

from ..transports._limited_log import LimitedLog
from ..transports.base import Endpoint, GuardTable, Route, TransferEnded
from ..transports.errors import (
    ConfigurationError,
    ForeignTransportError,
    KVTransferError,
    KVTransferStateError,
    UnexpectedError,
)
from .handoff.events import (
    Action,
    ClearGuard,
    Connect,
    Disconnect,
    LoadEnded,
    LocalBlocks,
    OfferCompleted,
    OfferEnded,
    PeerDiffers,
    Send,
    SetGuard,
    StartRead,
)
from .handoff.messages import encode
from .handoff.node import NodeProtocol
from .outcomes import Outcomes
from .unexpected import Unexpected

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: How long a read may go on that began although starting it raised; its peer is dropped, which ends reads soon.
_DOUBT_S = 1.0
#: For how long a node warns after the last peer that it could not connect to.
_WARNING_S = 60.0


class FatalError(UnexpectedError):
    """What failed cannot be ended by itself: only closing the transport makes the blocks concerned safe to reuse."""


class HandoffActions:
    """Does the protocol's actions, and owns the reads that they began.

    Each call to the outside has one owner of its failure, which ends what the call was about: `Unexpected` makes every
    exception a `KVTransferError`, and the protocol deals with it as with those that the call documents.

    Args:
        address: Where the endpoint listens.
    """

    def __init__(
        self,
        guards: GuardTable,
        endpoint: Endpoint,
        protocol: NodeProtocol,
        outcomes: Outcomes,
        address: str,
        unexpected: Unexpected,
    ) -> None:
        self._guards = guards
        self._endpoint = endpoint
        self._protocol = protocol
        self._outcomes = outcomes
        self._address = address
        self._unexpected = unexpected
        self._reads: dict[int, tuple[StartRead, Route]] = {}  # by transfer id
        self._doubts: dict[int, tuple[float, KVTransferError]] = {}  # by transfer id; its end, and why
        self._bugs: dict[str, KVTransferError] = {}  # by request; what its load will be reported with
        self._num_doubts = 0
        self._unreachable = _Unreachable()

    @property
    def num_transfers(self) -> int:
        """Reads whose ends are still to come."""
        return len(self._reads)

    @property
    def loads_in_transfer(self) -> set[str]:
        """Requests whose blocks are written into, as far as the transport has not said otherwise."""
        return {read.request_id for read, _ in self._reads.values()}

    @property
    def warning(self) -> str:
        """What kept a load from being connected within the last minute."""
        return self._unreachable.warning

    def next_deadline(self) -> float:
        """When `settled_doubts` will have something to tell; infinity if never."""
        return min((end for end, _ in self._doubts.values()), default=math.inf)

    def forget_load(self, request_id: str) -> None:
        """Forget why the load of this request is to fail: it will not be asked for any more."""
        self._bugs.pop(request_id, None)

    def clear_guards(self) -> bool:
        """Have nothing accepted any more that is read now, by anybody, whatever state the protocol is in.

        Returns:
            Whether that is so; False: a guard could not be cleared.
        """
        is_done = True
        for index in range(self._guards.num_guards):
            try:
                self._clear_guard(index)
            except KVTransferError:
                is_done = False
        return is_done

    def fail_load(self, request_id: str, blocks: LocalBlocks | None, error: KVTransferError) -> None:
        """End a load that met a bug. If something is written into its blocks, its end is reported after that.

        Args:
            blocks: What it was to fill, if it has not begun; None: the protocol knows, or its order is yet to come.
        """
        self._bugs[request_id] = error
        self.do(self._protocol.consumer.drop(request_id, _now()))
        if blocks is not None and request_id in self._bugs and request_id not in self.loads_in_transfer:
            self._end_load(LoadEnded(request_id, "failed", error, blocks))

    def end_transfer(self, ended: TransferEnded) -> list[Action]:
        self._doubts.pop(ended.transfer_id, None)
        if ended.transfer_id in self._reads:
            return self._end_read(ended)
        # One that began although starting it raised: its load waits for `_DOUBT_S` all the same.
        logger.error("the transport ended a transfer that was never started: %d", ended.transfer_id)
        return []

    def settled_doubts(self) -> list[TransferEnded]:
        now = _now()
        over = [(number, error) for number, (end, error) in self._doubts.items() if end <= now]
        return [TransferEnded(number, error, 0, 0.0, "") for number, error in over]

    def _doubt(self, peer_id: int, error: KVTransferError) -> tuple[int, list[Action]]:
        """Name a transfer that may have begun although starting it raised, so that its end comes after a while.

        An exception that the transport does not document says nothing about what it did before, and its blocks must not
        be reused while something may still copy. So its peer is dropped, and the end waits for `_DOUBT_S`.

        Returns:
            Its id, and what is to be done now.
        """
        self._num_doubts += 1
        transfer_id = -self._num_doubts  # no transport gives a negative id
        self._doubts[transfer_id] = (_now() + _DOUBT_S, error)
        return transfer_id, self._protocol.peer_failed(peer_id, error, _now())

    def do(self, actions: Iterable[Action]) -> None:
        """Do actions in order, and what the protocol wants done because of how they went.

        Raises:
            FatalError: one of them failed in a way that only the end of the thread makes safe.
        """
        todo = deque(actions)
        while todo:
            action = todo.popleft()
            try:
                todo.extend(self._perform(action))
            except FatalError:
                raise
            except Exception as bug:  # noqa: BLE001 - the protocol has one: the action's own failure was dealt with
                error = self._unexpected.as_typed(f"the protocol, after {type(action).__name__},", bug)
                if isinstance(action, Connect):
                    todo.extend(self._protocol.consumer.connect_failed(action.address, error, _now()))
                    continue
                if not isinstance(action, Send | StartRead):
                    raise FatalError(str(error)) from error
                todo.extend(self._protocol.peer_failed(action.peer_id, error, _now()))

    def _perform(self, action: Action) -> list[Action]:
        """Do one action.

        Returns:
            What the protocol wants done because of how it went.
        """
        match action:
            case SetGuard(index, value):
                return self._set_guard(index, value)
            case ClearGuard(index):
                self._clear_guard(index)
            case Send():
                return self._send(action)
            case Connect():
                return self._connect(action)
            case StartRead():
                return self._start_read(action)
            case Disconnect(peer_id):
                self._disconnect(peer_id)
            case PeerDiffers():
                logger.warning("%s", action)
            case OfferEnded():
                self.end_offer(action)
            case OfferCompleted(request_id):
                with self._unexpected.logged("noting that an offer is complete"):
                    self._outcomes.offer_completed(request_id, _now())
            case LoadEnded():
                self._end_load(action)
        return []

    def _set_guard(self, index: int, value: int) -> list[Action]:
        try:
            with self._unexpected.typed("setting a guard"):
                self._guards.set(index, value)
        except KVTransferError as error:
            return self._protocol.producer.guard_failed(index, str(error))
        return []

    def _clear_guard(self, index: int) -> None:
        # What follows lets the engine reuse the blocks under this guard, and as long as it holds, peers accept what they
        # read there. So there is no going on without it; the end of the thread keeps such blocks from being reused.
        self.must("clearing a guard", partial(self._guards.clear, index))

    def must(self, what: str, call: Callable[[], T]) -> T:
        """Make a call that nothing can go on without. It can be repeated, and is, once.

        Raises:
            FatalError: it failed twice.
        """
        with suppress(KVTransferError), self._unexpected.typed(what):
            return call()
        try:
            with self._unexpected.typed(what):
                return call()
        except KVTransferError as error:
            raise FatalError(f"{error}, twice") from error

    def _send(self, send: Send) -> list[Action]:
        try:
            with self._unexpected.typed("sending a message"):
                self._endpoint.send(send.peer_id, encode(send.message))
        except KVTransferError as error:
            return self._protocol.peer_failed(send.peer_id, error, _now())
        return []

    def _connect(self, connect: Connect) -> list[Action]:
        consumer = self._protocol.consumer
        try:
            with self._unexpected.typed("connecting to a peer"):
                peer_id = self._endpoint.start_connect(connect.address, timeout_s=connect.timeout_s)
        except KVTransferError as error:
            return consumer.connect_failed(connect.address, self._as_foreign(connect.address, error), _now())
        return consumer.connecting(connect.address, peer_id, _now())

    def _as_foreign(self, address: str, error: KVTransferError) -> KVTransferError:
        """Why an address was refused: it is malformed, or it is one of another transport."""
        schemes = [text.partition(":")[0] for text in (address, self._address)]
        if not isinstance(error, ConfigurationError) or schemes[0] == schemes[1]:
            return error
        foreign = ForeignTransportError(local=self._address, remote=address)
        self._outcomes.count("unreachable_peers_total")
        self._unreachable.note(schemes[0], str(foreign))
        return foreign

    def _disconnect(self, peer_id: int) -> None:
        try:
            with self._unexpected.typed("dropping a peer"):
                self._endpoint.disconnect(peer_id)
        except KVTransferError:
            # A peer that stays connected can do no harm: it cannot write here, and what it says is ignored.
            with self._unexpected.logged("dropping a peer once more"):
                self._endpoint.disconnect(peer_id)

    def _start_read(self, read: StartRead) -> list[Action]:
        actions: list[Action] = []
        route = Route(self._endpoint.scheme, "")
        try:
            with self._unexpected.typed("starting a read"):
                transfer_id = self._endpoint.start_read(
                    read.peer_id, read.pairs, read.guard, timeout_s=read.timeout_s
                )
        except UnexpectedError as error:
            transfer_id, actions = self._doubt(read.peer_id, error)
        except KVTransferError as error:
            return self._protocol.consumer.read_ended(read, error, _now())
        else:
            route = self._route_of(read)
        self._reads[transfer_id] = read, route
        return actions

    def _route_of(self, read: StartRead) -> Route:
        route = Route(self._endpoint.scheme, "")
        with self._unexpected.logged("asking for a peer's route"):
            route = self._endpoint.route_of(read.peer_id)
        return route

    def _end_read(self, ended: TransferEnded) -> list[Action]:
        read, route = self._reads.pop(ended.transfer_id)
        with self._unexpected.logged("recording a read"):
            self._outcomes.read_ended(read, ended, route, _now())
        consumer = self._protocol.consumer
        try:
            with self._unexpected.typed("the protocol, with the end of a read,"):
                return consumer.read_ended(read, ended.error, _now())
        except KVTransferError as bug:
            error = bug
        with suppress(
            KVTransferStateError
        ):  # the bug came after the protocol had taken note that the read is over
            self.do(consumer.read_ended(read, error, _now()))
        self.fail_load(read.request_id, None, error)
        return []

    def end_offer(self, ended: OfferEnded) -> None:
        level = logging.DEBUG if ended.outcome == "delivered" else logging.INFO
        logger.log(level, "offer of request %s ended: %s", ended.request_id, ended.reason)
        self.must("reporting the end of an offer", partial(self._outcomes.offer_ended, ended))

    def _end_load(self, ended: LoadEnded) -> None:
        if bug := self._bugs.pop(ended.request_id, None):
            ended = replace(ended, outcome="failed", error=bug)
        if ended.outcome == "failed":
            # One warning for all requests is enough where no request can succeed: see `_Unreachable`.
            level = logging.DEBUG if isinstance(ended.error, ForeignTransportError) else logging.WARNING
            # As text: a log record that lives on must not keep the error's frames, and with them the pool, alive.
            logger.log(level, "load of request %s failed: %s", ended.request_id, str(ended.error))
        self.must("reporting the end of a load", partial(self._outcomes.load_ended, ended, _now()))


class _Unreachable:
    """Peers that listen on another transport than this node's: no request to them can succeed, so one warning is enough."""

    #: Schemes that are told apart. Anyone can invent more, and each has a log line of its own.
    _MAX_SCHEMES = 8

    def __init__(self) -> None:
        self._log = LimitedLog(logger, max_lines=1, interval_s=_WARNING_S)
        self._schemes: set[str] = set()
        self._latest = ("", 0.0)  # in words, and until when it is worth a warning

    @property
    def warning(self) -> str:
        text, until = self._latest
        return text if _now() < until else ""

    def note(self, scheme: str, text: str) -> None:
        """A peer could not be connected to."""
        self._latest = text, _now() + _WARNING_S
        if len(self._schemes) < self._MAX_SCHEMES:
            self._schemes.add(scheme)
        self._log.warning("%s", text, key=scheme if scheme in self._schemes else "")


def _now() -> float:
    return time.monotonic()
