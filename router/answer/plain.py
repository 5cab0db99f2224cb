"""Bytes of a stream that only carry more of an answer, as almost all do: the client gets them as they are.

An event is parsed only if it may say something that the router has to know. This looks for the words that
such an event has, and counts the events. A word that stands in a text costs time and nothing else. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from .beginnings import TOKEN_IDS
from .moves import SIGNS

#: An event with one of these may end the answer, fail, report or stop it, or comes with the ids of a prompt.
_WORDS = (
    b'"error"',
    b"[DONE]",
    b'"abort"',
    b'"metrics"',
    b'"num_cached_tokens"',
    b'"prompt_token_ids"',
    *SIGNS,
)
#: How an event has these fields if they say nothing, as nodes write JSON.
_NOTHING = {
    b'"finish_reason"': (b'"finish_reason":null', b'"finish_reason": null'),
    b'"choices"': (b'"choices":[{', b'"choices": [{'),
}
#: Counts so far, which a client may ask for with each event.
_COUNTS = re.compile(
    rb'"usage": ?(?:null|\{(?:"(?:prompt|completion|total)_tokens": ?[0-9]{1,9}(?:, ?)?){1,3}\})'
)
#: Ids of tokens: few, and none that is too long to be one.
_IDS = re.compile(rb'"token_ids": ?(?:null|\[(?:[0-9]{1,10}(?:, ?[0-9]{1,10}){0,63})?\])')
#: Where the text of a token begins, in an event with one.
_TEXT = re.compile(rb'"(?:text|content)": ?"')


class PlainBytes:
    """Recognizes them, and takes the ids of tokens out of them.

    The events of a stream differ in their text, and often in nothing else. So what is around the text of the
    latest plain event is kept, and an event with the same around its own is plain as well.

    Args:
        last_events: Names of events that end the stream.
        hides_ids: The client does not get the ids of tokens.
    """

    def __init__(self, last_events: Iterable[str] = (), *, hides_ids: bool = True) -> None:
        self._words = (*_WORDS, *(name.encode() for name in last_events if name != "error"))
        self._hides_ids = hides_ids
        self._frame = (b"", b"", b"")  # before the text, after it, and what the client gets of that

    def passed(self, chunk: bytes) -> tuple[bytes, int] | None:
        """Return what the client gets of whole events, and how many they are. None: one may not be plain."""
        before, after, own_after = self._frame
        # A text without a quote is one text, whatever it says.
        if before and chunk.startswith(before) and chunk.endswith(after):
            text = chunk[len(before) : -len(after)]
            if b'"' not in text and b"\n" not in text and len(before) + len(after) <= len(chunk):
                return before + text + own_after, 1
        if not (num := self.count(chunk)):
            return None
        own = _without_ids(chunk) if self._hides_ids and b'"token_ids"' in chunk else chunk
        if num == 1:
            self._note_frame(chunk)
        return own, num

    def _note_frame(self, event: bytes) -> None:
        self._frame = (b"", b"", b"")
        if (found := _TEXT.search(event)) is None or (end := event.find(b'"', found.end())) < 0:
            return
        before, after = event[: found.end()], event[end:]
        if event[end - 1 : end] != b"\\" and b'"token_ids"' not in before:
            own = _without_ids(after) if self._hides_ids and b'"token_ids"' in after else after
            self._frame = before, after, own

    def count(self, chunk: bytes) -> int:
        """Return how many events whole events have, if all of them are plain. 0: one of them may not be."""
        if not chunk.endswith(b"\n\n") or b"\r" in chunk:
            return 0
        for word in self._words:
            if word in chunk:
                return 0
        for word, forms in _NOTHING.items():
            if (num := chunk.count(word)) and num != chunk.count(forms[0]) + chunk.count(forms[1]):
                return 0
        if (num := chunk.count(b'"usage"')) and num != len(_COUNTS.findall(chunk)):
            return 0
        num_events = chunk.count(b"\n\n")
        if num := chunk.count(b'"token_ids"'):
            if num != len(_IDS.findall(chunk)) or num > num_events:
                return 0
            if self._hides_ids and b'"delta":{}' in chunk:  # without the ids there would have been no event
                return 0
        return num_events


def _without_ids(chunk: bytes) -> bytes:
    """Return plain bytes without the ids of tokens: as `take_token_ids` does with one event."""
    is_vllm = b'"token_ids":[' in chunk  # see there
    return TOKEN_IDS.sub(rb'\1"token_ids":null' if is_vllm else b"", chunk)
