"""The stores of `stores`, each with exactly one thing broken. `tests/connector/test_kit.py` says which promise that breaks."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from kvferry.connector import ConnectorRequest, SchedulerOutput

from .stores import (
    AsyncBlocks,
    AsyncBlocksScheduler,
    AsyncBlocksWorker,
    Item,
    Layers,
    LayersScheduler,
    LayersWorker,
    Orders,
    Shelf,
    Store,
    StoreScheduler,
    StoreWorker,
    Tables,
    WholePrompts,
    WholePromptsScheduler,
    WholePromptsWorker,
)

# == a store that works within a step ==============================================================


class ReportsASaveTwice(WholePromptsWorker):
    before: frozenset[str] = frozenset()

    def get_finished(self, finished_req_ids: set[str]) -> Any:
        sent, _ = super().get_finished(finished_req_ids)
        again, self.before = self.before, frozenset(sent or ())
        return (sent or set()) | again, None


class ReportsASaveOfNothing(WholePromptsWorker):
    def get_finished(self, finished_req_ids: set[str]) -> Any:
        sent, _ = super().get_finished(finished_req_ids)
        return (sent or set()) | finished_req_ids, None


class DoesNotReportAFailedLoad(WholePromptsWorker):
    def get_block_ids_with_load_errors(self) -> set[int]:
        return set()


class ReportsAFailedLoadTooLate(WholePromptsWorker):
    late: frozenset[int] = frozenset()

    def get_block_ids_with_load_errors(self) -> set[int]:
        late, self.late = self.late, frozenset(super().get_block_ids_with_load_errors())
        return set(late)


class NamesOtherBlocksAsFailed(WholePromptsWorker):
    def get_block_ids_with_load_errors(self) -> set[int]:
        return {block - 1 for block in super().get_block_ids_with_load_errors()}


class FreesBeforeItCopied(WholePromptsScheduler):
    def request_finished(self, request: ConnectorRequest, block_ids: Tables) -> tuple[bool, None]:
        super().request_finished(request, block_ids)
        return False, None


class FreesBeforeItCopiedWorker(WholePromptsWorker):
    def get_finished(self, finished_req_ids: set[str]) -> Any:
        return None, None


class LoadsTheLastToken(WholePromptsScheduler):
    def num_loadable_blocks(self, request: ConnectorRequest) -> int:
        return request.num_prompt_tokens // self.block_size


class LoadsABlockTooFew(WholePromptsScheduler):
    def num_loadable_blocks(self, request: ConnectorRequest) -> int:
        return max(0, (request.num_prompt_tokens - 2) // self.block_size)


class CountsTokensThatItLacks(WholePromptsScheduler):
    """Counts the prompt's last block, of which a part was computed, as loaded."""

    def get_num_new_matched_tokens(self, request: ConnectorRequest, num_computed_tokens: int) -> Any:
        num_tokens, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        whole = self.num_loadable_blocks(request) * self.block_size - num_computed_tokens
        if num_tokens and num_tokens == whole:
            return request.num_prompt_tokens - 1 - num_computed_tokens, is_async
        return num_tokens, is_async

    def update_state_after_alloc(
        self, request: ConnectorRequest, block_ids: Tables, num_external_tokens: int
    ) -> None:
        whole = num_external_tokens // self.block_size * self.block_size
        super().update_state_after_alloc(request, block_ids, whole)


class LoadsMoreThanThePrompt(WholePromptsScheduler):
    def get_num_new_matched_tokens(self, request: ConnectorRequest, num_computed_tokens: int) -> Any:
        num_tokens, is_async = super().get_num_new_matched_tokens(request, 0)
        return num_tokens, is_async


class LoadsFromTheFirstBlock(WholePromptsScheduler):
    """Forgets that the first blocks are here already: the contents of the first block go into the first missing one."""

    def update_state_after_alloc(
        self, request: ConnectorRequest, block_ids: Tables, num_external_tokens: int
    ) -> None:
        super().update_state_after_alloc(request, block_ids, num_external_tokens)
        for request_id, items in self.orders.loads.items():
            keys = self.keys(request)[: len(items)]
            self.orders.loads[request_id] = [
                (key, block) for key, (_, block) in zip(keys, items, strict=True)
            ]


class WritesWhatIsHere(WholePromptsScheduler):
    def update_state_after_alloc(
        self, request: ConnectorRequest, block_ids: Tables, num_external_tokens: int
    ) -> None:
        super().update_state_after_alloc(request, block_ids, num_external_tokens)
        for items in self.orders.loads.values():
            items[0] = (items[0][0], block_ids[0][0])


class IgnoresTheSalt(WholePromptsScheduler):
    def separates(self, request: ConnectorRequest) -> Any:
        lora, _, items, embeds = super().separates(request)
        return lora, items, embeds


class IgnoresTheAdapter(WholePromptsScheduler):
    def separates(self, request: ConnectorRequest) -> Any:
        return super().separates(request)[1:]


class IgnoresItems(WholePromptsScheduler):
    def separates(self, request: ConnectorRequest) -> Any:
        lora, salt, _, embeds = super().separates(request)
        return lora, salt, embeds


class IgnoresWhereItemsAre(WholePromptsScheduler):
    def separates(self, request: ConnectorRequest) -> Any:
        lora, salt, items, embeds = super().separates(request)
        return lora, salt, [identifier for identifier, _, _ in items], embeds


class IgnoresVectors(WholePromptsScheduler):
    def separates(self, request: ConnectorRequest) -> Any:
        return super().separates(request)[:3]


class IgnoresTheModel(WholePromptsScheduler):
    def __init__(self, connector: Store) -> None:
        super().__init__(connector)
        self.model = repr(connector.kv_cache_config.kv_cache_groups)


class IgnoresEarlierBlocks(WholePromptsScheduler):
    def chained(self, before: bytes, tokens: list[int]) -> bytes:
        return repr((self.model, tokens)).encode()


class IgnoresTheOrderOfTokens(WholePromptsScheduler):
    def keys(self, request: ConnectorRequest) -> list[str]:
        tokens = sorted(request.prompt_token_ids)
        plain = SimpleNamespace(
            prompt_token_ids=tokens,
            num_prompt_tokens=len(tokens),
            lora_id=None,
            cache_salt=None,
            mm_features=(),
            prompt_embeds=None,
        )
        return super().keys(plain)


class HandsOutOnce(WholePromptsScheduler):
    """Asking has a side effect: the second answer is that there is nothing."""

    def __init__(self, connector: Store) -> None:
        super().__init__(connector)
        self.asked: set[str] = set()

    def get_num_new_matched_tokens(self, request: ConnectorRequest, num_computed_tokens: int) -> Any:
        num_tokens, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if num_tokens and request.request_id in self.asked:
            return 0, False
        if num_tokens:
            self.asked.add(request.request_id)
        return num_tokens, is_async


class LosesOrdersWithoutALoad(WholePromptsScheduler):
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Orders:
        orders = super().build_connector_meta(scheduler_output)
        return orders if orders.loads else Orders()


class LosesSavesBesideALoad(WholePromptsScheduler):
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Orders:
        orders = super().build_connector_meta(scheduler_output)
        return Orders(orders.loads) if orders.loads else orders


class ChangesItsOrdersLater(WholePromptsScheduler):
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Orders:
        return self.orders

    def update_connector_output(self, connector_output: Any) -> None:
        self.orders.loads.clear()
        self.orders.saves.clear()


class ChangesTheStep(WholePromptsScheduler):
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Orders:
        scheduler_output.finished_req_ids.clear()
        return super().build_connector_meta(scheduler_output)


@dataclass
class OrdersWithALock(Orders):
    lock: Any = field(default_factory=threading.Lock)


class SendsALock(WholePromptsScheduler):
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Orders:
        orders = super().build_connector_meta(scheduler_output)
        return OrdersWithALock(orders.loads, orders.saves)


class MixesUpRequests(WholePromptsWorker):
    """Gives each request of a step the contents of another."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        loads = self.orders.loads
        keys = [[key for key, _ in items] for items in loads.values()][::-1]
        for (request_id, items), other in zip(list(loads.items()), keys, strict=True):
            loads[request_id] = [(key, block) for key, (_, block) in zip(other, items, strict=False)]
        super().start_load_kv(forward_context, **kwargs)


class KeepsBlocksOfAbortedPrompts(WholePromptsScheduler):
    def request_finished(self, request: ConnectorRequest, block_ids: Tables) -> Any:
        is_aborted = request.finish_reason in {"abort", "error"}
        delay_free, params = super().request_finished(request, block_ids)
        if is_aborted:
            self.orders.saves.pop(request.request_id, None)
        return delay_free or (is_aborted and bool(block_ids[0])), params


class SavesWhatWasNotComputed(WholePromptsScheduler):
    def saves(self, request: ConnectorRequest, block_ids: Tables) -> list[Item]:
        items = list(zip(self.keys(request), block_ids[0], strict=False))
        return [item for item in items if not self.shelf.has(item[0], self.layers)]


class KnowsNoChecksum(Shelf):
    def is_whole(self, data: bytes) -> bool:
        return True


class ServesDamagedPages(WholePromptsWorker):
    def __init__(self, connector: Store) -> None:
        super().__init__(connector)
        self.shelf = KnowsNoChecksum(connector.shelf.folder)


class PadsShortPages(WholePromptsWorker):
    """Takes what is left of a page that was cut short."""

    def load(self, items: Iterable[Item], layers: Iterable[str]) -> set[int]:
        for layer in layers:
            for key, block in items:
                page = self.caches[layer][block].flatten().view(torch.uint8)
                data = (self.shelf.folder / f"{key}.{layer}").read_bytes()[32:]
                page[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return set()


class OverwritesTheNextBlock(WholePromptsWorker):
    def load(self, items: Iterable[Item], layers: Iterable[str]) -> set[int]:
        items = list(items)
        for cache in self.caches.values():
            cache[min(block for _, block in items) - 1] = 1.0
        return super().load(items, layers)


class UsesTheNullBlock(WholePromptsWorker):
    def load(self, items: Iterable[Item], layers: Iterable[str]) -> set[int]:
        for cache in self.caches.values():
            cache[0] = 1.0
        return super().load(items, layers)


class ShutsDownOnce(WholePromptsWorker):
    def shutdown(self) -> None:
        del self.shelf


class IgnoresUnknownOptions(WholePrompts):
    def open(self) -> None:
        options = self.kv_transfer_config.kv_connector_extra_config
        self.shelf = Shelf(Path(str(options["folder"])))
        self.layers = tuple(self.kv_cache_config.kv_cache_groups[0].layer_names)


class ReturnsParamsThatAreNoJson(WholePromptsScheduler):
    def request_finished(self, request: ConnectorRequest, block_ids: Tables) -> Any:
        delay_free, _ = super().request_finished(request, block_ids)
        return delay_free, {"file": self.shelf.folder}


class CannotJudgeParams(WholePromptsScheduler):
    def recognizes_params(self, kv_transfer_params: Any) -> Any:
        return kv_transfer_params.get("folder")


class LeaksADescriptor(WholePromptsWorker):
    opened: ClassVar[list[Any]] = []

    def register_kv_caches(self, kv_caches: Any) -> None:
        super().register_kv_caches(kv_caches)
        self.opened.append(open("/dev/null"))  # noqa: SIM115 - the bug

    @classmethod
    def end(cls) -> None:
        while cls.opened:
            cls.opened.pop().close()


class FreesBeforeItCopiedConnector(WholePrompts):
    scheduler_class = FreesBeforeItCopied
    worker_class = FreesBeforeItCopiedWorker


# == a store with a thread =========================================================================


class ReportsALoadTwice(AsyncBlocksWorker):
    before: frozenset[str] = frozenset()

    def get_finished(self, finished_req_ids: set[str]) -> Any:
        sent, received = super().get_finished(finished_req_ids)
        again, self.before = self.before, frozenset(received or ())
        return sent, (received or set()) | again


class ReportsBeforeTheBytes(AsyncBlocksWorker):
    """Names a load as finished when it begins; the thread writes after that."""

    def __init__(self, connector: Store) -> None:
        super().__init__(connector)
        self.is_reported = threading.Event()

    def run_load(self, request_id: str, items: list[Item]) -> None:
        with self.lock:
            self.received.add(request_id)
        self.is_reported.wait(5.0)
        self.load(items, self.caches)

    def shutdown(self) -> None:
        self.is_reported.set()
        super().shutdown()


@dataclass
class OrdersWithAborts(Orders):
    aborts: set[str] = field(default_factory=set)


class SaysWhatIsAborted(AsyncBlocksScheduler):
    def __init__(self, connector: Store) -> None:
        super().__init__(connector)
        self.loading: set[str] = set()
        self.aborts: set[str] = set()

    def update_state_after_alloc(
        self, request: ConnectorRequest, block_ids: Tables, num_external_tokens: int
    ) -> None:
        super().update_state_after_alloc(request, block_ids, num_external_tokens)
        (self.loading.add if num_external_tokens else self.loading.discard)(request.request_id)

    def request_finished(self, request: ConnectorRequest, block_ids: Tables) -> Any:
        if request.finish_reason == "abort" and request.request_id in self.loading:
            self.aborts.add(request.request_id)
        return super().request_finished(request, block_ids)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Orders:
        orders, aborts = super().build_connector_meta(scheduler_output), self.aborts
        self.aborts = set()
        return OrdersWithAborts(orders.loads, orders.saves, aborts)


class HeldBackWorker(AsyncBlocksWorker):
    """Carries out one load only after its request was aborted."""

    #: The request that the suite aborts a step after its load was ordered.
    held_back: ClassVar[str] = "d1"

    def __init__(self, connector: Store) -> None:
        super().__init__(connector)
        self.may_load = threading.Event()

    def note_aborts(self, aborts: set[str]) -> None: ...

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        super().start_load_kv(forward_context, **kwargs)
        self.note_aborts(getattr(self.orders, "aborts", set()))

    def run_load(self, request_id: str, items: list[Item]) -> None:
        if request_id == self.held_back:
            self.may_load.wait()
        super().run_load(request_id, items)

    def shutdown(self) -> None:
        self.may_load.set()
        super().shutdown()


class WritesAfterAnAbort(HeldBackWorker):
    """Reports an aborted load at once, although the thread goes on."""

    is_reported = False

    def note_aborts(self, aborts: set[str]) -> None:
        if self.is_reported:
            self.may_load.set()
        with self.lock:
            self.received |= aborts & {self.held_back}

    def get_finished(self, finished_req_ids: set[str]) -> Any:
        sent, received = super().get_finished(finished_req_ids)
        self.is_reported = self.is_reported or self.held_back in (received or ())
        return sent, received

    def run_load(self, request_id: str, items: list[Item]) -> None:
        if request_id != self.held_back:
            super().run_load(request_id, items)
            return
        self.may_load.wait()
        self.load(items, self.caches)


class WritesAfterAnAbortConnector(AsyncBlocks):
    scheduler_class = SaysWhatIsAborted
    worker_class = WritesAfterAnAbort


class ForgetsAbortedLoads(HeldBackWorker):
    def note_aborts(self, aborts: set[str]) -> None:
        if aborts:
            self.may_load.set()

    def run_load(self, request_id: str, items: list[Item]) -> None:
        super().run_load(request_id, items)
        if request_id == self.held_back:
            with self.lock:
                self.received.discard(request_id)


class ForgetsAbortedLoadsConnector(AsyncBlocks):
    scheduler_class = SaysWhatIsAborted
    worker_class = ForgetsAbortedLoads


class ForgetsFailedLoads(AsyncBlocksWorker):
    def run_load(self, request_id: str, items: list[Item]) -> None:
        super().run_load(request_id, items)
        with self.lock:
            if self.failed:
                self.received.discard(request_id)


class DiesOfADamagedPage(AsyncBlocksWorker):
    """The thread ends at the first page that it cannot read, and nothing is reported any more."""

    def load(self, items: Iterable[Item], layers: Iterable[str]) -> set[int]:
        if failed := super().load(items, layers):
            raise OSError(f"the contents of blocks {sorted(failed)} cannot be read")
        return set()

    def run(self) -> None:
        try:
            super().run()
        except OSError:
            return


class LeaksAThread(AsyncBlocksWorker):
    leaked: ClassVar[list[tuple[threading.Thread, queue.SimpleQueue[Any]]]] = []

    def shutdown(self) -> None:
        if self.thread is not None:
            self.leaked.append((self.thread, self.jobs))
        self.thread = None

    @classmethod
    def end(cls) -> None:
        while cls.leaked:
            thread, jobs = cls.leaked.pop()
            jobs.put(None)
            thread.join()


class SavesAfterTheReport(AsyncBlocksWorker):
    """Names a prompt as saved at once; the thread copies it when the engine may have reused the blocks."""

    def __init__(self, connector: Store) -> None:
        super().__init__(connector)
        self.is_reported = threading.Event()

    def run_save(self, request_id: str, items: list[Item]) -> None:
        self.is_reported.wait(5.0)
        self.save(items)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self.__dict__.pop("has_reported", False):
            self.is_reported.set()
        super().start_load_kv(forward_context, **kwargs)
        self.sent |= self.orders.saves.keys()

    def get_finished(self, finished_req_ids: set[str]) -> Any:
        sent, received = super().get_finished(finished_req_ids)
        if sent:
            self.has_reported = True
        return sent, received

    def shutdown(self) -> None:
        self.is_reported.set()
        super().shutdown()


class NeverReportsASave(AsyncBlocksWorker):
    def run_save(self, request_id: str, items: list[Item]) -> None:
        self.save(items)


class LoadsAllButTheLastBlock(AsyncBlocksWorker):
    def load(self, items: Iterable[Item], layers: Iterable[str]) -> set[int]:
        return super().load(list(items)[:-1], layers)


class NeverSaysHowMuch(AsyncBlocksScheduler):
    def get_num_new_matched_tokens(self, request: ConnectorRequest, num_computed_tokens: int) -> Any:
        return None, False


class WritesAfterShutdown(AsyncBlocksWorker):
    def shutdown(self) -> None:
        super().shutdown()
        for cache in self.caches.values():
            cache[:] = 0


class ClearsThePool(AsyncBlocksWorker):
    """Zeroes the blocks that it is to load before it loads them, and all others with them."""

    def run_load(self, request_id: str, items: list[Item]) -> None:
        for cache in self.caches.values():
            cache[:] = 0
        super().run_load(request_id, items)


# == a store that works layer by layer =============================================================


class DoesNotWaitForALayer(LayersWorker):
    """The layers arrive by the end of the step."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self.late = list(self.orders.loads.values())

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        self.threads = self.threads or ThreadPoolExecutor(1)
        super().save_kv_layer(*args, **kwargs)

    def wait_for_save(self) -> None:
        for items in self.late:
            self.failed |= self.load(items, self.caches)
        super().wait_for_save()


class WaitsForAnotherLayer(LayersWorker):
    """Loads only the layers before the one that is waited for."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        super().start_load_kv(forward_context, **kwargs)
        for loads in self.loads.values():
            for load in loads:
                load.result()
        for items in self.orders.loads.values():
            for _, block in items:
                self.caches[list(self.caches)[-1]][block] = 1.0
        self.again = list(self.orders.loads.values())

    def wait_for_save(self) -> None:
        for items in self.again:
            self.load(items, self.caches)
        super().wait_for_save()


class DoesNotWaitForASave(LayersWorker):
    """Copies when the engine may have reused the blocks."""

    late: tuple[Any, ...] = ()

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        self.late = (*self.late, (layer_name, kv_layer, list(self.orders.saves.values())))

    def wait_for_save(self) -> None: ...

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        late, self.late = self.late, ()
        for layer_name, kv_layer, saves in late:
            for items in saves:
                for key, block in items:
                    self.shelf.put(key, layer_name, kv_layer[block])
        super().start_load_kv(forward_context, **kwargs)


class SavesBeforeTheLayerIsComputed(LayersWorker):
    def wait_for_layer_load(self, layer_name: str) -> None:
        super().wait_for_layer_load(layer_name)
        super().save_kv_layer(layer_name, self.caches[layer_name], None)
        self.wait_for_save()

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None: ...


class SavesTheFirstLayerOnly(LayersWorker):
    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        super().save_kv_layer(layer_name, next(iter(self.caches.values())), attn_metadata)


class SavesAnotherRequestsTokens(LayersScheduler):
    """Takes the blocks of the step's first request for those of all."""

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Orders:
        orders = super().build_connector_meta(scheduler_output)
        for item in scheduler_output.scheduled_requests:
            first = item.num_computed_tokens // self.block_size
            table = scheduler_output.scheduled_requests[0].block_ids[0]
            keys = [key for key, _ in orders.saves[item.request_id]]
            orders.saves[item.request_id] = list(zip(keys, table[first:], strict=False))
        return orders


class SavesTheLastChunkOnly(LayersScheduler):
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Orders:
        orders = super().build_connector_meta(scheduler_output)
        for item in scheduler_output.scheduled_requests:
            whole = len(self.prompt_keys[item.request_id]) * self.block_size
            if item.num_computed_tokens + item.num_scheduled_tokens < whole:
                del orders.saves[item.request_id]
        return orders


class TakesTheTableForNewBlocks(LayersScheduler):
    """Takes a block table for the list of blocks that the step added."""

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Orders:
        orders = super().build_connector_meta(scheduler_output)
        for item in scheduler_output.scheduled_requests:
            keys = [key for key, _ in orders.saves[item.request_id]]
            orders.saves[item.request_id] = list(zip(keys, item.block_ids[0], strict=False))
        return orders


class IgnoresPreemptions(LayersScheduler):
    """Saves a prompt when its last chunk is computed, from the blocks that it noted at each chunk."""

    def __init__(self, connector: Store) -> None:
        super().__init__(connector)
        self.noted: dict[str, dict[str, int]] = {}

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Orders:
        orders = super().build_connector_meta(scheduler_output)
        for item in scheduler_output.scheduled_requests:
            noted = self.noted.setdefault(item.request_id, {})
            for key, block in orders.saves.pop(item.request_id):
                noted.setdefault(key, block)
            if len(noted) == len(self.prompt_keys[item.request_id]):
                orders.saves[item.request_id] = list(noted.items())
        return orders


def planted(base: type[Store], half: type[StoreScheduler | StoreWorker]) -> type[Store]:
    """Return the store with another half."""
    kind = "scheduler_class" if issubclass(half, StoreScheduler) else "worker_class"
    return type(half.__name__, (base,), {kind: half})


def __getattr__(name: str) -> type[Store]:
    """`BrokenBy` and the name of a half: the connector with that half, as a factory of connectors looks it up."""
    half = globals().get(name.removeprefix("BrokenBy"))
    if half is None or not name.startswith("BrokenBy"):
        raise AttributeError(name)
    if issubclass(half, (LayersScheduler, LayersWorker)):
        return planted(Layers, half)
    return planted(
        AsyncBlocks if issubclass(half, (AsyncBlocksScheduler, AsyncBlocksWorker)) else WholePrompts, half
    )
