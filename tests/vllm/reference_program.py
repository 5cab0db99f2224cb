"""The reference engine with the same orders as a vLLM engine, so that both pass the same tests.

python reference_program.py '{"model": ..., "kv_transfer_config": {...}, ...}'
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

from kvferry.connector.config import KVTransferConfig
from kvferry.connector.stats import KVConnectorStats
from kvferry.lab.engine.core import EngineCore
from kvferry.lab.engine.settings import EngineSettings
from kvferry.lab.engine.types import GenerationRequest, Logprobs, SamplingParams
from tests.support.orders import obey


class ReferenceHost:
    """The reference engine, which takes vLLM's settings and orders."""

    def __init__(self, settings: dict[str, Any]) -> None:
        transfer = settings["kv_transfer_config"]
        extra = dict(transfer["kv_connector_extra_config"])
        self._core = EngineCore(
            EngineSettings(
                model=settings["model"],
                dtype=settings["dtype"],
                block_size=settings["block_size"],
                num_blocks=settings["num_gpu_blocks_override"],
                max_model_len=settings["max_model_len"],
                max_num_batched_tokens=settings.get("max_num_batched_tokens", 512),
                max_num_seqs=settings["max_num_seqs"],
                kv_transfer=KVTransferConfig(
                    kv_connector=extra.pop("transport"),
                    kv_role=transfer["kv_role"],
                    kv_connector_extra_config=extra,
                    kv_load_failure_policy="fail",
                ),
            ),
            on_handoffs=self._count,
        )
        self._handoffs = KVConnectorStats()
        self._tokens: dict[str, list[int]] = {}
        self._logprobs: dict[str, list[float]] = {}
        self._likeliest: dict[str, Logprobs] = {}  # at the answer's first place

    @property
    def has_work(self) -> bool:
        return self._core.has_work

    def step(self) -> Iterator[dict[str, Any]]:
        num_tokens, outputs = self._core.step()
        for output in outputs:
            tokens = self._tokens[output.request_id]
            if output.new_token_ids and not tokens:
                yield {"first": output.request_id}
            tokens += output.new_token_ids
            self._logprobs[output.request_id] += [scores[0][1] for scores in output.logprobs]
            if output.logprobs:
                self._likeliest.setdefault(output.request_id, output.logprobs[0][1:])
            if output.finish_reason is not None:
                params = output.kv_transfer_params
                yield {
                    "finished": output.request_id,
                    "tokens": self._tokens.pop(output.request_id),
                    "logprobs": self._logprobs.pop(output.request_id),
                    "reason": output.finish_reason,
                    "params": None if params is None else dict(params),
                    "top_logits": self._likeliest.pop(output.request_id, ()),
                }
        if not num_tokens:
            time.sleep(0.001)

    def close(self) -> None:
        self._core.close()

    # -- orders --------------------------------------------------------------------------------------

    def add(
        self, request: str, prompt: list[int], max_tokens: int, params: Any, num_top_logits: int = 0
    ) -> dict[str, Any]:
        sampling = SamplingParams(
            max_tokens=max_tokens,
            temperature=0.0,
            ignore_eos=True,
            num_logprobs=num_top_logits,  # 0: those of the answer's tokens
        )
        self._core.add(GenerationRequest(request, tuple(prompt), sampling, params), time.monotonic())
        self._tokens[request], self._logprobs[request] = [], []
        return {}

    def abort(self, request: str) -> dict[str, Any]:
        self._core.abort(request)
        self._tokens.pop(request, None)
        self._logprobs.pop(request, None)
        self._likeliest.pop(request, None)
        return {}

    def forget(self) -> dict[str, Any]:
        return {"done": self._core.parts.manager.reset_prefix_cache()}

    def policy(self, policy: str) -> dict[str, Any]:
        self._core.parts.scheduler._fails_on_load_error = policy == "fail"
        return {}

    def status(self) -> dict[str, Any]:
        stats = self._core.stats()
        return {
            "used_blocks": stats.num_blocks - stats.num_free_blocks,
            "num_requests": stats.num_waiting + stats.num_loading + stats.num_running + stats.num_offered,
            "num_loading": stats.num_loading,
            "num_groups": len(self._core.parts.kv_cache_config.kv_cache_groups),
            "block_size": self._core.parts.kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size,
            "num_remembered": self._core.parts.scheduler.handoffs._connector._scheduler.num_requests,
        }

    def figures(self) -> dict[str, Any]:
        loads = self._handoffs.reduce()
        return {
            "num_loads": loads["num_transfers"],
            "num_failures": loads["num_failed_transfers"],
            "num_bytes": loads["num_bytes"],
            "num_preemptions": self._core.stats().totals.num_preemptions,
        }

    def _count(self, stats: KVConnectorStats) -> None:
        self._handoffs = self._handoffs.aggregate(stats)


if __name__ == "__main__":
    obey(ReferenceHost)
