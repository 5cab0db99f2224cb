"""vLLM's OffloadingConnector for servers on CPUs, whose cache is in main memory itself.

vLLM's own specs refuse to start there, because they copy on the streams of a GPU. Name this one in
`kv_connector_extra_config`: `"spec_name": "HostMemorySpec", "spec_module_path":
"kvferry.connector.testing.host_memory"`. Only the copies are ours. What is kept, found and fetched, from the
tiers behind main memory too, is decided by vLLM's code; and on a GPU the copies are vLLM's as well.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class HostMemorySpec(TieringOffloadingSpec):  # type: ignore[misc]
    """Offloading to main memory and to the tiers in `secondary_tiers`, if there are any.

    Each block is a chunk.
    """

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        if not current_platform.is_cpu():
            return super().get_worker(kv_caches)
        if self.blocks_per_chunk != 1:
            raise ValueError("block_size must be the block size of the cache on a CPU")
        # The same file as the scheduler's, whose tiers read it and write it.
        region = SharedOffloadRegion(
            engine_id=self.config.engine_id,
            num_chunks=self.num_chunks,
            rank=self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        try:
            return _HostMemoryWorker(kv_caches, region)
        except BaseException:
            region.cleanup()  # or its file would outlive this process
            raise


class _HostMemoryWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies blocks at once."""

    def __init__(self, kv_caches: Any, region: SharedOffloadRegion) -> None:
        self._region = region
        # Arrays of bytes (num_blocks, bytes_per_block), and (num_chunks, bytes_per_block).
        self._caches = [
            cache.tensor.view(torch.int8).view(-1, cache.page_size_bytes) for cache in kv_caches.tensors
        ]
        self._kept = [region.create_next_worker_view(cache.shape[1]) for cache in self._caches]
        self._ended: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, self._caches, src_spec, self._kept, dst_spec)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, self._kept, src_spec, self._caches, dst_spec)

    def _copy(
        self, job_id: int, sources: list[torch.Tensor], src: Any, targets: list[torch.Tensor], dst: Any
    ) -> bool:
        here, there = (torch.from_numpy(spec.block_ids).long() for spec in (src, dst))
        for source, target in zip(sources, targets, strict=True):
            target[there] = source[here]
        num_bytes = len(here) * sum(source.shape[1] for source in sources)
        self._ended.append(TransferResult(job_id, True, num_bytes, 1e-6))
        return True

    def get_finished(self) -> list[TransferResult]:
        ended, self._ended = self._ended, []
        return ended

    def wait(self, job_ids: set[int]) -> None:
        """Return at once: every copy is over."""

    def shutdown(self) -> None:
        # The views first: the region closes its mapping.
        self._kept.clear()
        self._region.cleanup()
