"""A node without a model, for tests of connectors: it makes the same calls as an engine, in the same order.

The caches hold random numbers instead of keys and values; a connector handles both in the same way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import torch

from ..base import (
    ContentItem,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    ScheduledRequest,
    SchedulerHalf,
    WorkerHalf,
)
from ..config import CacheConfig, EngineConfig, KVRole, KVTransferConfig, ModelConfig
from ..factory import KVConnectorFactory
from ..kv_cache_specs import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from ..output import KVConnectorOutput
from ..stats import KVConnectorStats

_POLL_S = 0.001


@dataclass
class Request:
    """A request as an engine's scheduler holds it. Its prompt counts up from `first_token_id`."""

    request_id: str
    num_prompt_tokens: int
    kv_transfer_params: Mapping[str, Any] | None = None
    num_computed_tokens: int = 0
    finish_reason: str | None = None
    first_token_id: int = 0
    cache_salt: str | None = None
    lora_id: str | None = None
    mm_features: Sequence[ContentItem] = ()
    prompt_embeds: torch.Tensor | None = None

    @property
    def prompt_token_ids(self) -> Sequence[int]:
        return range(self.first_token_id, self.first_token_id + self.num_prompt_tokens)


@dataclass(frozen=True)
class Step:
    """A step of an engine that computes nothing."""

    kv_connector_metadata: KVConnectorMetadata | None = None
    finished_req_ids: set[str] = field(default_factory=set)
    preempted_req_ids: set[str] = field(default_factory=set)
    scheduled_requests: Sequence[ScheduledRequest] = ()

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(item.num_scheduled_tokens for item in self.scheduled_requests)


@dataclass(frozen=True)
class CacheShape:
    """A small pool of one group of equal layers.

    Attributes:
        layout: `"uniform"` or `"per-layer"`, both in memory that the connector allocates; or `"foreign"`: per layer, in
            memory that the node allocates.
    """

    num_layers: int = 3
    num_blocks: int = 32
    block_size: int = 4
    num_kv_heads: int = 2
    head_size: int = 8
    dtype: torch.dtype = torch.float32
    layout: Literal["uniform", "per-layer", "foreign"] = "uniform"

    @property
    def spec(self) -> FullAttentionSpec:
        return FullAttentionSpec(self.block_size, self.num_kv_heads, self.head_size, self.dtype)

    @property
    def logical_page(self) -> tuple[int, ...]:
        """Shape of one layer's page: key or value, slot, head, element."""
        return (2, self.block_size, self.num_kv_heads, self.head_size)

    def kv_cache_config(self) -> KVCacheConfig:
        names = tuple(f"model.layers.{index}.self_attn" for index in range(self.num_layers))
        size = self.num_blocks * self.spec.page_size_bytes
        tensors = tuple(KVCacheTensor(size, (name,)) for name in names)
        return KVCacheConfig(self.num_blocks, tensors, (KVCacheGroupSpec(names, self.spec),))


def engine_config(
    connector: str, *, role: KVRole = "kv_both", model: str = "tiny", block_size: int = 4, **transfer: Any
) -> EngineConfig:
    """Return a node's configuration; `transfer` are fields of `KVTransferConfig`."""
    return EngineConfig(
        model=ModelConfig(model=model, dtype="float32", max_model_len=128),
        cache=CacheConfig(block_size=block_size),
        kv_transfer=KVTransferConfig(kv_connector=connector, kv_role=role, **transfer),
    )


class ModelFreeNode:
    """Both halves of a connector, a pool, and a block allocator. A context manager that shuts down.

    Attributes:
        cache: `(num_layers, num_blocks, 2, block_size, num_kv_heads, head_size)`, in logical order.
        outputs: The worker half's reports, of the steps in which it reported something.
    """

    def __init__(self, config: EngineConfig, shape: CacheShape) -> None:
        self.config = config
        self.shape = shape
        self.kv_cache_config = shape.kv_cache_config()
        create = KVConnectorFactory.create_connector
        self.worker: WorkerHalf = create(config, KVConnectorRole.WORKER, self.kv_cache_config)
        try:
            self.cache = self._register(self.kv_cache_config)
        except BaseException:
            self.worker.shutdown()
            raise
        self.scheduler: SchedulerHalf = create(config, KVConnectorRole.SCHEDULER, self.kv_cache_config)
        handshake = self.worker.get_handshake_metadata()
        self.scheduler.set_handshake_metadata(_by_rank(handshake))
        self.free_blocks = list(range(1, shape.num_blocks))
        self.held: dict[str, list[int]] = {}
        self.outputs: list[KVConnectorOutput] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.worker.shutdown()
        self.scheduler.shutdown()
        del self.worker, self.scheduler, self.cache  # the last view of the memory closes its descriptors

    # -- memory --------------------------------------------------------------------------------------

    def _register(self, kv_cache_config: KVCacheConfig) -> torch.Tensor:
        shape = self.shape
        num_bytes = sum(tensor.size for tensor in kv_cache_config.kv_cache_tensors)
        if shape.layout == "foreign":
            memory = torch.zeros(num_bytes, dtype=torch.int8)
        else:
            memory = self.worker.allocate_kv_memory(num_bytes, torch.device("cpu"))
        elements = memory.view(shape.dtype)
        if shape.layout == "uniform":
            cache = elements.view(shape.num_blocks, shape.num_layers, *shape.logical_page).transpose(0, 1)
            self.worker.register_cross_layers_kv_cache(cache, object)
        else:
            cache = elements.view(shape.num_layers, shape.num_blocks, *shape.logical_page)
            names = kv_cache_config.kv_cache_groups[0].layer_names
            self.worker.register_kv_caches(dict(zip(names, cache, strict=True)))
        return cache

    def fill(self, block_ids: Sequence[int], seed: int) -> None:
        """Put random numbers into blocks."""
        generator = torch.Generator().manual_seed(seed)
        for block in block_ids:
            page = torch.rand((self.shape.num_layers, *self.shape.logical_page), generator=generator)
            self.cache[:, block] = page.to(self.shape.dtype)

    def contents(self, block_ids: Sequence[int]) -> torch.Tensor:
        """Return a copy of blocks: `(num_layers, num_block_ids, 2, block_size, num_kv_heads, head_size)`."""
        return self.cache[:, list(block_ids)].clone()

    # -- an engine's calls ---------------------------------------------------------------------------

    def allocate(self, num_tokens: int) -> list[int]:
        """Take free blocks for tokens, the highest first."""
        num_blocks = -(-num_tokens // self.shape.block_size)
        taken, self.free_blocks = self.free_blocks[-num_blocks:][::-1], self.free_blocks[:-num_blocks]
        return taken

    def prefill(
        self, request_id: str, num_tokens: int, *, seed: int = 0
    ) -> tuple[list[int], dict[str, Any] | None]:
        """Run a request that is to be handed over, until it ends.

        Returns:
            Its blocks, and the `kv_transfer_params` for the client.
        """
        request = Request(request_id, num_tokens, {"do_remote_decode": True})
        self.scheduler.on_new_request(request)
        assert self.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
        blocks = self.allocate(num_tokens)
        self.scheduler.update_state_after_alloc(request, [blocks], 0)
        self.step()  # the step that computes the prompt
        self.fill(blocks, seed)
        request.num_computed_tokens = num_tokens
        return blocks, self.finish(request, blocks, "length")

    def start_load(self, request: Request, local_blocks: Sequence[int] = ()) -> tuple[list[int], int]:
        """Ask how much can be loaded beyond `local_blocks`, and order the load.

        Returns:
            The request's whole block table, and the number of tokens to load.
        """
        num_here = len(local_blocks) * self.shape.block_size
        num_tokens, _ = self.scheduler.get_num_new_matched_tokens(request, num_here)
        assert num_tokens is not None
        blocks = [*local_blocks, *self.allocate(request.num_prompt_tokens - num_here)]
        self.scheduler.update_state_after_alloc(request, [blocks], num_tokens)
        return blocks, num_tokens

    def finish(self, request: Request, blocks: list[int], reason: str) -> dict[str, Any] | None:
        """End a request; its blocks are freed now, or as soon as the connector releases them."""
        request.finish_reason = reason
        delay_free, params = self.scheduler.request_finished(request, [blocks])
        if delay_free:
            self.held[request.request_id] = blocks
        else:
            self.free_blocks += blocks
        return params

    def step(self) -> KVConnectorOutput:
        """Run one step of both halves, without a forward pass."""
        metadata = self.scheduler.build_connector_meta(Step())
        self.worker.bind_connector_metadata(metadata)
        self.worker.start_load_kv(None)
        self.worker.wait_for_save()
        output = KVConnectorOutput()
        sending, recving = self.worker.get_finished(set())
        output.finished_sending, output.finished_recving = sending or set(), recving or set()
        output.invalid_block_ids = self.worker.get_block_ids_with_load_errors()
        output.load_errors = self.worker.take_load_errors()
        output.kv_connector_stats = self.worker.get_kv_connector_stats()
        self.worker.clear_connector_metadata()
        self.scheduler.update_connector_output(output)
        for request_id in output.finished_sending:
            self.free_blocks += self.held.pop(request_id)
        if not output.is_empty():
            self.outputs.append(output)
        return output

    # -- results -------------------------------------------------------------------------------------

    def step_until(self, done: Callable[[], bool], *others: ModelFreeNode, timeout_s: float = 20.0) -> None:
        """Step this node, and other nodes of this process with it, until `done` returns True.

        Raises:
            TimeoutError: `done` did not return True within `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        while not done():
            if time.monotonic() > deadline:
                raise TimeoutError(f"timed out after {timeout_s} s of steps; reported so far: {self.outputs}")
            for node in (self, *others):
                node.step()
            time.sleep(_POLL_S)

    def num_reports(self, request_id: str, direction: Literal["sending", "recving"]) -> int:
        """Return how often a request was named as finished."""
        return sum(request_id in getattr(output, f"finished_{direction}") for output in self.outputs)

    def load_error(self, request_id: str) -> str:
        """Return why a load failed; empty if it did not."""
        return "".join(output.load_errors.get(request_id, "") for output in self.outputs)

    @property
    def invalid_block_ids(self) -> set[int]:
        """All blocks that were reported as failed."""
        return set().union(*(output.invalid_block_ids for output in self.outputs))

    @property
    def stats(self) -> KVConnectorStats:
        """All figures so far."""
        total = KVConnectorStats()
        for output in self.outputs:
            total = total if output.kv_connector_stats is None else total.aggregate(output.kv_connector_stats)
        return total


def _by_rank(
    handshake: KVConnectorHandshakeMetadata | None,
) -> dict[int, KVConnectorHandshakeMetadata]:
    return {} if handshake is None else {0: handshake}
