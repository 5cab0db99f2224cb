"""The scheduler half of a handoff: which request's blocks are offered, claimed, loaded or let go."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..transports.errors import ConfigurationError, ConnectorError, KVTransferStateError
from .handoff.events import BlockTables, GroupBlocks, LocalBlocks, RemoteOffer
from .kv_cache_specs import MambaSpec
from .metadata import HandoffMetadata, OfferOrder, WorkerAddress
from .params import TransferWish, offer_params, parse_transfer_params

if TYPE_CHECKING:
    from .base import ConnectorRequest
    from .config import KVTransferConfig
    from .kv_cache_specs import KVCacheConfig
    from .output import KVConnectorOutput

__all__ = ["HandoffScheduler"]

logger = logging.getLogger(__name__)

#: A consumer computes the last prompt token itself, to get its logits: fewer missing tokens are not worth a load.
_TOKENS_COMPUTED_ANYWAY = 1


@dataclass
class _Orders:
    """What the worker halves are told in the next step."""

    offers: dict[str, OfferOrder] = field(default_factory=dict)
    claims: dict[str, RemoteOffer] = field(default_factory=dict)
    loads: dict[str, LocalBlocks] = field(default_factory=dict)
    drops: list[str] = field(default_factory=list)

    def freeze(self) -> HandoffMetadata:
        return HandoffMetadata(self.offers, self.claims, self.loads, tuple(self.drops))


class HandoffScheduler:
    """Decides, request by request; the methods are those of `KVConnectorBase`'s scheduler half.

    A request id means one request until nothing of it is left here: it is not taken again while a worker half
    owes a report of its offer or its load.

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
        self._offers_wanted: set[str] = set()
        self._unreported: set[str] = set()
        self._last_lease = 0
        self._orders = _Orders()

    @property
    def num_requests(self) -> int:
        """Requests that are remembered: they asked for something, and it is not over."""
        return len(self._claims.keys() | self._offers_wanted | self._unreported)

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
            self._claims[request_id] = self._orders.claims[request_id] = wish.load_from
        if wish.offer_result:
            self._offers_wanted.add(request_id)

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

    def build_connector_meta(self) -> HandoffMetadata:
        """Take the orders that came together since the last step."""
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
        wanted = request_id in self._offers_wanted
        self._offers_wanted.discard(request_id)
        if not wanted or not _has_whole_prompt(request):
            return False, None
        if self._has_state and request.num_computed_tokens > request.num_prompt_tokens:
            logger.warning("request %s: its state is past its prompt, which is not offered", request_id)
            return False, None
        tables = tuple(tuple(table) for table in block_ids)
        return True, offer_params(self._order_offer(request_id, tables, request.num_prompt_tokens))

    def _order_offer(self, request_id: str, tables: BlockTables, num_tokens: int) -> RemoteOffer:
        if not self._workers:
            raise KVTransferStateError("no worker's address is known: set_handshake_metadata was not called")
        self._last_lease += 1
        self._unreported.add(request_id)
        self._orders.offers[request_id] = OfferOrder(self._last_lease, tables, num_tokens)
        return RemoteOffer(
            engine_id=self._config.engine_id,
            epoch=self._workers[0].epoch,
            request_id=request_id,
            lease=self._last_lease,
            addresses=tuple(worker.address for worker in self._workers),
            num_tokens=num_tokens,
            block_ids=tables,
        )

    def _knows(self, request_id: str) -> bool:
        return (
            request_id in self._claims
            or request_id in self._offers_wanted
            or request_id in self._unreported
            or request_id in self._orders.drops  # a drop of this step would meet the new request's claim
        )

    def _within_role(self, request_id: str, wish: TransferWish) -> TransferWish:
        allowed = TransferWish(
            offer_result=wish.offer_result and self._config.is_kv_producer,
            load_from=wish.load_from if self._config.is_kv_consumer else None,
        )
        if allowed != wish:
            logger.warning(
                "request %s asks for what a %s does not do; that part is ignored",
                request_id,
                self._config.kv_role,
            )
        return allowed


def _num_loadable_tokens(request: ConnectorRequest, offer: RemoteOffer) -> int:
    return min(request.num_prompt_tokens, offer.num_tokens)


def _has_whole_prompt(request: ConnectorRequest) -> bool:
    ended_by_itself = request.finish_reason in ("stop", "length")
    return ended_by_itself and request.num_computed_tokens >= request.num_prompt_tokens


def _missing_blocks(table: Sequence[int], block_size: int, num_here: int, num_tokens: int) -> GroupBlocks:
    """The blocks of one group that hold tokens from `num_here` to `num_tokens`, the last one perhaps in part."""
    first = num_here // block_size
    end = -(-num_tokens // block_size)
    return GroupBlocks(first, tuple(table[first:end]))
