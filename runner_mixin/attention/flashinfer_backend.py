"""FlashInfer's paged attention, available if its package is installed and the cache is on CUDA.

Written against FlashInfer's documented API (0.2 and later): `BatchPrefillWithPagedKVCacheWrapper` for steps
with prompts, `BatchDecodeWithPagedKVCacheWrapper` for steps of single tokens. The arguments are tested
against a stand-in that gives each its documented meaning, and the results with the real package on a GPU
(`tests/gpu/test_attention_backends.py`; docs/cuda.md says what has run). FlashInfer compiles a kernel for
each kind of step and of layer when it first runs.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...transports.errors import BackendUnavailableError
from .backend import AttentionBackend, AttentionGroup, AttentionParams, MetadataBuilder, MultipleOf
from .metadata import AttentionMetadata, CommonAttentionMetadata
from .paged import write_kv_to_slots

if TYPE_CHECKING:
    import numpy.typing as npt

#: The size that FlashInfer's documentation recommends for partial results.
_WORKSPACE_BYTES = 128 << 20
_DTYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class PageList:
    """A batch's kernel blocks in FlashInfer's format.

    Attributes:
        indptr: `(num_reqs + 1,)` int32, on the CPU: where each request's blocks begin in `indices`.
        indices: `(num_blocks,)` int32, on the device: block ids, request after request.
        last_page_len: `(num_reqs,)` int32, on the CPU: tokens in each request's last block.
    """

    indptr: torch.Tensor
    indices: torch.Tensor
    last_page_len: torch.Tensor

    @classmethod
    def of(cls, common: CommonAttentionMetadata, block_size: int) -> PageList:
        """List the blocks of a batch."""
        seq_lens = common.seq_lens_cpu.numpy()
        counts: npt.NDArray[np.int32] = -(-seq_lens // block_size)
        device, width = common.block_table.device, common.block_table.shape[1]
        used = torch.from_numpy(np.arange(width) < counts[:, None]).to(device)
        indptr = torch.from_numpy(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32))
        last = torch.from_numpy((seq_lens - (counts - 1) * block_size).astype(np.int32))
        # Planning reads these on the CPU; if they were on the device, it would have to wait for the device.
        return cls(indptr, common.block_table[used], last)


class FlashInferMetadataBuilder(MetadataBuilder):
    """Keeps one FlashInfer wrapper per kind of step and kind of layer, because each has its own plans."""

    def __init__(
        self, group: AttentionGroup, kernel_block_size: int, device: torch.device, workspace: torch.Tensor
    ) -> None:
        super().__init__(group, kernel_block_size, device, workspace)
        self._wrappers: dict[tuple[bool, AttentionParams], Any] = {}

    def build(self, common: CommonAttentionMetadata) -> FlashInferMetadata:
        return FlashInferMetadata(common, PageList.of(common, self.kernel_block_size), self)

    def wrapper(self, decode: bool, params: AttentionParams) -> Any:
        """Return the wrapper for layers with these parameters, for steps of single tokens or for steps with
        prompts.
        """
        wrapper = self._wrappers.get((decode, params))
        if wrapper is None:
            flashinfer = importlib.import_module("flashinfer")
            kind = (
                flashinfer.BatchDecodeWithPagedKVCacheWrapper
                if decode
                else flashinfer.BatchPrefillWithPagedKVCacheWrapper
            )
            wrapper = self._wrappers[decode, params] = kind(self.workspace.view(torch.uint8), "NHD")
        return wrapper


@dataclass(frozen=True)
class FlashInferMetadata(AttentionMetadata):
    """One step; planned when the first layer with given parameters asks for it.

    Attributes:
        pages: The batch's blocks.
        builder: The owner of the wrappers.
    """

    pages: PageList
    builder: FlashInferMetadataBuilder
    _planned: dict[AttentionParams, Any] = field(default_factory=dict)

    def planned(self, params: AttentionParams, query_dtype: torch.dtype, cache_dtype: torch.dtype) -> Any:
        """Return the wrapper to run for layers with these parameters."""
        wrapper = self._planned.get(params)
        if wrapper is None:
            wrapper = self._planned[params] = self._plan(params, query_dtype, cache_dtype)
        return wrapper

    def _plan(self, params: AttentionParams, query_dtype: torch.dtype, cache_dtype: torch.dtype) -> Any:
        if params.attention_chunk_size is not None:
            raise BackendUnavailableError(
                "attention backend FLASHINFER does not support chunked attention; use TORCH"
            )
        decode = self.common.causal and self.common.max_query_len == 1
        wrapper = self.builder.wrapper(decode, params)
        heads = (params.num_heads, params.num_kv_heads, params.head_size, self.builder.kernel_block_size)
        pages = (self.pages.indptr, self.pages.indices, self.pages.last_page_len)
        options = {
            # FlashInfer counts the tokens to the left; we count the token itself as well.
            "window_left": -1 if params.sliding_window is None else params.sliding_window - 1,
            "logits_soft_cap": params.softcap,
            "sm_scale": params.scale,
            "q_data_type": query_dtype,
            "kv_data_type": cache_dtype,
        }
        if decode:
            wrapper.plan(*pages, *heads, **options)
        else:
            wrapper.plan(
                self.common.query_start_loc_cpu, *pages, *heads, causal=self.common.causal, **options
            )
        return wrapper


class FlashInferBackend(AttentionBackend):
    """FlashInfer on CUDA.

    The cache has the shape of the torch backend's: `(num_blocks, 2, block_size, num_kv_heads, head_size)`.
    """

    @staticmethod
    def get_name() -> str:
        return "FLASHINFER"

    @staticmethod
    def get_unavailable_reason(device: torch.device, dtype: torch.dtype) -> str:
        if device.type != "cuda":
            return "it needs a CUDA device"
        if dtype not in _DTYPES:
            return f"it computes in {' or '.join(str(d) for d in _DTYPES)}, not in {dtype}"
        if importlib.util.find_spec("flashinfer") is None:
            return "the package is not installed: pip install flashinfer-python"
        return ""

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        return num_blocks, 2, block_size, num_kv_heads, head_size

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        return (1, 0, 2, 3, 4, 5) if include_num_layers_dimension else (0, 1, 2, 3, 4)

    @staticmethod
    def get_supported_kernel_block_sizes() -> tuple[int | MultipleOf, ...]:
        return 16, 32, 64

    @staticmethod
    def get_builder_cls() -> type[MetadataBuilder]:
        return FlashInferMetadataBuilder

    @staticmethod
    def get_workspace_bytes() -> int:
        return _WORKSPACE_BYTES

    @staticmethod
    def write_kv(
        key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, metadata: AttentionMetadata
    ) -> None:
        write_kv_to_slots(key, value, kv_cache, metadata.common.slot_mapping)

    @staticmethod
    def attend(
        query: torch.Tensor, kv_cache: torch.Tensor, metadata: AttentionMetadata, params: AttentionParams
    ) -> torch.Tensor:
        if not isinstance(metadata, FlashInferMetadata):
            raise TypeError(f"the FLASHINFER backend needs its own metadata, got {type(metadata).__name__}")
        wrapper = metadata.planned(params, query.dtype, kv_cache.dtype)
        out: torch.Tensor = wrapper.run(query.contiguous(), kv_cache)
        return out
