"""WHEN: the seam to a model runner: the lifecycle of one step, cache allocation and binding.

`kv_cache/` is an engine part beside the seam, which the seam does not need: the block manager of a scheduler.
"""

from __future__ import annotations

if __name__ != "kvferry.runner_mixin":  # the same file under a second name would be a second set of classes
    raise ImportError("import kvferry.runner_mixin, not runner_mixin: `pip install -e .` first")

from ..connector import pytorch

if not pytorch.IS_INSTALLED:
    raise pytorch.missing(__name__)

from .attention.backend import (
    AttentionBackend,
    AttentionGroup,
    AttentionParams,
    LookBack,
    MetadataBuilder,
    MultipleOf,
)
from .attention.building import build_attn_metadata
from .attention.layer import AttentionLayer
from .attention.metadata import (
    AttentionMetadata,
    CommonAttentionMetadata,
    StepBatch,
    compute_slot_mapping,
)
from .attention.selection import (
    attention_backend_names,
    register_attention_backend,
    select_attention_backend,
)
from .binding import (
    add_kv_sharing_layers_to_kv_cache_groups,
    bind_kv_cache,
    extract_layer_index,
    get_kv_sharing_layers,
    initialize_kv_cache_for_kv_sharing,
)
from .block_sizes import prepare_kernel_block_sizes, select_common_block_size
from .forward_context import (
    EMPTY_FORWARD_CONTEXT,
    ForwardContext,
    LayerWithCache,
    get_forward_context,
    set_forward_context,
)
from .hooks import maybe_transfer_kv_layer
from .hybrid_uniform import allocate_hybrid_uniform_kv_caches, use_hybrid_uniform_kv_cache
from .kv_caches import (
    AttentionSetup,
    get_kv_cache_spec,
    init_attn_backend,
    init_kv_cache,
    resolve_kv_cache_dtype,
)
from .layouts import KVCacheLayout, init_kv_cache_for_connector
from .memory import MemorySnapshot, allocate_pool, request_memory
from .mixin import KVConnectorModelRunnerMixin
from .multimodal import gather_mm_placeholders, sanity_check_mm_encoder_outputs, scatter_mm_placeholders
from .outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput
from .recurrent import StateMetadata, build_state_metadata
from .sequence_parallel import is_residual_scattered_for_sp
from .state import (
    ensure_kv_transfer_initialized,
    ensure_kv_transfer_shutdown,
    get_kv_transfer_group,
    has_kv_transfer_group,
    install_kv_transfer_group,
    kv_transfer_group,
)
from .uniform import allocate_uniform_kv_caches, use_uniform_kv_cache
from .views import mamba_state_views

__all__ = [
    "EMPTY_FORWARD_CONTEXT",
    "EMPTY_MODEL_RUNNER_OUTPUT",
    "AttentionBackend",
    "AttentionGroup",
    "AttentionLayer",
    "AttentionMetadata",
    "AttentionParams",
    "AttentionSetup",
    "CommonAttentionMetadata",
    "ForwardContext",
    "KVCacheLayout",
    "KVConnectorModelRunnerMixin",
    "LayerWithCache",
    "LookBack",
    "MemorySnapshot",
    "MetadataBuilder",
    "ModelRunnerOutput",
    "MultipleOf",
    "StateMetadata",
    "StepBatch",
    "add_kv_sharing_layers_to_kv_cache_groups",
    "allocate_hybrid_uniform_kv_caches",
    "allocate_pool",
    "allocate_uniform_kv_caches",
    "attention_backend_names",
    "bind_kv_cache",
    "build_attn_metadata",
    "build_state_metadata",
    "compute_slot_mapping",
    "ensure_kv_transfer_initialized",
    "ensure_kv_transfer_shutdown",
    "extract_layer_index",
    "gather_mm_placeholders",
    "get_forward_context",
    "get_kv_cache_spec",
    "get_kv_sharing_layers",
    "get_kv_transfer_group",
    "has_kv_transfer_group",
    "init_attn_backend",
    "init_kv_cache",
    "init_kv_cache_for_connector",
    "initialize_kv_cache_for_kv_sharing",
    "install_kv_transfer_group",
    "is_residual_scattered_for_sp",
    "kv_transfer_group",
    "mamba_state_views",
    "maybe_transfer_kv_layer",
    "prepare_kernel_block_sizes",
    "register_attention_backend",
    "request_memory",
    "resolve_kv_cache_dtype",
    "sanity_check_mm_encoder_outputs",
    "scatter_mm_placeholders",
    "select_attention_backend",
    "select_common_block_size",
    "set_forward_context",
    "use_hybrid_uniform_kv_cache",
    "use_uniform_kv_cache",
]
