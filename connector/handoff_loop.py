"""The thread that owns a node's transport and drives its handoff protocol."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from ..transports.base import Connected, Event, MessageReceived, PeerLost, Route, TransferEnded, Transport
from ..transports.errors import (
    KVTransferError,
    StaleRegionError,
    TransferTimeoutError,
    TransportClosedError,
)
from ..transports.regions import Guard, Regions
from .computed import at_once
from .handoff.events import (
    Action,
    ClearGuard,
    Connect,
    Disconnect,
    LoadEnded,
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

__all__ = ["HandoffLoop"]

logger = logging.getLogger(__name__)

#: Longest single wait for events. `wake` ends every wait, but nobody wakes us when the interpreter ends.
_MAX_WAIT_S = 1.0
#: Between two looks whether a GPU has computed what an order is about.
_DUE_POLL_S = 1e-3
#: Between two looks whether the thread still lives, while it is waited for.
_RETRACT_POLL_S = 0.1
#: In place of a transfer's id: it is another process's.
_OF_ANOTHER = -1


@dataclass(frozen=True)
class _Order:
    """What the thread shall do, and whether it may yet; later ones wait for it."""

    carry_out: Callable[[], None]
    is_due: Callable[[], bool] = at_once


class HandoffLoop:
    """Carries out orders and answers peers, in one thread, until `close`, or until the main thread ends without it.

    Should the thread die of a bug, peers are shut out, and every handoff, also of later orders, ends as failed:
    the engine goes on without handing over, and nothing waits for ever.

    Args:
        transport: With its pool registered and listening; from now on only the thread calls it.
        protocol: This node's; from now on only the thread calls it.
        outcomes: Where the ends of handoffs are put down.
    """

    def __init__(self, transport: Transport, protocol: NodeProtocol, outcomes: Outcomes) -> None:
        self._transport = transport
        self._outcomes = outcomes
        self._driver = _Driver(transport, protocol, outcomes)
        self._orders: deque[_Order] = deque()
        self._is_closing = threading.Event()
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvferry-handoff")
        self._thread.start()

    def submit(self, orders: HandoffMetadata, is_computed: Callable[[], bool]) -> None:
        """Have one step's orders carried out; returns at once.

        Args:
            is_computed: Whether all that was launched before them has run. Until then what they offer may not be
                there yet, and what they load into may still be written to.
        """
        self._outcomes.expect(orders, _now())
        self._orders.append(_Order(partial(self._driver.carry_out, orders), is_computed))
        self._transport.wake()
        if self._has_ended.is_set():  # set before its last look at what is owed, so one of us two sees these
            self._outcomes.fail_all(TransportClosedError("this node's handoff thread has ended"))

    def retract(self, request_ids: set[str], timeout_s: float) -> None:
        """End offers now; when this returns, no bytes of their blocks are accepted by anybody any more."""
        is_done = threading.Event()

        def retract() -> None:
            self._driver.abort(request_ids)
            is_done.set()

        self._orders.append(_Order(retract))
        self._transport.wake()
        deadline = _now() + timeout_s
        while not is_done.wait(_RETRACT_POLL_S) and not self._has_ended.is_set():
            if _now() > deadline:
                logger.error("the handoff thread does not answer; every offer of this node ends")
                self._driver.clear_guards()
                return

    def close(self, timeout_s: float) -> None:
        """End every handoff, close the transport and wait for the thread. Idempotent.

        Raises:
            TransferTimeoutError: a read could not be stopped in time. The thread still runs, and ends with it.
        """
        self._is_closing.set()
        self._transport.wake()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TransferTimeoutError(f"the handoff thread has not ended within {timeout_s} s")

    # -- the thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        error: KVTransferError = TransportClosedError("this node shuts down")
        try:
            self._serve()
            self._drain()
        except Exception as bug:  # whatever it is, nobody may wait for this thread for ever
            logger.exception("the handoff thread dies; this node hands nothing over from now on")
            error = TransportClosedError(f"this node's handoff thread died: {type(bug).__name__}: {bug}")
            self._driver.clear_guards()
        finally:
            self._transport.close()
            self._has_ended.set()
            self._outcomes.fail_all(error)

    def _serve(self) -> None:
        main_thread = threading.main_thread()
        while not self._is_closing.is_set() and main_thread.is_alive():
            self._carry_out_due()
            events = self._driver.wait(_DUE_POLL_S if self._orders else _MAX_WAIT_S)
            # A peer can only claim what our engine answered, and the order behind that answer was submitted before it.
            # So with the orders first, no claim ever meets an offer that is not known here yet.
            self._carry_out_due()
            self._driver.react(events)

    def _carry_out_due(self) -> None:
        while self._orders and self._orders[0].is_due():
            self._orders.popleft().carry_out()

    def _drain(self) -> None:
        """Say goodbye to every peer, and wait for transfers: until then their blocks are not the engine's."""
        self._driver.shut_down()
        while self._driver.num_transfers:
            self._driver.react(self._driver.wait(_MAX_WAIT_S))


class _Driver:
    """Events into the protocol, its actions into the transport."""

    def __init__(self, transport: Transport, protocol: NodeProtocol, outcomes: Outcomes) -> None:
        self._transport = transport
        self._protocol = protocol
        self._outcomes = outcomes
        self._reads: dict[int, tuple[StartRead, Route]] = {}  # by transfer id
        self._writes: dict[int, tuple[StartWrite, int]] = {}  # by transfer id; with the clearings before it
        self._pushed_since: dict[int, float] = {}  # by the guard's value
        self._num_clearings = 0

    @property
    def num_transfers(self) -> int:
        return len(self._reads) + len(self._writes)

    def carry_out(self, orders: HandoffMetadata) -> None:
        """Turn one step's orders into calls of the protocol."""
        producer, consumer = self._protocol.producer, self._protocol.consumer
        for request_id, lease in orders.announcements.items():
            self._do(producer.announce(request_id, lease))
        for request_id, order in orders.offers.items():
            self._offer(request_id, order)
        for request_id, extension in orders.extensions.items():
            self._do(producer.extend(request_id, extension.block_ids, extension.num_ready))
        for request_id, block_ids in orders.completions.items():
            self._do(producer.complete(request_id, block_ids, _now()))
        for lease in orders.withdrawals:
            self._do(producer.withdraw(lease))
        self.abort(orders.aborts)
        for request_id, lease in orders.releases:
            self._do(producer.give_up(request_id, lease))
        for request_id, offer in orders.claims.items():
            self._do(consumer.claim(request_id, offer, _now()))
        for request_id, blocks in orders.loads.items():
            self._do(consumer.load(request_id, blocks, _now()))
        for request_id in orders.drops:
            self._do(consumer.drop(request_id, _now()))

    def abort(self, request_ids: Iterable[str]) -> None:
        """End offers that are still there."""
        for request_id in request_ids:
            self._do(self._protocol.producer.abort(request_id, _now()))

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

    def wait(self, timeout_s: float) -> Sequence[Event]:
        """Wait for what happens next, at most until the next deadline."""
        wait_s = min(self._protocol.next_deadline() - _now(), timeout_s)
        return self._transport.wait_events(max(wait_s, 0.0))

    def react(self, events: Iterable[Event]) -> None:
        """Deal with what happened, and with what is due."""
        for event in events:
            self._do(self._react(event))
        self._do(self._protocol.advance(_now()))

    def shut_down(self) -> None:
        """End every handoff that is not reading, and drop every peer."""
        self._do(self._protocol.shutdown(_now()))

    def clear_guards(self) -> None:
        """Have nothing accepted any more that is read now, by anybody, whatever state the protocol is in."""
        self._num_clearings += 1
        for index in range(self._transport.guards.num_guards):
            self._transport.guards.clear(index)

    # -- events --------------------------------------------------------------------------------------

    def _react(self, event: Event) -> list[Action]:
        match event:
            case Connected(peer_id, incoming):
                return self._protocol.peer_connected(peer_id, incoming, _now())
            case MessageReceived(peer_id, message):
                return self._protocol.message_received(peer_id, message, _now())
            case PeerLost(peer_id, error):
                return self._protocol.peer_lost(peer_id, error, _now())
            case TransferEnded(transfer_id) if transfer_id in self._writes:
                return self._end_write(event)
            case TransferEnded(transfer_id):
                read, route = self._reads.pop(transfer_id)
                self._outcomes.read_ended(read, event, route, _now())
                return self._protocol.consumer.read_ended(read, event.error, _now())

    # -- actions -------------------------------------------------------------------------------------

    def _do(self, actions: Iterable[Action]) -> None:
        todo = deque(actions)
        while todo:
            todo.extend(self._perform(todo.popleft()))

    def _perform(self, action: Action) -> list[Action]:
        """Do one action.

        Returns:
            What the protocol wants done because of how it went.
        """
        match action:
            case SetGuard(index, value):
                self._transport.guards.set(index, value)
            case ClearGuard(index):
                self._transport.guards.clear(index)
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
                self._transport.disconnect(peer_id)
            case PeerDiffers():
                logger.warning("%s", action)
            case OfferEnded():
                self._end_offer(action)
            case OfferCompleted(request_id):
                self._outcomes.offer_completed(request_id, _now())
            case LoadEnded():
                self._end_load(action)
        return []

    def _send(self, send: Send) -> list[Action]:
        try:
            self._transport.send(send.peer_id, encode(send.message))
        except KVTransferError as error:
            return self._protocol.peer_failed(send.peer_id, error, _now())
        return []

    def _connect(self, connect: Connect) -> list[Action]:
        consumer = self._protocol.consumer
        try:
            peer_id = self._transport.start_connect(connect.address, timeout_s=connect.timeout_s)
        except KVTransferError as error:
            return consumer.connect_failed(connect.address, error, _now())
        return consumer.connecting(connect.address, peer_id, _now())

    def _start_read(self, read: StartRead) -> list[Action]:
        try:
            transfer_id = self._transport.start_read(
                read.peer_id, read.pairs, read.guard, timeout_s=read.timeout_s
            )
        except KVTransferError as error:
            return self._protocol.consumer.read_ended(read, error, _now())
        self._reads[transfer_id] = read, self._route_of(read)
        return []

    def _route_of(self, read: StartRead) -> Route:
        route = self._transport.route_of(read.peer_id)
        if not read.not_pushed:
            return route
        reasons = (route.reason, f"push was asked for, pulled: {read.not_pushed}")
        return Route(route.scheme, "; ".join(filter(None, reasons)))

    def _start_push(self, push: StartPush) -> list[Action]:
        read, reserve = push.read, push.reserve
        consumer = self._protocol.consumer
        if not self._transport.can_write(read.peer_id):
            return consumer.pull_instead(push, "the transport does not write to this peer")
        self._pushed_since[reserve.guard_value] = _now()
        regions = Regions(np.ascontiguousarray(read.pairs.table[:, [0, 2]]))
        guard = Guard(reserve.guard_index, reserve.guard_value)
        try:
            self._transport.accept_writes(read.peer_id, guard, regions)
        except KVTransferError as error:
            return consumer.push_ended(push, error, "", _now())
        return self._send(Send(read.peer_id, reserve))

    def _end_push(self, ended: PushEnded) -> None:
        now, read = _now(), ended.push.read
        seconds = now - self._pushed_since.pop(ended.push.reserve.guard_value, now)
        num_bytes = 0 if ended.error is not None else read.pairs.num_bytes
        mechanism = f"push/{ended.mechanism}" if ended.mechanism else "push"
        transfer = TransferEnded(_OF_ANOTHER, ended.error, num_bytes, seconds, mechanism)
        self._outcomes.read_ended(read, transfer, self._route_of(read), now)

    def _start_write(self, write: StartWrite) -> list[Action]:
        try:
            transfer_id = self._transport.start_write(
                write.peer_id, write.pairs, write.guard, timeout_s=write.timeout_s
            )
        except KVTransferError as error:
            return self._protocol.producer.write_ended(write, error, "")
        self._writes[transfer_id] = write, self._num_clearings
        return []

    def _end_write(self, ended: TransferEnded) -> list[Action]:
        write, num_clearings = self._writes.pop(ended.transfer_id)
        error = ended.error
        if error is None and num_clearings != self._num_clearings:
            error = StaleRegionError("the offer ended while it was written")
        return self._protocol.producer.write_ended(write, error, ended.mechanism)

    def _end_offer(self, ended: OfferEnded) -> None:
        level = logging.DEBUG if ended.outcome == "delivered" else logging.INFO
        logger.log(level, "offer of request %s ended: %s", ended.request_id, ended.reason)
        self._outcomes.offer_ended(ended)

    def _end_load(self, ended: LoadEnded) -> None:
        if ended.outcome == "failed":
            # As text: a log record that lives on must not keep the error's frames, and with them the pool, alive.
            logger.warning("load of request %s failed: %s", ended.request_id, str(ended.error))
        self._outcomes.load_ended(ended, _now())


def _now() -> float:
    return time.monotonic()
