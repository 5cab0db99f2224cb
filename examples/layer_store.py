"""A store that saves and loads layer by layer, while the model computes.

    python examples/disagg_pair.py --connector LayerStoreConnector --connector-module layer_store \\
        --connector-option folder=/tmp/layers

A file holds one block of all layers, and its name is a digest of everything that the block's bytes depend on.
A step saves the blocks that it completes: each layer as soon as it is computed, and the file appears at the
end of the step. So a prompt is in the store before its first token leaves the node. A request loads the
longest run of blocks that the store holds beyond those that the node has. Loads are synchronous, layer by
layer: a thread reads ahead, and each layer waits for its own pages only. The store deletes only what is
damaged.
"""

import os
import time
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import torch

import kvferry.connector as kv
from kvferry.transports.errors import ConfigurationError

Request = kv.ConnectorRequest
Tables = Sequence[Sequence[int]]

#: Seconds that a layer waits for its pages. After that, the load has failed.
READ_TIMEOUT_S = 30.0
#: Bytes of the checksum after each page.
CHECKSUM_BYTES = 4


@dataclass(frozen=True)
class Orders(kv.KVConnectorMetadata):
    """One step's work: by request the files and blocks to load; by file the block to save."""

    loads: dict[str, list[tuple[Path, int]]] = field(default_factory=dict)
    saves: dict[Path, int] = field(default_factory=dict)


class LayerStoreScheduler(kv.SchedulerHalf):
    """Decides which blocks are loaded and which are saved."""

    def __init__(self, folder: Path, config: kv.EngineConfig, spec: kv.KVCacheSpec) -> None:
        self._folder, self._config, self._spec = folder, config, spec
        self._paths: dict[str, list[Path]] = {}
        self._num_saved: dict[str, int] = {}
        self._to_load: dict[str, slice] = {}
        self._loads: dict[str, list[tuple[Path, int]]] = {}

    def on_new_request(self, request: Request) -> None:
        digests = kv.block_digests(request, self._config, self._spec)
        self._paths[request.request_id] = [self._folder / digest for digest in digests]
        self._num_saved[request.request_id] = 0

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        size = self._spec.block_size
        first = num_computed_tokens // size
        # The last token is always computed here, for its logits. So its block is not loaded.
        wanted = self._paths[request.request_id][first : (request.num_prompt_tokens - 1) // size]
        num_found = sum(1 for _ in takewhile(Path.exists, wanted))
        # The call with the blocks does not repeat how many of them the node had. The engine acts on our
        # latest answer, so this is the one to remember; to overwrite it changes no answer.
        self._to_load[request.request_id] = slice(first, first + num_found)
        return num_found * size, False

    def update_state_after_alloc(self, request: Request, block_ids: Tables, num_external_tokens: int) -> None:
        if num_external_tokens:
            blocks = self._to_load[request.request_id]
            paths = self._paths[request.request_id][blocks]
            self._loads[request.request_id] = list(zip(paths, block_ids[0][blocks], strict=True))

    def build_connector_meta(self, scheduler_output: kv.SchedulerOutput) -> Orders:
        # By file: two requests of a step may complete the same block.
        saves: dict[Path, int] = {}
        for item in scheduler_output.scheduled_requests:
            paths, size = self._paths[item.request_id], self._spec.block_size
            # A chunk of a prompt rarely ends with a block. A block is saved by the step that computes its
            # last token; its first tokens were computed by earlier steps, and are still in it. The first step
            # also saves what came from the node's own prefix cache: a block is found only if the store has
            # all blocks before it.
            last = min(len(paths), (item.num_computed_tokens + item.num_scheduled_tokens) // size)
            # A request starts over after a preemption, a failed load or a failed step. It then has fewer
            # computed tokens than before, and what was not saved the first time is saved now.
            first = min(self._num_saved[item.request_id], item.num_computed_tokens // size)
            for path, block in zip(paths[first:last], item.block_ids[0][first:last], strict=True):
                if not path.exists():
                    saves.setdefault(path, block)
            self._num_saved[item.request_id] = last
        # Last, because the engine calls this again if it raises, and a load that is forgotten leaves its
        # blocks as they are.
        loads, self._loads = self._loads, {}
        return Orders(loads, saves)

    def request_finished(self, request: Request, block_ids: Tables) -> tuple[bool, dict[str, Any] | None]:
        for remembered in (self._paths, self._num_saved, self._to_load, self._loads):
            remembered.pop(request.request_id, None)
        return False, None  # everything was saved in the step that computed it


@dataclass
class Load:
    """A request's load in this step.

    Attributes:
        waited_s: How long layers waited for their pages.
        seconds: From the start of the step until its latest layer was in place.
        error: Why it failed; otherwise empty.
    """

    request_id: str
    blocks: list[int]
    waited_s: float = 0.0
    seconds: float = 0.0
    error: str = ""


class LayerStoreWorker(kv.WorkerHalf):
    """Copies pages between the caches and memory of its own; a thread moves them between that memory and
    files.

    Only the engine's thread touches the caches, between the computation of two layers. So copies and
    computation are in the right order by themselves, on a GPU as well, and nothing writes into a block after
    a step that failed half-way.
    """

    def __init__(self, folder: Path, pool: kv.KVCacheConfig) -> None:
        (group,) = pool.kv_cache_groups
        self._folder, self._num_blocks = folder, pool.num_blocks
        self._layers = {name: index for index, name in enumerate(group.layer_names)}
        self._page_bytes = group.kv_cache_spec.page_size_bytes
        self._caches: dict[str, torch.Tensor] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="layer-store")
        self._started_s = 0.0
        self._loads: list[Load] = []
        self._reads: dict[str, list[Future[torch.Tensor]]] = {}
        self._writes: dict[str, Future[None]] = {}
        self._unfinished: dict[Path, Path] = {}
        self._failed_blocks: set[int] = set()
        self._load_errors: dict[str, str] = {}
        self._stats = kv.StatsCollector()
        self._warning = ""

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        # A layer that shares another's cache appears in `kv_caches` as well, but not in the group: it has no
        # calls of its own. Axis 0 may count an attention kernel's blocks, several of which make one block.
        caches = {name: kv_caches[name] for name in self._layers}
        self._caches = {
            name: cache.view(self._num_blocks, -1, *cache.shape[1:]) for name, cache in caches.items()
        }
        self._folder.mkdir(parents=True, exist_ok=True)

    # -- loads

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        loads = cast(Orders, self.connector_metadata).loads
        self._started_s = time.monotonic()
        self._loads = [Load(name, [block for _, block in copies]) for name, copies in loads.items()]
        # All requests' first layer, then their second: the thread reads what the model needs first.
        self._reads = {
            name: [
                self._thread.submit(self._read, [path for path, _ in copies], layer)
                for copies in loads.values()
            ]
            for name, layer in self._layers.items()
        }

    def wait_for_layer_load(self, layer_name: str) -> None:
        cache = self._caches[layer_name]
        for load, read in zip(self._loads, self._reads.pop(layer_name, ()), strict=False):
            if load.error:
                continue  # a layer that waited too long must not be followed by others that do the same
            started = time.monotonic()
            try:
                pages = read.result(READ_TIMEOUT_S)
            except (OSError, ValueError) as error:  # a TimeoutError is an OSError
                load.error = f"cannot load blocks from {self._folder}: {type(error).__name__} {error}"
            else:
                cache[load.blocks] = pages.view(cache.dtype).view(-1, *cache.shape[1:]).to(cache.device)
            load.waited_s += time.monotonic() - started
            load.seconds = time.monotonic() - self._started_s

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        # Synchronous loads end with their step, without being named. This is the first call that every step
        # makes after them.
        for load in self._loads:
            if self._reads and not load.error:
                load.error = f"the step failed before layer {next(iter(self._reads))!r}"
            if load.error:
                self._failed_blocks.update(load.blocks)
                self._load_errors[load.request_id] = load.error
            self._stats.add(
                kv.TransferRecord(
                    load.request_id,
                    transport="file",
                    mechanism="read",
                    layout="per-layer",
                    num_blocks=len(load.blocks),
                    num_bytes=len(load.blocks) * len(self._layers) * self._page_bytes,
                    seconds=load.seconds,
                    exposed_seconds=load.waited_s,  # the rest was hidden by computing the layers before
                    error=load.error,
                )
            )
        self._loads, self._reads = [], {}
        return None, None

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_load_errors(self) -> dict[str, str]:
        errors, self._load_errors = self._load_errors, {}
        return errors

    def get_kv_connector_stats(self) -> kv.KVConnectorStats | None:
        return self._stats.take()

    # -- saves

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        saves = cast(Orders, self.connector_metadata).saves
        if not saves:
            return
        # By file that is to appear, if all goes well, the one that is written until then.
        self._unfinished = self._unfinished or {
            path: path.with_name(f"{path.name}-{uuid4().hex}") for path in saves
        }
        # A copy, in logical order, so that the file also suits a node that keeps heads and tokens in another
        # order.
        pages = self._caches[layer_name][list(saves.values())].flatten(1).view(torch.uint8).cpu()
        paths = list(self._unfinished.values())
        self._writes[layer_name] = self._thread.submit(self._write, paths, self._layers[layer_name], pages)

    def wait_for_save(self) -> None:
        writes, self._writes = self._writes, {}
        unfinished, self._unfinished = self._unfinished, {}
        errors = [error for write in writes.values() if (error := write.exception())]
        # It is called even if the computation failed. Then some layers were not saved, so no file is
        # complete. And if a load failed, the step computed from what it did not load: nothing that it wrote
        # may be found by others.
        is_right = len(writes) == len(self._layers) and not any(load.error for load in self._loads)
        for path, written in unfinished.items():
            try:
                if is_right and not errors:
                    written.rename(path)
                else:
                    written.unlink(missing_ok=True)
            except OSError as error:
                errors.append(error)
        if writes:
            self._warning = f"cannot save blocks in {self._folder}: {errors[0]}" if errors else ""

    @property
    def warning(self) -> str:
        return self._warning

    def shutdown(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    # -- the thread: a page is followed by its checksum

    def _read(self, paths: Sequence[Path], layer: int) -> torch.Tensor:
        """Return a layer's pages in these files: `(num_blocks, page_bytes)`."""
        pages = bytearray()
        for path in paths:
            with path.open("rb") as file:
                file.seek(layer * (self._page_bytes + CHECKSUM_BYTES))
                page, found = file.read(self._page_bytes), file.read(CHECKSUM_BYTES)
            if found != checksum(page):
                path.unlink(missing_ok=True)  # so that the block is saved again
                raise ValueError(f"{path.name} is damaged")
            pages += page
        return torch.frombuffer(pages, dtype=torch.uint8).view(len(paths), -1)

    def _write(self, paths: Sequence[Path], layer: int, pages: torch.Tensor) -> None:
        for path, page in zip(paths, pages.numpy(), strict=True):
            with open(os.open(path, os.O_WRONLY | os.O_CREAT), "wb") as file:
                file.seek(layer * (self._page_bytes + CHECKSUM_BYTES))
                file.write(page.tobytes() + checksum(page.tobytes()))


def checksum(page: bytes) -> bytes:
    """Return the checksum of a page's bytes."""
    return zlib.crc32(page).to_bytes(CHECKSUM_BYTES, "little")


class LayerStoreConnector(kv.KVConnectorBase):
    """Keeps the blocks of prompts in a folder (the option `folder`), and loads those with which a prompt
    begins.
    """

    def make_scheduler_half(self) -> LayerStoreScheduler:
        folder, spec = self._settings()
        return LayerStoreScheduler(folder, self.config, spec)

    def make_worker_half(self) -> LayerStoreWorker:
        folder, _ = self._settings()
        return LayerStoreWorker(folder, self.kv_cache_config)

    def _settings(self) -> tuple[Path, kv.KVCacheSpec]:
        options = self.kv_transfer_config.kv_connector_extra_config
        if set(options) != {"folder"}:
            raise ConfigurationError(
                f"LayerStoreConnector needs one option, folder, and no other; it was given {dict(options)}",
                key="folder",
            )
        specs = [group.kv_cache_spec for group in self.kv_cache_config.kv_cache_groups]
        # A sliding window frees blocks of a prompt, and a recurrent state is not a block per token.
        is_full = [type(spec) for spec in specs] == [kv.FullAttentionSpec]
        if not is_full or self.config.parallel.world_size != 1:
            raise ConfigurationError(
                "LayerStoreConnector supports only one group of full attention on one rank; use another connector"
            )
        return Path(str(options["folder"])), specs[0]
