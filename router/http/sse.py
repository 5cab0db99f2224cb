"""Server-sent events, framed in one place: bytes come in as they arrive, and go out as events.

An event keeps the bytes that arrived, with the empty line that ends it, so that one that nothing changes
passes byte for byte. Its content is parsed when it is asked for. Nothing here does I/O.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from .json_body import object_of

_END = re.compile(rb"\n\r?\n")
_NAME = re.compile(rb"event:[ ]?([^\r\n]{0,80})\r?\n(?=data:)")


class EventTooLongError(ValueError):
    """An event has more bytes than it may have."""


class Event:
    """One event of a stream.

    Attributes:
        raw: Its bytes, with the empty line that ends it. The last event of a stream that broke off has none.
    """

    __slots__ = ("_content", "raw")

    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        self._content: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, content: Mapping[str, Any], name: str = "") -> Event:
        """Write an event, as vLLM writes JSON.

        Half of a surrogate pair, which no model writes, cannot be encoded.

        Args:
            name: For a line `event:`; empty: there is none.
        """
        text = json.dumps(content, separators=(",", ":"), ensure_ascii=False)
        named = f"event: {name}\ndata: {text}\n\n" if name else f"data: {text}\n\n"
        return cls(named.encode(errors="replace"))

    @property
    def content(self) -> Mapping[str, Any]:
        """The JSON object that it carries; empty for anything else, such as a comment or `[DONE]`."""
        if self._content is None:
            raw = self.raw.strip()
            name = _NAME.match(raw)
            self._content = object_of((raw[name.end() :] if name else raw).removeprefix(b"data:"))
        return self._content

    @property
    def name(self) -> str:
        """What its line `event:` says; empty if it has none."""
        name = _NAME.match(self.raw)
        return name[1].decode(errors="replace") if name else ""

    @property
    def is_comment(self) -> bool:
        """Whether it says nothing, as what keeps a silent connection open does."""
        return self.raw.startswith(b":")

    @property
    def is_done(self) -> bool:
        """Whether it is the one that ends an answer."""
        return self.raw.strip() == b"data: [DONE]"


#: The event that ends an answer.
DONE = Event(b"data: [DONE]\n\n")

#: Passes events on: as they are, changed, or not at all.
Filter = Callable[[Event], Iterable[Event]]


class Splitter:
    """Splits a stream into its events.

    Args:
        max_bytes: Of one event.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._rest = bytearray()

    @property
    def has_rest(self) -> bool:
        """Whether a part of the next event has arrived."""
        return bool(self._rest)

    def add(self, chunk: bytes) -> list[Event]:
        """Return the events that are complete with a chunk.

        Raises:
            EventTooLongError: The next event has more than `max_bytes`. What has arrived of it is dropped.
        """
        # Search only what is new, because a large event arrives in many chunks. An end may have begun in the
        # last two bytes.
        search_from, begin, events = max(0, len(self._rest) - 2), 0, []
        self._rest += chunk
        for end in _END.finditer(self._rest, search_from):
            events.append(Event(bytes(self._rest[begin : end.end()])))
            begin = end.end()
        del self._rest[:begin]
        if len(self._rest) > self._max_bytes:
            self._rest.clear()
            raise EventTooLongError(f"sent an event of more than {self._max_bytes} bytes")
        return events

    def rest(self) -> list[Event]:
        """Return what follows the last complete event, if there is anything, and forget it."""
        rest = bytes(self._rest)
        self._rest.clear()
        return [Event(rest)] if rest else []


def events_of(payload: bytes) -> list[Event]:
    """Split bytes that are all there."""
    splitter = Splitter(len(payload))
    return [*splitter.add(payload), *splitter.rest()]
