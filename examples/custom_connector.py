"""A complete connector of your own. It keeps finished prompts in a folder, and loads them when they come again.

    python examples/serve.py --role both --connector FileConnector --connector-module custom_connector \\
        --connector-option folder=/tmp/prompts

The scheduler half decides and the worker half copies. `Orders` are what the one sends the other in each step. Loads are
synchronous here: they are done when `start_load_kv` returns, before the step computes anything.
"""

import contextlib
import hashlib
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


@dataclass(frozen=True)
class Orders(kv.KVConnectorMetadata):
    """One step's work: the files and blocks to load, and those to save, by request."""

    loads: list[tuple[Path, list[int]]] = field(default_factory=list)
    saves: dict[str, tuple[Path, list[int]]] = field(default_factory=dict)


class FileScheduler(kv.SchedulerHalf):
    """Decides which prompts are loaded and which are saved."""

    def __init__(self, folder: Path, model: kv.ModelConfig, spec: kv.KVCacheSpec) -> None:
        self._folder = folder
        identity = model.identity
        self._model = (model.model, identity.configuration, identity.weights, identity.adapters)
        self._spec = spec
        self._orders = Orders()

    def _file(self, request: Request) -> tuple[Path, int]:
        """Return a prompt's file and its number of whole blocks. The last token is never loaded: it gives the logits."""
        num_blocks = (request.num_prompt_tokens - 1) // self._spec.block_size
        tokens = list(request.prompt_token_ids[: num_blocks * self._spec.block_size])
        # Everything that the bytes depend on, and whose they are. An engine without one of these has no such attribute.
        names = ("lora_id", "lora_request", "mm_features", "cache_salt")
        more = [getattr(request, name, None) or None for name in names]
        key = repr((self._model, self._spec, more, tokens)).encode()
        return self._folder / f"{hashlib.sha256(key).hexdigest()}.safetensors", num_blocks

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        path, num_blocks = self._file(request)
        num_tokens = num_blocks * self._spec.block_size - num_computed_tokens
        return (num_tokens if num_tokens > 0 and path.exists() else 0), False

    def update_state_after_alloc(self, request: Request, block_ids: Tables, num_external_tokens: int) -> None:
        if num_external_tokens:
            path, num_blocks = self._file(request)
            first = num_blocks - num_external_tokens // self._spec.block_size
            self._orders.loads.append((path, list(block_ids[0][first:num_blocks])))

    def build_connector_meta(self, scheduler_output: kv.SchedulerOutput) -> Orders:
        orders, self._orders = self._orders, Orders()
        return orders

    def request_finished(self, request: Request, block_ids: Tables) -> tuple[bool, dict[str, Any] | None]:
        path, num_blocks = self._file(request)
        if not 0 < num_blocks * self._spec.block_size <= request.num_computed_tokens or path.exists():
            return False, None
        self._orders.saves[request.request_id] = path, list(block_ids[0][:num_blocks])
        return True, None  # the engine keeps the blocks until `get_finished` names the request


class FileWorker(kv.WorkerHalf):
    """Copies blocks from files into the caches, and back."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._kv_caches: dict[str, torch.Tensor] = {}
        self._saved: set[str] = set()
        self._failed_blocks: set[int] = set()

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        self._kv_caches = dict(kv_caches)
        self._folder.mkdir(parents=True, exist_ok=True)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        orders = cast(Orders, self.connector_metadata)
        for path, blocks in orders.loads:
            try:
                pages = load_file(path)
                for name, cache in self._kv_caches.items():
                    cache[blocks] = pages[name][-len(blocks) :].to(cache.device)
            except (OSError, SafetensorError, RuntimeError, KeyError):  # gone, damaged, or not a file of ours
                self._failed_blocks.update(blocks)
        for request_id, (path, blocks) in orders.saves.items():
            with contextlib.suppress(
                OSError, SafetensorError
            ):  # a full disk costs later loads, but no answer
                self._save(path, {name: cache[blocks] for name, cache in self._kv_caches.items()})
            self._saved.add(request_id)

    def _save(self, path: Path, pages: Mapping[str, torch.Tensor]) -> None:
        with TemporaryDirectory(
            dir=self._folder
        ) as unfinished:  # the rename makes a file appear only when complete
            save_file({name: page.contiguous() for name, page in pages.items()}, f"{unfinished}/pages")
            Path(unfinished, "pages").rename(path)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        saved, self._saved = self._saved, set()
        return saved, None

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed


class FileConnector(kv.KVConnectorBase):
    """Saves the whole blocks of each finished prompt to a file, and loads them for the next request with that prompt."""

    def make_scheduler_half(self) -> FileScheduler:
        folder, spec = self._settings()
        return FileScheduler(folder, self.config.model, spec)

    def make_worker_half(self) -> FileWorker:
        folder, _ = self._settings()
        return FileWorker(folder)

    def _settings(self) -> tuple[Path, kv.KVCacheSpec]:
        options = self.kv_transfer_config.kv_connector_extra_config
        if set(options) != {"folder"}:
            raise ConfigurationError(
                f"FileConnector needs one option, folder, and no other; it was given {dict(options)}",
                key="folder",
            )
        specs = [group.kv_cache_spec for group in self.kv_cache_config.kv_cache_groups]
        # At the end of an answer, a sliding window has freed blocks of the prompt and a recurrent state is past it.
        is_full = [type(spec) for spec in specs] == [kv.FullAttentionSpec]
        if not is_full or self.config.parallel.world_size != 1:
            raise ConfigurationError(
                "FileConnector supports only one group of full attention on one rank; use another connector"
            )
        return Path(str(options["folder"])), specs[0]
