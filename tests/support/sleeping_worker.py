"""A worker of vLLM's CPU build that notifies its connector of sleep and wake, as GPU workers do."""

from __future__ import annotations

from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.v1.worker.cpu_worker import CPUWorker


class SleepingWorker(CPUWorker):  # type: ignore[misc]
    def sleep(self, level: int = 1) -> None:
        """Let the cache be lost."""
        get_kv_transfer_group().unregister_kv_caches()
        for cache in self.model_runner.kv_caches:
            cache.zero_()

    def wake_up(self, tags: list[str] | None = None) -> None:
        get_kv_transfer_group().restore_kv_caches()
