"""Write log probabilities as OpenAI's API does, and carry those of a prompt from a prefill node to a decode node."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from ...web.errors import bad_request
from ..engine.types import MAX_LOGPROBS, Logprobs

#: A key of ours in `kv_transfer_params`. A decode node that loads a prompt does not compute it, so the prefill node sends
#: along the log probabilities of the prompt that the client asked for. Connectors ignore the key.
PROMPT_LOGPROBS = "prompt_logprobs"


class TokenNames:
    """Texts of single tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        # Some tokenizers write a token differently at the start of a text, so tokens are decoded after another one.
        self._before = list(tokenizer.encode("a", add_special_tokens=False))[-1:]
        self._num_before = len(self._decoded([]))
        self._names: dict[int, str] = {}

    def name(self, token_id: int) -> str:
        """Return a token's text; for a part of a character, which has none of its own, `token_id:` and the id."""
        if token_id not in self._names:
            text = self._decoded([token_id])[self._num_before :]
            self._names[token_id] = f"token_id:{token_id}" if "\ufffd" in text else text
        return self._names[token_id]

    def _decoded(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(self._before + token_ids, skip_special_tokens=False))


def completion_logprobs(
    names: TokenNames, token_ids: Sequence[int], logprobs: Sequence[Logprobs | None], offset: int
) -> dict[str, Any]:
    """Return the `logprobs` of a choice of `/v1/completions`.

    Args:
        logprobs: One per token. None: unknown, as for the first token of a prompt.
        offset: Characters of the choice's text before these tokens.
    """
    texts = [names.name(token_id) for token_id in token_ids]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [entries[0][1] if entries else None for entries in logprobs],
        "top_logprobs": [_by_name(names, entries) if entries else None for entries in logprobs],
        "text_offset": offsets,
    }


def _by_name(names: TokenNames, entries: Logprobs) -> dict[str, float]:
    # Two tokens may have the same text. The likelier one keeps it.
    by_name: dict[str, float] = {}
    for token_id, logprob in (*entries[1:], entries[0]):
        by_name.setdefault(names.name(token_id), logprob)
    return by_name


def chat_logprobs(
    names: TokenNames, token_ids: Sequence[int], logprobs: Sequence[Logprobs | None]
) -> dict[str, Any]:
    """Return the `logprobs` of a choice of `/v1/chat/completions`."""
    known = (entries for entries in logprobs if entries)
    return {
        "content": [
            {**_named(names, *entries[0]), "top_logprobs": [_named(names, *entry) for entry in entries[1:]]}
            for entries in known
        ]
    }


def _named(names: TokenNames, token_id: int, logprob: float) -> dict[str, Any]:
    name = names.name(token_id)
    is_text = not name.startswith("token_id:")
    return {"token": name, "logprob": logprob, "bytes": list(name.encode()) if is_text else None}


def take_prompt_logprobs(
    params: Mapping[str, Any] | None, num_prompt_tokens: int
) -> tuple[Mapping[str, Any] | None, tuple[Logprobs, ...] | None]:
    """Take the log probabilities of a prompt out of `kv_transfer_params`.

    Returns:
        The other params, and the log probabilities of each token of the prompt but the first; None if there are none.

    Raises:
        ApiError: they are malformed, or those of another prompt (400).
    """
    if params is None or PROMPT_LOGPROBS not in params:
        return params, None
    others = {key: value for key, value in params.items() if key != PROMPT_LOGPROBS}
    value = params[PROMPT_LOGPROBS]
    if not isinstance(value, list) or len(value) != num_prompt_tokens - 1 or not all(map(_is_entry, value)):
        raise bad_request(
            f"kv_transfer_params.{PROMPT_LOGPROBS} must have [token id, log probability] pairs for each of the "
            f"{num_prompt_tokens - 1} tokens after the first of the prompt",
            "kv_transfer_params",
        )
    return others, tuple(tuple((pair[0], float(pair[1])) for pair in entry) for entry in value)


def _is_entry(entry: object) -> bool:
    return isinstance(entry, list) and 1 <= len(entry) <= MAX_LOGPROBS + 1 and all(map(_is_pair, entry))


def _is_pair(pair: object) -> bool:
    return (
        isinstance(pair, list)
        and len(pair) == 2
        and type(pair[0]) is int
        and pair[0] >= 0
        and type(pair[1]) in (int, float)
        and math.isfinite(pair[1])
    )
