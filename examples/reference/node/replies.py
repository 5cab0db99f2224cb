"""What a client gets: the JSON of OpenAI's API, for completions and for chats, whole and in chunks.

Beyond OpenAI: `kv_transfer_params` at the top level, where vLLM has it; `token_ids` in a choice when the request says
`return_token_ids`; `metrics`, how the answer came about, with the whole answer or with the last chunk. With
`"return_top_logits": n` the choice of a whole answer has `prompt_token_ids`, and `top_logits`: the n largest logits for the first token of the
answer as [token id, logit], the largest first.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from ..engine.types import RequestMetrics, RequestOutput
from ..web.errors import ApiError

#: What became of the KV cache that another node offered, for routers: they need not read the answer to count it.
TRANSFER_HEADER = "X-KV-Transfer"


class Wording(ABC):
    """How one endpoint spells a choice."""

    #: Begins the ids that clients see.
    id_prefix: str
    whole_object: str
    chunk_object: str

    @abstractmethod
    def whole(self, text: str) -> dict[str, Any]:
        """The choice of a whole answer."""

    @abstractmethod
    def chunk(self, text: str, *, is_first: bool) -> dict[str, Any]:
        """The choice of one chunk."""


class CompletionWording(Wording):
    """`/v1/completions`."""

    id_prefix = "cmpl"
    whole_object = chunk_object = "text_completion"

    def whole(self, text: str) -> dict[str, Any]:
        return {"text": text, "logprobs": None}

    def chunk(self, text: str, *, is_first: bool) -> dict[str, Any]:
        return self.whole(text)


class ChatWording(Wording):
    """`/v1/chat/completions`."""

    id_prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def whole(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text}, "logprobs": None}

    def chunk(self, text: str, *, is_first: bool) -> dict[str, Any]:
        role = {"role": "assistant"} if is_first else {}
        return {"delta": {**role, "content": text}, "logprobs": None}


@dataclasses.dataclass(frozen=True)
class Envelope:
    """What all parts of one answer have in common.

    Attributes:
        created: Seconds since 1970.
        with_token_ids: Choices carry `token_ids`.
    """

    wording: Wording
    request_id: str
    model: str
    created: int
    with_token_ids: bool

    def whole(self, text: str, token_ids: list[int], last: RequestOutput) -> dict[str, Any]:
        """A whole answer."""
        choice = self._choice(self.wording.whole(text), token_ids, last.finish_reason)
        if last.next_token is not None:
            choice |= dataclasses.asdict(last.next_token)
        return {
            **self._head(self.wording.whole_object, [choice]),
            "usage": usage(last.metrics),
            **ending(last),
        }

    def chunk(self, output: RequestOutput, *, is_first: bool) -> dict[str, Any]:
        """One piece of a stream; the last one also says how the answer came about."""
        content = self.wording.chunk(output.text_delta, is_first=is_first)
        choice = self._choice(content, list(output.new_token_ids), output.finish_reason)
        tail = ending(output) if output.finish_reason else {}
        return {**self._head(self.wording.chunk_object, [choice]), **tail}

    def early_chunk(self, kv_transfer_params: Mapping[str, Any]) -> dict[str, Any]:
        """A chunk without text, before all others: what a decode node needs to begin with the prompt."""
        head = self._head(self.wording.chunk_object, [])
        return {**head, "kv_transfer_params": dict(kv_transfer_params)}

    def usage_chunk(self, metrics: RequestMetrics) -> dict[str, Any]:
        """The chunk after the last piece, for clients that asked for the usage."""
        return {**self._head(self.wording.chunk_object, []), "usage": usage(metrics)}

    def _head(self, name: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.request_id,
            "object": name,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def _choice(
        self, content: dict[str, Any], token_ids: list[int], finish_reason: str | None
    ) -> dict[str, Any]:
        choice = {"index": 0, **content, "finish_reason": finish_reason}
        return {**choice, "token_ids": token_ids} if self.with_token_ids else choice


def usage(metrics: RequestMetrics) -> dict[str, Any]:
    """OpenAI's token counts."""
    return {
        "prompt_tokens": metrics.num_prompt_tokens,
        "completion_tokens": metrics.num_output_tokens,
        "total_tokens": metrics.num_prompt_tokens + metrics.num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": metrics.num_cached_tokens},
    }


def ending(last: RequestOutput) -> dict[str, Any]:
    """Return what is known only at the end of an answer."""
    error = failure(last).body() if last.finish_reason == "error" else {}
    params = None if last.kv_transfer_params is None else dict(last.kv_transfer_params)
    return {"kv_transfer_params": params, "metrics": dataclasses.asdict(last.metrics), **error}


def failure(last: RequestOutput) -> ApiError:
    """The error of a request that was accepted and then failed."""
    return ApiError(500, last.error or "the request failed", kind="server_error", code="generation_failed")


def transfer_outcome(metrics: RequestMetrics) -> str:
    """The value of `TRANSFER_HEADER`: `"loaded"`; `"failed"`, whether it was computed here after that or not; `"none"`."""
    if metrics.transfer is None:
        return "none"
    return "failed" if metrics.transfer.error else "loaded"
