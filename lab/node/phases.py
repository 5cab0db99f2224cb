"""The spans of one generation on a node, below the span of its HTTP request."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from ...connector.spans import Span
from ..engine.types import GenerationRequest, RequestOutput


class Phases:
    """Makes a span of the time until the first token, queueing included, and one of the rest.

    A node may answer one HTTP request with several generations, so the figures are those of the last span.

    Args:
        request: It arrived now.
        span: The node's.
    """

    def __init__(self, request: GenerationRequest, span: Span) -> None:
        self._request = request
        self._span = span
        self._began = time.time()
        self._has_output = False
        self._has_ended = False
        self._phase = _phase(request.kv_transfer_params or {})
        span.set(phase=self._phase)

    def observe(self, output: RequestOutput) -> None:
        """Note a piece of the answer, if it is the first or the last one, or carries an offer."""
        if output.kv_transfer_params is not None:
            tokens = output.kv_transfer_params.get("remote_num_tokens", 0)
            self._span.note("offer given to the router", tokens=tokens)
        metrics = output.metrics
        if not self._has_output and output.new_token_ids and not output.is_known:
            self._has_output = True
            # A node that loaded the prompt computed only its end.
            self._end("load_and_first_token" if metrics.num_loaded_tokens else "prefill")
        if output.finish_reason:
            error = output.error if output.finish_reason == "error" else ""
            if error:
                self._span.fail(error)
            self.end(
                output.finish_reason,
                error,
                cached_tokens=metrics.num_cached_tokens,
                loaded_tokens=metrics.num_loaded_tokens,
                output_tokens=metrics.num_output_tokens,
                first_token_s=metrics.ttft_s,
            )

    def end(self, reason: str, error: str = "", **figures: float) -> None:
        """Note the end of the answer, once."""
        if self._has_ended:
            return
        self._has_ended = True
        about: dict[str, str | float] = {"request_id": self._request.request_id, "phase": self._phase}
        num_prompt_tokens = len(self._request.prompt_token_ids)
        self._end(
            "generate", error, **about, finish_reason=reason, prompt_tokens=num_prompt_tokens, **figures
        )

    def _end(self, name: str, error: str = "", **attributes: str | float) -> None:
        span, now = self._span.child(name, self._began), time.time()
        span.set(**attributes)
        if error:
            span.fail(error)
        span.end(now)
        self._began = now


def _phase(params: Mapping[str, Any]) -> str:
    if params.get("do_remote_prefill"):
        return "decode"
    return "prefill" if params.get("do_remote_decode") else "alone"
