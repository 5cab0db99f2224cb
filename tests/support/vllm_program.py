"""A real vLLM engine as a child process. It receives orders and sends answers as JSON lines over an inherited
socket.

    KVFERRY_LAUNCHER_FD=DESCRIPTOR python vllm_program.py '{"model": ..., "kv_transfer_config": {...}, ...}'

Each order, `{"id": 1, "do": "add", ...}`, is answered by one line with its `id`. Its name is that of a method
of `VllmHost`. A request adds the line `{"first": ...}` with its first token, and `{"finished": ...,
"tokens": ..., "reason": ..., "params": ..., "top_logits": ...}` when it has ended. `"num_top_logits": n` in
an order to add a request asks for the n largest logits of its first token, as `[token id, logit]`, the
largest first. All may be shifted by the same amount, as log-probabilities are.

The engine core runs in this process, one step at a time, so that orders can inspect its scheduler.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any, TextIO

from PIL import Image
from prometheus_client import REGISTRY, generate_latest
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.request import RequestStatus

sys.path[0] = str(Path(__file__).resolve().parents[2])

from kvferry.router.http.launcher_link import LAUNCHER_VARIABLE


class VllmHost:
    """A vLLM engine that takes orders."""

    def __init__(self, settings: dict[str, Any]) -> None:
        pages_of = settings.pop("pages_of", None)
        config = EngineArgs(**settings).create_engine_config(UsageContext.ENGINE_CONTEXT)
        if pages_of is not None:
            # A CPU's platform sets the size of its kernel's blocks, of which vLLM's own blocks can have
            # several.
            config.cache_config.block_size = pages_of
        self._engine: Any = LLMEngine.from_vllm_config(config)
        self._scheduler: Any = self._engine.engine_core.engine_core.scheduler
        self._begun: set[str] = set()
        self._adapters: dict[str, int] = {}  # by folder: vLLM's number
        self._unrecorded: Any = None
        self._watch_figures()

    def _watch_figures(self) -> None:
        """Note the figures of each step, and whether the engine records them; before 0.28 only a server
        always does.
        """
        core, manager = self._engine.engine_core, self._engine.logger_manager
        get_output, record = core.get_output, manager.record

        def noted() -> Any:
            outputs = get_output()
            self._unrecorded = outputs.scheduler_stats
            return outputs

        def recorded(*arguments: Any, **named: Any) -> None:
            self._unrecorded = None
            record(*arguments, **named)

        core.get_output, manager.record = noted, recorded

    @property
    def has_work(self) -> bool:
        return bool(self._scheduler.has_requests())

    def step(self) -> Iterator[dict[str, Any]]:
        for output in self._engine.step():
            request, answer = output.request_id, output.outputs[0]
            if answer.token_ids and request not in self._begun:
                self._begun.add(request)
                yield {"first": request}
            if output.finished:
                self._begun.discard(request)
                yield {
                    "finished": request,
                    "tokens": list(answer.token_ids),
                    "reason": answer.finish_reason,
                    "stop_reason": answer.stop_reason,
                    "params": output.kv_transfer_params,
                    "items": getattr(output, "ec_transfer_params", None),
                    "logprobs": _logprobs(answer),
                    "top_logits": _top_logits(answer.logprobs),
                }
        if self._unrecorded is not None:
            self._engine.logger_manager.record(scheduler_stats=self._unrecorded, iteration_stats=None)
        if not self._scheduler.running:
            time.sleep(0.001)  # vLLM's own loop does the same after a step that computed nothing

    def close(self) -> None:
        self._engine.engine_core.shutdown()

    # -- orders --------------------------------------------------------------------------------------

    def add(
        self,
        request: str,
        prompt: list[int],
        max_tokens: int,
        params: Any,
        num_top_logits: int = 0,
        adapter: list[str] | None = None,
        image: str | None = None,
        items: Any = None,
    ) -> dict[str, Any]:
        """Add a request.

        Args:
            adapter: Name and folder of the LoRA adapter to use.
            image: Color of a small image, for which the prompt has one placeholder.
            items: The params with which an encoder's outputs are loaded.
        """
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=num_top_logits,  # 0: those of the answer's tokens
            extra_args={"kv_transfer_params": params, "ec_transfer_params": items},
        )
        inputs: dict[str, Any] = {"prompt_token_ids": prompt}
        if image is not None:
            inputs["multi_modal_data"] = {"image": Image.new("RGB", (32, 32), image)}
        self._engine.add_request(request, inputs, sampling, lora_request=self._adapter(adapter))
        return {}

    def _adapter(self, adapter: list[str] | None) -> LoRARequest | None:
        """Return vLLM's form of an adapter.

        An adapter of the same name from another folder replaces the first one.
        """
        if adapter is None:
            return None
        name, folder = adapter
        number = self._adapters.setdefault(folder, len(self._adapters) + 1)
        return LoRARequest(name, number, folder)

    def abort(self, request: str) -> dict[str, Any]:
        self._engine.abort_request([request])
        self._begun.discard(request)
        return {}

    def forget(self) -> dict[str, Any]:
        """Empty the prefix cache."""
        return {"done": self._engine.reset_prefix_cache()}

    def forget_items(self) -> dict[str, Any]:
        """Empty the cache of encoder outputs, and the prefix cache."""
        self._engine.reset_encoder_cache()
        return self.forget()

    def forget_everywhere(self) -> dict[str, Any]:
        """Empty the prefix cache, and what connectors have kept."""
        return {"done": self._engine.reset_prefix_cache(reset_connector=True)}

    def scale(self, parameter: str, factor: float) -> dict[str, Any]:
        """Change a weight of the running model in the way in which vLLM lets its users run anything in the
        workers.
        """
        self._engine.collective_rpc(_scale, args=(parameter, factor))
        return {}

    def pack_anew(self, layer: str, factor: float) -> dict[str, Any]:
        """Put another kernel in the place of a linear layer's, as if other weights were packed for a CPU."""
        self._engine.collective_rpc(_pack_anew, args=(layer, factor))
        return {}

    def call(self, method: str, arguments: dict[str, Any] | None = None) -> dict[str, Any]:
        """Call a method of each worker."""
        self._engine.collective_rpc(method, kwargs=arguments or {})
        return {}

    def sleep(self, level: int) -> dict[str, Any]:
        """Sleep, or say why vLLM does not."""
        try:
            self._engine.sleep(level)
        except RuntimeError as error:
            return {"refused": str(error)}
        return {"refused": ""}

    def wake_up(self) -> dict[str, Any]:
        self._engine.wake_up()
        # Since 0.33 vLLM does this by itself.
        core = self._engine.engine_core.engine_core
        known = core.model_executor.get_kv_connector_handshake_metadata()
        _kvferry(self._scheduler.connector).set_xfer_handshake_metadata_pp_aware(
            {place: own for worker in known for place, own in worker.items()}
        )
        return {}

    def preempt(self) -> dict[str, Any]:
        """Preempt every running request, and empty the prefix cache if no offer holds blocks."""
        # vLLM complains about blocks in use after it has preempted all requests.
        with contextlib.suppress(RuntimeError):
            return {"done": self._engine.reset_prefix_cache(reset_running_requests=True)}
        return {"done": False}

    def policy(self, policy: str) -> dict[str, Any]:
        """Set the load failure policy."""
        self._scheduler.recompute_kv_load_failures = policy == "recompute"
        return {}

    def status(self) -> dict[str, Any]:
        """Return counts from the scheduler, and from kvferry's scheduler half."""
        connector = _kvferry(self._scheduler.connector)
        requests, pool = self._scheduler.requests.values(), self._scheduler.kv_cache_manager.block_pool
        return {
            "used_blocks": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
            "num_requests": len(requests),
            "num_loading": sum(
                request.status == RequestStatus.WAITING_FOR_REMOTE_KVS for request in requests
            ),
            "num_groups": len(self._scheduler.kv_cache_config.kv_cache_groups),
            "block_size": self._scheduler.block_size,
            "num_remembered": connector.num_remembered_requests,
        }

    def encoder(self) -> dict[str, Any]:
        """Return what the connector of encoder outputs has counted, and how many blocks of its pool are in
        use.
        """
        side = self._scheduler.ec_connector.scheduler_side
        return {
            "num_offered": side.num_offered,
            "num_loaded": side.num_loaded,
            "num_failed": side.num_failed,
            "num_used": side.num_used,
            "num_remembered": len(side._items) + len(side._wanted) + len(side._loads),
        }

    def figures(self) -> dict[str, Any]:
        """Return totals since the start."""
        return {
            "num_loads": self._total("kvferry_load_seconds_count"),
            "num_failures": self._total("kvferry_load_failures_total"),
            "num_bytes": self._total("kvferry_load_bytes_sum"),
            "num_preemptions": self._total("vllm:num_preemptions_total"),
        }

    def blocks(self, request: str) -> dict[str, Any]:
        """Return the block table of a running request's first group."""
        # vLLM appends to the ids that it is given.
        name = next(name for name in self._scheduler.requests if request in (name, name.rpartition("-")[0]))
        return {"blocks": list(self._scheduler.kv_cache_manager.get_block_ids(name)[0])}

    def digests(self, blocks: list[int]) -> dict[str, Any]:
        """Return digests of the bytes of some blocks: for each rank, for each layer."""
        return {"digests": self._engine.collective_rpc(_block_digests, args=(blocks,))}

    def metric(self, name: str) -> dict[str, Any]:
        """Return a metric's labels and values, as `/metrics` would show them."""
        return {"samples": [[sample.labels, sample.value] for sample in _samples(name)]}

    def metrics_page(self) -> dict[str, Any]:
        """What `/metrics` would show."""
        return {"text": generate_latest(REGISTRY).decode()}

    def log_stats(self) -> dict[str, Any]:
        """Make vLLM log its statistics, as it does every ten seconds."""
        self._engine.do_log_stats()
        return {}

    def _total(self, name: str) -> float:
        return float(sum(sample.value for sample in _samples(name)))


def _kvferry(connector: Any) -> Any:
    """Return kvferry's connector, which may be a child of vLLM's MultiConnector."""
    children = getattr(connector, "_connectors", [connector])
    return next(child for child in children if hasattr(child, "num_remembered_requests"))


def _block_digests(worker: Any, blocks: list[int]) -> list[str]:
    """Hash some blocks of each layer; vLLM runs this in a worker."""
    caches = worker.model_runner.kv_caches
    return [sha256(cache[blocks].contiguous().numpy().tobytes()).hexdigest() for cache in caches]


def _scale(worker: Any, name: str, factor: float) -> None:
    """Multiply a parameter or a buffer; vLLM runs this in a worker."""
    model = worker.get_model()
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    tensors[name].data.mul_(factor)


def _pack_anew(worker: Any, layer: str, factor: float) -> None:
    """Scale what a linear layer computes; vLLM runs this in a worker."""
    module = worker.get_model().get_submodule(layer)
    packed = module.cpu_linear
    module.cpu_linear = lambda *arguments: packed(*arguments) * factor


def _logprobs(answer: Any) -> list[float]:
    """Return the log probability of each of the answer's tokens."""
    told = answer.logprobs or ()
    return [scores[token].logprob for token, scores in zip(answer.token_ids, told, strict=True)]


def _top_logits(logprobs: Any) -> list[tuple[int, float]]:
    """Return the first token's log-probabilities, the largest first.

    Their differences are those of the logits.
    """
    first = logprobs[0] if logprobs else {}
    return sorted(((token, told.logprob) for token, told in first.items()), key=lambda pair: -pair[1])


def _samples(name: str) -> list[Any]:
    return [sample for family in REGISTRY.collect() for sample in family.samples if sample.name == name]


def obey() -> None:
    """Carry out orders, and step while there is work, until the other end of the socket is shut down for
    writing.
    """
    host = VllmHost(json.loads(sys.argv[1]))
    orders: queue.Queue[dict[str, Any] | None] = queue.Queue()
    with socket.socket(fileno=int(os.environ.pop(LAUNCHER_VARIABLE))) as link:
        with link.makefile("r") as incoming, link.makefile("w") as answers:
            threading.Thread(target=_read, args=(incoming, orders), daemon=True).start()
            _say(answers, {"ready": True})
            _work(host, orders, answers)


def _work(host: VllmHost, orders: queue.Queue[dict[str, Any] | None], answers: TextIO) -> None:
    while True:
        try:
            order = orders.get(block=not host.has_work)
        except queue.Empty:
            for event in host.step():
                _say(answers, event)
            continue
        if order is None:
            host.close()
            return
        number, do = order.pop("id"), order.pop("do")
        _say(answers, {"id": number, **getattr(host, do)(**order)})


def _read(incoming: TextIO, orders: queue.Queue[dict[str, Any] | None]) -> None:
    with contextlib.suppress(ConnectionResetError):  # the process at the other end died
        for line in incoming:
            orders.put(json.loads(line))
    orders.put(None)


def _say(answers: TextIO, answer: dict[str, Any]) -> None:
    print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    obey()
