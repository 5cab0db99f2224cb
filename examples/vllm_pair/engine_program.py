"""One real vLLM engine as a child process: orders come as JSON lines on standard input, answers go to a pipe.

    python engine_program.py DESCRIPTOR '{"model": ..., "transfer": {...}, ...}'

The engine core runs in this very process, one step at a time, so that its scheduler can be looked at. Every
order gets one line with its `id`; a request gets one more with its first token, and one when it has ended.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from typing import Any

from prometheus_client import REGISTRY
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.engine.llm_engine import LLMEngine


class Program:
    """An engine, and the orders to it."""

    def __init__(self, descriptor: int, settings: dict[str, Any]) -> None:
        self.engine = LLMEngine.from_engine_args(EngineArgs(**settings))
        self.core = self.engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.answers = os.fdopen(descriptor, "w", buffering=1)
        self.begun: set[str] = set()
        self.orders: queue.Queue[dict[str, Any] | None] = queue.Queue()
        threading.Thread(target=self.read_orders, daemon=True).start()

    def say(self, **answer: Any) -> None:
        print(json.dumps(answer), file=self.answers)

    def read_orders(self) -> None:
        for line in sys.stdin:
            self.orders.put(json.loads(line))
        self.orders.put(None)

    def run(self) -> None:
        """Step while there is anything to do, until standard input ends."""
        self.say(ready=True)
        while True:
            is_busy = self.scheduler.has_requests()
            try:
                order = self.orders.get(block=not is_busy)
            except queue.Empty:
                self.step()
                if not self.scheduler.running:
                    time.sleep(0.001)  # as vLLM's own loop does when a step computed nothing
                continue
            if order is None:
                self.engine.engine_core.shutdown()
                return
            self.say(id=order.pop("id"), **getattr(self, order.pop("do"))(**order))

    def step(self) -> None:
        for output in self.engine.step():
            request, answer = output.request_id, output.outputs[0]
            if answer.token_ids and request not in self.begun:
                self.begun.add(request)
                self.say(first=request)
            if output.finished:
                self.begun.discard(request)
                self.say(
                    finished=request,
                    tokens=list(answer.token_ids),
                    reason=answer.finish_reason,
                    params=output.kv_transfer_params,
                )

    # -- orders --------------------------------------------------------------------------------------

    def add(self, request: str, prompt: list[int], max_tokens: int, params: Any) -> dict[str, Any]:
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            extra_args=None if params is None else {"kv_transfer_params": params},
        )
        self.engine.add_request(request, {"prompt_token_ids": prompt}, sampling)
        return {}

    def abort(self, request: str) -> dict[str, Any]:
        self.engine.abort_request([request])
        self.begun.discard(request)
        return {}

    def forget(self) -> dict[str, Any]:
        """Empty the prefix cache."""
        return {"done": self.engine.reset_prefix_cache()}

    def policy(self, policy: str) -> dict[str, Any]:
        """What becomes of requests whose load fails, from now on."""
        self.scheduler.recompute_kv_load_failures = policy == "recompute"
        return {}

    def metric(self, name: str) -> dict[str, Any]:
        """A metric's labels and values, as `/metrics` would show them."""
        samples = (sample for family in REGISTRY.collect() for sample in family.samples)
        return {"samples": [[sample.labels, sample.value] for sample in samples if sample.name == name]}

    def log_stats(self) -> dict[str, Any]:
        """Have vLLM print what it prints every ten seconds."""
        self.engine.do_log_stats()
        return {}

    def status(self) -> dict[str, Any]:
        """What the scheduler holds, and what kvferry's half of it remembers."""
        pool, connector = self.scheduler.kv_cache_manager.block_pool, self.scheduler.connector
        return {
            "free_blocks": pool.get_num_free_blocks(),
            "num_requests": len(self.scheduler.requests),
            "num_groups": len(self.scheduler.kv_cache_config.kv_cache_groups),
            "num_remembered": connector.num_remembered_requests,
        }


if __name__ == "__main__":
    Program(int(sys.argv[1]), json.loads(sys.argv[2])).run()
