"""The thread that owns a node's transport: it carries out orders, and drives the handoff protocol.

Orders and events go into the protocol, and the protocol's actions go to the transport. Ends go to `Outcomes`,
where the engine's thread takes them.

What must never break: every load that was ordered, and every offer of a finished request, gets one end,
whatever raises; and blocks are given back only when no peer accepts bytes of them and nothing writes into
them.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from ...transports.base import (
    Connected,
    Endpoint,
    Event,
    MessageReceived,
    PeerLost,
    Route,
    TransferEnded,
    Transport,
)
from ...transports.errors import (
    ConfigurationError,
    ForeignTransportError,
    KVTransferError,
    KVTransferStateError,
    PeerRefusedError,
    TransferTimeoutError,
    TransportClosedError,
    UnexpectedError,
)
from ...transports.limited_log import LimitedLog
from ...transports.outside import bug_log, log_traceback, survived, undocumented, unexpected
from ..errors import RendezvousError
from ..handoff.events import (
    Action,
    ClaimUnmet,
    ClearGuard,
    Connect,
    Disconnect,
    ExtendGuard,
    Identity,
    LayersLeftOut,
    LoadEnded,
    LocalBlocks,
    OfferCompleted,
    OfferEnded,
    PeerDiffers,
    Send,
    SetGuard,
    StartRead,
)
from ..handoff.messages import Message, encode
from ..handoff.node import NodeProtocol
from ..planning.extents import BlockExtents
from .computed import AT_ONCE, Mark, Watch
from .offer_guards import OfferGuards
from .orders import HandoffMetadata, OfferOrder, OpenOrder, RequestOrders, WorkerAddress
from .outcomes import Outcomes
from .trace import HandoffTrace

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: Longest single wait for events. `wake` ends every wait, but nothing calls it when the interpreter ends.
_MAX_WAIT_S = 1.0
#: How often `begin_anew` checks whether the thread still runs, while it waits for it.
_BEGIN_POLL_S = 0.1
#: The thread ends after this many consecutive iterations in which the transport or the protocol as a whole
#: failed. It rests after each, twice as long each time; 1.3 s in all: long enough for a shortage to pass, and
#: short enough that the operator learns of it soon.
_MAX_FAILED_ITERATIONS = 8
_FIRST_REST_S = 0.01
#: How long a read may continue if it began although starting it raised. Its peer is dropped, which ends reads
#: soon.
_DOUBT_S = 1.0
#: How long a node warns after the last peer that it could not connect to.
_WARNING_S = 60.0


class _FatalError(UnexpectedError):
    """Something failed that cannot be ended by itself: only closing the transport makes the blocks safe to
    reuse.
    """


@dataclass(frozen=True)
class _Order:
    """One step's orders.

    Later ones wait until these are due, so that orders keep their sequence. Only announcements do not wait.

    Attributes:
        number: Counts the steps with orders.
        computed: They are due as soon as this is over.
        begin_anew: Ends every handoff that was ordered before; then there are no other orders. None: there is
            nothing to end.
    """

    number: int
    orders: HandoffMetadata
    computed: Mark
    begin_anew: Callable[[], None] | None = None


class HandoffDriver:
    """Passes orders and events to the protocol and does its actions; owns the reads that they started.

    After `start` it does so in a thread of its own, until `close`, or until the main thread ends.

    Each call to the outside has one owner of its failure, which ends what the call was about: `undocumented`
    turns every exception into a `KVTransferError`, and the protocol deals with it as with the errors that the
    call documents. So an unexpected exception ends one load, one offer or one peer. The thread itself ends if
    that is not enough: if the transport as a whole fails again and again, if a guard cannot be cleared, or if
    a failure cannot be dealt with. Then peers are shut out, every handoff ends as failed, those of later
    orders as well, and `failure` says why. The engine goes on without handing over, and nothing waits
    forever.

    Args:
        transport: With its pool registered; after `start` only the thread calls it and its endpoint.
        endpoint: The transport's, listening.
        protocol: This node's; after `start` only the thread calls it.
        outcomes: Where the ends of handoffs are noted.
        identity: This node's, as the protocol has it.
        address: Where the endpoint listens.
        trace: Makes the spans of each request; None if they are not wanted.
        required: See `ConnectorOptions.require_transport`.

    Attributes:
        identity: What peers are told from the latest `begin_anew` on.
        layout: Where the pages of the caches lie in the pool.
    """

    def __init__(
        self,
        transport: Transport,
        endpoint: Endpoint,
        protocol: NodeProtocol,
        outcomes: Outcomes,
        identity: Identity,
        address: WorkerAddress,
        trace: HandoffTrace | None = None,
        required: Sequence[str] = (),
    ) -> None:
        self.outcomes = outcomes
        self.identity = identity
        self.address = address
        self.layout = protocol.producer.layout
        self._transport = transport
        self._endpoint = endpoint
        self._protocol = protocol
        self._trace = trace
        self._required = required
        self._guards = OfferGuards(transport.guards, BlockExtents(protocol.producer.layout))
        self._log = bug_log(logger)
        self._failure = ""
        self._is_unsafe = False  # a guard could not be cleared
        self._num_submitted = 0
        self._num_announced = 0  # orders whose offers are announced
        self._number = 0  # of the orders that are carried out
        self._orders: deque[_Order] = deque()
        self._retractions: deque[set[str]] = deque()  # requests whose offers are to end before anything else
        self._watch = Watch(self._wake)
        self._watched: _Order | None = None  # the order for which `_watch` wakes the thread
        self._reads: dict[int, tuple[StartRead, Route]] = {}  # by transfer id
        self._doubts: dict[int, tuple[float, KVTransferError]] = {}  # by transfer id: when it ends, and why
        self._num_doubts = 0
        #: By request: the error that its load will be reported with.
        self._bugs: dict[str, KVTransferError] = {}
        self._num_failed_iterations = 0
        self._unreachable = _Unreachable()
        # Any client can cause these lines, so they are limited.
        self._unmet_log = LimitedLog(logger, max_lines=1, interval_s=_WARNING_S)
        self._is_shutting_down = False
        self._is_closing = threading.Event()
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvferry-handoff")

    @property
    def failure(self) -> str:
        """Why this node hands nothing over any more; empty while it does, and after `close`."""
        return self._failure

    @property
    def warning(self) -> str:
        """What kept a handoff from working within the last minute, although this node can hand over; empty if
        nothing.
        """
        return self._unreachable.warning

    @property
    def loads_in_transfer(self) -> set[str]:
        """Requests whose blocks the transport may still write to."""
        return {read.request_id for read, _ in self._reads.values()}

    # -- the engine's thread -------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread, once. Only a simulation calls `run_once` itself instead."""
        self._thread.start()

    def submit(self, orders: HandoffMetadata, computed: Mark = AT_ONCE) -> None:
        """Have one step's orders carried out; return at once.

        Args:
            computed: All that was launched before the orders. Until it has run, the offered blocks may not be
                written yet, and the blocks that are loaded into may still be in use.
        """
        # Before the thread can see the orders: otherwise it could report the end of a load that is not
        # expected yet.
        self.outcomes.expect(orders, _now())
        self._num_submitted += 1
        self._orders.append(_Order(self._num_submitted, orders, computed))
        # An announcement is carried out before the next message is dealt with, and that is early enough. A
        # thread that woke up for it would take the interpreter's lock, and often the core, from the step that
        # computes the prompt.
        if not orders.only_announces():
            self._wake()
        # The thread sets this before it ends all that is expected. So whichever of the two comes later ends
        # these orders.
        if self._has_ended.is_set():
            self.outcomes.fail_all(TransportClosedError("this node's handoff thread has ended"))

    def retract(self, request_ids: set[str]) -> None:
        """End the open offers of requests that lose their blocks.

        After this no peer accepts bytes of these blocks.

        It waits for nothing. The orders of these offers may still wait for the GPU: they are void from now
        on, and the thread revokes the offers when it comes to that.

        Raises:
            UnexpectedError: these or earlier guards cannot be cleared. The blocks must not be reused.
        """
        if open_offers := self.outcomes.take_open(request_ids):
            try:
                self._must("clearing guards", partial(self._guards.retract, open_offers, self._num_submitted))
            except KVTransferError:
                self._is_unsafe = True
            self._retractions.append(open_offers)
            self._wake()
        if self._is_unsafe:  # then also later: an engine names the requests again after a step that failed
            raise UnexpectedError(
                "the guards of open offers cannot be cleared: peers would accept what is written next into the blocks of "
                "preempted requests; restart the node"
            )

    def begin_anew(self, identity: Identity, why: str, timeout_s: float | None) -> None:
        """End every handoff and go on as `identity`; see `NodeProtocol.begin_anew`.

        Orders that were submitted before come first.

        Args:
            timeout_s: How long to wait for it. Then, when this returns, nothing that was offered before can
                be read, and no load that was ordered before can succeed. None: not at all.

        Raises:
            TransferTimeoutError: the thread has not come to it in time. It will.
            UnexpectedError: a guard cannot be cleared; as for `retract`.
        """
        self.identity = identity
        is_done = threading.Event()

        def begin() -> None:
            logger.info("ending every handoff of this node: %s", why)
            # Without it, peers would go on with what is no longer so. The end of the thread shuts them out.
            self._do(self._must("ending every handoff", partial(self._protocol.begin_anew, identity, why)))
            is_done.set()

        self._orders.append(_Order(self._num_submitted, HandoffMetadata(), AT_ONCE, begin))
        self._wake()
        if timeout_s is None:
            return
        deadline = _now() + timeout_s
        while not is_done.wait(_BEGIN_POLL_S) and not self._has_ended.is_set():
            if _now() > deadline:
                raise TransferTimeoutError(
                    f"the handoff thread has not ended the handoffs within {timeout_s:g} s after this: {why}"
                )
        if self._is_unsafe:
            raise UnexpectedError("the guards of offers cannot be cleared; restart the node")

    def close(self, timeout_s: float) -> None:
        """End every handoff, close the transport and wait for the thread. Idempotent.

        Raises:
            TransferTimeoutError: a read could not be stopped in time. The thread still runs, and ends with
                the read.
        """
        self._is_closing.set()
        self._wake()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TransferTimeoutError(f"the handoff thread has not ended within {timeout_s} s")

    def _wake(self) -> None:
        # If this fails, the thread wakes up by itself after `_MAX_WAIT_S`; the engine's step must not fail
        # because of it.
        with survived("cannot wake the handoff thread", self._log):
            self._endpoint.wake()

    # -- the thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        error: KVTransferError = TransportClosedError("this node shuts down")
        try:
            self._serve()
            self._drain()
        except Exception as bug:  # noqa: BLE001 - whatever it is, nothing may wait for this thread forever
            error = self._die(bug)
        try:
            self._transport.close()
        except Exception as bug:  # noqa: BLE001 - whatever it is, nothing may wait for this thread forever
            log_traceback(bug, "cannot close the transport", self._log)
            # The transport did not confirm that it stopped writing, so the engine must not reuse the blocks
            # of these loads.
            self.outcomes.forget_loads(self.loads_in_transfer)
        finally:
            self._watch.close()
            # In this order; see `submit`. After the close, because a failed load's blocks may be reused at
            # once.
            self._has_ended.set()
            self.outcomes.fail_all(error)

    def _die(self, bug: Exception) -> KVTransferError:
        trace = "".join(traceback.format_exception(bug)).rstrip()
        logger.critical(
            "the handoff thread dies; this node hands nothing over until it is restarted:\n%s", trace
        )
        reason = str(bug) if isinstance(bug, UnexpectedError) else f"{type(bug).__name__}: {bug}"
        self._failure = f"this node's handoff thread died: {reason}; restart the node"
        self.outcomes.count("handoff_thread_deaths_total")
        if not self._clear_guards():
            # Peers would still accept what they read of these blocks, so the engine must not reuse them.
            self._is_unsafe = True
            self.outcomes.forget_offers()
        return TransportClosedError(self._failure)

    def _serve(self) -> None:
        main_thread = threading.main_thread()
        while not self._is_closing.is_set() and main_thread.is_alive():
            self._carry_out_due()
            self.run_once(_MAX_WAIT_S)

    def _carry_out_due(self) -> None:
        while True:
            order = self._orders[0] if self._orders else None
            # After the look at the order: a request that is preempted and offered again has its old offer
            # ended first.
            while self._retractions:
                self._abort(self._retractions.popleft())
            self._announce_waiting()
            if order is None or not (carry_out := self._due(order)):
                return
            # Before it is carried out: an order that ends the thread must not be met again.
            self._orders.popleft()
            carry_out()

    def _announce_waiting(self) -> None:
        """Announce the offers of orders that still wait for the GPU: an announcement is about no memory.

        Otherwise a claim would be denied for good when it comes to a rank whose GPU is behind that of the
        rank that answered.
        """
        for order in tuple(self._orders):
            if order.begin_anew is not None:
                return  # it would end what is announced before it
            self._announce(order.orders, order.number)

    def _due(self, order: _Order) -> Callable[[], None] | None:
        """Return what to do about an order now; None if it is not due.

        Then the thread is woken when it is.
        """
        try:
            with undocumented("cannot ask whether a step has run", self._log):
                if order.begin_anew is not None:
                    return order.begin_anew
                if order.computed.is_over():
                    return partial(self._carry_out_step, order.orders, order.number)
        except KVTransferError as error:
            return partial(self._carry_out_step, order.orders, order.number, error)
        # Not by asking again and again: that would take the interpreter's lock from the step that is being
        # computed.
        if self._watched is not order:
            self._watched = order
            self._watch.add(order.computed)
        return None

    def _drain(self) -> None:
        """Drop every peer, and wait for reads: until they have ended, their blocks are not the engine's."""
        self._is_shutting_down = True
        self._do(self._protocol.shutdown(_now()))
        while self._reads:
            self.run_once(_MAX_WAIT_S)

    # -- orders --------------------------------------------------------------------------------------

    def _announce(self, orders: HandoffMetadata, number: int) -> None:
        """Announce one step's offers, ahead of the rest of its orders.

        Those that were announced before are left out.
        """
        if number <= self._num_announced:
            return
        self._num_announced = number
        for order in orders.requests:
            if (announced := order.announcement) is not None:
                # If this fails, only claims that come too early are lost.
                with survived("cannot announce an offer", self._log):
                    self._do(
                        self._protocol.producer.announce(
                            order.request_id, announced.lease, announced.name, _now(), announced.num_loads
                        )
                    )

    def _carry_out_step(
        self, orders: HandoffMetadata, number: int, error: KVTransferError | None = None
    ) -> None:
        """Turn one step's orders into calls of the protocol. A bug in one of them fails that request alone.

        Args:
            number: Of the orders; see `OfferGuards`.
            error: Why it is not known whether the memory is written or free. What is about memory fails then:
                otherwise offered blocks would be read too early, and blocks that the engine still uses would
                be loaded into.
        """
        self._number = number
        self._announce(orders, number)
        for order in orders.requests:
            if error is None:
                self._carry_out(order)
            else:
                self._refuse(order, error)
        for request_id, lease in orders.releases:
            self._do(self._protocol.producer.give_up(request_id, lease))
        self._guards.carried_out(number)

    def _refuse(self, order: RequestOrders, error: KVTransferError) -> None:
        is_cut = order.abort or order.extension is not None or order.completion is not None
        self._carry_out(replace(order, offer=None, extension=None, completion=None, abort=is_cut, load=None))
        if order.offer is not None:
            self._refuse_offer(order.request_id, order.offer.lease, str(error))
        if order.load is not None:
            self._fail_load(order.request_id, order.load, error)

    def _carry_out(self, order: RequestOrders) -> None:
        """Carry out one request's orders, in the order in which a request goes through them."""
        request_id = order.request_id
        producer, consumer = self._protocol.producer, self._protocol.consumer
        if self._trace is not None:
            with survived("cannot trace orders", self._log):
                self._trace.ordered(order)
        is_void = self._guards.is_void(request_id, self._number)
        if order.offer is not None:
            with self._failing_offer(request_id, order.offer.lease):
                if is_void:
                    self._refuse_offer(
                        request_id, order.offer.lease, "was aborted: its request lost its blocks"
                    )
                else:
                    self._offer(request_id, order.offer)
        if order.extension is not None and not is_void:
            with self._failing_offer(request_id):
                self._do(producer.extend(request_id, order.extension.block_ids, order.extension.num_ready))
        if order.completion is not None:
            with self._failing_offer(request_id):
                self._do(producer.complete(request_id, order.completion, _now()))
        if order.withdrawal is not None:
            self._do(self._must("withdrawing an offer", partial(producer.withdraw, order.withdrawal)))
        if order.abort:
            self._abort((request_id,))
        if order.claim is not None:
            with self._failing_load(request_id):
                context = self._trace.claim_context(request_id) if self._trace is not None else ""
                self._do(consumer.claim(request_id, order.claim, _now(), traceparent=context))
        if order.load is not None:
            with self._failing_load(request_id, order.load):
                self._do(consumer.load(request_id, order.load, _now()))
        if order.drop:
            with self._failing_load(request_id):
                self._do(consumer.drop(request_id, _now()))
            self._bugs.pop(request_id, None)  # the load will not be asked for any more

    def _abort(self, request_ids: Iterable[str]) -> None:
        """End those of these requests' offers that have not ended."""
        abort = self._protocol.producer.abort
        for request_id in request_ids:
            self._do(self._must("aborting an offer", partial(abort, request_id, _now())))

    def _refuse_offer(self, request_id: str, lease: int, why: str) -> None:
        """End an offer that was ordered and is not made; deny its claims."""
        self._do(self._must("withdrawing an offer", partial(self._protocol.producer.withdraw, lease)))
        self._end_offer(OfferEnded(request_id, "aborted", why))

    def _offer(self, request_id: str, order: OfferOrder | OpenOrder) -> None:
        producer = self._protocol.producer
        if isinstance(order, OfferOrder):
            actions = producer.offer(
                request_id,
                order.lease,
                order.block_ids,
                order.num_tokens,
                _now(),
                order.content,
                order.guard_value,
            )
        else:
            actions = producer.open(
                request_id,
                order.lease,
                order.block_ids,
                order.num_tokens,
                order.num_ready,
                order.content,
                order.guard_value,
            )
        self._do(actions)

    @contextmanager
    def _failing_offer(self, request_id: str, lease: int = 0) -> Iterator[None]:
        """Carry out an order about an offer. If the protocol has a bug there, end the offer as aborted.

        Args:
            lease: Of an offer that is being made: claims of it are to be denied.
        """
        try:
            with undocumented("cannot carry out an order about an offer", self._log):
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
        """Carry out an order about a load. If the protocol has a bug there, end the load as failed."""
        try:
            with undocumented("cannot carry out an order about a load", self._log):
                yield
        except _FatalError:
            raise
        except KVTransferError as error:
            self._fail_load(request_id, blocks, error)

    # -- events --------------------------------------------------------------------------------------

    def run_once(self, timeout_s: float) -> None:
        """Wait for events, at most until the next deadline.

        Then carry out orders, handle the events, and do what is due.

        Raises:
            KVTransferError: the transport or the protocol as a whole has failed too many times in a row.
        """
        events: list[Event] = []
        failure: KVTransferError | None = None
        try:
            with undocumented("cannot wait for events", self._log):
                settled = min((end for end, _ in self._doubts.values()), default=math.inf)
                due = min(self._protocol.next_deadline(), settled)
                events = self._endpoint.wait_events(max(min(due - _now(), timeout_s), 0.0))
        except KVTransferError as error:
            failure = error
        if not self._is_shutting_down:
            # A peer can claim only what our engine has answered, and the order for that answer was submitted
            # before the answer. So orders go before events: no claim ever meets an offer that is not known
            # here yet.
            self._carry_out_due()
        for event in (*events, *self._settled_doubts()):
            self._handle(event)
        # Deadlines after events: a message that has arrived in time must not meet its own timeout.
        try:
            with undocumented("cannot do what is due", self._log):
                actions = self._protocol.advance(_now())
        except KVTransferError as error:
            failure = error
        else:
            self._do(actions)
        self._judge(failure)

    def _judge(self, failure: KVTransferError | None) -> None:
        """Rest after an iteration that failed as a whole, for which no single peer or load is to blame; give
        up in the end.
        """
        if failure is None:
            self._num_failed_iterations = 0
            return
        self._num_failed_iterations += 1
        if self._num_failed_iterations >= _MAX_FAILED_ITERATIONS:
            raise failure
        # The next wait may fail at once as well, so without a rest this would be a busy loop.
        time.sleep(_FIRST_REST_S * 2 ** (self._num_failed_iterations - 1))

    def _handle(self, event: Event) -> None:
        """Deal with one event. A bug on the way ends the peer that the event came from."""
        if isinstance(event, TransferEnded):
            self._do(self._end_transfer(event))
            return
        try:
            actions = self._react(event)
        except Exception as bug:  # noqa: BLE001 - whatever it is, it ends one peer
            error = unexpected(bug, "the protocol failed with an event of a peer", self._log)
            actions = self._protocol.peer_failed(event.peer_id, error, _now())
        self._do(actions)

    def _react(self, event: Connected | MessageReceived | PeerLost) -> list[Action]:
        match event:
            case Connected(peer_id, incoming):
                # The side that reads decides, before the handshake, so that no byte goes the wrong way.
                if not incoming and (refusal := self._refusal_of_route(peer_id)) is not None:
                    return self._protocol.peer_failed(peer_id, refusal, _now())
                return self._protocol.peer_connected(peer_id, incoming, _now())
            case MessageReceived(peer_id, message):
                return self._protocol.message_received(peer_id, message, _now(), self._note_message)
            case PeerLost(peer_id, error):
                self.outcomes.count("connection_failures_total")
                return self._protocol.peer_lost(peer_id, error, _now())

    def _refusal_of_route(self, peer_id: int) -> PeerRefusedError | None:
        if not self._required or (route := self._route_of(peer_id)).is_one_of(self._required):
            return None
        why = f" ({route.reason})" if route.reason else ""
        return PeerRefusedError(
            f"require_transport={list(self._required)}, and the peer is reached by "
            f"{route.mechanism or route.scheme!r}{why}: repair the faster network, or add this way to require_transport"
        )

    def _note_message(self, message: Message) -> None:
        if self._trace is not None:
            with survived("cannot trace a message", self._log):
                self._trace.received(message)

    # -- actions -------------------------------------------------------------------------------------

    def _do(self, actions: Iterable[Action]) -> None:
        """Do actions in order, and after them what the protocol wants done because of how they went.

        The order matters: the protocol puts each `ClearGuard` before the `OfferEnded` that lets blocks be
        reused.

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
            except Exception as bug:  # noqa: BLE001 - a bug of the protocol: `_perform` handles the action's own failure
                error = unexpected(bug, f"the protocol failed after {type(action).__name__}", self._log)
                if isinstance(action, Connect):
                    todo.extend(self._protocol.consumer.connect_failed(action.address, error, _now()))
                    continue
                if not isinstance(action, Send | StartRead):
                    raise _FatalError(str(error)) from error
                todo.extend(self._protocol.peer_failed(action.peer_id, error, _now()))

    def _perform(self, action: Action) -> list[Action]:
        """Do one action.

        Returns:
            What the protocol wants done because of how it went.
        """
        if self._trace is not None:
            with survived("cannot trace an action", self._log):
                self._trace.performed(action)
        match action:
            case SetGuard():
                return self._set_guard(action)
            case ExtendGuard(index, block_ids):
                # If it fails, a peer that reads the new blocks is refused, and computes them itself.
                with survived("cannot extend a guard", self._log):
                    self._guards.allow(index, block_ids)
            case ClearGuard(index):
                self._clear_guard(index)
            case Send():
                return self._send(action)
            case Connect():
                return self._connect(action)
            case StartRead():
                return self._start_read(action)
            case Disconnect(peer_id):
                if not self._is_shutting_down:
                    self.outcomes.count("connection_failures_total")
                self._disconnect(peer_id)
            case PeerDiffers() | LayersLeftOut():
                logger.warning("%s", action)
            case OfferEnded():
                self._end_offer(action)
            case ClaimUnmet():
                self.outcomes.count("unmet_claims_total")
                # Part of the name: any peer that knows all of it may claim.
                self._unmet_log.warning(
                    "denied the claim of rendezvous %s…: the offer %s", action.name[:8], action.reason
                )
            case OfferCompleted(request_id):
                with survived("cannot note that an offer is complete", self._log):
                    self.outcomes.offer_completed(request_id, _now())
            case LoadEnded():
                self._end_load(action)
        return []

    def _must(self, what: str, call: Callable[[], T]) -> T:
        """Make a call without whose success nothing can go on.

        The call can be repeated, and is repeated once.

        Raises:
            _FatalError: it failed twice.
        """
        with suppress(KVTransferError), undocumented(f"{what} failed", self._log):
            return call()
        try:
            with undocumented(f"{what} failed", self._log):
                return call()
        except KVTransferError as error:
            raise _FatalError(f"{error}, twice") from error

    def _set_guard(self, action: SetGuard) -> list[Action]:
        try:
            with undocumented("cannot set a guard", self._log):
                # Before `set`: a guard that holds without a restriction would open the whole pool.
                self._guards.allow(action.index, action.block_ids)
                if self._guards.set(action.index, action.value, action.request_id, self._number):
                    return []
        except KVTransferError as error:
            return self._protocol.producer.guard_failed(action.index, str(error))
        return self._protocol.producer.guard_failed(action.index, "its request lost its blocks")

    def _clear_guard(self, index: int) -> None:
        # The next action lets the engine reuse the blocks under this guard, and while the guard holds, peers
        # accept what they read there. So this must succeed; if it cannot, the end of the thread keeps the
        # blocks from being reused.
        self._must("clearing a guard", partial(self._guards.clear, index))

    def _clear_guards(self) -> bool:
        """Clear every guard, whatever state the protocol is in: no peer accepts what it reads from now on.

        Returns:
            Whether that worked; False if a guard could not be cleared.
        """
        is_done = True
        for index in range(self._transport.guards.num_guards):
            try:
                self._clear_guard(index)
            except KVTransferError:
                is_done = False
        return is_done

    def _send(self, send: Send) -> list[Action]:
        try:
            with undocumented("cannot send a message", self._log):
                self._endpoint.send(send.peer_id, encode(send.message, send.version))
        except KVTransferError as error:
            return self._protocol.peer_failed(send.peer_id, error, _now())
        return []

    def _connect(self, connect: Connect) -> list[Action]:
        consumer = self._protocol.consumer
        try:
            with undocumented("cannot connect to a peer", self._log):
                peer_id = self._endpoint.start_connect(connect.address, timeout_s=connect.timeout_s)
        except KVTransferError as error:
            self.outcomes.count("connection_failures_total")
            return consumer.connect_failed(connect.address, self._as_foreign(connect.address, error), _now())
        return consumer.connecting(connect.address, peer_id, _now())

    def _as_foreign(self, address: str, error: KVTransferError) -> KVTransferError:
        """Return a `ForeignTransportError` if the address is of another transport; otherwise `error`, as for
        a malformed one.
        """
        schemes = [text.partition(":")[0] for text in (address, self.address.address)]
        if not isinstance(error, ConfigurationError) or schemes[0] == schemes[1]:
            return error
        foreign = ForeignTransportError(local=self.address.address, remote=address)
        self.outcomes.count("unreachable_peers_total")
        self._unreachable.note(schemes[0], str(foreign))
        return foreign

    def _disconnect(self, peer_id: int) -> None:
        try:
            with undocumented("cannot drop a peer", self._log):
                self._endpoint.disconnect(peer_id)
        except KVTransferError:
            # A peer that stays connected can do no harm: it cannot write here, and its messages are ignored.
            with survived("cannot drop a peer once more", self._log):
                self._endpoint.disconnect(peer_id)

    # -- reads ---------------------------------------------------------------------------------------

    def _start_read(self, read: StartRead) -> list[Action]:
        actions: list[Action] = []
        route = Route(self._endpoint.scheme, "")
        try:
            with undocumented("cannot start a read", self._log):
                transfer_id = self._endpoint.start_read(
                    read.peer_id, read.pairs, read.guard, timeout_s=read.timeout_s
                )
        except UnexpectedError as error:
            transfer_id, actions = self._doubt(read.peer_id, error)
        except KVTransferError as error:
            return self._protocol.consumer.read_ended(read, error, _now())
        else:
            # Now, because after the read's end the peer may be lost, and its route with it.
            route = self._route_of(read.peer_id)
        self._reads[transfer_id] = read, route
        return actions

    def _route_of(self, peer_id: int) -> Route:
        route = Route(self._endpoint.scheme, "")
        with survived("cannot ask for a peer's route", self._log):
            route = self._endpoint.route_of(peer_id)
        return route

    def _doubt(self, peer_id: int, error: KVTransferError) -> tuple[int, list[Action]]:
        """Note a read that may have begun although starting it raised, so that its end comes after a while.

        An exception that the transport does not document does not say what the transport did before it
        raised, and the blocks must not be reused while something may still be copied into them. So the peer
        is dropped, and the end comes after `_DOUBT_S`.

        Returns:
            The read's id, and what is to be done now.
        """
        self._num_doubts += 1
        transfer_id = -self._num_doubts  # no transport gives a negative id
        self._doubts[transfer_id] = (_now() + _DOUBT_S, error)
        return transfer_id, self._protocol.peer_failed(peer_id, error, _now())

    def _settled_doubts(self) -> list[TransferEnded]:
        now = _now()
        over = [(number, error) for number, (end, error) in self._doubts.items() if end <= now]
        return [TransferEnded(number, error, 0, 0.0, "") for number, error in over]

    def _end_transfer(self, ended: TransferEnded) -> list[Action]:
        self._doubts.pop(ended.transfer_id, None)
        if ended.transfer_id in self._reads:
            return self._end_read(ended)
        # A read that began although starting it raised. Its load still waits for `_DOUBT_S`, because this id
        # is not known.
        logger.error("the transport ended a transfer that was never started: %d", ended.transfer_id)
        return []

    def _end_read(self, ended: TransferEnded) -> list[Action]:
        read, route = self._reads.pop(ended.transfer_id)
        # Before the protocol hears of it: the protocol may end the load, whose record needs this read's
        # figures.
        with survived("cannot record a read", self._log):
            self.outcomes.read_ended(read, ended, route, _now())
            if self._trace is not None:
                self._trace.read_ended(read, ended, route)
        consumer = self._protocol.consumer
        try:
            with undocumented("the protocol failed with the end of a read", self._log):
                return consumer.read_ended(read, ended.error, _now())
        except KVTransferError as bug:
            error = bug
        # The second call raises `KVTransferStateError` if the bug came after the protocol had noted the end
        # of the read.
        with suppress(KVTransferStateError):
            self._do(consumer.read_ended(read, error, _now()))
        self._fail_load(read.request_id, None, error)
        return []

    # -- ends ----------------------------------------------------------------------------------------

    def _fail_load(self, request_id: str, blocks: LocalBlocks | None, error: KVTransferError) -> None:
        """End a load that met a bug. If something writes into its blocks, its end is reported after that.

        Args:
            blocks: What it was to fill, if it has not begun; None if the protocol knows, or its order is yet
                to come.
        """
        # First, because the drop may end the load, and `_end_load` takes the error from here.
        self._bugs[request_id] = error
        self._do(self._protocol.consumer.drop(request_id, _now()))
        if blocks is not None and request_id in self._bugs and request_id not in self.loads_in_transfer:
            self._end_load(LoadEnded(request_id, "failed", error, blocks))

    def _end_offer(self, ended: OfferEnded) -> None:
        level = logging.DEBUG if ended.outcome == "delivered" else logging.INFO
        about = {"request_id": ended.request_id}
        logger.log(level, "offer of request %r ended: %s", ended.request_id, ended.reason, extra=about)
        self._must("reporting the end of an offer", partial(self.outcomes.offer_ended, ended))

    def _end_load(self, ended: LoadEnded) -> None:
        if bug := self._bugs.pop(ended.request_id, None):
            ended = replace(ended, outcome="failed", error=bug)
        if isinstance(ended.error, RendezvousError):
            self.outcomes.count("rendezvous_failures_total")
        if ended.outcome == "failed":
            # If the peer is on another transport, no request can succeed, and `_Unreachable` has warned once
            # for all.
            level = logging.DEBUG if isinstance(ended.error, ForeignTransportError) else logging.WARNING
            # As text: a log record that lives on must not keep the error's frames alive, and with them the
            # pool.
            about = {"request_id": ended.request_id}
            logger.log(
                level, "load of request %r failed: %s", ended.request_id, str(ended.error), extra=about
            )
        now = _now()
        if self._trace is not None:
            # Before the engine hears of it: an engine that has nothing more to do asks for no further stats.
            with survived("cannot trace the end of a load", self._log):
                self._trace.load_ended(ended, self.outcomes.figures_of(ended, now))
        self._must("reporting the end of a load", partial(self.outcomes.load_ended, ended, now))


class _Unreachable:
    """Warns about peers that listen on another transport than this node: once, because no request to them can
    succeed.
    """

    #: Schemes that have a log line of their own. The number is bounded, because anyone can invent schemes.
    _MAX_SCHEMES = 8

    def __init__(self) -> None:
        self._log = LimitedLog(logger, max_lines=1, interval_s=_WARNING_S)
        self._schemes: set[str] = set()
        self._latest = ("", 0.0)  # the warning, and until when it is shown

    @property
    def warning(self) -> str:
        text, until = self._latest
        return text if _now() < until else ""

    def note(self, scheme: str, text: str) -> None:
        """Note that a peer could not be connected to."""
        self._latest = text, _now() + _WARNING_S
        if len(self._schemes) < self._MAX_SCHEMES:
            self._schemes.add(scheme)
        self._log.warning("%s", text, key=scheme if scheme in self._schemes else "")


def _now() -> float:
    return time.monotonic()
