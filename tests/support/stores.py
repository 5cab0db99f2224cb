"""Three small stores, one of each kind, on which tests of the conformance suite plant bugs.

`WholePrompts` loads and saves synchronously. `AsyncBlocks` loads and saves in a thread, and reports both in a later step.
`Layers` saves through `save_kv_layer` and loads layer by layer. Each keeps whole blocks in a folder, in one file per block
and layer. A block's key contains everything that its bytes depend on, the blocks before it included.
"""

from __future__ import annotations

import hashlib
import queue
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import torch

from kvferry.connector import (
    ConnectorRequest,
    KVConnectorBase,
    KVConnectorMetadata,
    SchedulerHalf,
    SchedulerOutput,
    WorkerHalf,
)
from kvferry.transports.errors import ConfigurationError

Tables = Sequence[Sequence[int]]
#: The key of a block's contents, and the block.
Item = tuple[str, int]


class Shelf:
    """Pages in a folder, with a checksum, so that a damaged one is noticed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def _file(self, key: str, layer: str) -> Path:
        return self.folder / f"{key}.{layer}"

    def has(self, key: str, layers: Iterable[str]) -> bool:
        return all(self._file(key, layer).exists() for layer in layers)

    def put(self, key: str, layer: str, page: torch.Tensor) -> None:
        data = page.contiguous().view(torch.uint8).numpy().tobytes()
        unfinished = self._file(key, f"{layer}.{threading.get_ident()}.unfinished")
        unfinished.write_bytes(hashlib.sha256(data).digest() + data)
        unfinished.rename(self._file(key, layer))

    def get(self, key: str, layer: str, like: torch.Tensor) -> torch.Tensor:
        """Raises OSError or ValueError if the page is gone or damaged."""
        data = self._file(key, layer).read_bytes()
        if not self.is_whole(data):
            raise ValueError(f"the page {key} of {layer} is damaged")
        return torch.from_numpy(np.frombuffer(data[32:], np.uint8).copy()).view(like.dtype).view(like.shape)

    def is_whole(self, data: bytes) -> bool:
        return hashlib.sha256(data[32:]).digest() == data[:32]


@dataclass
class Orders(KVConnectorMetadata):
    """One step's work, by request."""

    loads: dict[str, list[Item]] = field(default_factory=dict)
    saves: dict[str, list[Item]] = field(default_factory=dict)


class StoreScheduler(SchedulerHalf):
    """Keys, and orders for the next step. A subclass decides what is saved when."""

    is_async: ClassVar[bool] = False

    def __init__(self, connector: Store) -> None:
        self.shelf = connector.shelf
        self.layers = connector.layers
        spec = connector.kv_cache_config.kv_cache_groups[0].kv_cache_spec
        self.block_size = spec.block_size
        self.model = repr((connector.config.model, spec, self.layers))
        self.orders = Orders()

    # -- keys

    def separates(self, request: ConnectorRequest) -> tuple[Any, ...]:
        """What must be equal, besides the tokens, for two requests to share a cache."""
        items = [(item.identifier, item.offset, item.length) for item in request.mm_features]
        embeds = None if request.prompt_embeds is None else request.prompt_embeds.tolist()
        return request.lora_id, request.cache_salt, items, embeds

    def keys(self, request: ConnectorRequest) -> list[str]:
        """One key per whole block of the prompt."""
        digest, keys = repr((self.model, self.separates(request))).encode(), []
        for index in range(request.num_prompt_tokens // self.block_size):
            tokens = request.prompt_token_ids[index * self.block_size : (index + 1) * self.block_size]
            digest = hashlib.sha256(self.chained(digest, list(tokens))).digest()
            keys.append(digest.hex()[:32])
        return keys

    def chained(self, before: bytes, tokens: list[int]) -> bytes:
        return before + repr(tokens).encode()

    # -- loads

    def num_loadable_blocks(self, request: ConnectorRequest) -> int:
        return request.num_prompt_tokens // self.block_size

    def get_num_new_matched_tokens(
        self, request: ConnectorRequest, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        keys = self.keys(request)[: self.num_loadable_blocks(request)]
        num_blocks = self.num_found(keys)
        return max(0, num_blocks * self.block_size - num_computed_tokens), self.is_async

    def num_found(self, keys: list[str]) -> int:
        """How many blocks from the first on are in the store."""
        has = [self.shelf.has(key, self.layers) for key in keys]
        return (*has, False).index(False)

    def update_state_after_alloc(
        self, request: ConnectorRequest, block_ids: Tables, num_external_tokens: int
    ) -> None:
        if num_external_tokens:
            items = list(zip(self.keys(request), block_ids[0], strict=False))
            last = self.num_found([key for key, _ in items[: self.num_loadable_blocks(request)]])
            first = last - num_external_tokens // self.block_size
            self.orders.loads[request.request_id] = items[first:last]

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Orders:
        orders, self.orders = self.orders, Orders()
        return orders

    # -- saves

    def saves(self, request: ConnectorRequest, block_ids: Tables) -> list[Item]:
        """The computed whole blocks that the store lacks."""
        num_blocks = request.num_computed_tokens // self.block_size
        items = list(zip(self.keys(request), block_ids[0][:num_blocks], strict=False))
        return [item for item in items if not self.shelf.has(item[0], self.layers)]

    def request_finished(
        self, request: ConnectorRequest, block_ids: Tables
    ) -> tuple[bool, dict[str, Any] | None]:
        items = self.saves(request, block_ids)
        if items:
            self.orders.saves[request.request_id] = items
        return bool(items), None


class StoreWorker(WorkerHalf):
    """Copies pages between the shelf and the caches."""

    def __init__(self, connector: Store) -> None:
        self.shelf = connector.shelf
        self.caches: dict[str, torch.Tensor] = {}
        self.sent: set[str] = set()
        self.received: set[str] = set()
        self.failed: set[int] = set()

    @property
    def orders(self) -> Orders:
        return cast(Orders, self.connector_metadata)

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        self.caches = dict(kv_caches)

    def load(self, items: Iterable[Item], layers: Iterable[str]) -> set[int]:
        """Return the blocks that failed."""
        failed = set()
        for layer in layers:
            for key, block in items:
                try:
                    self.caches[layer][block] = self.shelf.get(key, layer, self.caches[layer][block])
                except (OSError, ValueError):
                    failed.add(block)
        return failed

    def save(self, items: Iterable[Item]) -> None:
        for key, block in items:
            for layer, cache in self.caches.items():
                self.shelf.put(key, layer, cache[block])

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        sent, self.sent = self.sent, set()
        received, self.received = self.received, set()
        return sent, received

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self.failed = self.failed, set()
        return failed


class Store(KVConnectorBase):
    """A connector with the option `folder`. A subclass names the classes of its halves."""

    scheduler_class: ClassVar[type[StoreScheduler]] = StoreScheduler
    worker_class: ClassVar[type[StoreWorker]]

    def make_scheduler_half(self) -> StoreScheduler:
        self.open()
        return self.scheduler_class(self)

    def make_worker_half(self) -> StoreWorker:
        self.open()
        return self.worker_class(self)

    def open(self) -> None:
        options = self.kv_transfer_config.kv_connector_extra_config
        if set(options) != {"folder"}:
            raise ConfigurationError(f"the only option is folder, not {dict(options)}", key="folder")
        self.shelf = Shelf(Path(str(options["folder"])))
        self.layers = tuple(self.kv_cache_config.kv_cache_groups[0].layer_names)


# == loads and saves within a step =================================================================


class WholePromptsScheduler(StoreScheduler):
    def num_loadable_blocks(self, request: ConnectorRequest) -> int:
        return (request.num_prompt_tokens - 1) // self.block_size  # the last token gives the logits


class WholePromptsWorker(StoreWorker):
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for items in self.orders.loads.values():
            self.failed |= self.load(items, self.caches)
        for request_id, items in self.orders.saves.items():
            self.save(items)
            self.sent.add(request_id)


class WholePrompts(Store):
    scheduler_class = WholePromptsScheduler
    worker_class = WholePromptsWorker


# == loads and saves in a thread ===================================================================


class AsyncBlocksScheduler(StoreScheduler):
    is_async = True


class AsyncBlocksWorker(StoreWorker):
    def __init__(self, connector: Store) -> None:
        super().__init__(connector)
        self.jobs: queue.SimpleQueue[tuple[str, str, list[Item]] | None] = queue.SimpleQueue()
        self.lock = threading.Lock()
        self.failed_now: set[int] = set()
        self.thread: threading.Thread | None = None

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for request_id, items in self.orders.loads.items():
            self.jobs.put(("load", request_id, items))
        for request_id, items in self.orders.saves.items():
            self.jobs.put(("save", request_id, items))

    def run(self) -> None:
        while (job := self.jobs.get()) is not None:
            kind, request_id, items = job
            if kind == "load":
                self.run_load(request_id, items)
            else:
                self.run_save(request_id, items)

    def run_load(self, request_id: str, items: list[Item]) -> None:
        failed = self.load(items, self.caches)
        with self.lock:
            self.received.add(request_id)
            self.failed |= failed

    def run_save(self, request_id: str, items: list[Item]) -> None:
        self.save(items)
        with self.lock:
            self.sent.add(request_id)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        with self.lock:
            self.failed_now, self.failed = self.failed, set()
            return super().get_finished(finished_req_ids)

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self.failed_now = self.failed_now, set()
        return failed

    def shutdown(self) -> None:
        thread, self.thread = self.thread, None
        if thread is not None:
            self.jobs.put(None)
            thread.join()


class AsyncBlocks(Store):
    scheduler_class = AsyncBlocksScheduler
    worker_class = AsyncBlocksWorker


# == layer by layer ================================================================================


class LayersScheduler(WholePromptsScheduler):
    """Saves each block in the step that completes it, so that nothing is left to do when a request ends."""

    def __init__(self, connector: Store) -> None:
        super().__init__(connector)
        self.prompt_keys: dict[str, list[str]] = {}

    def on_new_request(self, request: ConnectorRequest) -> None:
        self.prompt_keys[request.request_id] = self.keys(request)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Orders:
        orders = super().build_connector_meta(scheduler_output)
        for item in scheduler_output.scheduled_requests:
            first = item.num_computed_tokens // self.block_size
            last = (item.num_computed_tokens + item.num_scheduled_tokens) // self.block_size
            items = list(zip(self.prompt_keys[item.request_id], item.block_ids[0], strict=False))
            orders.saves[item.request_id] = items[first:last]
        return orders

    def request_finished(self, request: ConnectorRequest, block_ids: Tables) -> tuple[bool, None]:
        del self.prompt_keys[request.request_id]
        return False, None


class LayersWorker(StoreWorker):
    def __init__(self, connector: Store) -> None:
        super().__init__(connector)
        self.threads: ThreadPoolExecutor | None = None
        self.loads: dict[str, list[Future[set[int]]]] = {}
        self.stores: list[Future[None]] = []

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self.threads = self.threads or ThreadPoolExecutor(2)
        self.loads = {
            layer: [self.threads.submit(self.load, items, [layer]) for items in self.orders.loads.values()]
            for layer in self.caches
        }

    def wait_for_layer_load(self, layer_name: str) -> None:
        for load in self.loads.pop(layer_name, ()):
            self.failed |= load.result()

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        assert self.threads is not None
        for items in self.orders.saves.values():
            for key, block in items:
                self.stores.append(self.threads.submit(self.shelf.put, key, layer_name, kv_layer[block]))

    def wait_for_save(self) -> None:
        while self.stores:
            self.stores.pop().result()

    def shutdown(self) -> None:
        if self.threads is not None:
            self.threads.shutdown()


class Layers(Store):
    scheduler_class = LayersScheduler
    worker_class = LayersWorker
