"""The scheduler half of a handoff: which requests are announced, offered, claimed, loaded or dropped.

In come the engine's calls about its requests, on the engine's thread, and the ends that the worker halves
report. Out go the orders of each step (`HandoffMetadata`), and the params of a finished request, which a
router carries to the other node.

What must never break: a request's blocks stay its own while a peer may read them or a load may write into
them, which is until the end of the offer or load was reported.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, cast

from ...transports.errors import ConfigurationError, KVTransferStateError
from ...transports.limited_log import LimitedLog
from ..base import KVConnectorHandshakeMetadata, SchedulerHalf
from ..errors import ConnectorError, RendezvousError
from ..handoff.events import BlockTables, GroupBlocks, RemoteOffer
from ..handoff.messages import PROTOCOL_VERSION
from ..handoff.numbers import GuardNumbers
from ..identity.content import content_digest
from ..kv_cache_specs import FullAttentionSpec, MambaSpec, UniformTypeKVCacheSpecs
from .orders import (
    Announcement,
    ExtendOrder,
    HandoffMetadata,
    OfferOrder,
    OpenOrder,
    RequestOrders,
    WorkerAddress,
)
from .params import (
    MOVED,
    TransferWish,
    offer_params,
    parse_transfer_params,
    place_params,
    rendezvous_lease,
    traceparent_of,
)

if TYPE_CHECKING:
    from ..base import ConnectorRequest, SchedulerOutput
    from ..config import KVTransferConfig
    from ..kv_cache_specs import KVCacheConfig, KVCacheSpec
    from ..output import KVConnectorOutput

logger = logging.getLogger(__name__)

#: Names of rendezvous that are remembered as used, the latest ones.
_MAX_USED_NAMES = 4096
#: Stands in a block table for a block that the engine has freed.
_NULL_BLOCK = 0


class RequestState(Enum):
    """Where a request's handoff is. `docs/design.md` has the table of states and events."""

    CLAIMED = "claimed"
    LOADING = "loading"
    DRAINING = "draining"
    ANNOUNCED = "announced"
    OPEN = "open"
    OFFERED = "offered"
    ENDED = "ended"


#: The states that may follow each state. A request that loads and then offers goes through both halves of the
#: list.
_NEXT: Mapping[RequestState, tuple[RequestState, ...]] = {
    RequestState.CLAIMED: (RequestState.LOADING, RequestState.ANNOUNCED, RequestState.ENDED),
    RequestState.LOADING: (RequestState.DRAINING, RequestState.ANNOUNCED, RequestState.ENDED),
    RequestState.DRAINING: (RequestState.ENDED,),
    RequestState.ANNOUNCED: (RequestState.OPEN, RequestState.OFFERED, RequestState.ENDED),
    RequestState.OPEN: (RequestState.OFFERED, RequestState.ENDED),
    RequestState.OFFERED: (RequestState.ENDED,),
    RequestState.ENDED: (),
}


@dataclass(frozen=True)
class _OwnOffer:
    """The offer that a request is to make.

    Attributes:
        lease: Its number, drawn when the request arrived; in a rendezvous, part of the name that the router
            drew.
        content: Digest of the prompt; that of prompt and answer is not known before the request ends.
        name: Of a rendezvous; empty: it is none. Only an offer with a name may be opened while the prompt is
            still computed.
        guard_value: In a rendezvous, what the guard holds: a number of our own, because names may be used
            again. 0: the lease.
        num_loads: Loads after which it is over.
        release_as: The name by which the router may release it; empty: none.
        is_released: The router has done so before it was made, so it is not made any more.
        is_answer: Whether it is of prompt and answer, for the node that goes on with a stopped answer.
    """

    lease: int
    content: str
    name: str = ""
    guard_value: int = 0
    num_loads: int = 1
    release_as: str = ""
    is_released: bool = False
    is_answer: bool = False


@dataclass(repr=False)
class _Request:
    """One request that loads, offers, or does both in this order.

    Only `HandoffScheduler._move` changes its state.

    Attributes:
        claim: The offer that it loads, if it does.
        offer: The offer that it makes, if it does.
        traceparent: Of the node's span of the request; empty if it is not traced.
        loaded_into: Local blocks of its load.
        orders: What the worker halves learn about it in the next step; None: nothing.
    """

    request_id: str
    state: RequestState
    claim: RemoteOffer | None
    offer: _OwnOffer | None
    traceparent: str
    loaded_into: frozenset[int] = frozenset()
    orders: RequestOrders | None = None

    def __repr__(self) -> str:
        return f"<request {self.request_id!r}, {self.state.value}>"


class HandoffScheduler(SchedulerHalf):
    """Decide about each request.

    A request id stands for one request until its handoff is over: it is refused while the worker halves still
    owe a report about its offer or its load.

    If a request asks for an offer, its lease number is drawn when the request arrives, and the worker halves
    learn the number in the next step. So a consumer may claim before the offer is made: it then waits for as
    long as the request is known.

    If a request has an offer to load, the offer is claimed when the request arrives, so that the handshake is
    done and the lease is renewed while the request is queued. The offer is loaded when the request's blocks
    are allocated. The claim is dropped if the blocks turn out to be in the prefix cache, or if the request
    ends. A request loads at most once: if the load fails, the engine computes the prompt.

    A recurrent state stands for all tokens so far and cannot be cut back. So a model that has one offers a
    prompt only if nothing was computed after it, and loads an offer only if it ends before the prompt's last
    token, which every engine computes itself. The producer must therefore be given the prompt without that
    token.
    """

    def __init__(self, config: KVTransferConfig, kv_cache_config: KVCacheConfig) -> None:
        #: Whether what this node computed may be offered. While it may not, requests end without an offer.
        self.may_offer = True
        self._config = config
        specs = self._specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        self._block_sizes = tuple(spec.block_size for spec in specs)
        self._has_state = any(map(_keeps_state, specs))
        self._keeps_all_blocks = all(map(_keeps_all_blocks, specs))
        self._workers: tuple[WorkerAddress, ...] = ()
        self._numbers = GuardNumbers()
        self._requests: dict[str, _Request] = {}
        # Requests with orders. A list of its own: most requests of a busy node wait, and have none in a given
        # step.
        self._unsent: list[_Request] = []
        # They name an offer by its number, and not always a request that is known here.
        self._releases: list[tuple[str, int]] = []
        self._used_names: OrderedDict[str, None] = OrderedDict()
        # Requests that only ask what this node is.
        self._questions: set[str] = set()
        self._counts: Counter[str] = Counter()
        # Any client can cause these lines, so they are limited.
        self._role_log = LimitedLog(logger, max_lines=1, interval_s=60.0)

    @property
    def offers_state(self) -> bool:
        """Whether this node offers recurrent states, so that a prompt to offer must come without its last
        token.
        """
        return self._has_state and self._config.is_kv_producer

    @property
    def num_requests(self) -> int:
        """Requests whose handoff is not over."""
        return len(self._requests)

    def set_handshake_metadata(self, metadata: Mapping[int, KVConnectorHandshakeMetadata]) -> None:
        """Learn where the worker halves can be reached, by rank.

        Raises:
            ConfigurationError: the workers are not all of one start of one node. Nothing was learnt.
        """
        workers = cast(Mapping[int, WorkerAddress], metadata)
        if len(epochs := {worker.epoch for worker in workers.values()}) != 1:
            raise ConfigurationError(f"the workers of one node share one epoch, got {len(epochs)}")
        self._workers = tuple(workers[rank] for rank in sorted(workers))

    @property
    def engine_id(self) -> str:
        return self._config.engine_id

    def describe(self) -> dict[str, Any]:
        return {
            "kv_role": self._config.kv_role,
            "load_failure_policy": self._config.kv_load_failure_policy,
            "protocol": PROTOCOL_VERSION,
            **(self._place() if self._workers else {"remote_engine_id": self._config.engine_id}),
        }

    def on_new_request(self, request: ConnectorRequest) -> None:
        """Read what the request asks for; announce its offer, and claim the offer that it is to load.

        Raises:
            InvalidTransferParamsError: its `kv_transfer_params` are malformed; the request is not remembered.
            ConnectorError: the handoff of an earlier request with this id is not over; that one goes on.
            RendezvousError: another request has used this name of a rendezvous.
        """
        request_id = request.request_id
        # Whether the node may continue another one's answer, stops one of its own, or explains a request, is
        # its host's concern, and no handoff.
        asked = parse_transfer_params(request.kv_transfer_params)
        asked = replace(asked, continues="", move_as="", move="", explain="")
        wish = self._within_role(request_id, asked)
        if wish == TransferWish():
            return
        if (known := self._requests.get(request_id)) is not None:
            raise ConnectorError(
                f"request id {request_id!r} is in use: the worker halves are not done with the earlier request, which is "
                f"{known.state.value!r}; use another id"
            )
        if wish.describe:
            self._questions.add(request_id)
            return
        if wish.release_named:
            self._release_named(wish.release_named)
            return
        if wish.release is not None:
            if self._is_ours(wish.release):
                self._releases.append((wish.release.request_id, wish.release.lease))
            return
        claim = offer = None
        if wish.load_from is not None:
            # The worker halves compare this digest with the producer's grant. So an offer of another prompt
            # is claimed as well, and the claim releases it as soon as the difference is found.
            num_tokens = wish.load_from.num_tokens
            if wish.load_from.is_rendezvous:
                # A state cannot be cut back, so its producer gets the prompt without the last token.
                num_tokens = request.num_prompt_tokens - (1 if self._has_state else 0)
            content = content_digest(request, num_tokens)
            claim = replace(wish.load_from, num_tokens=num_tokens, content=content)
        if wish.offer_result:
            content = content_digest(request, request.num_prompt_tokens)
            named = wish.release_as
            offer = _OwnOffer(self._numbers.draw(), content, num_loads=wish.num_loads, release_as=named)
            if wish.rendezvous:
                self._use_name(wish.rendezvous)
                lease = rendezvous_lease(wish.rendezvous)
                offer = _OwnOffer(lease, content, wish.rendezvous, guard_value=offer.lease)
        state = RequestState.ANNOUNCED if claim is None else RequestState.CLAIMED
        traceparent = traceparent_of(request.kv_transfer_params)
        record = self._requests[request_id] = _Request(request_id, state, claim, offer, traceparent)
        orders = self._order(record)
        orders.traceparent = traceparent
        orders.claim = claim
        orders.announcement = (
            None if offer is None else Announcement(offer.lease, offer.name, offer.num_loads)
        )
        logger.debug("%r has arrived", record)

    def get_num_new_matched_tokens(
        self, request: ConnectorRequest, num_computed_tokens: int
    ) -> tuple[int, bool]:
        record = self._in_state(request, RequestState.CLAIMED)
        if record is None or record.claim is None:
            return 0, False
        num_known = len(request.all_token_ids)
        if self._includes_last_token(request, record.claim):
            logger.warning(
                "request %r: not loading the recurrent state on offer: it includes the prompt's last token, which this "
                "node computes itself; send the prompt without that token to the prefill node",
                request.request_id,
            )
            return 0, False
        num_missing = self._num_loadable_tokens(request, record.claim) - num_computed_tokens
        # A consumer computes the last token itself, to get its logits. So a load of that token alone is not
        # worth it.
        if num_missing <= 0 or num_known - num_computed_tokens <= 1:
            return 0, False
        return num_missing, True

    def update_state_after_alloc(
        self, request: ConnectorRequest, block_ids: Sequence[Sequence[int]], num_external_tokens: int
    ) -> None:
        """Order the load into the blocks, or drop the claim if there is nothing to load."""
        record = self._in_state(request, RequestState.CLAIMED)
        if record is None or record.claim is None:
            return
        if num_external_tokens == 0:
            self.count_offered("state" if self._includes_last_token(request, record.claim) else "cached")
            self._drop_claim(record)
            return
        num_tokens = self._num_loadable_tokens(request, record.claim)
        load = self._order(record).load = tuple(
            _missing_blocks(table, block_size, num_tokens - num_external_tokens, num_tokens)
            for table, block_size in zip(block_ids, self._block_sizes, strict=True)
        )
        record.loaded_into = frozenset(block for group in load for block in group.block_ids)
        self._move(record, RequestState.LOADING)

    def request_progressed(self, request: ConnectorRequest, block_ids: Sequence[Sequence[int]]) -> None:
        """Open the offer of a rendezvous with what is computed so far, or extend it.

        Its consumer has claimed, or will, by the name. A request that loses its blocks after that is not
        offered a second time: its consumer knows of the first offer only.

        Raises:
            KVTransferStateError: there is something to offer, but `set_handshake_metadata` was never called.
        """
        if not self.may_offer:
            return
        tables, num_ready = _as_tables(block_ids), request.num_computed_tokens
        if (record := self._in_state(request, RequestState.OPEN)) is not None:
            orders = self._order(record)
            if isinstance(orders.offer, OpenOrder):
                orders.offer = replace(orders.offer, block_ids=tables, num_ready=num_ready)
            else:
                orders.extension = ExtendOrder(tables, num_ready)
            return
        record = self._in_state(request, RequestState.ANNOUNCED)
        if record is None or record.offer is None or not (record.offer.name and self._keeps_all_blocks):
            return
        own = record.offer
        offer = self._name_offer(request, own.lease, tables)
        self._order(record).offer = OpenOrder(
            offer.lease, tables, offer.num_tokens, num_ready, own.content, own.guard_value
        )
        self._move(record, RequestState.OPEN)

    def request_stopping(self, request: ConnectorRequest) -> None:
        """Announce an offer of prompt and answer: the node that goes on may claim it before the worker halves
        get the offer.
        """
        if request.request_id in self._requests:
            return  # it is in the middle of another handoff
        own = _OwnOffer(self._numbers.draw(), "", is_answer=True)
        traceparent = traceparent_of(request.kv_transfer_params)
        record = _Request(request.request_id, RequestState.ANNOUNCED, None, own, traceparent)
        self._requests[request.request_id] = record
        orders = self._order(record)
        orders.traceparent, orders.announcement = traceparent, Announcement(own.lease)

    def owes_offer(self, request_id: str) -> bool:
        """Say whether an offer is to be made of what a request computes."""
        record = self._requests.get(request_id)
        own = None if record is None else record.offer
        return self.may_offer and own is not None and not own.is_released

    def end_offers(self) -> None:
        """End the offers that no worker half knows of yet.

        The worker halves end the others by themselves (`begin_anew`).
        """
        for record in tuple(self._unsent):
            orders = self._order(record)
            if record.state is RequestState.OPEN and orders.offer is not None:
                self._take_back_open(record)
            elif record.state is RequestState.OFFERED:
                # The blocks are held until the worker halves report an end, so the offer is ordered all the
                # same.
                orders.abort, orders.completion = True, None

    def build_connector_meta(self, scheduler_output: SchedulerOutput | None = None) -> HandoffMetadata:
        """Take the orders that were collected since the last step.

        Args:
            scheduler_output: Names the requests that lost their blocks; None if none did. The worker halves
                end those of their open offers that they know of. An open order that was not sent yet is
                withdrawn here, and claims of that offer are denied.
        """
        for request_id in scheduler_output.preempted_req_ids if scheduler_output is not None else ():
            record = self._requests.get(request_id)
            if record is not None and record.state is RequestState.OPEN:
                self._take_back_open(record)
        sent, self._unsent = self._unsent, []
        releases, self._releases = self._releases, []
        orders = [record.orders for record in sent if record.orders is not None]
        for record in sent:
            record.orders = None
        # Of a request that came and went within the step, nothing may be left to say.
        told = tuple(
            order for order in orders if order.announcement is not None or not order.only_announces()
        )
        counts, self._counts = dict(self._counts), Counter()
        return HandoffMetadata(told, tuple(releases), counts)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        for request_id in connector_output.finished_recving:
            record = self._requests.get(request_id)
            if record is not None and record.state is RequestState.LOADING:
                has_failed = request_id in connector_output.load_errors
                has_failed |= not record.loaded_into.isdisjoint(connector_output.invalid_block_ids)
                self.count_offered("failed" if has_failed else "loaded")
            if record is not None and record.state is RequestState.LOADING and record.offer is not None:
                self._move(record, RequestState.ANNOUNCED)
            elif record is not None and record.state in (RequestState.LOADING, RequestState.DRAINING):
                self._move(record, RequestState.ENDED)
        for request_id in connector_output.finished_sending:
            record = self._requests.get(request_id)
            if record is not None and record.state is RequestState.OFFERED:
                self._move(record, RequestState.ENDED)

    def request_finished(
        self, request: ConnectorRequest, block_ids: Sequence[Sequence[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Offer the blocks if the request asked for that, and drop what it still had to load.

        They are offered only if the prompt was computed as a whole and the request was neither aborted nor
        failed.

        Raises:
            KVTransferStateError: there is something to offer, but `set_handshake_metadata` was never called.
                The request is forgotten.
        """
        if request.request_id in self._questions:
            self._questions.remove(request.request_id)
            return False, self.describe()
        record = self._requests.get(request.request_id)
        if record is None:
            return False, None
        if record.state is RequestState.CLAIMED:
            self._drop_claim(record)
        match record.state:
            case RequestState.LOADING:
                # The blocks may be written to until the worker halves report the end, so an offer of them
                # cannot follow.
                self._order(record).drop = True
                if record.offer is not None:
                    self._withdraw(record, record.offer)
                self._move(record, RequestState.DRAINING)
            case RequestState.ANNOUNCED if record.offer is not None and record.offer.is_answer:
                return self._make_answer_offer(request, record, record.offer, _as_tables(block_ids))
            case RequestState.ANNOUNCED if record.offer is not None:
                return self._make_offer(request, record, record.offer, _as_tables(block_ids))
            case RequestState.OPEN if record.offer is not None:
                return self._close_open(request, record, record.offer, _as_tables(block_ids))
        return False, None

    def count_offered(self, outcome: str) -> None:
        """Count a request that came with an offer, by one of the outcomes of
        `kvferry_offered_requests_total`.
        """
        # With policy `fail` such a request fails, and no prompt is computed a second time.
        if outcome not in ("failed", "refused") or self._config.kv_load_failure_policy == "recompute":
            self._counts[f"offered_requests_total/{outcome}"] += 1

    # -- steps between states ------------------------------------------------------------------------

    def _move(self, record: _Request, state: RequestState) -> None:
        """Change a request's state. A request that has ended is forgotten."""
        assert state in _NEXT[record.state], f"{record!r} cannot become {state.value}"
        logger.debug("%r is now %s", record, state.value)
        record.state = state
        # Orders that were not sent yet are sent all the same, before those of a later request with this id.
        if state is RequestState.ENDED:
            del self._requests[record.request_id]

    def _order(self, record: _Request) -> RequestOrders:
        """Return the orders about the request that the next step will send, to add to them."""
        if record.orders is None:
            record.orders = RequestOrders(record.request_id)
            self._unsent.append(record)
        return record.orders

    def _drop_claim(self, record: _Request) -> None:
        """Do not load.

        If the claim was not sent yet, both are sent, because a node can release an offer only after its
        claim.
        """
        self._order(record).drop = True
        self._move(record, RequestState.ENDED if record.offer is None else RequestState.ANNOUNCED)

    def _make_offer(
        self, request: ConnectorRequest, record: _Request, own: _OwnOffer, tables: BlockTables
    ) -> tuple[bool, dict[str, Any] | None]:
        """Offer a finished request's blocks, or withdraw the announcement if they cannot be offered."""
        try:
            can_offer = not own.is_released and self._can_offer(request)
            offer = self._name_offer(request, own.lease, tables) if can_offer else None
        except KVTransferStateError:
            self._withdraw(record, own)
            self._move(record, RequestState.ENDED)
            raise
        if offer is None:
            self._withdraw(record, own)
            self._move(record, RequestState.ENDED)
            return False, None
        self._order(record).offer = OfferOrder(
            own.lease, tables, offer.num_tokens, own.content, own.guard_value
        )
        self._move(record, RequestState.OFFERED)
        return True, self._params(offer, record)

    def _make_answer_offer(
        self, request: ConnectorRequest, record: _Request, own: _OwnOffer, tables: BlockTables
    ) -> tuple[bool, dict[str, Any] | None]:
        """Offer prompt and answer of a stopped request, or withdraw the announcement if they cannot be
        offered.
        """
        num_tokens = _num_answered_tokens(request)
        # A state cannot be cut back to the tokens that are certain.
        is_exact = not self._has_state or request.num_computed_tokens == num_tokens
        can_offer = _has_whole_prompt(request) and request.finish_reason == MOVED and is_exact
        can_offer = can_offer and self._can_be_continued(tables, num_tokens)
        if not can_offer or not self.may_offer or not self._workers:
            self._withdraw(record, own)
            self._move(record, RequestState.ENDED)
            return False, None
        offer = replace(self._name_offer(request, own.lease, tables), num_tokens=num_tokens)
        content = content_digest(request, num_tokens)
        self._order(record).offer = OfferOrder(own.lease, tables, num_tokens, content)
        self._move(record, RequestState.OFFERED)
        return True, offer_params(offer, record.traceparent)

    def _can_be_continued(self, tables: BlockTables, num_tokens: int) -> bool:
        """Say whether all blocks are here that the token after these sees.

        An engine that drafts, or schedules ahead, has computed more tokens than it tells, and for these the
        windows of its layers have moved on: where that is past the end of a block, the engine has freed this
        block.
        """
        for table, spec in zip(tables, self._specs, strict=True):
            if not _keeps_state(spec):
                first = spec.first_visible_token(num_tokens) // spec.block_size
                if _NULL_BLOCK in table[first : -(-num_tokens // spec.block_size)]:
                    return False
        return True

    def _can_offer(self, request: ConnectorRequest) -> bool:
        if not self.may_offer or not _has_whole_prompt(request):
            return False
        if self._has_state and request.num_computed_tokens > request.num_prompt_tokens:
            logger.warning(
                "request %r: not offering its recurrent state, which is past the prompt; set max_tokens to 1",
                request.request_id,
            )
            return False
        return True

    def _close_open(
        self, request: ConnectorRequest, record: _Request, own: _OwnOffer, tables: BlockTables
    ) -> tuple[bool, dict[str, Any] | None]:
        """Complete an open offer, or abort it if its prompt was not computed as a whole.

        In both cases the blocks are kept until the worker halves report the offer's end: a consumer may be
        reading them.
        """
        orders = self._order(record)
        orders.extension = None
        offer = self._name_offer(request, own.lease, tables)
        is_whole = self.may_offer and _has_whole_prompt(request)
        if not is_whole:
            # An open order that was not sent yet is sent together with the abort: the consumer has had the
            # params since the open, and its claim needs an answer.
            orders.abort = True
        elif orders.offer is not None:
            orders.offer = OfferOrder(own.lease, tables, offer.num_tokens, own.content, own.guard_value)
        else:
            orders.completion = tables
        self._move(record, RequestState.OFFERED)
        return True, self._params(offer, record) if is_whole else None

    def _take_back_open(self, record: _Request) -> None:
        """End an open offer whose blocks are lost; the worker halves clear the guards of those that they
        know.
        """
        if record.orders is not None:
            record.orders.extension = None
            if record.orders.offer is not None and record.offer is not None:
                record.orders.offer = None
                self._withdraw(record, record.offer)
        self._move(record, RequestState.ENDED)

    def _withdraw(self, record: _Request, own: _OwnOffer) -> None:
        """Withdraw the announced offer. If its number was not sent yet, nothing can be waiting for it.

        A rendezvous is announced all the same: its consumer knows the name from the router, and is denied at
        once.
        """
        orders = self._order(record)
        if orders.announcement is not None and not own.name:
            orders.announcement = None
        else:
            orders.withdrawal = own.lease

    def _release_named(self, name: str) -> None:
        """Release an offer of which the router has not heard.

        Unknown names are ignored: its request was refused or has ended.
        """
        for record in self._requests.values():
            own = record.offer
            if own is None or own.release_as != name:
                continue
            if record.state is RequestState.OFFERED:
                self._releases.append((record.request_id, own.lease))
            else:  # the end of its request may be on its way to the engine, and may come too late to abort it
                record.offer = replace(own, is_released=True)

    def _use_name(self, name: str) -> None:
        """Note that a request offers by this name of a rendezvous.

        Raises:
            RendezvousError: an earlier one did.
        """
        if name in self._used_names:
            raise RendezvousError(
                "the name of a rendezvous was used already by another request; a router must draw a new name for each "
                "request and each retry"
            )
        self._used_names[name] = None
        if len(self._used_names) > _MAX_USED_NAMES:
            self._used_names.popitem(last=False)

    # -- helpers -------------------------------------------------------------------------------------

    def _in_state(self, request: ConnectorRequest, state: RequestState) -> _Request | None:
        record = self._requests.get(request.request_id)
        return record if record is not None and record.state is state else None

    def _num_loadable_tokens(self, request: ConnectorRequest, offer: RemoteOffer) -> int:
        """Count the tokens that can be loaded.

        Those of an answer with which the request goes on count as well. An engine computes the last token
        that it knows. Where layers do not keep all blocks, it has room only for what the token after the
        loaded ones sees. If that token were not the one that it computes, it would lack what the latter sees:
        the oldest token of its window, or its whole chunk.
        """
        num_known = len(request.all_token_ids)
        return min(num_known if self._keeps_all_blocks else num_known - 1, offer.num_tokens)

    def _includes_last_token(self, request: ConnectorRequest, offer: RemoteOffer) -> bool:
        """Say whether a recurrent state is past what can be loaded: every engine computes the last token that
        it knows itself.
        """
        return self._has_state and offer.num_tokens >= len(request.all_token_ids)

    def _is_ours(self, offer: RemoteOffer) -> bool:
        epochs = {worker.epoch for worker in self._workers}
        return offer.engine_id == self._config.engine_id and offer.epoch in epochs

    def _params(self, offer: RemoteOffer, record: _Request) -> dict[str, Any]:
        return offer_params(offer, record.traceparent) | self._place()

    def _place(self) -> dict[str, Any]:
        # A consumer of a state must know how many tokens it stands for before it claims, which only an answer
        # tells.
        may_name_offers = self._config.is_kv_producer and not self._has_state
        return place_params(
            self._config.engine_id,
            self._workers[0].epoch,
            [worker.address for worker in self._workers],
            has_rendezvous=may_name_offers,
        )

    def _name_offer(self, request: ConnectorRequest, lease: int, tables: BlockTables) -> RemoteOffer:
        if not self._workers:
            raise KVTransferStateError("no worker's address is known: set_handshake_metadata was not called")
        return RemoteOffer(
            engine_id=self._config.engine_id,
            epoch=self._workers[0].epoch,
            request_id=request.request_id,
            lease=lease,
            addresses=tuple(worker.address for worker in self._workers),
            num_tokens=request.num_prompt_tokens,
            block_ids=tables,
        )

    def _within_role(self, request_id: str, wish: TransferWish) -> TransferWish:
        allowed = replace(
            wish,
            offer_result=wish.offer_result and self._config.is_kv_producer,
            load_from=wish.load_from if self._config.is_kv_consumer else None,
            rendezvous=wish.rendezvous if self._config.is_kv_producer else "",
            release_as=wish.release_as if self._config.is_kv_producer else "",
        )
        if allowed != wish:
            key = "do_remote_decode"
            if allowed.load_from != wish.load_from:
                key = "do_remote_prefill"
                self.count_offered("role")
            role = self._config.kv_role
            better = "kv_consumer" if role == "kv_producer" else "kv_producer"
            self._role_log.warning(
                "ignoring %r of request %r: this node's kv_role %r does not support it; send such requests to a node "
                "with kv_role %r or 'kv_both'",
                key,
                request_id,
                role,
                better,
                key=key,
            )
        return allowed


def _as_tables(block_ids: Sequence[Sequence[int]]) -> BlockTables:
    return tuple(tuple(table) for table in block_ids)


def _keeps_all_blocks(spec: KVCacheSpec) -> bool:
    """Whether a request keeps all its blocks until it ends; a window, for one, frees blocks while the prompt
    is computed.
    """
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return all(map(_keeps_all_blocks, spec.kv_cache_specs.values()))
    return isinstance(spec, FullAttentionSpec)


def _keeps_state(spec: KVCacheSpec) -> bool:
    members = spec.kv_cache_specs.values() if isinstance(spec, UniformTypeKVCacheSpecs) else (spec,)
    return any(isinstance(member, MambaSpec) for member in members)


def _num_answered_tokens(request: ConnectorRequest) -> int:
    """Count the tokens of prompt and answer whose keys and values are certainly computed.

    Those of the last sampled token are not: an engine that schedules ahead counts them while their step still
    runs.
    """
    return min(request.num_computed_tokens, len(request.all_token_ids) - 1)


def _has_whole_prompt(request: ConnectorRequest) -> bool:
    return (
        request.finish_reason in ("stop", "length", MOVED)
        and request.num_computed_tokens >= request.num_prompt_tokens
    )


def _missing_blocks(table: Sequence[int], block_size: int, num_here: int, num_tokens: int) -> GroupBlocks:
    """The blocks of one group that hold the tokens from `num_here` to `num_tokens`; the last block may be
    partly filled.
    """
    first = num_here // block_size
    end = -(-num_tokens // block_size)
    return GroupBlocks(first, tuple(table[first:end]))
