"""The simplest complete connector: it keeps finished prompts in a folder, and loads them when they come
again.

    python examples/disagg_pair.py --connector FileConnector --connector-module custom_connector \\
        --connector-option folder=/tmp/prompts

The scheduler half decides and the worker half copies. `Orders` travel from the one to the other in each step.
A prompt is saved as one file after its request has ended. It is loaded synchronously: the load is done when
`start_load_kv` returns, before the step computes anything.
"""

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

import kvferry.connector as kv
from kvferry.transports.errors import ConfigurationError

Request = kv.ConnectorRequest
Tables = Sequence[Sequence[int]]

#: In `kv_transfer_params`: the file to which the prefill node is just saving the prompt.
SAVING = "file_store_saving"
#: Seconds that a request waits for it. After that, the node computes the prompt itself.
WAIT_S = 2.0


@dataclass(frozen=True)
class Orders(kv.KVConnectorMetadata):
    """One step's work, by request: the file and blocks to load, and those to save."""

    loads: dict[str, tuple[Path, list[int]]] = field(default_factory=dict)
    saves: dict[str, tuple[Path, list[int]]] = field(default_factory=dict)


class FileScheduler(kv.SchedulerHalf):
    """Decides which prompts are loaded and which are saved."""

    def __init__(self, folder: Path, config: kv.EngineConfig, spec: kv.KVCacheSpec) -> None:
        self._folder, self._config, self._spec = folder, config, spec
        self._orders = Orders()
        self._deadlines: dict[str, float] = {}

    def _file(self, request: Request) -> tuple[Path, int]:
        """Return a prompt's file and its number of whole blocks."""
        # The last token is never loaded: a step has to compute it, because its logits give the first token of
        # the answer.
        num_blocks = (request.num_prompt_tokens - 1) // self._spec.block_size
        # The digest of a block depends on everything that its bytes depend on, so the last one names the
        # whole prompt.
        digests = kv.block_digests(request, self._config, self._spec)
        return self._folder / f"{digests[num_blocks - 1] if num_blocks else 'empty'}.safetensors", num_blocks

    def on_new_request(self, request: Request) -> None:
        if (request.kv_transfer_params or {}).get(SAVING) == self._file(request)[0].name:
            self._deadlines[request.request_id] = time.monotonic() + WAIT_S

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        path, num_blocks = self._file(request)
        num_tokens = num_blocks * self._spec.block_size - num_computed_tokens
        if num_tokens <= 0 or path.exists():
            return max(0, num_tokens), False
        is_coming = time.monotonic() < self._deadlines.get(request.request_id, 0.0)
        return None if is_coming else 0, False  # None: ask again in the next step

    def update_state_after_alloc(self, request: Request, block_ids: Tables, num_external_tokens: int) -> None:
        if num_external_tokens:
            path, num_blocks = self._file(request)
            first = num_blocks - num_external_tokens // self._spec.block_size
            self._orders.loads[request.request_id] = path, list(block_ids[0][first:num_blocks])

    def build_connector_meta(self, scheduler_output: kv.SchedulerOutput) -> Orders:
        orders, self._orders = self._orders, Orders()
        return orders

    def request_finished(self, request: Request, block_ids: Tables) -> tuple[bool, dict[str, Any] | None]:
        self._deadlines.pop(request.request_id, None)
        path, num_blocks = self._file(request)
        if not 0 < num_blocks * self._spec.block_size <= request.num_computed_tokens or path.exists():
            return False, None
        self._orders.saves[request.request_id] = path, list(block_ids[0][:num_blocks])
        return True, {SAVING: path.name}  # the engine keeps the blocks until `get_finished` names the request


class FileWorker(kv.WorkerHalf):
    """Copies blocks from files into the caches, and back."""

    def __init__(self, folder: Path, num_blocks: int) -> None:
        self._folder, self._num_blocks = folder, num_blocks
        self._caches: dict[str, torch.Tensor] = {}
        self._saved: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._stats = kv.StatsCollector()

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        # Axis 0 may count an attention kernel's blocks, several of which make one block.
        self._caches = {name: cache.unflatten(0, (self._num_blocks, -1)) for name, cache in kv_caches.items()}
        self._folder.mkdir(parents=True, exist_ok=True)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        orders = cast(Orders, self.connector_metadata)
        for request_id, (path, blocks) in orders.loads.items():
            self._load(request_id, path, blocks)
        for path, blocks in orders.saves.values():
            self._save(path, {name: cache[blocks] for name, cache in self._caches.items()})
        self._saved.update(orders.saves)

    def _load(self, request_id: str, path: Path, blocks: list[int]) -> None:
        started, num_bytes, error = time.monotonic(), 0, ""
        try:
            saved = load_file(path)
            for name, cache in self._caches.items():
                pages = saved[name][-len(blocks) :]  # the node has the blocks before these already
                cache[blocks] = pages.to(cache.device)
                num_bytes += pages.nbytes
        except (OSError, SafetensorError, RuntimeError, KeyError) as failure:  # gone, damaged, or not ours
            error = f"cannot load {path.name!r}: {failure}"
            with contextlib.suppress(OSError):
                path.unlink()  # so that the prompt is saved again
            self._failed_blocks.update(blocks)
        seconds = time.monotonic() - started  # the step waited all this time: nothing of it was hidden
        figures = {
            "num_blocks": len(blocks),
            "num_bytes": num_bytes,
            "seconds": seconds,
            "exposed_seconds": seconds,
        }
        self._stats.add(
            kv.TransferRecord(request_id, "file", "safetensors", "per-layer", error=error, **figures)
        )

    def _save(self, path: Path, pages: Mapping[str, torch.Tensor]) -> None:
        with (
            contextlib.suppress(OSError, SafetensorError),
            TemporaryDirectory(dir=self._folder) as unfinished,
        ):
            save_file({name: page.contiguous() for name, page in pages.items()}, f"{unfinished}/pages")
            Path(unfinished, "pages").rename(path)  # so that a file appears only when it is complete

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        saved, self._saved = self._saved, set()
        return saved, None

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def get_kv_connector_stats(self) -> kv.KVConnectorStats | None:
        return self._stats.take()


class FileConnector(kv.KVConnectorBase):
    """Saves the whole blocks of each finished prompt to a file, and loads them for the next request with that
    prompt.
    """

    def make_scheduler_half(self) -> FileScheduler:
        folder, spec = self._settings()
        return FileScheduler(folder, self.config, spec)

    def make_worker_half(self) -> FileWorker:
        folder, _ = self._settings()
        return FileWorker(folder, self.kv_cache_config.num_blocks)

    def _settings(self) -> tuple[Path, kv.KVCacheSpec]:
        options = self.kv_transfer_config.kv_connector_extra_config
        if set(options) != {"folder"}:
            raise ConfigurationError(
                f"FileConnector needs one option, folder, and no other; it was given {dict(options)}",
                key="folder",
            )
        specs = [group.kv_cache_spec for group in self.kv_cache_config.kv_cache_groups]
        # At the end of an answer, a sliding window has freed blocks of the prompt and a recurrent state is
        # past it.
        is_full = [type(spec) for spec in specs] == [kv.FullAttentionSpec]
        if not is_full or self.config.parallel.world_size != 1:
            raise ConfigurationError(
                "FileConnector supports only one group of full attention on one rank; use another connector"
            )
        return Path(str(options["folder"])), specs[0]
