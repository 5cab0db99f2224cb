"""The thread that owns a node's transport and drives its handoff protocol."""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from ..transports.base import Connected, Endpoint, Event, MessageReceived, PeerLost, TransferEnded, Transport
from ..transports.errors import (
    KVTransferError,
    TransferTimeoutError,
    TransportClosedError,
    UnexpectedError,
)
from .computed import at_once
from .handoff.events import (
    Action,
    LocalBlocks,
    OfferEnded,
)
from .handoff.node import NodeProtocol
from .handoff_actions import FatalError, HandoffActions
from .metadata import HandoffMetadata, OfferOrder, OpenOrder
from .outcomes import Outcomes
from .unexpected import Unexpected

logger = logging.getLogger(__name__)

#: Longest single wait for events. `wake` ends every wait, but nobody wakes us when the interpreter ends.
_MAX_WAIT_S = 1.0
#: Between two looks whether a GPU has computed what an order is about.
_DUE_POLL_S = 1e-3
#: Between two looks whether the thread still lives, while it is waited for.
_RETRACT_POLL_S = 0.1
#: Turns in a row in which the transport or the protocol as a whole fails, before the thread ends; after each it rests,
#: for a time that doubles. Together 1.3 s: long enough for a shortage to pass, short enough to tell the operator.
_MAX_FAILED_TURNS = 8
_FIRST_REST_S = 0.01


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
        transport: Its pool is registered; from now on only the thread calls it and its endpoint.
        endpoint: The transport's, listening.
        protocol: This node's; from now on only the thread calls it.
        outcomes: Where the ends of handoffs are put down.
        address: Where the transport listens.
    """

    def __init__(
        self,
        transport: Transport,
        endpoint: Endpoint,
        protocol: NodeProtocol,
        outcomes: Outcomes,
        address: str,
    ) -> None:
        self._transport = transport
        self._endpoint = endpoint
        self._outcomes = outcomes
        self._unexpected = Unexpected()
        self._actions = HandoffActions(
            transport.guards, endpoint, protocol, outcomes, address, self._unexpected
        )
        self._driver = _Driver(endpoint, protocol, self._actions, self._unexpected)
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
        return self._actions.warning

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
                self._is_unsafe = not self._actions.clear_guards()
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
            self._endpoint.wake()

    # -- the thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        error: KVTransferError = TransportClosedError("this node shuts down")
        try:
            self._serve()
            self._drain()
        except Exception as bug:  # noqa: BLE001 - whatever it is, nothing may wait for this thread for ever
            error = self._die(bug)
        try:
            self._transport.close()
        except Exception as bug:  # noqa: BLE001 - whatever it is, nothing may wait for this thread for ever
            self._unexpected.log("closing the transport", bug)
            # It did not say that it stopped writing, so the engine must not reuse the blocks of these loads.
            self._outcomes.forget_loads(self._actions.loads_in_transfer)
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
        if not self._actions.clear_guards():
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
        while self._actions.num_transfers:
            self._driver.turn(_MAX_WAIT_S)


class _Driver:
    """Orders and events into the protocol, its actions to `HandoffActions`."""

    def __init__(
        self, endpoint: Endpoint, protocol: NodeProtocol, actions: HandoffActions, unexpected: Unexpected
    ) -> None:
        self._endpoint = endpoint
        self._protocol = protocol
        self._actions = actions
        self._unexpected = unexpected
        self._do = actions.do
        self._num_failed_turns = 0

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
            self._do(self._actions.must("withdrawing an offer", partial(producer.withdraw, lease)))
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
            self._actions.forget_load(request_id)

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
            self._actions.end_offer(OfferEnded(request_id, "aborted", str(error)))
        for request_id, blocks in orders.loads.items():
            self._actions.fail_load(request_id, blocks, error)

    @contextmanager
    def _failing_offer(self, request_id: str, lease: int = 0) -> Iterator[None]:
        """Carry out an order about an offer; if the protocol has a bug there, end the offer as aborted.

        Args:
            lease: Of an offer that is made just now: whoever claims it is to be denied.
        """
        try:
            with self._unexpected.typed("an order about an offer"):
                yield
        except FatalError:
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
        except FatalError:
            raise
        except KVTransferError as error:
            self._actions.fail_load(request_id, blocks, error)

    def abort(self, request_ids: Iterable[str]) -> None:
        """End offers that are still there."""
        abort = self._protocol.producer.abort
        for request_id in request_ids:
            self._do(self._actions.must("aborting an offer", partial(abort, request_id, _now())))

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
                due = min(self._protocol.next_deadline(), self._actions.next_deadline())
                events = self._endpoint.wait_events(max(min(due - _now(), timeout_s), 0.0))
        except KVTransferError as error:
            failure = error
        before_events()
        for event in (*events, *self._actions.settled_doubts()):
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

    # -- events --------------------------------------------------------------------------------------

    def _handle(self, event: Event) -> None:
        """Deal with one event. A bug on the way ends the peer that it came from."""
        if isinstance(event, TransferEnded):
            self._do(self._actions.end_transfer(event))
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
                return self._protocol.peer_lost(peer_id, error, _now())


def _now() -> float:
    return time.monotonic()
