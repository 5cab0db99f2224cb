"""A connector of your own, complete: it keeps finished prompts in a folder, and loads them from there.

Run it (`python examples/custom_connector.py`) to see a save and a load, or give it to a node:

    python examples/serve.py --role both --connector FileConnector --connector-module custom_connector \\
        --connector-option folder=/tmp/prompts

The scheduler half decides and the worker half copies; what they say to each other is `FileMetadata`. Loads are
synchronous here: they are done when `start_load_kv` returns, before the step computes anything.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from kvferry.connector import (
    ConnectorRequest,
    EngineConfig,
    KVCacheConfig,
    KVConnectorBase,
    KVConnectorMetadata,
    KVConnectorRole,
    SchedulerOutput,
)
from kvferry.connector.testing import CacheShape, ModelFreeNode, Request, engine_config
from kvferry.transports.errors import ConfigurationError


@dataclass(frozen=True)
class FileMetadata(KVConnectorMetadata):
    """One step's work: request → (file, blocks)."""

    loads: dict[str, tuple[Path, list[int]]] = field(default_factory=dict)
    saves: dict[str, tuple[Path, list[int]]] = field(default_factory=dict)


class FileConnector(KVConnectorBase):
    """Saves the whole blocks of each finished prompt to a file, and loads them when the same prompt comes again."""

    def __init__(self, config: EngineConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(config, role, kv_cache_config)
        options = dict(self.kv_transfer_config.kv_connector_extra_config)
        self._folder = Path(str(options.pop("folder", "")))
        if options or self._folder == Path():
            raise ConfigurationError(
                "FileConnector has one option, folder", key=next(iter(options), "folder")
            )
        if len(kv_cache_config.kv_cache_groups) != 1:
            raise ConfigurationError("FileConnector knows models with one KV cache group")
        self._block_size = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        self._orders = FileMetadata()  # scheduler half
        self._kv_caches: dict[str, torch.Tensor] = {}  # worker half
        self._saved: set[str] = set()
        self._failed_blocks: set[int] = set()

    # -- scheduler half ------------------------------------------------------------------------------

    def _file(self, request: ConnectorRequest) -> tuple[Path, int]:
        """Where the request's prompt is kept, and how many whole blocks of it."""
        # The last token is always computed here, to get its logits; so its block is not worth keeping.
        num_blocks = (request.num_prompt_tokens - 1) // self._block_size
        tokens = list(request.prompt_token_ids[: num_blocks * self._block_size])
        # Engines that have adapters and salts tell of them in the request: what is cached under one is not another's.
        apart = [getattr(request, name, None) for name in ("lora_id", "cache_salt")]
        key = repr((self.config.model.model, self.config.model.dtype, self._block_size, apart, tokens))
        return self._folder / f"{hashlib.sha256(key.encode()).hexdigest()}.safetensors", num_blocks

    def get_num_new_matched_tokens(
        self, request: ConnectorRequest, num_computed_tokens: int
    ) -> tuple[int, bool]:
        path, num_blocks = self._file(request)
        num_tokens = num_blocks * self._block_size - num_computed_tokens
        return (num_tokens, False) if num_tokens > 0 and path.exists() else (0, False)

    def update_state_after_alloc(
        self, request: ConnectorRequest, block_ids: Sequence[Sequence[int]], num_external_tokens: int
    ) -> None:
        if num_external_tokens:
            path, num_blocks = self._file(request)
            first = num_blocks - num_external_tokens // self._block_size
            self._orders.loads[request.request_id] = (path, list(block_ids[0][first:num_blocks]))

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        orders, self._orders = self._orders, FileMetadata()
        return orders

    def request_finished(
        self, request: ConnectorRequest, block_ids: Sequence[Sequence[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        path, num_blocks = self._file(request)
        whole = request.num_computed_tokens >= num_blocks * self._block_size
        if not whole or not num_blocks or path.exists():
            return False, None
        self._orders.saves[request.request_id] = (path, list(block_ids[0][:num_blocks]))
        return True, None  # the engine keeps the blocks until `get_finished` names the request

    # -- worker half ---------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        if any(len(cache) != self.kv_cache_config.num_blocks for cache in kv_caches.values()):
            raise ConfigurationError("FileConnector needs caches whose first axis is blocks")
        self._kv_caches = dict(kv_caches)
        self._folder.mkdir(parents=True, exist_ok=True)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        orders = cast(FileMetadata, self.connector_metadata)
        for path, blocks in orders.loads.values():
            try:
                self._load(path, blocks)
            except (OSError, SafetensorError, RuntimeError, KeyError):  # gone, cut short, or of another model
                self._failed_blocks.update(blocks)
        for request_id, (path, blocks) in orders.saves.items():
            self._save(path, blocks)
            self._saved.add(request_id)

    def _load(self, path: Path, blocks: list[int]) -> None:
        pages = load_file(path)
        for name, cache in self._kv_caches.items():
            cache[blocks] = pages[name][-len(blocks) :].to(cache.device)

    def _save(self, path: Path, blocks: list[int]) -> None:
        unfinished = path.with_suffix(f".{os.getpid()}")
        save_file({name: cache[blocks].contiguous() for name, cache in self._kv_caches.items()}, unfinished)
        unfinished.rename(path)  # so that nobody ever loads half a file

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None: ...

    def wait_for_save(self) -> None: ...

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        saved, self._saved = self._saved, set()
        return saved, None

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed


def main() -> None:
    """Save a prompt of 18 tokens on one node, and load it on another."""
    with tempfile.TemporaryDirectory() as folder:
        config = engine_config(
            "FileConnector",
            kv_connector_module_path="custom_connector",
            kv_connector_extra_config={"folder": folder},
        )
        shape = CacheShape(layout="per-layer")
        with ModelFreeNode(config, shape) as first, ModelFreeNode(config, shape) as second:
            blocks, _ = first.prefill("first", 18, seed=1)
            expected = first.contents(blocks[:4])
            first.step()
            print(f"saved 4 blocks to {len(os.listdir(folder))} file; held blocks: {len(first.held)}")

            table, num_tokens = second.start_load(Request("second", 18))
            second.step()
            same = torch.equal(second.contents(table[:4]), expected)
            print(f"loaded {num_tokens} of 18 tokens; bytes identical: {'yes' if same else 'no'}")


if __name__ == "__main__":
    main()
