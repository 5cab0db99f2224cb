"""Connectors: which blocks of which request cross between nodes, which peer may read them, and until when.

The modules beside this file are the contract, for authors of connectors and of engines:

    base            the two halves of a connector, and the class that authors subclass
    compat          a class in vLLM's style instead of two halves
    config          what an engine and its connector are set to
    kv_cache_specs  what a KV cache consists of
    output          what a step reports; `aggregator` joins the reports of several ranks
    stats           figures of handoffs, and the table of metrics
    errors          what goes wrong about a request
    factory         from a name to a connector
    pytorch         whether PyTorch is installed

Each folder is one room:

    p2p             the connector that carries caches from node to node
    handoff         its protocol, as pure state machines
    planning        which bytes of one pool go where in another, as pure functions
    identity        digests: do two nodes run the same model, and do two prompts have the same cache?
    vllm            kvferry inside vLLM
    testing         the suites that every connector passes

The connector over each built-in transport is here too, under the name of the transport's class:
`SharedMemoryConnector`, `TcpConnector` and so on.
"""

from __future__ import annotations

if __name__ != "kvferry.connector":  # under a second name, the same file would define a second set of classes
    raise ImportError("import kvferry.connector, not connector: `pip install -e .` first")

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .aggregator import KVOutputAggregator
from .base import (
    ConnectorRequest,
    KVConnectorBase,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    ScheduledRequest,
    SchedulerHalf,
    SchedulerOutput,
    WorkerHalf,
)
from .config import (
    AttentionLayerConfig,
    CacheConfig,
    CompilationConfig,
    EngineConfig,
    KVTransferConfig,
    ModelConfig,
    ModelIdentity,
    ParallelConfig,
    SchedulerConfig,
)
from .factory import KVConnectorFactory, built_in_schemes
from .kv_cache_specs import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from .output import KVConnectorOutput
from .stats import KVConnectorStats, StatsCollector, TransferRecord

if TYPE_CHECKING:
    from .identity.content import block_digests
    from .p2p.connector import PeerToPeerConnector

#: Imported at their first use, because they import the protocol and the transports.
_LAZY = {
    "block_digests": ".identity.content",
    "PeerToPeerConnector": ".p2p.connector",
}

__all__ = [
    "AttentionLayerConfig",
    "AttentionSpec",
    "CacheConfig",
    "ChunkedLocalAttentionSpec",
    "CompilationConfig",
    "ConnectorRequest",
    "EncoderOnlyAttentionSpec",
    "EngineConfig",
    "FullAttentionSpec",
    "KVCacheConfig",
    "KVCacheGroupSpec",
    "KVCacheSpec",
    "KVCacheTensor",
    "KVConnectorBase",
    "KVConnectorFactory",
    "KVConnectorHandshakeMetadata",
    "KVConnectorMetadata",
    "KVConnectorOutput",
    "KVConnectorRole",
    "KVConnectorStats",
    "KVOutputAggregator",
    "KVTransferConfig",
    "MambaSpec",
    "ModelConfig",
    "ModelIdentity",
    "ParallelConfig",
    "PeerToPeerConnector",
    "ScheduledRequest",
    "SchedulerConfig",
    "SchedulerHalf",
    "SchedulerOutput",
    "SlidingWindowSpec",
    "StatsCollector",
    "TransferRecord",
    "UniformTypeKVCacheSpecs",
    "WorkerHalf",
    "block_digests",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name], __name__), name)
    if name.endswith("Connector") and (scheme := built_in_schemes().get(name)) is not None:
        from .p2p.connector import connector_over

        return connector_over(scheme)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
