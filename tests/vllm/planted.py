"""vLLM's ExampleConnector with typical bugs; `test_conformance` shows that the suite reports each of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector


class SavesTooLate(ExampleConnector):
    """Saves a step's layers in the next step, when their blocks may belong to another request."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._late: list[tuple[Any, tuple[Any, ...]]] = []

    def save_kv_layer(self, *layer: Any, **kwargs: Any) -> None:
        self._late.append((self._get_connector_metadata(), layer))

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        for metadata, layer in self._late:
            super().bind_connector_metadata(metadata)
            super().save_kv_layer(*layer)
        self._late.clear()
        super().bind_connector_metadata(connector_metadata)


class ForgetsALayer(ExampleConnector):
    """Loads every layer but the last."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        *most, _ = forward_context.no_compile_layers.items()
        super().start_load_kv(replace(forward_context, no_compile_layers=dict(most)), **kwargs)


class LoadsTheLastToken(ExampleConnector):
    """Claims the whole prompt, so that nothing is left from which the first token of the answer could be
    computed.
    """

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        num_tokens, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return num_tokens and request.num_prompt_tokens - num_computed_tokens, is_async


class AnswersOnce(ExampleConnector):
    """Treats the first question as the order to load: later questions about the same request find nothing."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        asked = vars(self).setdefault("asked", set())
        if request.request_id in asked:
            return 0, False
        asked.add(request.request_id)
        return super().get_num_new_matched_tokens(request, num_computed_tokens)


class ReportsSynchronousLoads(ExampleConnector):
    """Reports the end of loads for which no request waits; that would end vLLM's engine."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, set(finished_req_ids)


class UsesTheBlockPool(ExampleConnector):
    """No bug: it works with the reference counts of vLLM's block pool."""

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self.gpu_block_pool = gpu_block_pool
