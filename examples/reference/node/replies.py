"""Write answers as the JSON of OpenAI's API, for completions and chats, whole and in chunks.

Answers have these fields in addition to OpenAI's:

- `kv_transfer_params` at the top level, as in vLLM.
- `metrics` at the top level of a whole answer or of the last chunk: how the answer was computed.
- `token_ids` in each choice, if the request says `return_token_ids`.
- `prompt_token_ids` and `top_logits` in the choice of a whole answer, if the request says `"return_top_logits": n`. The
  latter has the n largest logits for the answer's first token as [token id, logit], the largest first.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from ..engine.types import RequestMetrics, RequestOutput
from ..web.errors import ApiError

#: How a connector's load of the request's KV cache ended. Routers count this header, so they need not parse the answer.
TRANSFER_HEADER = "X-KV-Transfer"


class ReplyFormat(ABC):
    """The format of one endpoint's choices."""

    #: Prefix of the ids that clients see.
    id_prefix: str
    whole_object: str
    chunk_object: str

    @abstractmethod
    def whole(self, text: str) -> dict[str, Any]:
        """Return the choice of a whole answer."""

    @abstractmethod
    def chunk(self, text: str, *, is_first: bool) -> dict[str, Any]:
        """Return the choice of one chunk."""


class CompletionFormat(ReplyFormat):
    """`/v1/completions`."""

    id_prefix = "cmpl"
    whole_object = chunk_object = "text_completion"

    def whole(self, text: str) -> dict[str, Any]:
        return {"text": text, "logprobs": None}

    def chunk(self, text: str, *, is_first: bool) -> dict[str, Any]:
        return self.whole(text)


class ChatFormat(ReplyFormat):
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
    """The fields that all parts of one answer have in common.

    Attributes:
        created: Seconds since 1970.
        with_token_ids: Whether choices have `token_ids`.
    """

    reply_format: ReplyFormat
    request_id: str
    model: str
    created: int
    with_token_ids: bool

    def whole(self, text: str, token_ids: list[int], last: RequestOutput) -> dict[str, Any]:
        """Return a whole answer."""
        choice = self._choice(self.reply_format.whole(text), token_ids, last.finish_reason)
        if last.next_token is not None:
            choice |= dataclasses.asdict(last.next_token)
        return {
            **self._head(self.reply_format.whole_object, [choice]),
            "usage": usage(last.metrics),
            **ending(last),
        }

    def chunk(self, output: RequestOutput, *, is_first: bool) -> dict[str, Any]:
        """Return one chunk of a stream. The last one also has the fields of `ending`."""
        content = self.reply_format.chunk(output.text_delta, is_first=is_first)
        choice = self._choice(content, list(output.new_token_ids), output.finish_reason)
        tail = ending(output) if output.finish_reason else {}
        return {**self._head(self.reply_format.chunk_object, [choice]), **tail}

    def early_chunk(self, kv_transfer_params: Mapping[str, Any]) -> dict[str, Any]:
        """Return a chunk without text, before all others, with what a decode node needs to start loading the prompt."""
        head = self._head(self.reply_format.chunk_object, [])
        return {**head, "kv_transfer_params": dict(kv_transfer_params)}

    def usage_chunk(self, metrics: RequestMetrics) -> dict[str, Any]:
        """Return the chunk after the last piece, for clients that asked for the usage."""
        return {**self._head(self.reply_format.chunk_object, []), "usage": usage(metrics)}

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
    """Return OpenAI's token counts."""
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
    """Return the error of a request that was accepted and then failed."""
    return ApiError(500, last.error or "the request failed", kind="server_error", code="generation_failed")


def transfer_outcome(metrics: RequestMetrics) -> str:
    """Return the value of `TRANSFER_HEADER`: `"loaded"`, `"failed"` or `"none"`.

    A failed load is `"failed"` even if this node then computed the prompt itself.
    """
    if metrics.transfer is not None:
        return "failed" if metrics.transfer.error else "loaded"
    # A connector may report no figures, but the engine knows what it loaded.
    return "loaded" if metrics.num_loaded_tokens else "none"
