"""Write log probabilities as OpenAI's API does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..engine.types import Logprobs

#: Token id → what log probabilities call it: a method of `TokenNames`.
NameOf = Callable[[int], str]


class TokenNames:
    """Names single tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        # Some tokenizers write a token differently at the start of a text, so tokens are decoded after another one.
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


def completion_logprobs(
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


def chat_logprobs(name_of: NameOf, token_ids: Sequence[int], logprobs: Sequence[Logprobs]) -> dict[str, Any]:
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
