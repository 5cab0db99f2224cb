"""Whether a node's answer has come to its end: the one place that says what a complete answer is. Pure.

A connection that closes says nothing. A node that is killed behind a proxy, or that is stopping, ends its
answer as if all of it had been sent. So a stream is complete after a `finish_reason` for each of its choices,
and a whole answer is one JSON object.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ..http.json_body import is_object
from ..http.sse import Event, Filter
from .dialects import Dialect

#: In a text the quotes would be escaped, so these are keys.
_REASON = re.compile(rb'"finish_reason":\s*"')
_NO_CHOICES = re.compile(rb'"choices":\s*\[\s*\]')

EMPTY = "the node ended it before its first token; is it stopping?"
CUT = "the node ended it without a finish_reason; is it stopping?"
UNFINISHED = "the node ended it without its last event; is it stopping?"
ABORTED = "the node aborted the request; is it stopping?"
NOT_AN_OBJECT = "the node's answer is not one JSON object; was it cut off?"

_PLAIN = Dialect()

#: How the message begins with which a server of vLLM answers as soon as its engine has ended: it crashed, or
#: the server is stopping.
_ENGINE_ENDED = "EngineCore encountered an issue"


class Heard:
    """What one node has said of an answer in its stream.

    Args:
        num_choices: How many answers the client has asked for.
        dialect: Says how the stream ends. Of one with named events only the last one counts.

    Attributes:
        has_said: It has sent more of an answer than its frame.
        has_usage: It has sent the counts of tokens that follow an answer, or an error, which has none.
        names_reasons: Its events have the field `finish_reason`.
        is_over: Nothing is missing: each choice has its reason, or the node has said why it failed.
        change: Turns its events into those for the client.
    """

    def __init__(self, num_choices: int, dialect: Dialect = _PLAIN) -> None:
        self._num_choices = num_choices
        self._dialect = dialect
        self.names_reasons = False
        self._ended = set[int]()
        self.has_said = self.has_usage = self.is_over = False
        self.change: Filter = unchanged

    def objection(self, event: Event) -> str:
        """Return why an event shows that the node gives the answer up, before it is added.

        Empty: it does not.

        An end is not believed before the last token. A server of vLLM that is stopping sends no chunk without
        a token, not even to say that it aborts: only the counts of tokens, if they were asked for, and
        `[DONE]`.
        """
        if is_abort(event):
            return ABORTED
        if self.is_over or self._dialect.last_events or not (event.is_done or _is_usage(event)):
            return ""
        if not self.has_said:
            return EMPTY
        return CUT if self.names_reasons else ""

    def missing(self) -> str:
        """Return what a stream lacks that ends here. Empty: nothing."""
        cut = UNFINISHED if self._dialect.last_events else CUT
        return "" if self.is_over else cut if self.has_said else EMPTY

    def is_last(self, event: Event) -> bool:
        """Whether an event ends a stream."""
        last = self._dialect.last_events
        return event.name in last if last else event.is_done

    def add(self, event: Event) -> None:
        """Take in the next event."""
        if self._dialect.last_events:
            is_frame = event.is_comment or event.name in self._dialect.first_events
            self.has_said = self.has_said or not is_frame
            self.is_over = self.is_over or self.is_last(event)
            return
        self.has_said = self.has_said or says_something(event)
        is_error = b'"error"' in event.raw and "error" in event.content
        self.has_usage = self.has_usage or is_error or _is_usage(event)
        if b'"finish_reason"' in event.raw:
            self.names_reasons = True
            if _REASON.search(event.raw):  # parsing each event would take time
                self._ended |= {_index(one) for one in choices_of(event.content) if _has_reason(one)}
        self.is_over = self.is_over or event.is_done or is_error or len(self._ended) >= self._num_choices


def objection_to(payload: bytes, content: Mapping[str, Any]) -> str:
    """Return why a node's whole answer with status 200 is none. Empty: it is one.

    Args:
        content: The payload, parsed.
    """
    if not content and not is_object(payload):
        return NOT_AN_OBJECT
    if any(one.get("finish_reason") == "abort" for one in choices_of(content)):
        return ABORTED
    # So vLLM writes it for Messages and for Responses.
    is_message = content.get("type") == "message" and content.get("stop_reason") is None
    return ABORTED if is_message or content.get("status") == "cancelled" else ""


def is_abort(event: Event) -> bool:
    """Whether a node says that it aborts an answer, as a server does that is stopping."""
    choices = choices_of(event.content) if b'"abort"' in event.raw else ()
    return any(one.get("finish_reason") == "abort" for one in choices)


def says_engine_ended(content: Mapping[str, Any]) -> bool:
    """Whether an answer or an event of one says that the engine of its vLLM server has ended."""
    error = content.get("error")
    message = error.get("message") if isinstance(error, dict) else None
    # Other errors may quote the request, so only the beginning counts.
    return isinstance(message, str) and message.startswith(_ENGINE_ENDED)


def says_something(event: Event) -> bool:
    """Whether an event has a part of an answer, or says why it ends. What is not known is taken for one."""
    if event.is_done or event.is_comment:
        return False
    choices = event.content.get("choices")
    return not isinstance(choices, list) or not all(map(_is_empty, choices))


def choices_of(content: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the choices of an answer or of one event of it."""
    choices = content.get("choices")
    yield from (one for one in (choices if isinstance(choices, list) else ()) if isinstance(one, dict))


def _is_usage(event: Event) -> bool:
    is_possible = b'"usage"' in event.raw and _NO_CHOICES.search(event.raw) is not None
    return is_possible and isinstance(event.content.get("usage"), dict)


def _has_reason(choice: Mapping[str, Any]) -> bool:
    return isinstance(choice.get("finish_reason"), str)


def _index(choice: Mapping[str, Any]) -> int:
    index = choice.get("index", 0)
    return index if type(index) is int else 0


def _is_empty(choice: Any) -> bool:
    """Whether a choice is like that in which a chat's stream of vLLM says who speaks."""
    if not isinstance(choice, dict) or choice.get("finish_reason") is not None or choice.get("token_ids"):
        return False
    delta = choice.get("delta")
    if isinstance(delta, dict):
        return not any(value for key, value in delta.items() if key != "role")
    return choice.get("text") == ""


def unchanged(event: Event) -> Iterable[Event]:
    """Pass an event on as it is."""
    return (event,)
