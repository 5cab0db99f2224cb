"""Settings of an engine and of its connector. They are frozen: a setting never changes after the start."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Self, get_args

from ..transports.checked import text
from ..transports.errors import ConfigurationError
from ..transports.options import from_mapping, require_valid

KVRole = Literal["kv_producer", "kv_consumer", "kv_both"]
LoadFailurePolicy = Literal["recompute", "fail"]
#: The order of tokens (N) and heads (H) inside a page, D being the elements of a head. The names are vLLM's.
PageOrder = Literal["NHD", "HND"]


@dataclass(frozen=True)
class AttentionLayerConfig:
    """What the KV cache of one attention layer depends on. Head counts are this rank's.

    Attributes:
        name: The layer's name; its number is the only integer in it, e.g. `"model.layers.3.self_attn"`.
        num_kv_heads: Heads of keys and of values.
        head_size: Elements per head.
        sliding_window: Number of tokens that a token sees, itself included; None: all.
        is_decoder: False for a layer of an encoder, which keeps no cache.
        kv_sharing_target: Name of the layer whose cache this one reads instead of its own; empty: none.
        attention_chunk_size: A token sees only its own aligned chunk of this many tokens; None: no chunks.
    """

    name: str
    num_kv_heads: int
    head_size: int
    sliding_window: int | None = None
    is_decoder: bool = True
    kv_sharing_target: str = ""
    attention_chunk_size: int | None = None

    def __post_init__(self) -> None:
        if self.sliding_window is not None and self.attention_chunk_size is not None:
            raise ConfigurationError(
                f"layer {self.name!r} has both sliding_window={self.sliding_window} and "
                f"attention_chunk_size={self.attention_chunk_size}: set only one of them",
                key="attention_chunk_size",
                value=self.attention_chunk_size,
            )


@dataclass(frozen=True)
class RecurrentLayerConfig:
    """What the state of one recurrent layer depends on. Shapes are this rank's.

    Attributes:
        name: The layer's name; its number is the only integer in it, e.g. `"model.layers.3.mamba"`.
        state_shapes: Shape of each state tensor of one request.
        state_dtypes: Name of each state tensor's element type, e.g. `"float32"`.
    """

    name: str
    state_shapes: tuple[tuple[int, ...], ...]
    state_dtypes: tuple[str, ...]


@dataclass(frozen=True)
class ModelIdentity:
    """What the model was made of, part by part: digests, or any strings that differ when the part differs.

    Peers must have equal weights, configuration and adapters. The draft model may differ: its layers are
    handed over only between nodes that have the same one. Tokenizer and chat template may differ, because
    each prompt's tokens are compared; the consumer logs such a difference once. See `identity/model.py`.

    Attributes:
        tokenizer: If it is empty, the tokenizer is unknown and is not compared.
        chat_template: Likewise.
        draft: A name for everything that a draft model's cache depends on; empty if there is no draft model.
    """

    weights: str = ""
    configuration: str = ""
    adapters: str = ""
    tokenizer: str = ""
    chat_template: str = ""
    draft: str = ""


@dataclass(frozen=True)
class ModelConfig:
    """What the KV cache of the whole model depends on.

    Attributes:
        model: Its kind or name. Peers must have the same one.
        dtype: Name of the activation dtype, e.g. `"float32"`.
        max_model_len: Longest sequence, prompt and answer together, in tokens.
        layers: Its attention layers, in the order in which they run.
        recurrent_layers: Its recurrent layers, likewise.
        num_kv_heads: KV heads of each attention layer in the whole model, before they are spread over ranks;
            0 if layers differ or the number is unknown. In that case no two ranks are taken to keep the same
            head.
        num_draft_kv_heads: The same for the layers of a draft model.
        num_layers: Layers that keep a cache, over all pipeline stages; 0: each rank keeps all of them.
        identity: What else must be equal on a peer, or should be.
    """

    model: str
    dtype: str
    max_model_len: int
    layers: tuple[AttentionLayerConfig, ...] = ()
    recurrent_layers: tuple[RecurrentLayerConfig, ...] = ()
    num_kv_heads: int = 0
    num_draft_kv_heads: int = 0
    num_layers: int = 0
    identity: ModelIdentity = ModelIdentity()


@dataclass(frozen=True)
class CacheConfig:
    """The KV cache pool.

    Attributes:
        block_size: Tokens per block.
        cache_dtype: Name of the stored dtype; `"auto"` means the model's.
        memory_utilization: Share of the device's memory that the node may use, 0 to 1.
        enable_prefix_caching: Keep and reuse blocks of finished requests.
        hash_seed: Seed of the block hashes; nodes that share it agree on them. Empty: random per process.
        num_blocks_override: Number of blocks; 0: as many as fit into the memory.
        attention_backend: Name of the attention backend; `"auto"`: the best one for the device.
        kv_cache_layout: The order inside a page: each token's heads together, or each head's tokens.
    """

    block_size: int = 16
    cache_dtype: str = "auto"
    memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    hash_seed: str = ""
    num_blocks_override: int = 0
    attention_backend: str = "auto"
    kv_cache_layout: PageOrder = "NHD"

    def __post_init__(self) -> None:
        if self.kv_cache_layout not in get_args(PageOrder):
            raise ConfigurationError(
                f"kv_cache_layout must be one of {', '.join(map(repr, get_args(PageOrder)))}, got "
                f"{self.kv_cache_layout!r}",
                key="kv_cache_layout",
                value=self.kv_cache_layout,
            )


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of one step: tokens (the prefill chunk) and requests."""

    max_num_batched_tokens: int = 512
    max_num_seqs: int = 16
    enable_hybrid_kv_cache_manager: bool = True


@dataclass(frozen=True)
class ParallelConfig:
    """How the model is spread over ranks.

    Attributes:
        epoch: Random number of this start of the node, the same for all its ranks; 0: there is one rank, and
            it draws the number.
    """

    tensor_parallel_size: int = 1
    tensor_parallel_rank: int = 0
    pipeline_parallel_size: int = 1
    pipeline_parallel_rank: int = 0
    epoch: int = 0

    @property
    def world_size(self) -> int:
        """Ranks of the node."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def rank(self) -> int:
        """This rank's number in the node: stage by stage, in each stage by tensor-parallel rank."""
        return self.pipeline_parallel_rank * self.tensor_parallel_size + self.tensor_parallel_rank


@dataclass(frozen=True)
class CompilationConfig:
    """How the model is compiled, for engines that compile it.

    Attributes:
        enable_sequence_parallelism: Between layers, each tensor-parallel rank keeps a share of the tokens.
        full_graph: The model is one graph: it is not split at the attention layers.
        use_graph_partition: The compiler itself partitions the graph, after its passes.
        compile_sizes: Token counts that each have their own compiled graph.
    """

    enable_sequence_parallelism: bool = False
    full_graph: bool = False
    use_graph_partition: bool = False
    compile_sizes: frozenset[int] = frozenset()


@dataclass(frozen=True)
class KVTransferConfig:
    """Which connector, in which role, with which options. The names are vLLM's.

    Attributes:
        kv_connector: Name of a registered connector, or of a class in `kv_connector_module_path`.
        kv_role: `kv_producer` offers, `kv_consumer` loads, `kv_both` does what each request asks.
        engine_id: This node's name in the handoff protocol; unique per node, by default random.
        kv_connector_module_path: Import path of an out-of-tree connector's module; empty for registered ones.
        kv_connector_extra_config: Options of the connector; it refuses those that it does not know.
        kv_load_failure_policy: What to do with a request whose load fails: `recompute` the prompt, or `fail`
            it.

    Raises:
        ConfigurationError: a value is not allowed; the error names its key.
    """

    kv_connector: Annotated[str, text(max_chars=1024, min_chars=1)]
    kv_role: KVRole
    engine_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    kv_connector_module_path: str = ""
    kv_connector_extra_config: Mapping[str, Any] = field(default_factory=dict)
    kv_load_failure_policy: LoadFailurePolicy = "recompute"

    def __post_init__(self) -> None:
        require_valid(self)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Self:
        """Parse what a user wrote, e.g. the JSON of `--kv-transfer-config`.

        Raises:
            ConfigurationError: a key is unknown, missing, or has a value that is not allowed.
        """
        return from_mapping(cls, mapping, "key", " in the KV transfer configuration")

    @property
    def is_kv_producer(self) -> bool:
        return self.kv_role in ("kv_producer", "kv_both")

    @property
    def is_kv_consumer(self) -> bool:
        return self.kv_role in ("kv_consumer", "kv_both")


@dataclass(frozen=True)
class EngineConfig:
    """All settings of a node. `kv_transfer` is None on a node that neither offers nor loads."""

    model: ModelConfig
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    compilation: CompilationConfig = field(default_factory=CompilationConfig)
    kv_transfer: KVTransferConfig | None = None
