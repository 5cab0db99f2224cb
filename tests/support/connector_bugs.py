"""Connectors with exactly one thing broken.

`Blocks` is the asynchronous store of `examples/`, `Layers` the one that loads and saves layer by layer, and
`Ranks` that one for nodes of several ranks. A bug is a class of its own scheduler half or worker half, or a
connector if it needs both. `tests/connector/test_kit.py` says which promise each breaks, which test of
`ConnectorConformance` notices it, and by what words.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar, cast

import block_store
import layer_store
import torch
from block_store import (
    BlockStoreConnector,
    BlockStoreScheduler,
    BlockStoreWorker,
    Copies,
)
from layer_store import LayerStoreConnector, LayerStoreScheduler, LayerStoreWorker

from kvferry.connector import KVCacheSpec, KVConnectorBase, SchedulerHalf, SchedulerOutput, WorkerHalf
from kvferry.connector.config import ParallelConfig
from kvferry.connector.identity.content import block_digests
from kvferry.connector.testing.loads import Item
from kvferry.connector.testing.shapes import Request

T = TypeVar("T")
Tables = Sequence[Sequence[int]]

# == the stores, with halves that can be replaced ==================================================


class BlocksScheduler(BlockStoreScheduler):
    """Announces no save to the client. So the suite waits until the save has ended."""

    def request_finished(self, request: Any, block_ids: Tables) -> Any:
        return super().request_finished(request, block_ids)[0], None


class Blocks(BlockStoreConnector):
    scheduler_class: ClassVar[type[BlockStoreScheduler]] = BlocksScheduler
    worker_class: ClassVar[type[BlockStoreWorker]] = BlockStoreWorker

    def make_scheduler_half(self) -> BlockStoreScheduler:
        return self.scheduler_class(self.folder, 1 << 10, self.config, self._spec())

    def make_worker_half(self) -> BlockStoreWorker:
        return self.worker_class(self.folder, 1 << 30, self.kv_cache_config)

    @property
    def folder(self) -> Path:
        return Path(str(self.kv_transfer_config.kv_connector_extra_config["folder"]))


class Layers(LayerStoreConnector):
    scheduler_class: ClassVar[type[LayerStoreScheduler]] = LayerStoreScheduler
    worker_class: ClassVar[type[LayerStoreWorker]] = LayerStoreWorker

    def make_scheduler_half(self) -> LayerStoreScheduler:
        folder, spec = self._settings()
        return self.scheduler_class(folder, self.config, spec)

    def make_worker_half(self) -> LayerStoreWorker:
        return self.worker_class(self._settings()[0], self.kv_cache_config)


def asked_otherwise(half: type[T], method: str, change: Callable[..., tuple[Any, ...]]) -> type[T]:
    """Return a half that calls a method of this one with other arguments."""
    whole = getattr(half, method)
    return type(half.__name__, (half,), {method: lambda self, *asked: whole(self, *change(*asked))})


def answers_otherwise(half: type[T], method: str, change: Callable[[Any], Any]) -> type[T]:
    """Return a half that changes the answer of a method of this one."""
    whole = getattr(half, method)
    return type(half.__name__, (half,), {method: lambda self, *asked: change(whole(self, *asked))})


def longer(request: Request, num_tokens: int) -> Request:
    """Return a copy of a request that claims this many additional tokens."""
    return replace(request, num_prompt_tokens=request.num_prompt_tokens + num_tokens)


# == which prompts share blocks ====================================================================


def hashes(change: Callable[[Any], Any]) -> type[LayerStoreScheduler]:
    """Names the blocks of each prompt after those of another one."""
    return asked_otherwise(LayerStoreScheduler, "on_new_request", lambda request: (change(request),))


IgnoresTheSalt = hashes(lambda request: replace(request, cache_salt=None))
IgnoresTheAdapter = hashes(lambda request: replace(request, lora_id=None))
IgnoresItems = hashes(lambda request: replace(request, mm_features=()))
IgnoresWhereItemsAre = hashes(
    lambda request: replace(
        request, mm_features=[Item(item.identifier, 0, item.length) for item in request.mm_features]
    )
)
IgnoresVectors = hashes(lambda request: replace(request, prompt_embeds=None))
IgnoresTheOrderOfTokens = hashes(lambda request: replace(request, token_ids=sorted(request.prompt_token_ids)))


def keeps_bits(num_bits: int) -> type[LayerStoreScheduler]:
    kept = (1 << num_bits) - 1
    return hashes(
        lambda request: replace(request, token_ids=[token & kept for token in request.prompt_token_ids])
    )


KeepsEightBitsOfATokenId = keeps_bits(8)
KeepsSixteenBitsOfATokenId = keeps_bits(16)
KeepsThirtyOneBitsOfATokenId = keeps_bits(31)


class IgnoresTheModel(LayerStoreScheduler):
    def __init__(self, folder: Path, config: Any, spec: KVCacheSpec) -> None:
        super().__init__(folder, replace(config, model=replace(config.model, model="any")), spec)


class IgnoresEarlierBlocks(LayerStoreScheduler):
    def on_new_request(self, request: Any) -> None:
        super().on_new_request(request)
        size, tokens = self._spec.block_size, request.prompt_token_ids
        alone = [
            replace(request, num_prompt_tokens=size, token_ids=tokens[start : start + size])
            for start in range(0, len(tokens) - size + 1, size)
        ]
        self._paths[request.request_id] = [
            self._folder / block_digests(block, self._config, self._spec)[0] for block in alone
        ]


# == how much is loaded, and where =================================================================


LoadsTheLastToken = asked_otherwise(
    LayerStoreScheduler,
    "get_num_new_matched_tokens",
    lambda request, num_computed: (longer(request, 1), num_computed),
)


LoadsABlockTooFew = asked_otherwise(
    LayerStoreScheduler,
    "get_num_new_matched_tokens",
    lambda request, num_computed: (longer(request, -1), num_computed),
)


class CountsTokensThatItLacks(LayerStoreScheduler):
    """Counts the prompt's last block, of which a part was computed, as loaded."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        num_tokens, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        size, last = self._spec.block_size, request.num_prompt_tokens - 1
        if num_tokens and num_computed_tokens + num_tokens == last // size * size:
            return last - num_computed_tokens, is_async
        return num_tokens, is_async


LoadsMoreThanThePrompt = asked_otherwise(
    LayerStoreScheduler, "get_num_new_matched_tokens", lambda request, num_computed: (request, 0)
)


class LoadsFromTheFirstBlock(LayerStoreScheduler):
    """Forgets that the first blocks are here already: the contents of the first block go into the first
    missing one.
    """

    def update_state_after_alloc(self, request: Any, block_ids: Tables, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, block_ids, num_external_tokens)
        if (copies := self._loads.get(request.request_id)) is not None:
            paths = self._paths[request.request_id][: len(copies)]
            self._loads[request.request_id] = [
                (path, block) for path, (_, block) in zip(paths, copies, strict=True)
            ]


class WritesWhatIsHere(LayerStoreScheduler):
    def update_state_after_alloc(self, request: Any, block_ids: Tables, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, block_ids, num_external_tokens)
        for copies in self._loads.values():
            copies[0] = (copies[0][0], block_ids[0][0])


class HandsOutOnce(LayerStoreScheduler):
    """Asking has a side effect: the second answer is that there is nothing."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.asked: set[str] = set()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        num_tokens, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if num_tokens and request.request_id in self.asked:
            return 0, False
        if num_tokens:
            self.asked.add(request.request_id)
        return num_tokens, is_async


NeverSaysHowMuch = answers_otherwise(
    BlocksScheduler, "get_num_new_matched_tokens", lambda found: (None, False)
)


class MixesUpRequests(LayerStoreWorker):
    """Gives each request of a step the contents of another."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        loads = cast(layer_store.Orders, self.connector_metadata).loads
        paths = [[path for path, _ in copies] for copies in loads.values()][::-1]
        for (request_id, copies), other in zip(list(loads.items()), paths, strict=True):
            loads[request_id] = [(path, block) for path, (_, block) in zip(other, copies, strict=False)]
        super().start_load_kv(forward_context, **kwargs)


class OverwritesTheNextBlock(LayerStoreWorker):
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        super().start_load_kv(forward_context, **kwargs)
        for load in self._loads:
            for cache in self._caches.values():
                cache[min(load.blocks) - 1] = 1.0


class UsesTheNullBlock(LayerStoreWorker):
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        super().start_load_kv(forward_context, **kwargs)
        for cache in self._caches.values():
            cache[0] = 1.0


LoadsAllButTheLastBlock = asked_otherwise(BlockStoreWorker, "_load", lambda copies: (copies[:-1],))


class ClearsThePool(BlockStoreWorker):
    """Zeroes the blocks that it is to load before it loads them, and all others with them."""

    def _load(self, copies: Copies) -> None:
        for cache in self._caches:
            cache[:] = 0
        super()._load(copies)


# == orders ========================================================================================


LosesOrdersWithoutALoad = answers_otherwise(
    BlocksScheduler, "build_connector_meta", lambda orders: orders if orders.loads else block_store.Orders()
)


LosesSavesBesideALoad = answers_otherwise(
    BlocksScheduler,
    "build_connector_meta",
    lambda orders: block_store.Orders(orders.loads) if orders.loads else orders,
)


class ChangesItsOrdersLater(BlocksScheduler):
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> block_store.Orders:
        return self._orders

    def update_connector_output(self, connector_output: Any) -> None:
        self._orders.loads.clear()
        self._orders.saves.clear()


class ChangesTheStep(LayerStoreScheduler):
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> layer_store.Orders:
        scheduler_output.finished_req_ids.clear()
        return super().build_connector_meta(scheduler_output)


@dataclass(frozen=True)
class OrdersWithALock(layer_store.Orders):
    lock: Any = field(default_factory=threading.Lock)


SendsALock = answers_otherwise(
    LayerStoreScheduler, "build_connector_meta", lambda orders: OrdersWithALock(orders.loads, orders.saves)
)


# == the end of a request ==========================================================================


class KeepsBlocksOfAbortedPrompts(BlocksScheduler):
    def request_finished(self, request: Any, block_ids: Tables) -> Any:
        delay_free, params = super().request_finished(request, block_ids)
        is_aborted = request.finish_reason in {"abort", "error"}
        return delay_free or (is_aborted and bool(block_ids[0])), params


SavesWhatWasNotComputed = asked_otherwise(
    BlocksScheduler,
    "request_finished",
    lambda request, blocks: (replace(request, finish_reason="length"), blocks),
)


class ReturnsParamsThatAreNoJson(BlocksScheduler):
    def request_finished(self, request: Any, block_ids: Tables) -> Any:
        delay_free, _ = super().request_finished(request, block_ids)
        return delay_free, {"file": self._folder}


FreesBeforeItCopied = answers_otherwise(BlocksScheduler, "request_finished", lambda found: (False, None))


class ReportsASaveTwice(BlockStoreWorker):
    before: frozenset[str] = frozenset()

    def get_finished(self, finished_req_ids: set[str]) -> Any:
        sent, received = super().get_finished(finished_req_ids)
        again, self.before = self.before, frozenset(sent or ())
        return (sent or set()) | again, received


class ReportsASaveOfNothing(BlockStoreWorker):
    def get_finished(self, finished_req_ids: set[str]) -> Any:
        sent, received = super().get_finished(finished_req_ids)
        return (sent or set()) | finished_req_ids, received


NeverReportsASave = answers_otherwise(BlockStoreWorker, "get_finished", lambda found: (None, found[1]))


class FreesBeforeItCopiedConnector(Blocks):
    scheduler_class = FreesBeforeItCopied
    worker_class = NeverReportsASave


class SavesAfterTheReport(BlockStoreWorker):
    """Names a prompt as saved at once; the thread copies it when the engine may have reused the blocks."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.ordered: set[str] = set()
        self.has_reported = False
        self.may_save = threading.Event()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self.has_reported:
            self.may_save.set()
        super().start_load_kv(forward_context, **kwargs)
        self.ordered = set(cast(block_store.Orders, self.connector_metadata).saves)

    def get_finished(self, finished_req_ids: set[str]) -> Any:
        _, received = super().get_finished(finished_req_ids)
        self.has_reported = self.has_reported or bool(self.ordered)
        return self.ordered, received

    def _save(self, copies: Copies) -> None:
        self.may_save.wait(5.0)
        super()._save(copies)

    def shutdown(self) -> None:
        self.may_save.set()
        super().shutdown()


# == the end of a load =============================================================================


class ReportsALoadTwice(BlockStoreWorker):
    before: frozenset[str] = frozenset()

    def get_finished(self, finished_req_ids: set[str]) -> Any:
        sent, received = super().get_finished(finished_req_ids)
        again, self.before = self.before, frozenset(received or ())
        return sent, (received or set()) | again


class ReportsBeforeTheBytes(BlockStoreWorker):
    """Names a load as finished when it begins; the thread writes after that."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.may_load = threading.Event()

    def get_finished(self, finished_req_ids: set[str]) -> Any:
        sent, _ = super().get_finished(finished_req_ids)
        return sent, set(cast(block_store.Orders, self.connector_metadata).loads)

    def _load(self, copies: Copies) -> None:
        self.may_load.wait(5.0)
        super()._load(copies)

    def shutdown(self) -> None:
        self.may_load.set()
        super().shutdown()


@dataclass(frozen=True)
class OrdersWithAborts(block_store.Orders):
    aborts: set[str] = field(default_factory=set)


class SaysWhatIsAborted(BlocksScheduler):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.loading: set[str] = set()
        self.aborts: set[str] = set()

    def update_state_after_alloc(self, request: Any, block_ids: Tables, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, block_ids, num_external_tokens)
        (self.loading.add if num_external_tokens else self.loading.discard)(request.request_id)

    def request_finished(self, request: Any, block_ids: Tables) -> Any:
        if request.finish_reason == "abort" and request.request_id in self.loading:
            self.aborts.add(request.request_id)
        return super().request_finished(request, block_ids)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> OrdersWithAborts:
        orders, aborts = super().build_connector_meta(scheduler_output), self.aborts
        self.aborts = set()
        return OrdersWithAborts(orders.loads, orders.saves, aborts)


class HeldBackWorker(BlockStoreWorker):
    """Carries out one load only after its request was aborted, and does not report that."""

    #: The request that the suite aborts a step after its load was ordered.
    held_back: ClassVar[str] = "d1"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.may_load = threading.Event()
        self.copies: Copies | None = None
        self.is_aborted = False

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        orders = cast(OrdersWithAborts, self.connector_metadata)
        self.copies = orders.loads.get(self.held_back, self.copies)
        self.is_aborted = self.held_back in orders.aborts
        super().start_load_kv(forward_context, **kwargs)

    def get_finished(self, finished_req_ids: set[str]) -> Any:
        sent, received = super().get_finished(finished_req_ids)
        return sent, (received or set()) - {self.held_back}

    def _load(self, copies: Copies) -> None:
        if copies is self.copies:
            self.may_load.wait()
        super()._load(copies)

    def shutdown(self) -> None:
        self.may_load.set()
        super().shutdown()


class WritesAfterAnAbort(HeldBackWorker):
    """Reports an aborted load at once, although the thread goes on."""

    is_reported = False

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self.is_reported:
            self.may_load.set()
        super().start_load_kv(forward_context, **kwargs)

    def get_finished(self, finished_req_ids: set[str]) -> Any:
        sent, received = super().get_finished(finished_req_ids)
        self.is_reported = self.is_reported or self.is_aborted
        return sent, received | {self.held_back} if self.is_aborted else received


class WritesAfterAnAbortConnector(Blocks):
    scheduler_class = SaysWhatIsAborted
    worker_class = WritesAfterAnAbort


class ForgetsAbortedLoads(HeldBackWorker):
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        super().start_load_kv(forward_context, **kwargs)
        if self.is_aborted:
            self.may_load.set()


class ForgetsAbortedLoadsConnector(Blocks):
    scheduler_class = SaysWhatIsAborted
    worker_class = ForgetsAbortedLoads


# == loads that fail ===============================================================================


DoesNotReportAFailedLoad = answers_otherwise(
    LayerStoreWorker, "get_block_ids_with_load_errors", lambda blocks: set()
)


class ReportsAFailedLoadTooLate(LayerStoreWorker):
    late: frozenset[int] = frozenset()

    def get_block_ids_with_load_errors(self) -> set[int]:
        late, self.late = self.late, frozenset(super().get_block_ids_with_load_errors())
        return set(late)


NamesOtherBlocksAsFailed = answers_otherwise(
    LayerStoreWorker, "get_block_ids_with_load_errors", lambda blocks: {block - 1 for block in blocks}
)


class ForgetsFailedLoads(BlockStoreWorker):
    def get_finished(self, finished_req_ids: set[str]) -> Any:
        sent, received = super().get_finished(finished_req_ids)
        return sent, (received or set()) - self._load_errors.keys()


class DiesOfADamagedPage(BlockStoreWorker):
    """The thread ends at the first file that it cannot read, and nothing is reported any more."""

    def _load(self, copies: Copies) -> None:
        try:
            super()._load(copies)
        except ValueError as error:
            raise SystemExit from error

    def _run(self, jobs: Any) -> None:
        with contextlib.suppress(SystemExit):
            super()._run(jobs)


class ServesDamagedPages(LayerStoreWorker):
    """Compares no checksum."""

    def _read(self, paths: Sequence[Path], layer: int) -> torch.Tensor:
        start = layer * (self._page_bytes + layer_store.CHECKSUM_BYTES)
        pages = bytearray().join(path.read_bytes()[start : start + self._page_bytes] for path in paths)
        return torch.frombuffer(pages, dtype=torch.uint8).view(len(paths), -1)


class PadsShortPages(BlockStoreWorker):
    """Takes what is left of a file that was cut short."""

    def _load(self, copies: Copies) -> None:
        for path, block in copies:
            data = path.read_bytes()
            for cache in self._caches:
                page = cache[block].flatten().view(torch.uint8)
                part, data = data[: len(page)], data[len(page) :]
                page[: len(part)] = torch.frombuffer(bytearray(part), dtype=torch.uint8)


# == layers ========================================================================================


class DoesNotWaitForALayer(LayerStoreWorker):
    """The layers arrive by the end of the step."""

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def wait_for_save(self) -> None:
        for name in self._layers:
            super().wait_for_layer_load(name)
        super().wait_for_save()


class WaitsForAnotherLayer(LayerStoreWorker):
    """Waits for the last layer only when the step ends."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        if layer_name != list(self._layers)[-1]:
            super().wait_for_layer_load(layer_name)

    def wait_for_save(self) -> None:
        super().wait_for_layer_load(list(self._layers)[-1])
        super().wait_for_save()


class DoesNotWaitForASave(LayerStoreWorker):
    """Copies when the engine may have reused the blocks."""

    late: tuple[Any, ...] = ()

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        self.late = (*self.late, (self.connector_metadata, layer_name, kv_layer))

    def wait_for_save(self) -> None: ...

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        orders, late, self.late = self.connector_metadata, self.late, ()
        for self._connector_metadata, layer_name, kv_layer in late:
            super().save_kv_layer(layer_name, kv_layer, None)
        super().wait_for_save()
        self._connector_metadata = orders
        super().start_load_kv(forward_context, **kwargs)


class SavesBeforeTheLayerIsComputed(LayerStoreWorker):
    def wait_for_layer_load(self, layer_name: str) -> None:
        super().wait_for_layer_load(layer_name)
        super().save_kv_layer(layer_name, self._caches[layer_name], None)

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None: ...


class SavesTheFirstLayerOnly(LayerStoreWorker):
    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        caches = self._caches
        self._caches = dict.fromkeys(caches, next(iter(caches.values())))
        super().save_kv_layer(layer_name, kv_layer, attn_metadata)
        self._caches = caches


class SavesOthers(LayerStoreScheduler):
    """Changes which blocks a step saves."""

    def changed(self, scheduler_output: SchedulerOutput, item: Any, saves: Mapping[Path, int]) -> Any:
        """Return what is saved of a request instead of `saves`."""
        raise NotImplementedError

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> layer_store.Orders:
        orders = super().build_connector_meta(scheduler_output)
        changed: dict[Path, int] = {}
        for item in scheduler_output.scheduled_requests:
            paths = self._paths[item.request_id]
            saves = {path: orders.saves[path] for path in paths if path in orders.saves}
            changed.update(self.changed(scheduler_output, item, saves))
        return layer_store.Orders(orders.loads, changed)


class SavesAnotherRequestsTokens(SavesOthers):
    """Takes the blocks of the step's first request for those of all."""

    def changed(self, scheduler_output: SchedulerOutput, item: Any, saves: Mapping[Path, int]) -> Any:
        table = scheduler_output.scheduled_requests[0].block_ids[0]
        first = item.num_computed_tokens // self._spec.block_size
        return dict(zip(saves, table[first:], strict=False))


class SavesTheLastChunkOnly(SavesOthers):
    def changed(self, scheduler_output: SchedulerOutput, item: Any, saves: Mapping[Path, int]) -> Any:
        whole = len(self._paths[item.request_id]) * self._spec.block_size
        return saves if item.num_computed_tokens + item.num_scheduled_tokens >= whole else {}


class TakesTheTableForNewBlocks(SavesOthers):
    """Takes a block table for the list of blocks that the step added."""

    def changed(self, scheduler_output: SchedulerOutput, item: Any, saves: Mapping[Path, int]) -> Any:
        return dict(zip(saves, item.block_ids[0], strict=False))


class IgnoresPreemptions(SavesOthers):
    """Saves a prompt when its last chunk is computed, from the blocks that it noted at each chunk."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.noted: dict[str, dict[Path, int]] = {}

    def changed(self, scheduler_output: SchedulerOutput, item: Any, saves: Mapping[Path, int]) -> Any:
        noted = self.noted.setdefault(item.request_id, {})
        for path, block in saves.items():
            noted.setdefault(path, block)
        return noted if saves and len(noted) == len(self._paths[item.request_id]) else {}


# == steps that fail, and several ranks ============================================================


class SavesAllLayersAtTheEnd(LayerStoreWorker):
    """Does not care whether the layers were computed from what was loaded."""

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None:
        for name, cache in self._caches.items():
            super().save_kv_layer(name, cache, None)
        super().wait_for_save()


class KeepsTheStepOfAFailedHook(LayerStoreWorker):
    """If layers are missing at the end of a step, it takes those of the next step for them."""

    def wait_for_save(self) -> None:
        if len(self._writes) == len(self._layers):
            super().wait_for_save()


class RanksScheduler(LayerStoreScheduler):
    """Each rank has a folder.

    All ranks save a block in one step, so it is enough to look for the first one's file.
    """

    saved: Sequence[Path] = ()

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> layer_store.Orders:
        orders = super().build_connector_meta(scheduler_output)
        self.saved = list(orders.saves)
        return orders

    def update_connector_output(self, connector_output: Any) -> None:
        if connector_output.hook_errors:
            for path in self.saved:
                for rank in range(self._config.parallel.world_size):
                    of_rank(path, rank).unlink(missing_ok=True)


class RankWorker(LayerStoreWorker):
    rank = 0

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        loads = {
            name: [(of_rank(path, self.rank), block) for path, block in copies]
            for name, copies in connector_metadata.loads.items()
        }
        saves = {of_rank(path, self.rank): block for path, block in connector_metadata.saves.items()}
        super().bind_connector_metadata(layer_store.Orders(loads, saves))


def of_rank(path: Path, rank: int) -> Path:
    return path.with_name(f"{path.name}.{rank}") if rank else path


class Ranks(Layers):
    scheduler_class = RanksScheduler
    worker_class = RankWorker

    def make_worker_half(self) -> LayerStoreWorker:
        worker = super().make_worker_half()
        if isinstance(worker, RankWorker):
            worker.rank = self.config.parallel.rank
        return worker

    def _settings(self) -> tuple[Path, KVCacheSpec]:
        config = self.config
        self.config = replace(config, parallel=ParallelConfig())  # the store itself refuses several ranks
        try:
            return super()._settings()
        finally:
            self.config = config


class IgnoresHookErrors(RanksScheduler):
    """Keeps what a rank saved in a step in which another rank's hook raised."""

    def update_connector_output(self, connector_output: Any) -> None: ...


class SharesFilesBetweenRanks(RankWorker):
    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        LayerStoreWorker.bind_connector_metadata(self, connector_metadata)


class LoadsOnTheFirstRankOnly(RankWorker):
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self.rank:
            cast(layer_store.Orders, self.connector_metadata).loads.clear()
        super().start_load_kv(forward_context, **kwargs)


# == the life of a half ============================================================================


class IgnoresUnknownOptions(LayerStoreConnector):
    def _settings(self) -> tuple[Path, KVCacheSpec]:
        folder = self.kv_transfer_config.kv_connector_extra_config["folder"]
        return Path(str(folder)), self.kv_cache_config.kv_cache_groups[0].kv_cache_spec


class ShutsDownOnce(LayerStoreWorker):
    def shutdown(self) -> None:
        super().shutdown()
        del self._thread


class WritesAfterShutdown(BlockStoreWorker):
    def shutdown(self) -> None:
        super().shutdown()
        for cache in self._caches:
            cache[:] = 0


class LeaksADescriptor(LayerStoreWorker):
    opened: ClassVar[list[Any]] = []

    def register_kv_caches(self, kv_caches: Any) -> None:
        super().register_kv_caches(kv_caches)
        self.opened.append(open("/dev/null"))  # noqa: SIM115 - the bug

    @classmethod
    def end(cls) -> None:
        while cls.opened:
            cls.opened.pop().close()


class LeaksAThread(BlockStoreWorker):
    leaked: ClassVar[list[LeaksAThread]] = []

    def shutdown(self) -> None:
        self.leaked.append(self)

    @classmethod
    def end(cls) -> None:
        while cls.leaked:
            BlockStoreWorker.shutdown(cls.leaked.pop())


# == by name ======================================================================================


def planted(half: type[SchedulerHalf | WorkerHalf]) -> type[KVConnectorBase]:
    """Return the connector of a broken half."""
    if issubclass(half, (RanksScheduler, RankWorker)):
        store: type[KVConnectorBase] = Ranks
    else:
        store = Layers if issubclass(half, (LayerStoreScheduler, LayerStoreWorker)) else Blocks
    kind = "scheduler_class" if issubclass(half, SchedulerHalf) else "worker_class"
    return type(half.__name__, (store,), {kind: half})


def __getattr__(name: str) -> type[KVConnectorBase]:
    """`BrokenBy` and the name of a bug: the connector, as a factory of connectors looks it up."""
    bug = name.removeprefix("BrokenBy")
    if bug not in globals() or bug == name:
        raise AttributeError(name)
    broken: type[Any] = globals()[bug]
    return broken if issubclass(broken, KVConnectorBase) else planted(broken)
