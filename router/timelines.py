"""Record what became of each request, for the router's page: when it was where, and what its handoff cost.

The router notes what it sees itself: when it sent a request to a node, and when the answer began and ended.
What happened inside a node comes from the `metrics` of the node's answer. Nodes of vLLM answer without; then
a part of the record says what else it contains. A record has no word of the prompt or of the answer.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import itertools
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from ..web.errors import CLIENT_LEFT, ApiError
from ..web.json_body import object_of
from ..web.sse import Event
from .membership import Role
from .reading import NodeAnswer

#: Finished requests that the router keeps.
MAX_RECENT: Final = 200
#: Unfinished requests in one report. There may be more, whose number is reported.
MAX_LISTED: Final = 50
#: Seconds of the throughput's history.
HISTORY_S: Final = 120
#: A client chooses the request's id, and a node chooses its errors. At most this many characters of each are
#: kept.
MAX_ID_CHARS: Final = 128
MAX_ERROR_CHARS: Final = 400
#: No figure of a node is larger, be it seconds, bytes or tokens.
MAX_FIGURE: Final = 1e15

#: A request that waited less for a slot at the router has not waited.
SHORTEST_QUEUE_S: Final = 1e-3

#: Calls of a request that others have replaced, and that its record keeps: the latest ones. The others' time
#: is the router's.
MAX_FORMER_CALLS: Final = 16

#: What a request spends its time on. `routing` is the router's own time. `lost` is a call of a node that gave
#: nothing.
Kind = Literal["routing", "queue", "prefill", "exposed", "decode", "lost"]


@dataclass(frozen=True)
class Part:
    """A part of a request's time. The parts of a request follow each other without a gap.

    Attributes:
        node: The URL of the node that worked on it; empty for the router.
        start_s: From the request's arrival at the router.
        includes: Other kinds that this part contains, because the node does not report them separately.
    """

    kind: Kind
    node: str
    start_s: float
    seconds: float
    includes: tuple[Kind, ...] = ()


@dataclass(frozen=True)
class _Figures:
    """What a node's answer says about a request.

    A node may leave out anything, and what it says is not to be trusted.

    Attributes:
        is_split: The node reports how long the request waited, and its transfer, as nodes of `serve.py` do.
        ttft_s: 0 if it does not say.
        num_found_tokens: Prompt tokens whose cache was loaded or was there already.
        transfer_s: From the start of the first read to the end of the last one.
        exposed_s: The part of the transfer that computing the prompt did not hide.
    """

    is_split: bool = False
    queue_s: float = 0.0
    ttft_s: float = 0.0
    num_prompt_tokens: int | None = None
    num_output_tokens: int | None = None
    num_found_tokens: int = 0
    transport: str = ""
    mechanism: str = ""
    num_bytes: int = 0
    transfer_s: float = 0.0
    exposed_s: float = 0.0
    transfer_error: str = ""

    @staticmethod
    def of(answer: Mapping[str, Any]) -> _Figures:
        """Read a whole answer, or the last event of a stream."""
        usage, metrics = _mapping(answer, "usage"), _mapping(answer, "metrics")
        transfer = _mapping(metrics, "transfer")
        return _Figures(
            is_split="queue_s" in metrics,
            queue_s=_number(metrics, "queue_s"),
            ttft_s=_number(metrics, "ttft_s"),
            num_prompt_tokens=_count(metrics, "num_prompt_tokens", usage, "prompt_tokens"),
            num_output_tokens=_count(metrics, "num_output_tokens", usage, "completion_tokens"),
            num_found_tokens=int(
                _number(metrics, "num_loaded_tokens") + _number(metrics, "num_cached_tokens")
            ),
            transport=_text(transfer, "transport", MAX_ID_CHARS),
            mechanism=_text(transfer, "mechanism", MAX_ID_CHARS),
            num_bytes=int(_number(transfer, "num_bytes")),
            transfer_s=_number(transfer, "seconds"),
            exposed_s=_number(transfer, "exposed_seconds"),
            transfer_error=_text(transfer, "error", MAX_ERROR_CHARS),
        )


@dataclass
class _Visit:
    """One phase of a request at one node.

    Attributes:
        sent_s: When the router sent it, on the timeline's clock, as all times here.
        first_s: When the first bytes of a streamed answer arrived.
        ended_s: When the prefill node's answer had arrived.
    """

    node: str
    sent_s: float
    first_s: float | None = None
    ended_s: float | None = None
    figures: _Figures = field(default_factory=_Figures)

    @property
    def first_token_s(self) -> float | None:
        if self.first_s is not None:
            return self.first_s
        return self.sent_s + self.figures.ttft_s if self.figures.ttft_s else None

    @property
    def has_computed_prompt(self) -> bool:
        """Whether the node reports that it found nothing of the prompt.

        A decode node always computes the last token.
        """
        figures = self.figures
        return figures.is_split and figures.num_found_tokens == 0 and (figures.num_prompt_tokens or 0) > 1


class Timeline:
    """The record of one request.

    If a phase is repeated at another node, the figures are those of the last call. The earlier ones are a
    part each.

    Args:
        number: Tells records apart, because clients may repeat request ids.
        arrived_s: When the request arrived, by `time.monotonic`. None: now.
        admitted_s: When the router, which limits how many requests it answers at a time, began with it. None:
            at once.
    """

    def __init__(
        self,
        number: int = 0,
        request_id: str = "",
        path: str = "",
        arrived_s: float | None = None,
        admitted_s: float | None = None,
    ) -> None:
        self._number = number
        self._request_id = request_id[:MAX_ID_CHARS]
        self._path = path
        self._zero_s = time.monotonic() if arrived_s is None else arrived_s
        self._arrived_at = time.time() - self._now_s()
        self._admitted_s = 0.0 if admitted_s is None else admitted_s - self._zero_s
        self._prefill: _Visit | None = None
        self._decode: _Visit | None = None
        self._former: collections.deque[Part] = collections.deque(maxlen=MAX_FORMER_CALLS)
        self._first_sent_s: float | None = None
        self._num_pieces = 0
        self._last_piece_s = 0.0
        self._longest_pause_s = 0.0
        self._ended_s: float | None = None
        self._num_attempts = 0
        self._status: int | None = None
        self._error = ""
        self._placement = ""

    def _now_s(self) -> float:
        return time.monotonic() - self._zero_s

    # -- what the router notes ------------------------------------------------------------------------

    def placed(self, choice: str) -> None:
        """Note which way the request goes, and the estimates behind that."""
        self._placement = choice

    def prefill_sent(self, node: str) -> None:
        """Note that a prefill node is about to receive the request."""
        self._replace_prefill(_Visit(node, self._now_s()))
        self._replace_decode(None)
        self._num_attempts += 1

    def prefill_ended(self, answer: Mapping[str, Any]) -> None:
        """Note the answer of the prefill node: the whole of it, or the last event."""
        if self._prefill is not None:
            self._prefill.ended_s = self._now_s()
            self._prefill.figures = _Figures.of(answer)

    def call_lost(self, phase: Role) -> None:
        """Note that the call of a phase's node has ended without an answer, or without the rest of it."""
        if phase == "prefill":
            self._replace_prefill(None)
        else:
            self._replace_decode(None)

    def _replace_prefill(self, visit: _Visit | None) -> None:
        if (former := self._prefill) is not None:
            self._keep(former, "lost" if former.ended_s is None else "prefill", ("queue",))
        self._prefill = visit

    def _replace_decode(self, visit: _Visit | None) -> None:
        if (former := self._decode) is not None:
            # What it has sent is a part of the answer, also if another node gives the rest.
            has_sent = former.first_s is not None and self._num_pieces > 0
            if has_sent and self._first_sent_s is None:
                self._first_sent_s = former.first_s
            self._keep(former, "decode" if has_sent else "lost", ("queue", "exposed"))
        self._decode = visit

    def _keep(self, former: _Visit, kind: Kind, includes: tuple[Kind, ...]) -> None:
        ended_s = self._now_s() if former.ended_s is None else former.ended_s
        includes = () if kind == "lost" else includes
        self._former.append(Part(kind, former.node, former.sent_s, ended_s - former.sent_s, includes))

    def pieces_sent(self, num: int) -> None:
        """Note pieces of a streamed answer that the client receives together. Usually each is a token."""
        now_s = self._now_s()
        if self._num_pieces:
            self._longest_pause_s = max(self._longest_pause_s, now_s - self._last_piece_s)
        self._num_pieces += num
        self._last_piece_s = now_s

    def decode_sent(self, node: str, *, is_alone: bool) -> None:
        """Note that a decode node is about to receive the request.

        Args:
            is_alone: Without a prefill node.
        """
        if is_alone:
            self._replace_prefill(None)
        self._replace_decode(_Visit(node, self._now_s()))

    def decode_began(self, answer: NodeAnswer) -> None:
        """Note a whole answer, or the first event of a stream."""
        if self._decode is None:
            return
        if answer.is_stream:
            self._decode.first_s = self._now_s()
        else:
            self._take_in(self._decode, object_of(answer.payload))

    def decode_ended(self, status: int, tail: Iterable[Event]) -> None:
        """Note the end of the answer.

        Args:
            tail: The last events of a stream, which have the node's figures.
        """
        if self._decode is not None:
            for event in tail:
                self._take_in(self._decode, event.content)
        self.ended(status)

    def _take_in(self, visit: _Visit, answer: Mapping[str, Any]) -> None:
        if not answer.keys() & {"metrics", "usage", "error"}:
            return
        if "metrics" in answer or not visit.figures.is_split:
            visit.figures = _Figures.of(answer)
        self._error = self._error or _text(_mapping(answer, "error"), "message", MAX_ERROR_CHARS)

    def failed(self, status: int, error: str) -> None:
        """Note why the answer is missing or incomplete."""
        self._status, self._error = status, error[:MAX_ERROR_CHARS]

    def ended(self, status: int) -> None:
        """Note the end of the answer, once. A failure that was noted before keeps its own status."""
        if self._ended_s is None:
            self._ended_s = self._now_s()
            self._status = self._status or status

    # -- what the page shows --------------------------------------------------------------------------

    @property
    def first_token_s(self) -> float | None:
        """Seconds from the arrival to the first token that the client saw or could see; None before
        it came.
        """
        if self._first_sent_s is None and self._decode is not None:
            return self._decode.first_token_s
        return self._first_sent_s

    @property
    def is_done(self) -> bool:
        return self._ended_s is not None

    @property
    def has_failed(self) -> bool:
        return bool(self._error) or (self._status or 0) >= 400

    @property
    def _figures(self) -> _Figures:
        """The figures of the decode node, which end the story."""
        return self._decode.figures if self._decode else _Figures()

    @property
    def num_output_tokens(self) -> int:
        return self._figures.num_output_tokens or 0

    @property
    def num_bytes(self) -> int:
        return self._figures.num_bytes

    @property
    def _last_s(self) -> float:
        return self._now_s() if self._ended_s is None else self._ended_s

    def parts(self) -> list[Part]:
        """Return what the time was spent on, from the arrival to the end, or until now.

        The order is fixed, so a part that overlaps with an earlier one begins where that one ends: what is
        hidden costs nothing.
        """
        last_s = self._last_s
        parts: list[Part] = []
        cursor_s = 0.0

        def add(kind: Kind, until_s: float, node: str = "", includes: tuple[Kind, ...] = ()) -> None:
            nonlocal cursor_s
            until_s = min(until_s, last_s)
            if until_s > cursor_s:
                parts.append(Part(kind, node, cursor_s, until_s - cursor_s, includes))
                cursor_s = until_s

        if self._admitted_s >= SHORTEST_QUEUE_S:
            add("queue", self._admitted_s)
        former = collections.deque(self._former)

        def add_former(sent_s: float) -> None:
            """Add the calls that began before a later one was sent."""
            while former and former[0].start_s < sent_s:
                part = former.popleft()
                add("routing", part.start_s)
                add(part.kind, part.start_s + part.seconds, part.node, part.includes)
            add("routing", sent_s)

        prefill, decode = self._prefill, self._decode
        first_s = decode.first_token_s if decode else None
        exposed_s = self._figures.exposed_s
        if prefill is not None:
            add_former(prefill.sent_s)
            if prefill.figures.is_split:
                add("queue", prefill.sent_s + prefill.figures.queue_s, prefill.node)
            # If both were asked at once, the prefill node's answer may reach the router after the first
            # token.
            until_s = last_s if prefill.ended_s is None else prefill.ended_s
            if first_s is not None:
                until_s = min(until_s, first_s - exposed_s)
            add("prefill", until_s, prefill.node, () if prefill.figures.is_split else ("queue",))
        if decode is not None:
            add_former(decode.sent_s)
            if decode.figures.is_split:
                add("queue", decode.sent_s + decode.figures.queue_s, decode.node)
                add("exposed", cursor_s + exposed_s, decode.node)
                if decode.has_computed_prompt and first_s is not None:
                    add("prefill", first_s, decode.node)
            add("decode", last_s, decode.node, () if decode.figures.is_split else ("queue", "exposed"))
        add_former(last_s)
        return parts

    def first_token_parts(self) -> list[Part]:
        """Return what the time until the first token was spent on.

        The parts add up to `first_token_s`; there are none before it.
        """
        end_s = self.first_token_s or 0.0
        # The decode node's part begins with the step that gives the first token.
        return [
            replace(part, seconds=min(part.seconds, end_s - part.start_s))
            for part in self.parts()
            if part.start_s < end_s
        ]

    def hidden(self) -> tuple[float, float]:
        """Return when the hidden part of the transfer began, and for how many seconds; (0, 0) if nothing was
        hidden.

        It is the part that happened while the prompt was still being computed.
        """
        hidden_s = self._figures.transfer_s - self._figures.exposed_s
        if self._decode is None or hidden_s <= 0:
            return 0.0, 0.0
        parts = self.parts()
        after = ("exposed", "decode")
        sent_s = self._decode.sent_s
        ends = (part.start_s for part in parts if part.kind in after and part.start_s >= sent_s)
        start_s = max(sent_s, (end_s := next(ends, self._last_s)) - hidden_s)
        return (start_s, end_s - start_s) if end_s > start_s else (0.0, 0.0)

    def report(self) -> dict[str, Any]:
        """Return the record as JSON. Times are in milliseconds from the arrival."""
        prefill, decode = self._prefill, self._decode
        first_s = self.first_token_s
        hidden_start_s, hidden_s = self.hidden()
        prompt_tokens = [visit.figures.num_prompt_tokens for visit in (decode, prefill) if visit]
        figures = self._figures
        return {
            "number": self._number,
            "id": self._request_id,
            "path": self._path,
            "arrived_at": self._arrived_at,
            "is_done": self.is_done,
            "status": self._status,
            "error": self._error or figures.transfer_error,
            "attempts": self._num_attempts,
            "placement": self._placement,
            "prefill": prefill.node if prefill else "",
            "decode": decode.node if decode else "",
            "prompt_tokens": next((count for count in prompt_tokens if count is not None), None),
            "output_tokens": figures.num_output_tokens,
            "pieces": self._num_pieces,
            "longest_pause_ms": _ms(self._longest_pause_s),
            "total_ms": _ms(self._last_s),
            "first_token_ms": None if first_s is None else _ms(first_s),
            "parts": [
                {
                    "kind": part.kind,
                    "node": part.node,
                    "start_ms": _ms(part.start_s),
                    "ms": _ms(part.seconds),
                    "includes": part.includes,
                }
                for part in self.parts()
            ],
            "hidden": {"start_ms": _ms(hidden_start_s), "ms": _ms(hidden_s)},
            "transfer": {
                "transport": figures.transport,
                "mechanism": figures.mechanism,
                "bytes": figures.num_bytes,
                "ms": _ms(figures.transfer_s),
            },
        }


@dataclass
class _Second:
    """What ended in one second."""

    second: int
    num_done: int = 0
    num_failed: int = 0
    num_output_tokens: int = 0
    num_bytes: int = 0


class RecentRequests:
    """The records of the requests in flight and of the last `MAX_RECENT` finished ones, and the
    throughput.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._finished: collections.deque[tuple[int, Timeline]] = collections.deque(maxlen=MAX_RECENT)
        self._num_finished = 0
        self._live: dict[int, Timeline] = {}
        self._seconds: collections.deque[_Second] = collections.deque(maxlen=HISTORY_S)

    @contextlib.contextmanager
    def following(
        self, request_id: str, path: str, arrived_s: float | None = None, admitted_s: float | None = None
    ) -> Iterator[Timeline]:
        """Record a request inside the block, which calls `Timeline.ended` if there is an answer.

        See `Timeline`.
        """
        number = next(self._numbers)
        timeline = self._live[number] = Timeline(number, request_id, path, arrived_s, admitted_s)
        try:
            yield timeline
        except ApiError as error:
            timeline.failed(error.status, str(error))
            timeline.ended(error.status)
            raise
        except (asyncio.CancelledError, ConnectionError):
            if not timeline.is_done:  # a client may disconnect as soon as it has the last byte
                timeline.failed(CLIENT_LEFT, "the client left before the answer was complete")
            raise
        finally:
            timeline.ended(500)
            del self._live[number]
            self._num_finished += 1
            self._finished.append((self._num_finished, timeline))
            self._count(timeline)

    def _count(self, timeline: Timeline) -> None:
        second = int(time.monotonic())
        if not self._seconds or self._seconds[-1].second != second:
            self._seconds.append(_Second(second))
        current = self._seconds[-1]
        current.num_done += not timeline.has_failed
        current.num_failed += timeline.has_failed
        current.num_output_tokens += timeline.num_output_tokens
        current.num_bytes += timeline.num_bytes

    def report(self, since: int) -> dict[str, Any]:
        """Return the requests in flight and those that finished after a former report, oldest first, as JSON.

        Args:
            since: The `last` of that report; 0 for none.
        """
        live = list(self._live.values())
        return {
            "last": self._num_finished,
            "keeps": MAX_RECENT,
            "finished": [timeline.report() for number, timeline in self._finished if number > since],
            "num_in_flight": len(live),
            "in_flight": [timeline.report() for timeline in live[:MAX_LISTED]],
            "history": self._history(),
        }

    def _history(self) -> dict[str, list[int]]:
        """Return counts per second, oldest first. The last second is not over."""
        end = int(time.monotonic())
        seconds = {entry.second: entry for entry in self._seconds}
        none = _Second(0)
        entries = [seconds.get(second, none) for second in range(end - HISTORY_S + 1, end + 1)]
        return {
            "done": [entry.num_done for entry in entries],
            "failed": [entry.num_failed for entry in entries],
            "output_tokens": [entry.num_output_tokens for entry in entries],
            "bytes": [entry.num_bytes for entry in entries],
        }


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def _mapping(source: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = source.get(name)
    return value if isinstance(value, dict) else {}


def _number(source: Mapping[str, Any], name: str) -> float:
    """Return a number from 0 to `MAX_FIGURE`; 0 in place of anything else."""
    value = source.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return 0.0
    return float(value) if 0 <= value <= MAX_FIGURE else 0.0


def _count(metrics: Mapping[str, Any], name: str, usage: Mapping[str, Any], usage_name: str) -> int | None:
    """Return a number of tokens. None if the node does not report it."""
    for source, key in ((metrics, name), (usage, usage_name)):
        if key in source:
            return int(_number(source, key))
    return None


def _text(source: Mapping[str, Any], name: str, max_chars: int) -> str:
    value = source.get(name)
    return value[:max_chars] if isinstance(value, str) else ""
