"""Turn token ids into text piece by piece. Stop texts may span tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

#: Prompt tokens decoded along with the answer: some tokenizers write a token differently at the start of a
#: text.
_NUM_CONTEXT_TOKENS = 6
_REPLACEMENT = "\ufffd"


class TokenDecoder(Protocol):
    """The part of a tokenizer that this module uses."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str | list[str]: ...


class IncrementalDetokenizer:
    """Return the text that each new token adds.

    A character may take several tokens; its text is returned when it is complete. Returned text never
    changes, and all of it together is the text of all tokens.
    """

    def __init__(self, tokenizer: TokenDecoder, prompt_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        # A window over the sequence: the text of `_context` was returned already, that of `_pending` was not.
        self._context = list(prompt_token_ids[-_NUM_CONTEXT_TOKENS:])
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        """Add a token; return the text that is complete now, which may be empty."""
        self._pending.append(token_id)
        delta = self._pending_text()
        if delta.endswith(_REPLACEMENT):
            return ""
        if delta:
            self._context = self._pending
            self._pending = []
        return delta

    def flush(self) -> str:
        """Return the text of the pending tokens. An incomplete character becomes U+FFFD."""
        delta = self._pending_text()
        self._context, self._pending = self._pending, []
        return delta

    def _pending_text(self) -> str:
        before = self._decode(self._context)
        return self._decode(self._context + self._pending)[len(before) :]

    def _decode(self, token_ids: list[int]) -> str:
        text = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        assert isinstance(text, str), "one sequence gives one text"
        return text


class StopMatcher:
    """Pass text on until one of the stop texts appears in it."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""
        self.matched = False

    def push(self, text: str) -> str:
        """Add text; return the part that cannot belong to a stop text. Return nothing after `matched`."""
        if self.matched:
            return ""
        self._held += text
        found = [at for at in (self._held.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self.matched = True
            return self._release(min(found))
        return self._release(len(self._held) - self._num_ambiguous())

    def flush(self) -> str:
        """Return the text that was held back because it could have been the start of a stop text."""
        return "" if self.matched else self._release(len(self._held))

    def _release(self, length: int) -> str:
        out, self._held = self._held[:length], self._held[length:]
        return out

    def _num_ambiguous(self) -> int:
        """Return the length of the longest suffix of the held text that is a prefix of a stop text."""
        longest = min(len(self._held), max((len(stop) for stop in self._stop), default=1) - 1)
        for length in range(longest, 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stop):
                return length
        return 0
