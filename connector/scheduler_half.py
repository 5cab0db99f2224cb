"""The scheduler half of a handoff: which request's blocks are offered, claimed, loaded or let go."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ..transports.errors import ConfigurationError, KVTransferStateError
from .content import content_digest
from .errors import ConnectorError
from .handoff.events import BlockTables, GroupBlocks, LocalBlocks, RemoteOffer
from .handoff.numbers import GuardNumbers
from .kv_cache_specs import FullAttentionSpec, MambaSpec, UniformTypeKVCacheSpecs
from .metadata import ExtendOrder, HandoffMetadata, OfferOrder, OpenOrder, WorkerAddress
from .params import TransferWish, offer_params, parse_transfer_params
from .unexpected import RepeatLog

if TYPE_CHECKING:
    from .base import ConnectorRequest
    from .config import KVTransferConfig
    from .kv_cache_specs import KVCacheConfig, KVCacheSpec
    from .output import KVConnectorOutput

logger = logging.getLogger(__name__)

#: A consumer computes the last prompt token itself, to get its logits: fewer missing tokens are not worth a load.
_TOKENS_COMPUTED_ANYWAY = 1


@dataclass
class _Orders:
    """What the worker halves are told in the next step."""

    announcements: dict[str, int] = field(default_factory=dict)
    offers: dict[str, OfferOrder | OpenOrder] = field(default_factory=dict)
    extensions: dict[str, ExtendOrder] = field(default_factory=dict)
    completions: dict[str, BlockTables] = field(default_factory=dict)
    withdrawals: list[int] = field(default_factory=list)
    aborts: list[str] = field(default_factory=list)
    releases: list[tuple[str, int]] = field(default_factory=list)
    claims: dict[str, RemoteOffer] = field(default_factory=dict)
    loads: dict[str, LocalBlocks] = field(default_factory=dict)
    drops: list[str] = field(default_factory=list)

    def freeze(self) -> HandoffMetadata:
        return HandoffMetadata(
            self.announcements,
            self.offers,
            self.extensions,
            self.completions,
            tuple(self.withdrawals),
            tuple(self.aborts),
            tuple(self.releases),
            self.claims,
            self.loads,
            tuple(self.drops),
        )


@dataclass(frozen=True)
class _Wanted:
    """The offer that a request asked for, until it is made.

    Attributes:
        content: Digest of the prompt.
        is_early: Whether it may be made while the prompt is computed.
    """

    lease: int
    content: str
    is_early: bool


class HandoffScheduler:
    """Decides, request by request; the methods are those of `KVConnectorBase`'s scheduler half.

    A request id means one request until nothing of it is left here: it is not taken again while a worker half
    owes a report of its offer or its load.

    A request that asks for an offer has its lease number drawn at its arrival, and the worker halves learn it at once: a
    consumer that claims before the offer reaches them waits, for as long as the request is known.

    A request with an offer to load goes: claimed at its arrival, so that the handshake is done and the lease
    renewed while it queues; loaded when its blocks are allocated, or dropped when they turn out to be here
    already or the request ends. It is loaded once at most: after a failure the engine recomputes.

    A recurrent state stands for all tokens so far and cannot be cut back. So a model that has one offers only a prompt
    with nothing computed behind it, and loads only an offer that ends before its prompt's last token, which every
    engine computes itself: the producer is to be given the prompt without that token.
    """

    def __init__(self, config: KVTransferConfig, kv_cache_config: KVCacheConfig) -> None:
        self._config = config
        self._block_sizes = tuple(group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups)
        self._has_state = any(isinstance(g.kv_cache_spec, MambaSpec) for g in kv_cache_config.kv_cache_groups)
        self._workers: tuple[WorkerAddress, ...] = ()
        self._claims: dict[str, RemoteOffer] = {}
        self._wanted: dict[str, _Wanted] = {}
        self._open: dict[str, RemoteOffer] = {}  # offers of requests whose prompt is still computed
        self._keeps_all_blocks = all(
            _keeps_all_blocks(g.kv_cache_spec) for g in kv_cache_config.kv_cache_groups
        )
        self._unreported: set[str] = set()
        self._numbers = GuardNumbers()
        self._orders = _Orders()
        self._role_log = RepeatLog()  # any client can cause it

    @property
    def num_requests(self) -> int:
        """Requests that are remembered: they asked for something, and it is not over."""
        return len(self._claims.keys() | self._wanted.keys() | self._open.keys() | self._unreported)

    def set_handshake_metadata(self, metadata: Mapping[int, WorkerAddress]) -> None:
        """Learn where the worker halves can be reached, by rank.

        Raises:
            ConfigurationError: they are not all of one start of one node. Nothing was learnt.
        """
        if len(epochs := {worker.epoch for worker in metadata.values()}) != 1:
            raise ConfigurationError(f"the workers of one node share one epoch, got {len(epochs)}")
        self._workers = tuple(metadata[rank] for rank in sorted(metadata))

    def on_new_request(self, request: ConnectorRequest) -> None:
        """Read what the request asks for, and order an early claim of what it is to load.

        Raises:
            InvalidTransferParamsError: its `kv_transfer_params` are malformed; it is not remembered.
            ConnectorError: an earlier request of this id is not over; that one goes on.
        """
        request_id = request.request_id
        wish = self._within_role(request_id, parse_transfer_params(request.kv_transfer_params))
        if wish != TransferWish() and self._knows(request_id):
            raise ConnectorError(f"request id {request_id!r} is in use: its handoff is not over")
        if wish.load_from is not None:
            # The worker halves compare this with the producer's grant. So also an offer of something else is claimed, and
            # is released when that is found out.
            offer = replace(wish.load_from, content=content_digest(request, wish.load_from.num_tokens))
            self._claims[request_id] = self._orders.claims[request_id] = offer
        if wish.offer_result:
            self._announce(request, is_early=wish.offer_early and self._keeps_all_blocks)
        if wish.release is not None and self._is_ours(wish.release):
            self._orders.releases.append((wish.release.request_id, wish.release.lease))

    def _announce(self, request: ConnectorRequest, *, is_early: bool) -> None:
        content = content_digest(request, request.num_prompt_tokens)
        wanted = _Wanted(self._numbers.draw(), content, is_early)
        self._wanted[request.request_id] = wanted
        self._orders.announcements[request.request_id] = wanted.lease

    def _withdraw(self, request_id: str, lease: int) -> None:
        """What was announced will not come."""
        if self._orders.announcements.pop(request_id, None) is None:
            self._orders.withdrawals.append(lease)

    def _is_ours(self, offer: RemoteOffer) -> bool:
        epochs = {worker.epoch for worker in self._workers}
        return offer.engine_id == self._config.engine_id and offer.epoch in epochs

    def get_num_new_matched_tokens(
        self, request: ConnectorRequest, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Tokens beyond `num_computed_tokens` that the offer holds, to be loaded asynchronously."""
        offer = self._claims.get(request.request_id)
        if offer is None:
            return 0, False
        if self._has_state and offer.num_tokens >= request.num_prompt_tokens:
            logger.warning(
                "request %s: the state on offer is past its prompt's last token", request.request_id
            )
            return 0, False
        num_missing = _num_loadable_tokens(request, offer) - num_computed_tokens
        if num_missing <= 0 or request.num_prompt_tokens - num_computed_tokens <= _TOKENS_COMPUTED_ANYWAY:
            return 0, False
        return num_missing, True

    def update_state_after_alloc(
        self, request: ConnectorRequest, block_ids: Sequence[Sequence[int]], num_external_tokens: int
    ) -> None:
        """Order the load into the blocks, or drop the claim if there is nothing to load."""
        request_id = request.request_id
        offer = self._claims.pop(request_id, None)
        if offer is None:
            return
        if num_external_tokens == 0:
            self._orders.drops.append(request_id)
            return
        num_tokens = _num_loadable_tokens(request, offer)
        self._unreported.add(request_id)
        self._orders.loads[request_id] = tuple(
            _missing_blocks(table, block_size, num_tokens - num_external_tokens, num_tokens)
            for table, block_size in zip(block_ids, self._block_sizes, strict=True)
        )

    def request_progressed(
        self, request: ConnectorRequest, block_ids: Sequence[Sequence[int]]
    ) -> dict[str, Any] | None:
        """Open an offer of what is computed so far, or extend it, if the request asked for that.

        A request that loses its blocks after that is not offered a second time: its consumer knows of the first offer only.

        Raises:
            KVTransferStateError: there is something to offer, but `set_handshake_metadata` was never called.
        """
        request_id, num_ready = request.request_id, request.num_computed_tokens
        tables = tuple(tuple(table) for table in block_ids)
        if request_id in self._open:
            opening = self._orders.offers.get(request_id)
            if isinstance(opening, OpenOrder):
                self._orders.offers[request_id] = replace(opening, block_ids=tables, num_ready=num_ready)
            else:
                self._orders.extensions[request_id] = ExtendOrder(tables, num_ready)
            return None
        wanted = self._wanted.get(request_id)
        if wanted is None or not wanted.is_early:
            return None
        offer = self._name_offer(request, wanted, tables)
        del self._wanted[request_id]
        self._open[request_id] = offer
        self._orders.offers[request_id] = OpenOrder(
            offer.lease, tables, offer.num_tokens, num_ready, wanted.content
        )
        return offer_params(offer)

    def build_connector_meta(self, preempted_req_ids: AbstractSet[str] = frozenset()) -> HandoffMetadata:
        """Take the orders that came together since the last step.

        Args:
            preempted_req_ids: Requests that lost their blocks; the worker halves end their open offers, and refuse who
                claims one that they were not told of yet.
        """
        for request_id in preempted_req_ids & self._open.keys():
            offer = self._open.pop(request_id)
            self._orders.extensions.pop(request_id, None)
            if self._orders.offers.pop(request_id, None) is not None:
                self._withdraw(request_id, offer.lease)
        orders, self._orders = self._orders, _Orders()
        return orders.freeze()

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Forget the offers and loads that ended, well or not."""
        self._unreported -= connector_output.finished_recving
        self._unreported -= connector_output.finished_sending

    def request_finished(
        self, request: ConnectorRequest, block_ids: Sequence[Sequence[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Offer the prompt's blocks if the request asked for that, and let go of what it still had to load.

        Only a prompt that was computed as a whole, of a request that ended by itself, is offered.

        Raises:
            KVTransferStateError: there is something to offer, but `set_handshake_metadata` was never called.
        """
        request_id = request.request_id
        if self._claims.pop(request_id, None) is not None or request_id in self._unreported:
            self._orders.drops.append(request_id)
        wanted = self._wanted.pop(request_id, None)
        tables = tuple(tuple(table) for table in block_ids)
        if request_id in self._open:
            return self._close_open(request, tables)
        if wanted is None:
            return False, None
        if not self._can_offer(request):
            self._withdraw(request_id, wanted.lease)
            return False, None
        offer = self._name_offer(request, wanted, tables)
        self._unreported.add(request_id)
        self._orders.offers[request_id] = OfferOrder(offer.lease, tables, offer.num_tokens, wanted.content)
        return True, offer_params(offer)

    def _can_offer(self, request: ConnectorRequest) -> bool:
        if not _has_whole_prompt(request):
            return False
        if self._has_state and request.num_computed_tokens > request.num_prompt_tokens:
            logger.warning("request %s: not offering its state, which is past its prompt", request.request_id)
            return False
        return True

    def _close_open(
        self, request: ConnectorRequest, tables: BlockTables
    ) -> tuple[bool, dict[str, Any] | None]:
        """Complete an open offer, or take it back if its prompt was not computed as a whole."""
        request_id = request.request_id
        offer = self._open.pop(request_id)
        self._orders.extensions.pop(request_id, None)
        is_whole = _has_whole_prompt(request)
        self._unreported.add(request_id)
        if not is_whole:
            # Also if no worker half has heard of it yet: its consumer may have, and waits for the claim's answer.
            self._orders.aborts.append(request_id)
        elif request_id in self._orders.offers:
            content = self._orders.offers[request_id].content
            self._orders.offers[request_id] = OfferOrder(offer.lease, tables, offer.num_tokens, content)
        else:
            self._orders.completions[request_id] = tables
        return True, offer_params(replace(offer, block_ids=tables)) if is_whole else None

    def _name_offer(self, request: ConnectorRequest, wanted: _Wanted, tables: BlockTables) -> RemoteOffer:
        if not self._workers:
            raise KVTransferStateError("no worker's address is known: set_handshake_metadata was not called")
        return RemoteOffer(
            engine_id=self._config.engine_id,
            epoch=self._workers[0].epoch,
            request_id=request.request_id,
            lease=wanted.lease,
            addresses=tuple(worker.address for worker in self._workers),
            num_tokens=request.num_prompt_tokens,
            block_ids=tables,
        )

    def _knows(self, request_id: str) -> bool:
        return (
            request_id in self._claims
            or request_id in self._wanted
            or request_id in self._open
            or request_id in self._unreported
            or request_id in self._orders.drops  # a drop of this step would meet the new request's claim
        )

    def _within_role(self, request_id: str, wish: TransferWish) -> TransferWish:
        allowed = TransferWish(
            offer_result=wish.offer_result and self._config.is_kv_producer,
            load_from=wish.load_from if self._config.is_kv_consumer else None,
            offer_early=wish.offer_early and self._config.is_kv_producer,
            release=wish.release if self._config.is_kv_producer else None,
        )
        if allowed != wish:
            key = "do_release" if wish.release is not None else "do_remote_decode"
            key = "do_remote_prefill" if allowed.load_from != wish.load_from else key
            role = self._config.kv_role
            better = "kv_consumer" if role == "kv_producer" else "kv_producer"
            self._role_log.log(
                logging.WARNING,
                key,
                lambda: (
                    f"ignoring {key!r} of request {request_id}: this node's kv_role {role!r} does not support it; "
                    f"send such requests to a node with kv_role {better!r} or 'kv_both'"
                ),
            )
        return allowed


def _num_loadable_tokens(request: ConnectorRequest, offer: RemoteOffer) -> int:
    return min(request.num_prompt_tokens, offer.num_tokens)


def _keeps_all_blocks(spec: KVCacheSpec) -> bool:
    """Whether a request's blocks stay its own until it ends; others are let go of while its prompt is computed."""
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return all(map(_keeps_all_blocks, spec.kv_cache_specs.values()))
    return isinstance(spec, FullAttentionSpec)


def _has_whole_prompt(request: ConnectorRequest) -> bool:
    ended_by_itself = request.finish_reason in ("stop", "length")
    return ended_by_itself and request.num_computed_tokens >= request.num_prompt_tokens


def _missing_blocks(table: Sequence[int], block_size: int, num_here: int, num_tokens: int) -> GroupBlocks:
    """The blocks of one group that hold tokens from `num_here` to `num_tokens`, the last one perhaps in part."""
    first = num_here // block_size
    end = -(-num_tokens // block_size)
    return GroupBlocks(first, tuple(table[first:end]))
