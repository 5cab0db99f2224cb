"""Token ids to text, piece by piece, with stop texts that may cross tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

#: Prompt tokens decoded along with the answer: some tokenizers write a token differently at the start of a text.
_NUM_CONTEXT_TOKENS = 6
_REPLACEMENT = "\ufffd"


class TokenDecoder(Protocol):
    """What is used of a tokenizer."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str | list[str]: ...


class IncrementalDetokenizer:
    """The text that each new token adds.

    A character may take several tokens: nothing is returned until it is whole. What was returned is never
    taken back, and all of it together is the text of all tokens.
    """

    def __init__(self, tokenizer: TokenDecoder, prompt_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        # A window over the sequence: the text of `_context` is out already, that of `_pending` is not.
        self._context = list(prompt_token_ids[-_NUM_CONTEXT_TOKENS:])
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        """Add a token; return the text that is whole now, maybe empty."""
        self._pending.append(token_id)
        delta = self._pending_text()
        if delta.endswith(_REPLACEMENT):
            return ""
        if delta:
            self._context = self._pending
            self._pending = []
        return delta

    def flush(self) -> str:
        """Return the text of what is still pending; a character that stayed incomplete is U+FFFD."""
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
    """Lets text through until one of the stop texts appears in it."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""
        self.matched = False

    def push(self, text: str) -> str:
        """Add text; return what surely precedes any stop text. Nothing any more once `matched`."""
        if self.matched:
            return ""
        self._held += text
        found = [at for at in (self._held.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self.matched = True
            return self._release(min(found))
        return self._release(len(self._held) - self._num_ambiguous())

    def flush(self) -> str:
        """Return what was held back as the possible start of a stop text that never came."""
        return "" if self.matched else self._release(len(self._held))

    def _release(self, length: int) -> str:
        out, self._held = self._held[:length], self._held[length:]
        return out

    def _num_ambiguous(self) -> int:
        """Length of the longest end of the held text with which a stop text begins."""
        longest = min(len(self._held), max((len(stop) for stop in self._stop), default=1) - 1)
        for length in range(longest, 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stop):
                return length
        return 0
