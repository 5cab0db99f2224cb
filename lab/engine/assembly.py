"""Make the parts of an engine from its settings, in the only possible order."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...connector.base import KVConnectorRole, SchedulerHalf
from ...connector.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig, SchedulerConfig
from ...connector.factory import KVConnectorFactory
from ...connector.kv_cache_specs import KVCacheConfig
from ...connector.p2p.worker import new_epoch
from ...runner_mixin.kv_cache import (
    CacheEvents,
    KVCacheManager,
    get_request_block_hasher,
    init_none_hash,
    sha256,
)
from ...transports.errors import ConfigurationError
from .attention import IMPLEMENTATION, attention_layers
from .executor import Executor, SingleProcessExecutor
from .memory import plan_pool
from .parallel.executor import MultiProcessExecutor
from .parallel.sharding import layers_of_rank, require_divisible
from .publisher import EventPublisher
from .request import BlockHasher
from .scheduler import Scheduler
from .settings import EngineSettings
from .weights import ModelDescription, describe_model, load_model, model_folder


@dataclass(frozen=True)
class Parts:
    """The parts of a running engine.

    Attributes:
        config: The configuration derived from the settings.
        connector_name: Class of the connector; empty if there is none.
        connector_description: What the connector says of this start of the node.
        events: Those of the prefix cache, for the publisher; None without one.
        resources: Closing it shuts the connector down, and stops the executor's processes.
    """

    model: ModelDescription
    config: EngineConfig
    kv_cache_config: KVCacheConfig
    manager: KVCacheManager
    scheduler: Scheduler
    executor: Executor
    hasher: BlockHasher
    connector_name: str
    connector_description: Mapping[str, Any]
    events: CacheEvents | None
    publisher: EventPublisher | None
    resources: ExitStack


def assemble(settings: EngineSettings) -> Parts:
    """Make everything that a step needs.

    Raises:
        ConfigurationError: a setting, the model or a connector option cannot work. All that was started has
            ended.
        KVTransferStateError: this process runs an engine with a connector already.
    """
    device = _device(settings.device)
    if settings.num_threads:
        torch.set_num_threads(settings.num_threads)
    if settings.kv_transfer is not None:
        # Check this before the model is loaded, so that a wrong name is reported at once.
        KVConnectorFactory.check_options(settings.kv_transfer)
    dtype = _dtype(settings.dtype, device)
    model = describe_model(model_folder(settings.model))
    if settings.tensor_parallel_size > 1:
        require_divisible(model.text_config, settings.tensor_parallel_size)
    with ExitStack() as resources:
        config, pool, executor = _start(settings, model, _engine_config(settings, model, dtype), device)
        resources.callback(executor.close)
        connector = _scheduler_half(config, pool, executor, resources)
        if settings.hash_seed:
            init_none_hash(sha256, settings.hash_seed)
        manager = KVCacheManager(
            pool, config.model.max_model_len, enable_prefix_caching=settings.enable_prefix_caching
        )
        events = publisher = None
        if settings.kv_events_endpoint:
            events, publisher = CacheEvents(manager), EventPublisher(settings.kv_events_endpoint)
            resources.callback(publisher.close)
        return Parts(
            model=model,
            config=config,
            kv_cache_config=pool,
            manager=manager,
            scheduler=Scheduler(config, manager, connector, events),
            executor=executor,
            hasher=get_request_block_hasher(settings.block_size, sha256),
            connector_name="" if connector is None else type(connector).__name__,
            connector_description={} if connector is None else connector.describe(),
            events=events,
            publisher=publisher,
            resources=resources.pop_all(),
        )


def _start(
    settings: EngineSettings, model: ModelDescription, config: EngineConfig, device: torch.device
) -> tuple[EngineConfig, KVCacheConfig, Executor]:
    """Plan the pool and load the model, here or in worker processes."""
    may_shorten = settings.max_model_len == 0
    if settings.tensor_parallel_size == 1:
        dtype = getattr(torch, config.model.dtype)
        # Load the model before the pool is planned, because the weights take memory.
        weights = load_model(model.folder, dtype, device, IMPLEMENTATION)
        config, pool = plan_pool(config, device, may_shorten=may_shorten)
        return config, pool, SingleProcessExecutor(config, pool, weights, settings.layout)
    config, pool = plan_pool(config, device, may_shorten=may_shorten)
    config = replace(config, cache=replace(config.cache, num_blocks_override=pool.num_blocks))
    executor = MultiProcessExecutor(config, model.folder, settings.layout, settings.num_threads)
    return config, pool, executor


def _scheduler_half(
    config: EngineConfig, pool: KVCacheConfig, executor: Executor, resources: ExitStack
) -> SchedulerHalf | None:
    if config.kv_transfer is None:
        return None
    connector = KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, pool)
    resources.callback(connector.shutdown)
    if executor.handshake_metadata:
        connector.set_handshake_metadata(executor.handshake_metadata)
    return connector


def _engine_config(settings: EngineSettings, model: ModelDescription, dtype: torch.dtype) -> EngineConfig:
    layers = attention_layers(model.text_config)
    num_kv_heads = {layer.num_kv_heads for layer in layers}
    return EngineConfig(
        model=ModelConfig(
            model=model.text_config.model_type,
            dtype=str(dtype).removeprefix("torch."),
            max_model_len=_max_model_len(settings, model),
            layers=layers_of_rank(layers, settings.tensor_parallel_size),
            num_kv_heads=num_kv_heads.pop() if len(num_kv_heads) == 1 else 0,
            identity=model.identity,
        ),
        cache=CacheConfig(
            block_size=settings.block_size,
            # The ranks share the machine's memory, so each gets an equal part.
            memory_utilization=settings.memory_utilization / settings.tensor_parallel_size,
            enable_prefix_caching=settings.enable_prefix_caching,
            hash_seed=settings.hash_seed,
            num_blocks_override=settings.num_blocks,
            kv_cache_layout=settings.page_order,
        ),
        scheduler=SchedulerConfig(
            max_num_batched_tokens=settings.max_num_batched_tokens, max_num_seqs=settings.max_num_seqs
        ),
        parallel=ParallelConfig(
            settings.tensor_parallel_size, epoch=new_epoch() if settings.tensor_parallel_size > 1 else 0
        ),
        kv_transfer=settings.kv_transfer,
    )


def _max_model_len(settings: EngineSettings, model: ModelDescription) -> int:
    trained: int | None = getattr(model.text_config, "max_position_embeddings", None)
    if trained is None:
        return _required_model_len(settings)
    if settings.max_model_len > trained:
        raise ConfigurationError(
            f"max_model_len={settings.max_model_len}: the model was trained for {trained} tokens",
            key="max_model_len",
            value=settings.max_model_len,
        )
    return settings.max_model_len or trained


def _required_model_len(settings: EngineSettings) -> int:
    """Return the length that the user set, because the model's configuration has no limit."""
    if settings.max_model_len == 0:
        raise ConfigurationError(
            "max_model_len=0: the model does not say how long a sequence it was trained for; set max_model_len",
            key="max_model_len",
            value=0,
        )
    return settings.max_model_len


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigurationError(f"device={name!r} is not a device", key="device", value=name) from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigurationError(f"device={name!r}; allowed: cpu, cuda", key="device", value=name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigurationError(
            f"device={name!r}: this machine has {torch.cuda.device_count()} CUDA devices that PyTorch can use",
            key="device",
            value=name,
        )
    return device


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype), name
    return dtype
