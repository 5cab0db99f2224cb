"""An encoder apart: what a multimodal model's encoder computed goes from the node that computed it to the one
that needs it.

    vllm serve MODEL --ec-transfer-config '{"ec_connector": "KvferryEncoderConnector",
        "ec_connector_module_path": "kvferry.connector.vllm", "ec_role": "ec_producer"}'

For the handoff protocol an item (an image, a sound) is a request whose cache has one layer, with a row per
token of the item. So transports, guards, leases and digests are those of KV caches. All of it is in the
scheduler's process: vLLM runs no step of a worker while a request waits for an item, and takes nothing back
from the workers of a node that only encodes. Such a worker writes what it has computed into the pool, which
it maps. What has been loaded travels to the workers with a step's orders.

What must never break: an item is offered only if all its rows are in its blocks, and a worker gets one only
after its bytes were accepted under the guard. One that cannot be had is computed here, so no failure of a
peer costs an answer.
"""

from __future__ import annotations

import enum
import hashlib
import logging
import mmap
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any

import msgpack
from vllm import __version__ as vllm_version
from vllm.distributed import get_tp_group
from vllm.distributed.ec_transfer.ec_connector.base import (
    ECConnectorBase,
    ECConnectorMetadata,
    ECConnectorRole,
)
from vllm.distributed.ec_transfer.ec_connector.metrics import ECConnectorPromMetrics, ECConnectorStats
from vllm.v1.request import RequestStatus

from ...transports.checked import integer
from ...transports.errors import ConfigurationError
from ...transports.options import require_valid
from ...transports.registry import create_transport
from ..config import CacheConfig, EngineConfig, KVRole, KVTransferConfig, ModelConfig
from ..errors import InvalidTransferParamsError
from ..handoff.events import GroupBlocks, RemoteOffer
from ..handoff.numbers import GuardNumbers
from ..kv_cache_specs import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from ..p2p.orders import Announcement, HandoffMetadata, OfferOrder, RequestOrders
from ..p2p.params import offer_params, parse_transfer_params
from ..p2p.worker import HandoffWorker
from .config import connector_options
from .identity import model_identity
from .weights import watch_engine_cores

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

#: Part of what is hashed of an item. Change it together with what is hashed.
_FORM = "kvferry-encoder-1"
#: Rows of a block of the pool.
_BLOCK_ROWS = 16
#: vLLM repeats its loop at once while a request waits for an item. Each time, its end is waited for this
#: long.
_POLL_S = 0.002
_ROLES: Mapping[str, KVRole] = {"ec_producer": "kv_producer", "ec_consumer": "kv_consumer"}


@dataclass(frozen=True)
class PoolOptions:
    """What `ec_connector_extra_config` has beside the options of every connector.

    Attributes:
        pool_mb: Main memory, in MiB, in which a node keeps what it offers and loads.

    Raises:
        ConfigurationError: a value is not allowed; the error names its key.
    """

    pool_mb: Annotated[int, integer(1)] = 256

    def __post_init__(self) -> None:
        require_valid(self)


@dataclass(frozen=True)
class Place:
    """Where an item's rows are to be written.

    Attributes:
        ticket: What the first block's ticket is to hold when they are written: a number that nothing else
            ever has.
    """

    ticket: int
    blocks: tuple[int, ...]
    num_rows: int


@dataclass
class EncoderOrders(ECConnectorMetadata):  # type: ignore[misc]
    """From the scheduler half to the worker half, for one step.

    Attributes:
        pool: Where the worker finds the pool, and its form.
        wanted: Items that are to be written, as soon as they are computed.
        unwanted: Tickets of those that are not to be written any more. They come first: their blocks may be
            others' by now.
        loaded: Items that have come: `(num_rows, width)`.
    """

    pool: tuple[str, int, int, str]
    wanted: list[tuple[str, Place]] = field(default_factory=list)
    unwanted: set[int] = field(default_factory=set)
    loaded: dict[str, torch.Tensor] = field(default_factory=dict)


class ItemPool:
    """Blocks of rows in memory that both halves map, and a ticket per block.

    Args:
        path: Of a file that another process keeps open; empty: memory of a new one, which lives as long as
            the processes.

    Attributes:
        blocks: `(num_blocks, rows of a block, width)`.
    """

    def __init__(self, path: str, num_blocks: int, width: int, dtype: str) -> None:
        import torch

        kind = getattr(torch, dtype)
        size = num_blocks * _BLOCK_ROWS * width * kind.itemsize
        tickets = num_blocks * torch.int64.itemsize
        descriptor = os.open(path, os.O_RDWR) if path else os.memfd_create("kvferry-encoder", os.MFD_CLOEXEC)
        try:
            if not path:
                os.ftruncate(descriptor, size + tickets)
            memory = mmap.mmap(descriptor, size + tickets)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        self.blocks = torch.frombuffer(memory, dtype=kind, count=size // kind.itemsize)
        self.blocks = self.blocks.view(num_blocks, _BLOCK_ROWS, width)
        self._tickets = torch.frombuffer(memory, dtype=torch.int64, offset=size)
        #: By which another process of this user finds it.
        self.form = (f"/proc/{os.getpid()}/fd/{descriptor}", num_blocks, width, dtype)

    def write(self, place: Place, rows: torch.Tensor) -> None:
        """Write an item. One of another form is left out."""
        if rows.shape != (place.num_rows, self.blocks.shape[2]) or rows.dtype != self.blocks.dtype:
            return
        for number, block in enumerate(place.blocks):
            part = rows[number * _BLOCK_ROWS : (number + 1) * _BLOCK_ROWS]
            self.blocks[block, : len(part)] = part
        # Last: the other process takes the ticket as a proof that all rows are there.
        self._tickets[place.blocks[0]] = place.ticket

    def has(self, place: Place) -> bool:
        """Return whether an item was written."""
        return int(self._tickets[place.blocks[0]]) == place.ticket

    def read(self, blocks: tuple[int, ...], num_rows: int) -> torch.Tensor:
        """Return a copy of an item."""
        return self.blocks[list(blocks)].flatten(0, 1)[:num_rows].clone()

    def close(self) -> None:
        os.close(self._descriptor)


#: What becomes of items, and what the metric of it counts.
_COUNTS: Mapping[str, str] = {
    "offered": "Items that this node's encoder computed and offered to another node",
    "loaded": "Items that were loaded from another node",
    "failed": "Items that another node offered and this one computed itself",
}
_USAGE = "usage"


class EncoderStats(ECConnectorStats):  # type: ignore[misc]
    """Counts of items since the figures before, and the share of the pool that is in use."""

    data: dict[str, float]

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: ECConnectorStats) -> EncoderStats:
        counts = {name: self.data.get(name, 0) + other.data.get(name, 0) for name in _COUNTS}
        return EncoderStats(data={**counts, _USAGE: other.data.get(_USAGE, self.data.get(_USAGE, 0.0))})

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not self.data


class EncoderPromMetrics(ECConnectorPromMetrics):  # type: ignore[misc]
    """Export the figures with vLLM's labels."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._counters = {
            name: self._counter_cls(f"kvferry_encoder_{name}_items", text, self._labelnames)
            for name, text in _COUNTS.items()
        }
        text = "Share of the pool of encoder outputs that is in use, 0 to 1"
        self._usage = self._gauge_cls("kvferry_encoder_pool_usage", text, self._labelnames)
        for host in self.per_engine_labelvalues.values():  # so that they are there from the start
            for metric in (*self._counters.values(), self._usage):
                metric.labels(*host)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        host = self.per_engine_labelvalues[engine_idx]
        for name, counter in self._counters.items():
            counter.labels(*host).inc(transfer_stats_data.get(name, 0))
        self._usage.labels(*host).set(transfer_stats_data.get(_USAGE, 0.0))


class KvferryEncoderConnector(ECConnectorBase):  # type: ignore[misc]
    """Both halves, of which vLLM makes one per process."""

    def __init__(self, vllm_config: Any, role: ECConnectorRole) -> None:
        super().__init__(vllm_config=vllm_config, role=role)
        if not hasattr(ECConnectorBase, "ensure_cache_available"):
            raise ConfigurationError(
                f"vLLM {vllm_version} cannot let a request wait for an encoder's output; use 0.32 or later"
            )
        _refuse_unsupported(vllm_config)
        watch_engine_cores()
        self._device = vllm_config.device_config.device
        self._pool: ItemPool | None = None  # of a worker half
        self._wanted: list[tuple[str, Place]] = []  # what a worker half is still to write
        self.scheduler_side = SchedulerSide(vllm_config) if role is ECConnectorRole.SCHEDULER else None

    @property
    def _scheduler_side(self) -> SchedulerSide:
        assert self.scheduler_side is not None
        return self.scheduler_side

    # -- the worker half -----------------------------------------------------------------------------

    def start_save_caches(self, **kwargs: Any) -> None:
        orders = self._get_connector_metadata()
        self._wanted = [each for each in self._wanted if each[1].ticket not in orders.unwanted]
        self._wanted += orders.wanted
        if self._pool is None and self._wanted and get_tp_group().rank_in_group == 0:
            self._pool = ItemPool(*orders.pool)
        for item in {item for item, _ in self._wanted} & kwargs["encoder_cache"].keys():
            self.save_caches(kwargs["encoder_cache"], item)  # computed for an earlier request

    def save_caches(self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any) -> None:
        if self._pool is not None:
            for item, place in self._wanted:
                if item == mm_hash:
                    self._pool.write(place, encoder_cache[mm_hash].detach().cpu())
        self._wanted = [each for each in self._wanted if each[0] != mm_hash]

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        for item, rows in self._get_connector_metadata().loaded.items():
            encoder_cache[item] = rows.to(self._device)

    # -- the scheduler half --------------------------------------------------------------------------

    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        if self.is_producer:
            self._scheduler_side.want(request)
        return not self.is_consumer or self._scheduler_side.are_here(request, num_computed_tokens)

    def has_cache_item(self, identifier: str) -> bool:
        return self._scheduler_side.has(identifier)

    def update_state_after_alloc(self, request: Any, index: int) -> None:
        self._scheduler_side.give(request.mm_features[index].identifier)

    def build_connector_meta(self, scheduler_output: Any) -> EncoderOrders:
        return self._scheduler_side.take_orders()

    def request_finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        return False, self._scheduler_side.request_finished(request)

    def get_ec_connector_stats(self) -> EncoderStats | None:
        return None if self.scheduler_side is None else self.scheduler_side.take_stats()

    @classmethod
    def build_ec_connector_stats(cls, data: dict[str, Any] | None = None) -> EncoderStats:
        return EncoderStats(data=data or {})

    @classmethod
    def build_prom_metrics(cls, *args: Any) -> EncoderPromMetrics:
        return EncoderPromMetrics(*args)

    def weights_may_change(self) -> None:
        """Exchange nothing any more.

        What a caller of the workers does to the weights of an encoder is not looked at.
        """
        self._scheduler_side.end_all(
            "the workers were called, and may have other weights now; restart the node"
        )

    def shutdown(self) -> None:
        if self.scheduler_side is not None:
            self.scheduler_side.shutdown()
        if self._pool is not None:
            self._pool.close()
            self._pool = None


class _Phase(enum.Enum):
    """Of an item that another node offers."""

    LOADING = "loading"
    HERE = "here"
    #: It is computed here.
    FAILED = "failed"


@dataclass
class _Item:
    """An item that another node offers.

    Attributes:
        requests: Those that need it and have not ended.
        blocks: It is loaded into.
        rows: Its bytes, once it is here.
    """

    phase: _Phase
    requests: set[str]
    num_rows: int = 0
    blocks: tuple[int, ...] = ()
    rows: torch.Tensor | None = None


class SchedulerSide:
    """Offers what this node's encoder computed, and loads what that of another node did.

    Attributes:
        num_offered, num_loaded, num_failed: Items since the start.

    Raises:
        ConfigurationError: an option is wrong, or the pool is too small for one item.
    """

    def __init__(self, vllm_config: Any) -> None:
        self.num_offered = self.num_loaded = self.num_failed = 0
        self._told: dict[str, float] = {}  # the figures of all time, as they were last told
        self._numbers = GuardNumbers()
        self._wanted: dict[str, dict[str, Place]] = {}  # by request, by item; what the worker is to write
        self._held: dict[str, tuple[int, ...]] = {}  # by name of an offer: its blocks
        self._items: dict[str, _Item] = {}
        self._loads: dict[str, str] = {}  # by name of a load: its item
        self._num_named = 0
        self._half, self._pool = _served_pool(vllm_config)
        self._orders = EncoderOrders(self._pool.form)
        self._engine_id = vllm_config.ec_transfer_config.engine_id
        self._free = list(range(1, len(self._pool.blocks)))  # block 0 is the null block

    @property
    def num_used(self) -> int:
        """Blocks that are in use."""
        self._poll()
        return len(self._pool.blocks) - 1 - len(self._free)

    def take_stats(self) -> EncoderStats:
        """Return what has changed since the last call."""
        counts: dict[str, float] = {name: getattr(self, f"num_{name}") for name in _COUNTS}
        # Counting them also takes back the blocks of offers that have ended, which nothing else does while no
        # item is asked for.
        usage = self.num_used / (len(self._pool.blocks) - 1)
        before, self._told = self._told, {**counts, _USAGE: usage}
        if self._told == before:
            return EncoderStats()
        changes = {name: count - before.get(name, 0) for name, count in counts.items()}
        return EncoderStats(data={**changes, _USAGE: usage})

    # -- items of this node --------------------------------------------------------------------------

    def want(self, request: Any) -> None:
        """Ask the worker for a request's items.

        One for which there is no room is not offered: its consumer computes it.
        """
        if request.request_id in self._wanted:
            return
        places = self._wanted[request.request_id] = {}
        for index, feature in enumerate(request.mm_features):
            item, num_rows = feature.identifier, request.get_num_encoder_embeds(index)
            if item in places:
                continue
            if (blocks := self._allocate(num_rows)) is None:
                logger.warning("item %s is not offered, because the pool is full: increase pool_mb", item)
                continue
            places[item] = place = Place(self._numbers.draw(), blocks, num_rows)
            self._orders.wanted.append((item, place))

    def _offer(self, item: str, place: Place, *, is_aborted: bool) -> dict[str, Any] | None:
        """Offer an item.

        Returns the params for the node that needs it; None if none does, or the worker has not written it.
        """
        if is_aborted or not self._pool.has(place):
            # The orders that say so reach the worker before any that give the blocks to another item.
            self._orders.unwanted.add(place.ticket)
            self._free.extend(place.blocks)
            return None
        name, worker = self._new_name(item), self._half.get_handshake_metadata()
        self._held[name] = place.blocks
        self.num_offered += 1
        order = OfferOrder(place.ticket, (place.blocks,), place.num_rows, _content(item, place.num_rows))
        orders = RequestOrders(name, announcement=Announcement(place.ticket), offer=order)
        self._submit(orders, is_computed=True)
        where = self._engine_id, worker.epoch, name, place.ticket, (worker.address,)
        return offer_params(RemoteOffer(*where, place.num_rows, (place.blocks,)))

    # -- items of other nodes ------------------------------------------------------------------------

    def are_here(self, request: Any, num_computed_tokens: int) -> bool:
        """Load a request's items, and return whether none of them is still on its way."""
        told = request.ec_transfer_params
        for index, feature in enumerate(request.mm_features):
            item, place = feature.identifier, feature.mm_position
            if place.offset + place.length <= num_computed_tokens:
                continue
            if item in self._items:
                self._items[item].requests.add(request.request_id)
            elif isinstance(told, Mapping) and item in told:
                num_rows = request.get_num_encoder_embeds(index)
                self._items[item] = self._load(item, request.request_id, num_rows, told[item])
        mine = [item for item in self._items.values() if request.request_id in item.requests]
        if any(item.phase is _Phase.LOADING for item in mine):
            self._half.wait_finished(_POLL_S)
            self._poll()
        return all(item.phase is not _Phase.LOADING for item in mine)

    def _load(self, item: str, request_id: str, num_rows: int, params: Any) -> _Item:
        failed = _Item(_Phase.FAILED, {request_id})
        try:
            offered = parse_transfer_params(params).load_from
        except InvalidTransferParamsError as error:
            return self._failed(failed, item, str(error))
        if offered is None or offered.num_tokens != num_rows:
            return self._failed(failed, item, f"its params name no offer of {num_rows} rows")
        blocks = self._allocate(num_rows)
        if blocks is None:
            return self._failed(failed, item, "the pool is full; increase pool_mb")
        name = self._new_name(item)
        self._loads[name] = item
        claim = replace(offered, content=_content(item, num_rows))
        self._submit(RequestOrders(name, claim=claim, load=(GroupBlocks(0, blocks),)))
        return _Item(_Phase.LOADING, {request_id}, num_rows, blocks)

    def _failed(self, failed: _Item, item: str, why: str) -> _Item:
        self.num_failed += 1
        logger.warning("item %s could not be loaded, and is computed here: %s", item, why)
        return failed

    def has(self, item: str) -> bool:
        """Return whether an item of another node is here."""
        return item in self._items and self._items[item].phase is _Phase.HERE

    def give(self, item: str) -> None:
        """Give an item to the worker with the next orders, if it is here."""
        if self.has(item):
            rows = self._items.pop(item).rows
            assert rows is not None
            self._orders.loaded[item] = rows

    # -- both ----------------------------------------------------------------------------------------

    def take_orders(self) -> EncoderOrders:
        orders, self._orders = self._orders, EncoderOrders(self._pool.form)
        return orders

    def request_finished(self, request: Any) -> dict[str, Any] | None:
        """Forget a request.

        Returns the params with which other nodes load its items, if any were computed.
        """
        for item in [key for key, each in self._items.items() if request.request_id in each.requests]:
            known = self._items[item]
            known.requests.remove(request.request_id)
            if not known.requests and known.phase is not _Phase.LOADING:
                del self._items[item]
        places = self._wanted.pop(request.request_id, {})
        is_aborted = request.status is RequestStatus.FINISHED_ABORTED
        told = {item: self._offer(item, place, is_aborted=is_aborted) for item, place in places.items()}
        return {item: params for item, params in told.items() if params is not None} or None

    def _poll(self) -> None:
        sent, received = self._half.get_finished()
        self._half.get_block_ids_with_load_errors()
        errors = self._half.take_load_errors()
        for name in sent:
            self._free.extend(self._held.pop(name, ()))
        for name in received:
            item = self._loads.pop(name)
            known = self._items[item]
            if (why := errors.get(name)) is not None:
                known.phase = _Phase.FAILED
                self._failed(known, item, why)
            else:
                known.phase = _Phase.HERE
                # A copy, because the blocks are free from now on, and the worker gets the rows in a later
                # step.
                known.rows = self._pool.read(known.blocks, known.num_rows)
                self.num_loaded += 1
            self._free.extend(known.blocks)
            if not known.requests:
                del self._items[item]

    def _allocate(self, num_rows: int) -> tuple[int, ...] | None:
        num = -(-num_rows // _BLOCK_ROWS)
        if num > len(self._free):
            self._poll()
        if num > len(self._free):
            return None
        blocks, self._free = self._free[:num], self._free[num:]
        return tuple(blocks)

    def _new_name(self, item: str) -> str:
        self._num_named += 1
        return f"{item}-{self._num_named}"

    def _submit(self, orders: RequestOrders, *, is_computed: bool = False) -> None:
        self._half.submit(HandoffMetadata((orders,)), is_computed=is_computed)

    def end_all(self, why: str) -> None:
        """End every handoff, and agree with no peer from now on."""
        # No other node has this number, so no peer takes these weights for its own.
        self._half.begin_anew(f"not known: {secrets.token_hex(8)}", why)

    def shutdown(self) -> None:
        self._half.shutdown()
        self._pool.close()


def _refuse_unsupported(vllm_config: Any) -> None:
    role, lora = vllm_config.ec_transfer_config.ec_role, getattr(vllm_config, "lora_config", None)
    for key, is_set, why in (
        (
            "ec_role=ec_both",
            role == "ec_both",
            "a node either encodes or answers: set ec_producer or ec_consumer",
        ),
        (
            "enable_tower_connector_lora",
            getattr(lora, "enable_tower_connector_lora", False),
            "vLLM tells an encoder's adapters apart by name only",
        ),
        (
            "enable_sleep_mode",
            getattr(vllm_config.model_config, "enable_sleep_mode", False),
            "the weights may be others when the node wakes",
        ),
    ):
        if is_set:
            raise ConfigurationError(f"{key} does not work with this connector: {why}", key=key, value=True)


def _served_pool(vllm_config: Any) -> tuple[HandoffWorker, ItemPool]:
    """Return a pool of items, and what serves it."""
    model, transfer = vllm_config.model_config, vllm_config.ec_transfer_config
    extra = dict(transfer.ec_connector_extra_config)
    pool_mb = PoolOptions(**{key: extra.pop(key) for key in ("pool_mb",) if key in extra}).pool_mb
    options = connector_options(extra)
    width = model.get_inputs_embeds_size()
    spec = FullAttentionSpec(_BLOCK_ROWS, 1, width, model.dtype, use_mla=True)
    num_blocks = (pool_mb << 20) // spec.page_size_bytes
    if num_blocks < 2:
        raise ConfigurationError(
            f"pool_mb={pool_mb} is too small for {_BLOCK_ROWS} rows of {width} elements: increase it",
            key="pool_mb",
            value=pool_mb,
        )
    dtype = str(model.dtype).removeprefix("torch.")
    half = HandoffWorker(
        EngineConfig(
            ModelConfig(
                model.hf_config.model_type,
                dtype,
                model.max_model_len,
                num_kv_heads=1,
                identity=model_identity(vllm_config, by_name=options.weights_by_name),
            ),
            CacheConfig(block_size=_BLOCK_ROWS),
            kv_transfer=KVTransferConfig(
                KvferryEncoderConnector.__name__, _ROLES[transfer.ec_role], transfer.engine_id
            ),
        ),
        KVCacheConfig(num_blocks, (), (KVCacheGroupSpec(("encoder",), spec),)),
        create_transport(options.transport, options.transport_options),
        options,
    )
    pool = ItemPool("", num_blocks, width, dtype)
    half.register_kv_caches(
        {"encoder": pool.blocks}, {"host": "encoder of vLLM", "host_version": vllm_version}
    )
    logger.info("kvferry serves encoder outputs at %s", half.get_handshake_metadata().address)
    return half, pool


def _content(item: str, num_rows: int) -> str:
    """Hash what an item's rows were computed from.

    `item` is vLLM's digest of the item, or the id that a client gave it.
    """
    return hashlib.sha256(msgpack.packb([_FORM, item, num_rows])).hexdigest()
