"""The thread that owns a node's transport and drives its handoff protocol."""

from __future__ import annotations

import logging
import math
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import numpy as np

from ..transports.base import Connected, Event, MessageReceived, PeerLost, Route, TransferEnded, Transport
from ..transports.errors import (
    ConfigurationError,
    ForeignTransportError,
    KVTransferError,
    KVTransferStateError,
    StaleRegionError,
    TransferTimeoutError,
    TransportClosedError,
    UnexpectedError,
)
from ..transports.regions import Guard, Regions
from .computed import at_once
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
    PushEnded,
    Send,
    SetGuard,
    StartPush,
    StartRead,
    StartWrite,
)
from .handoff.messages import encode
from .handoff.node import NodeProtocol
from .metadata import HandoffMetadata, OfferOrder, OpenOrder
from .outcomes import Outcomes
from .unexpected import RepeatLog, Unexpected

__all__ = ["HandoffLoop"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: Longest single wait for events. `wake` ends every wait, but nobody wakes us when the interpreter ends.
_MAX_WAIT_S = 1.0
#: Between two looks whether a GPU has computed what an order is about.
_DUE_POLL_S = 1e-3
#: Between two looks whether the thread still lives, while it is waited for.
_RETRACT_POLL_S = 0.1
#: In place of a transfer's id: it is another process's.
_OF_ANOTHER = -1
#: Turns in a row in which the transport or the protocol as a whole fails, before the thread ends; after each it rests,
#: for a time that doubles. Together 1.3 s: long enough for a shortage to pass, short enough to tell the operator.
_MAX_FAILED_TURNS = 8
_FIRST_REST_S = 0.01
#: How long a transfer may go on that began although starting it raised; its peer is dropped, which ends transfers soon.
_DOUBT_S = 1.0
#: For how long a node warns after the last peer that it could not connect to.
_WARNING_S = 60.0


class _FatalError(UnexpectedError):
    """What failed cannot be ended by itself: only closing the transport makes the blocks concerned safe to reuse."""


def _cannot_refuse(error: KVTransferError) -> None:
    raise error


@dataclass(frozen=True)
class _Order:
    """What the thread shall do, and whether it may yet; later ones wait for it.

    Attributes:
        refuse: What it does instead if it cannot be told whether it may.
    """

    carry_out: Callable[[], None]
    is_due: Callable[[], bool] = at_once
    refuse: Callable[[KVTransferError], None] = _cannot_refuse


class HandoffLoop:
    """Carries out orders and answers peers, in one thread, until `close`, or until the main thread ends without it.

    An unexpected exception ends what it was about: one load, one offer or one peer. It ends the thread if that is not
    enough: if the transport as a whole fails again and again, if a guard cannot be cleared, or if a failure cannot be
    dealt with. Then peers are shut out, every handoff, also of later orders, ends as failed, and `failure` says why:
    the engine goes on without handing over, and nothing waits for ever.

    Args:
        transport: With its pool registered and listening; from now on only the thread calls it.
        protocol: This node's; from now on only the thread calls it.
        outcomes: Where the ends of handoffs are put down.
        address: Where the transport listens.
    """

    def __init__(
        self, transport: Transport, protocol: NodeProtocol, outcomes: Outcomes, address: str
    ) -> None:
        self._transport = transport
        self._outcomes = outcomes
        self._unexpected = Unexpected()
        self._driver = _Driver(transport, protocol, outcomes, address, self._unexpected)
        self._failure = ""
        self._is_unsafe = False  # a guard could not be cleared
        self._orders: deque[_Order] = deque()
        self._is_closing = threading.Event()
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvferry-handoff")
        self._thread.start()

    @property
    def failure(self) -> str:
        """Why this node hands nothing over any more; empty while it does, and after `close`."""
        return self._failure

    @property
    def warning(self) -> str:
        """What kept a handoff from working within the last minute although this node can hand over; else empty."""
        return self._driver.warning

    def submit(self, orders: HandoffMetadata, is_computed: Callable[[], bool]) -> None:
        """Have one step's orders carried out; returns at once.

        Args:
            is_computed: Whether all that was launched before them has run. Until then what they offer may not be
                there yet, and what they load into may still be written to.
        """
        self._outcomes.expect(orders, _now())
        carry_out, refuse = partial(self._driver.carry_out, orders), partial(self._driver.refuse, orders)
        self._orders.append(_Order(carry_out, is_computed, refuse))
        self._wake()
        if self._has_ended.is_set():  # set before its last look at what is owed, so one of us two sees these
            self._outcomes.fail_all(TransportClosedError("this node's handoff thread has ended"))

    def retract(self, request_ids: set[str], timeout_s: float) -> None:
        """End offers now; when this returns, no bytes of their blocks are accepted by anybody any more.

        Raises:
            UnexpectedError: their guards cannot be cleared. The blocks must not be reused.
        """
        is_done = threading.Event()

        def retract() -> None:
            self._driver.abort(request_ids)
            is_done.set()

        self._orders.append(_Order(retract))
        self._wake()
        deadline = _now() + timeout_s
        while not is_done.wait(_RETRACT_POLL_S) and not self._has_ended.is_set():
            if _now() > deadline:
                logger.error("the handoff thread does not answer; every offer of this node ends")
                self._is_unsafe = not self._driver.clear_guards()
                break
        if self._is_unsafe:
            raise UnexpectedError(
                f"the guards of open offers cannot be cleared: peers would accept what is written into the blocks of "
                f"{', '.join(sorted(request_ids))} next; restart the node"
            )

    def close(self, timeout_s: float) -> None:
        """End every handoff, close the transport and wait for the thread. Idempotent.

        Raises:
            TransferTimeoutError: a read could not be stopped in time. The thread still runs, and ends with it.
        """
        self._is_closing.set()
        self._wake()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TransferTimeoutError(f"the handoff thread has not ended within {timeout_s} s")

    def _wake(self) -> None:
        # If that fails, the thread wakes up by itself after `_MAX_WAIT_S`; the engine's step must not fail for it.
        with self._unexpected.logged("waking the handoff thread"):
            self._transport.wake()

    # -- the thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        error: KVTransferError = TransportClosedError("this node shuts down")
        try:
            self._serve()
            self._drain()
        except Exception as bug:  # noqa: BLE001 - whatever it is, nobody may wait for this thread for ever
            error = self._die(bug)
        try:
            self._transport.close()
        except Exception as bug:  # noqa: BLE001 - whatever it is, nobody may wait for this thread for ever
            self._unexpected.log("closing the transport", bug)
            # It did not say that it stopped writing, so the engine must not reuse the blocks of these loads.
            self._outcomes.forget_loads(self._driver.loads_in_transfer)
        finally:
            self._has_ended.set()
            self._outcomes.fail_all(error)

    def _die(self, bug: Exception) -> KVTransferError:
        trace = "".join(traceback.format_exception(bug)).rstrip()
        logger.critical(
            "the handoff thread dies; this node hands nothing over until it is restarted:\n%s", trace
        )
        reason = str(bug) if isinstance(bug, UnexpectedError) else f"{type(bug).__name__}: {bug}"
        self._failure = f"this node's handoff thread died: {reason}; restart the node"
        self._outcomes.count("handoff_thread_deaths_total")
        if not self._driver.clear_guards():
            # Peers would still accept what they read of these blocks, so the engine must not reuse them.
            self._is_unsafe = True
            self._outcomes.forget_offers()
        return TransportClosedError(self._failure)

    def _serve(self) -> None:
        main_thread = threading.main_thread()
        while not self._is_closing.is_set() and main_thread.is_alive():
            self._carry_out_due()
            # A peer can only claim what our engine answered, and the order behind that answer was submitted before it.
            # So with the orders first, no claim ever meets an offer that is not known here yet.
            self._driver.turn(_DUE_POLL_S if self._orders else _MAX_WAIT_S, self._carry_out_due)

    def _carry_out_due(self) -> None:
        while self._orders and (carry_out := self._due(self._orders[0])):
            self._orders.popleft()
            carry_out()

    def _due(self, order: _Order) -> Callable[[], None] | None:
        """What is to be done about an order now; None: it is not due."""
        try:
            with self._unexpected.typed("asking whether a step has run"):
                return order.carry_out if order.is_due() else None
        except KVTransferError as error:
            return partial(order.refuse, error)

    def _drain(self) -> None:
        """Say goodbye to every peer, and wait for transfers: until then their blocks are not the engine's."""
        self._driver.shut_down()
        while self._driver.num_transfers:
            self._driver.turn(_MAX_WAIT_S)


class _Driver:
    """Events into the protocol, its actions into the transport.

    Each call to the outside has one owner of its failure, which ends what the call was about: `Unexpected` makes every
    exception a `KVTransferError`, and the protocol deals with it as with those that the call documents.
    """

    def __init__(
        self,
        transport: Transport,
        protocol: NodeProtocol,
        outcomes: Outcomes,
        address: str,
        unexpected: Unexpected,
    ) -> None:
        self._transport = transport
        self._protocol = protocol
        self._outcomes = outcomes
        self._address = address
        self._unexpected = unexpected
        self._reads: dict[int, tuple[StartRead, Route]] = {}  # by transfer id
        self._writes: dict[int, tuple[StartWrite, int]] = {}  # by transfer id; with the clearings before it
        self._doubts: dict[int, tuple[float, KVTransferError]] = {}  # by transfer id; its end, and why
        self._pushes: dict[int, tuple[float, str]] = {}  # by the guard's value; since when, and the request
        self._writers: set[int] = set()  # peers that were allowed to write here
        self._bugs: dict[str, KVTransferError] = {}  # by request; what its load will be reported with
        self._num_clearings = 0
        self._num_doubts = 0
        self._num_failed_turns = 0
        self._unreachable = _Unreachable()

    @property
    def num_transfers(self) -> int:
        return len(self._reads) + len(self._writes)

    @property
    def loads_in_transfer(self) -> set[str]:
        """Requests whose blocks are written into, as far as the transport has not said otherwise."""
        reads = {read.request_id for read, _ in self._reads.values()}
        return reads | {request_id for _, request_id in self._pushes.values()}

    @property
    def warning(self) -> str:
        return self._unreachable.warning

    def carry_out(self, orders: HandoffMetadata) -> None:
        """Turn one step's orders into calls of the protocol. A bug met by one of them fails that request alone."""
        producer, consumer = self._protocol.producer, self._protocol.consumer
        for request_id, lease in orders.announcements.items():
            with self._unexpected.logged("announcing an offer"):  # it costs the claims that come too early
                self._do(producer.announce(request_id, lease))
        for request_id, order in orders.offers.items():
            with self._failing_offer(request_id, order.lease):
                self._offer(request_id, order)
        for request_id, extension in orders.extensions.items():
            with self._failing_offer(request_id):
                self._do(producer.extend(request_id, extension.block_ids, extension.num_ready))
        for request_id, block_ids in orders.completions.items():
            with self._failing_offer(request_id):
                self._do(producer.complete(request_id, block_ids, _now()))
        for lease in orders.withdrawals:
            self._do(self._must("withdrawing an offer", partial(producer.withdraw, lease)))
        self.abort(orders.aborts)
        for request_id, lease in orders.releases:
            self._do(producer.give_up(request_id, lease))
        for request_id, offer in orders.claims.items():
            with self._failing_load(request_id):
                self._do(consumer.claim(request_id, offer, _now()))
        for request_id, blocks in orders.loads.items():
            with self._failing_load(request_id, blocks):
                self._do(consumer.load(request_id, blocks, _now()))
        for request_id in orders.drops:
            with self._failing_load(request_id):
                self._do(consumer.drop(request_id, _now()))
            self._bugs.pop(request_id, None)

    def refuse(self, orders: HandoffMetadata, error: KVTransferError) -> None:
        """Fail one step's orders that are about memory, because it cannot be told whether that is written or free.

        What is offered would be read too early, and what is loaded into might still be in use by the engine.
        """
        leases = [order.lease for order in orders.offers.values()]
        aborts = (*orders.aborts, *orders.extensions, *orders.completions)
        withdrawals = (*orders.withdrawals, *leases)
        memoryless = replace(
            orders, offers={}, extensions={}, completions={}, withdrawals=withdrawals, aborts=aborts, loads={}
        )
        self.carry_out(memoryless)
        for request_id in orders.offers:
            self._end_offer(OfferEnded(request_id, "aborted", str(error)))
        for request_id, blocks in orders.loads.items():
            self._fail_load(request_id, blocks, error)

    @contextmanager
    def _failing_offer(self, request_id: str, lease: int = 0) -> Iterator[None]:
        """Carry out an order about an offer; if the protocol has a bug there, end the offer as aborted.

        Args:
            lease: Of an offer that is made just now: whoever claims it is to be denied.
        """
        try:
            with self._unexpected.typed("an order about an offer"):
                yield
        except _FatalError:
            raise
        except KVTransferError as error:
            producer = self._protocol.producer
            ended = producer.abort(request_id, _now())
            # Without actions there is nothing to take back: no guard was set, so no peer can have read.
            self._do(ended or [OfferEnded(request_id, "aborted", str(error))])
            self._do(producer.withdraw(lease))

    @contextmanager
    def _failing_load(self, request_id: str, blocks: LocalBlocks | None = None) -> Iterator[None]:
        """Carry out an order about a load; if the protocol has a bug there, end the load as failed."""
        try:
            with self._unexpected.typed("an order about a load"):
                yield
        except _FatalError:
            raise
        except KVTransferError as error:
            self._fail_load(request_id, blocks, error)

    def _fail_load(self, request_id: str, blocks: LocalBlocks | None, error: KVTransferError) -> None:
        """End a load that met a bug. If something is written into its blocks, its end is reported after that.

        Args:
            blocks: What it was to fill, if it has not begun; None: the protocol knows, or its order is yet to come.
        """
        self._bugs[request_id] = error
        self._do(self._protocol.consumer.drop(request_id, _now()))
        if blocks is not None and request_id in self._bugs and request_id not in self.loads_in_transfer:
            self._end_load(LoadEnded(request_id, "failed", error, blocks))

    def abort(self, request_ids: Iterable[str]) -> None:
        """End offers that are still there."""
        abort = self._protocol.producer.abort
        for request_id in request_ids:
            self._do(self._must("aborting an offer", partial(abort, request_id, _now())))

    def _offer(self, request_id: str, order: OfferOrder | OpenOrder) -> None:
        producer = self._protocol.producer
        if isinstance(order, OfferOrder):
            actions = producer.offer(
                request_id, order.lease, order.block_ids, order.num_tokens, _now(), order.content
            )
        else:
            actions = producer.open(
                request_id, order.lease, order.block_ids, order.num_tokens, order.num_ready, order.content
            )
        self._do(actions)

    def turn(self, timeout_s: float, before_events: Callable[[], None] = lambda: None) -> None:
        """Wait for what happens next, at most until the next deadline, and deal with it.

        Args:
            before_events: Called when the wait is over, before any event is dealt with.

        Raises:
            KVTransferError: the transport or the protocol as a whole has failed too many times in a row.
        """
        events: list[Event] = []
        failure: KVTransferError | None = None
        try:
            with self._unexpected.typed("waiting for events"):
                due = min(
                    self._protocol.next_deadline(), *(end for end, _ in self._doubts.values()), math.inf
                )
                events = self._transport.wait_events(max(min(due - _now(), timeout_s), 0.0))
        except KVTransferError as error:
            failure = error
        before_events()
        for event in (*events, *self._settled_doubts()):
            self._handle(event)
        try:
            with self._unexpected.typed("doing what is due"):
                actions = self._protocol.advance(_now())
        except KVTransferError as error:
            failure = error
        else:
            self._do(actions)
        self._judge(failure)

    def _judge(self, failure: KVTransferError | None) -> None:
        """Rest after a turn that failed as a whole, which no single peer or load is to blame for; give up in the end."""
        if failure is None:
            self._num_failed_turns = 0
            return
        self._num_failed_turns += 1
        if self._num_failed_turns >= _MAX_FAILED_TURNS:
            raise failure
        time.sleep(_FIRST_REST_S * 2 ** (self._num_failed_turns - 1))  # it may fail at once: never spin

    def shut_down(self) -> None:
        """End every handoff that is not reading, and drop every peer."""
        self._do(self._protocol.shutdown(_now()))

    def clear_guards(self) -> bool:
        """Have nothing accepted any more that is read now, by anybody, whatever state the protocol is in.

        Returns:
            Whether that is so; False: a guard could not be cleared.
        """
        self._num_clearings += 1
        is_done = True
        for index in range(self._transport.guards.num_guards):
            try:
                self._clear_guard(index)
            except KVTransferError:
                is_done = False
        return is_done

    # -- events --------------------------------------------------------------------------------------

    def _handle(self, event: Event) -> None:
        """Deal with one event. A bug on the way ends the peer that it came from."""
        if isinstance(event, TransferEnded):
            self._do(self._end_transfer(event))
            return
        try:
            actions = self._react(event)
        except Exception as bug:  # noqa: BLE001 - whatever it is, it ends one peer
            error = self._unexpected.as_typed("the protocol, with an event of a peer,", bug)
            actions = self._protocol.peer_failed(event.peer_id, error, _now())
        self._do(actions)

    def _react(self, event: Connected | MessageReceived | PeerLost) -> list[Action]:
        match event:
            case Connected(peer_id, incoming):
                return self._protocol.peer_connected(peer_id, incoming, _now())
            case MessageReceived(peer_id, message):
                return self._protocol.message_received(peer_id, message, _now())
            case PeerLost(peer_id, error):
                self._writers.discard(peer_id)
                return self._protocol.peer_lost(peer_id, error, _now())

    def _end_transfer(self, ended: TransferEnded) -> list[Action]:
        self._doubts.pop(ended.transfer_id, None)
        if ended.transfer_id in self._writes:
            return self._end_write(ended)
        if ended.transfer_id in self._reads:
            return self._end_read(ended)
        # One that began although starting it raised: its load waits for `_DOUBT_S` all the same.
        logger.error("the transport ended a transfer that was never started: %d", ended.transfer_id)
        return []

    def _settled_doubts(self) -> list[TransferEnded]:
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
        transfer_id = _OF_ANOTHER - 1 - self._num_doubts
        self._num_doubts += 1
        self._doubts[transfer_id] = (_now() + _DOUBT_S, error)
        return transfer_id, self._protocol.peer_failed(peer_id, error, _now())

    # -- actions -------------------------------------------------------------------------------------

    def _do(self, actions: Iterable[Action]) -> None:
        """Do actions in order, and what the protocol wants done because of how they went.

        Raises:
            _FatalError: one of them failed in a way that only the end of the thread makes safe.
        """
        todo = deque(actions)
        while todo:
            action = todo.popleft()
            try:
                todo.extend(self._perform(action))
            except _FatalError:
                raise
            except Exception as bug:  # noqa: BLE001 - the protocol has one: the action's own failure was dealt with
                error = self._unexpected.as_typed(f"the protocol, after {type(action).__name__},", bug)
                if isinstance(action, Connect):
                    todo.extend(self._protocol.consumer.connect_failed(action.address, error, _now()))
                    continue
                if not isinstance(action, Send | StartRead | StartPush | StartWrite):
                    raise _FatalError(str(error)) from error
                peer_id = action.read.peer_id if isinstance(action, StartPush) else action.peer_id
                todo.extend(self._protocol.peer_failed(peer_id, error, _now()))

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
            case StartPush():
                return self._start_push(action)
            case StartWrite():
                return self._start_write(action)
            case PushEnded():
                self._end_push(action)
            case Disconnect(peer_id):
                self._disconnect(peer_id)
            case PeerDiffers():
                logger.warning("%s", action)
            case OfferEnded():
                self._end_offer(action)
            case OfferCompleted(request_id):
                with self._unexpected.logged("noting that an offer is complete"):
                    self._outcomes.offer_completed(request_id, _now())
            case LoadEnded():
                self._end_load(action)
        return []

    def _set_guard(self, index: int, value: int) -> list[Action]:
        try:
            with self._unexpected.typed("setting a guard"):
                self._transport.guards.set(index, value)
        except KVTransferError as error:
            return self._protocol.producer.guard_failed(index, str(error))
        return []

    def _clear_guard(self, index: int) -> None:
        # What follows lets the engine reuse the blocks under this guard, and as long as it holds, peers accept what they
        # read there. So there is no going on without it; the end of the thread keeps such blocks from being reused.
        self._must("clearing a guard", partial(self._transport.guards.clear, index))

    def _must(self, what: str, call: Callable[[], T]) -> T:
        """Make a call that nothing can go on without. It can be repeated, and is, once.

        Raises:
            _FatalError: it failed twice.
        """
        with suppress(KVTransferError), self._unexpected.typed(what):
            return call()
        try:
            with self._unexpected.typed(what):
                return call()
        except KVTransferError as error:
            raise _FatalError(f"{error}, twice") from error

    def _send(self, send: Send) -> list[Action]:
        try:
            with self._unexpected.typed("sending a message"):
                self._transport.send(send.peer_id, encode(send.message))
        except KVTransferError as error:
            return self._protocol.peer_failed(send.peer_id, error, _now())
        return []

    def _connect(self, connect: Connect) -> list[Action]:
        consumer = self._protocol.consumer
        try:
            with self._unexpected.typed("connecting to a peer"):
                peer_id = self._transport.start_connect(connect.address, timeout_s=connect.timeout_s)
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
                self._transport.disconnect(peer_id)
        except KVTransferError as error:
            # Only when that has returned does the peer write nothing here any more, and the blocks that it may write to
            # are reused next. Once more proves nothing: the transport may know the peer no longer.
            if peer_id in self._writers:
                raise _FatalError(str(error)) from error
            # One that was never allowed to write can do no harm: what it says is ignored.
            with self._unexpected.logged("dropping a peer once more"):
                self._transport.disconnect(peer_id)
        self._writers.discard(peer_id)

    def _start_read(self, read: StartRead) -> list[Action]:
        actions: list[Action] = []
        route = Route(self._transport.scheme, "")
        try:
            with self._unexpected.typed("starting a read"):
                transfer_id = self._transport.start_read(
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
        route = Route(self._transport.scheme, "")
        with self._unexpected.logged("asking for a peer's route"):
            route = self._transport.route_of(read.peer_id)
        if not read.not_pushed:
            return route
        reasons = (route.reason, f"push was asked for, pulled: {read.not_pushed}")
        return Route(route.scheme, "; ".join(filter(None, reasons)))

    def _start_push(self, push: StartPush) -> list[Action]:
        read, reserve = push.read, push.reserve
        consumer = self._protocol.consumer
        can_write = False
        with self._unexpected.logged("asking whether a peer can write"):
            can_write = self._transport.can_write(read.peer_id)
        if not can_write:
            return consumer.pull_instead(push, "the transport does not write to this peer")
        self._pushes[reserve.guard_value] = _now(), read.request_id
        regions = Regions(np.ascontiguousarray(read.pairs.table[:, [0, 2]]))
        guard = Guard(reserve.guard_index, reserve.guard_value)
        self._writers.add(read.peer_id)
        try:
            with self._unexpected.typed("accepting writes"):
                self._transport.accept_writes(read.peer_id, guard, regions)
        except KVTransferError as error:
            # The peer was told nothing of these regions, and its guard is cleared next.
            return consumer.push_ended(push, error, "", _now())
        return self._send(Send(read.peer_id, reserve))

    def _end_push(self, ended: PushEnded) -> None:
        now, read = _now(), ended.push.read
        seconds = now - self._pushes.pop(ended.push.reserve.guard_value, (now, ""))[0]
        num_bytes = 0 if ended.error is not None else read.pairs.num_bytes
        mechanism = f"push/{ended.mechanism}" if ended.mechanism else "push"
        transfer = TransferEnded(_OF_ANOTHER, ended.error, num_bytes, seconds, mechanism)
        route = self._route_of(read)
        with self._unexpected.logged("recording a push"):
            self._outcomes.read_ended(read, transfer, route, now)

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
            self._do(consumer.read_ended(read, error, _now()))
        self._fail_load(read.request_id, None, error)
        return []

    def _start_write(self, write: StartWrite) -> list[Action]:
        actions: list[Action] = []
        try:
            with self._unexpected.typed("starting a write"):
                transfer_id = self._transport.start_write(
                    write.peer_id, write.pairs, write.guard, timeout_s=write.timeout_s
                )
        except UnexpectedError as error:
            transfer_id, actions = self._doubt(write.peer_id, error)
        except KVTransferError as error:
            return self._protocol.producer.write_ended(write, error, "")
        self._writes[transfer_id] = write, self._num_clearings
        return actions

    def _end_write(self, ended: TransferEnded) -> list[Action]:
        write, num_clearings = self._writes.pop(ended.transfer_id)
        error = ended.error
        if error is None and num_clearings != self._num_clearings:
            error = StaleRegionError("the offer ended while it was written")
        write_ended = self._protocol.producer.write_ended
        # An offer whose request has finished may wait for this, and its blocks with it.
        return self._must("the end of a write", partial(write_ended, write, error, ended.mechanism))

    def _end_offer(self, ended: OfferEnded) -> None:
        level = logging.DEBUG if ended.outcome == "delivered" else logging.INFO
        logger.log(level, "offer of request %s ended: %s", ended.request_id, ended.reason)
        self._must("reporting the end of an offer", partial(self._outcomes.offer_ended, ended))

    def _end_load(self, ended: LoadEnded) -> None:
        if bug := self._bugs.pop(ended.request_id, None):
            ended = replace(ended, outcome="failed", error=bug)
        if ended.outcome == "failed":
            # One warning for all requests is enough where no request can succeed: see `_Unreachable`.
            level = logging.DEBUG if isinstance(ended.error, ForeignTransportError) else logging.WARNING
            # As text: a log record that lives on must not keep the error's frames, and with them the pool, alive.
            logger.log(level, "load of request %s failed: %s", ended.request_id, str(ended.error))
        self._must("reporting the end of a load", partial(self._outcomes.load_ended, ended, _now()))


class _Unreachable:
    """Peers that listen on another transport than this node's: no request to them can succeed, so one warning is enough."""

    #: Schemes that are told apart. Anyone can invent more, and each has a log line of its own.
    _MAX_SCHEMES = 8

    def __init__(self) -> None:
        self._log = RepeatLog()
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
        self._log.log(logging.WARNING, scheme if scheme in self._schemes else "", lambda: text)


def _now() -> float:
    return time.monotonic()
