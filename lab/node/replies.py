"""Write answers as the JSON of OpenAI's API, for completions and chats, whole and in chunks.

Answers have these fields in addition to OpenAI's:

- `kv_transfer_params` at the top level, as in vLLM.
- `metrics` at the top level of a whole answer or of a choice's last chunk: how it was computed. Of a whole
  answer with several choices, it is about the first one, which is the one that loads a KV cache.
- `token_ids` in each choice, and `prompt_token_ids` in each of a whole answer, if the request says
  `return_token_ids`.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from ...router.http.errors import ApiError
from ..engine.types import Logprobs, RequestMetrics, RequestOutput

#: How a connector's load of the request's KV cache ended. Routers count this header, so they need not parse
#: the answer.
TRANSFER_HEADER = "X-KV-Transfer"


#: Token id → what log probabilities call it: a method of `TokenNames`.
NameOf = Callable[[int], str]


class TokenNames:
    """Names single tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        # Some tokenizers write a token differently at the start of a text, so tokens are decoded after
        # another one.
        self._before = list(tokenizer.encode("a", add_special_tokens=False))[-1:]
        self._num_before = len(self._decoded([]))
        self._names: dict[int, str] = {}

    def text_of(self, token_id: int) -> str:
        """Return a token's text. A part of a character has none of its own, so return what `id_of` does."""
        if token_id not in self._names:
            text = self._decoded([token_id])[self._num_before :]
            self._names[token_id] = self.id_of(token_id) if "\ufffd" in text else text
        return self._names[token_id]

    @staticmethod
    def id_of(token_id: int) -> str:
        """Return a name that no other token has."""
        return f"token_id:{token_id}"

    def _decoded(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(self._before + token_ids, skip_special_tokens=False))


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

    @abstractmethod
    def logprobs(
        self, name_of: NameOf, token_ids: Sequence[int], logprobs: Sequence[Logprobs], offset: int
    ) -> dict[str, Any]:
        """Return a choice's `logprobs`; see `_completion_logprobs`."""


class CompletionFormat(ReplyFormat):
    """`/v1/completions`."""

    id_prefix = "cmpl"
    whole_object = chunk_object = "text_completion"

    def whole(self, text: str) -> dict[str, Any]:
        return {"text": text, "logprobs": None}

    def chunk(self, text: str, *, is_first: bool) -> dict[str, Any]:
        return self.whole(text)

    def logprobs(
        self, name_of: NameOf, token_ids: Sequence[int], logprobs: Sequence[Logprobs], offset: int
    ) -> dict[str, Any]:
        return _completion_logprobs(name_of, token_ids, logprobs, offset)


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

    def logprobs(
        self, name_of: NameOf, token_ids: Sequence[int], logprobs: Sequence[Logprobs], offset: int
    ) -> dict[str, Any]:
        return _chat_logprobs(name_of, token_ids, logprobs)


@dataclasses.dataclass(frozen=True)
class Delta:
    """What a piece adds to an answer.

    Attributes:
        scored: Tokens with their log probabilities, if the client asked for them: (token id, log
            probabilities).
    """

    text: str
    token_ids: tuple[int, ...]
    scored: tuple[tuple[int, Logprobs], ...]
    finish_reason: str | None


class Choice:
    """One answer on its way to the client.

    Attributes:
        text: All text so far.
        token_ids: All tokens so far.
        scored: See `Delta`: of all pieces so far.
        num_scored_chars: Length of the texts of `scored`, as far as they were sent.
        last: The latest piece.
    """

    last: RequestOutput

    def __init__(self, index: int, prompt_token_ids: Sequence[int]) -> None:
        self.index = index
        self.prompt_token_ids = prompt_token_ids
        self.text = ""
        self.token_ids: list[int] = []
        self.scored: list[tuple[int, Logprobs]] = []
        self.num_scored_chars = 0
        self.has_begun = False

    def add(self, output: RequestOutput) -> Delta:
        """Take in a piece."""
        scored = tuple(zip(output.new_token_ids, output.logprobs, strict=False))
        delta = Delta(output.text_delta, output.new_token_ids, scored, output.finish_reason)
        self.last = output
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.scored += delta.scored
        return delta

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer."""
        return len(self.token_ids)


@dataclasses.dataclass(frozen=True)
class Envelope:
    """The fields that all parts of one answer have in common.

    Attributes:
        created: Seconds since 1970.
        name_of: What `logprobs` call a token.
        with_token_ids: Whether choices have `token_ids`.
        with_logprobs: Whether choices have `logprobs`.
        answers_per_prompt: Choices `0` to this number belong to the first prompt, and so on.
    """

    reply_format: ReplyFormat
    request_id: str
    model: str
    created: int
    name_of: NameOf
    with_token_ids: bool
    with_logprobs: bool
    answers_per_prompt: int

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Return a whole answer."""
        written = []
        for choice in choices:
            reason = choice.last.finish_reason
            every = Delta(choice.text, tuple(choice.token_ids), tuple(choice.scored), reason)
            written.append(self._choice(choice, every, self.reply_format.whole(choice.text)))
            if self.with_token_ids:
                written[-1]["prompt_token_ids"] = list(choice.prompt_token_ids)
        return {
            **self._head(self.reply_format.whole_object, written),
            "usage": self._usage(choices),
            **ending(choices[0].last),
        }

    def chunk(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        """Return one chunk of a stream. The last one of each choice also has the fields of `ending`."""
        content = self.reply_format.chunk(delta.text, is_first=not choice.has_begun)
        choice.has_begun = True
        tail = ending(choice.last) if choice.last.finish_reason else {}
        return {
            **self._head(self.reply_format.chunk_object, [self._choice(choice, delta, content)]),
            **tail,
        }

    def usage_chunk(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Return the chunk after the last piece, for clients that asked for the usage."""
        return {**self._head(self.reply_format.chunk_object, []), "usage": self._usage(choices)}

    def _head(self, name: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.request_id,
            "object": name,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def _choice(self, choice: Choice, delta: Delta, content: dict[str, Any]) -> dict[str, Any]:
        written = {"index": choice.index, **content, "finish_reason": delta.finish_reason}
        if self.with_logprobs and delta.scored:
            token_ids, logprobs = zip(*delta.scored, strict=True)
            offset = choice.num_scored_chars
            written["logprobs"] = self.reply_format.logprobs(self.name_of, token_ids, logprobs, offset)
            choice.num_scored_chars += sum(len(self.name_of(token_id)) for token_id in token_ids)
        return {**written, "token_ids": list(delta.token_ids)} if self.with_token_ids else written

    def _usage(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Return OpenAI's token counts. A prompt counts once, however many answers it has."""
        firsts = [choice.last.metrics for choice in choices if choice.index % self.answers_per_prompt == 0]
        num_prompt = sum(metrics.num_prompt_tokens for metrics in firsts)
        num_output = sum(choice.num_tokens for choice in choices)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": {"cached_tokens": sum(metrics.num_cached_tokens for metrics in firsts)},
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


def _completion_logprobs(
    name_of: NameOf, token_ids: Sequence[int], logprobs: Sequence[Logprobs], offset: int
) -> dict[str, Any]:
    """Return the `logprobs` of a choice of `/v1/completions`.

    Args:
        logprobs: One per token.
        offset: Characters of the choice's text before these tokens.
    """
    texts = [name_of(token_id) for token_id in token_ids]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [entries[0][1] for entries in logprobs],
        "top_logprobs": [_by_name(name_of, entries) for entries in logprobs],
        "text_offset": offsets,
    }


def _by_name(name_of: NameOf, entries: Logprobs) -> dict[str, float]:
    # Two tokens may have the same text. The likelier one keeps it.
    by_name: dict[str, float] = {}
    for token_id, logprob in (*entries[1:], entries[0]):
        by_name.setdefault(name_of(token_id), logprob)
    return by_name


def _chat_logprobs(name_of: NameOf, token_ids: Sequence[int], logprobs: Sequence[Logprobs]) -> dict[str, Any]:
    """Return the `logprobs` of a choice of `/v1/chat/completions`."""
    return {
        "content": [
            {
                **_named(name_of, *entries[0]),
                "top_logprobs": [_named(name_of, *entry) for entry in entries[1:]],
            }
            for entries in logprobs
        ]
    }


def _named(name_of: NameOf, token_id: int, logprob: float) -> dict[str, Any]:
    name = name_of(token_id)
    is_text = not name.startswith("token_id:")
    return {"token": name, "logprob": logprob, "bytes": list(name.encode()) if is_text else None}
