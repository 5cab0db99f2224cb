"""Show what became of each request, for the router's page: when it was where, and what its handoff cost.

A record is the request's span and those of its calls of nodes, ended or not. All that is shown is computed
from these; the `Observer` writes them. Nodes of vLLM report no figures of their own; then a part of the time
says what else it contains. A record has no word of the prompt or of the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple, TypeVar

from ...connector.spans import PART, PREFIX, Span
from ..answer.bill import Count, count_of, num_prompt_of, usage_in
from ..answer.dialects import UsageNames
from ..answer.exchange import Exchange, Fact
from ..answer.handoffs import NO_REASON, REMEDY
from ..choice.placement import Choice
from ..http.errors import CLIENT_LEFT, ApiError
from ..http.json_body import object_of
from ..http.sse import Event
from ..http.tracing import NO_SPAN
from ..nodes.membership import Role
from ..nodes.reading import NodeAnswer
from .metrics import RouterMetrics

#: Finished requests that the router keeps.
MAX_RECENT: Final = 200
#: Unfinished requests in one report. There may be more, whose number is reported.
MAX_LISTED: Final = 50
#: The throughput's history: what is counted, and for how many seconds.
HISTORY: Final = ("done", "failed", "output_tokens", "bytes")
HISTORY_S: Final = 120
#: A client chooses the request's id, and a node its errors. Longer ones are cut to this many characters.
MAX_ID_CHARS: Final = 128
MAX_ERROR_CHARS: Final = 400
#: No figure of a node is larger, be it seconds, bytes or tokens.
MAX_FIGURE: Final = 1e15

#: A request that waited less for a slot at the router has not waited.
SHORTEST_QUEUE_S: Final = 1e-3

#: Calls of nodes that a record keeps: the latest ones. The others' time is the router's.
MAX_CALLS: Final = 16

#: The facts that end a call of a node, whose phase another call has afterwards.
LOST_CALLS: Final[Mapping[str, Role]] = {
    "prefill lost": "prefill",
    "decode lost": "decode",
    "answer moved": "decode",
    "answer stopped": "decode",
}

#: What a request spends its time on. `routing` is the router's own time. `lost` is a call that gave nothing.
Kind = Literal["routing", "queue", "prefill", "exposed", "decode", "lost"]


class Part(NamedTuple):
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


class Marks(NamedTuple):
    """What the span of a request has for the page, besides `placement`. Times are from the arrival.

    Attributes:
        admitted_s: When the router, which limits how many requests it answers at a time, began with it.
        attempts: How often a prefill node was asked.
        ended_s: When the answer ended; None before that.
        failure: Why the answer is missing or incomplete.
    """

    admitted_s: float = 0.0
    attempts: int = 0
    ended_s: float | None = None
    status: int | None = None
    failure: str = ""


class CallMarks(NamedTuple):
    """What the span of a call has for the page: what the router saw, and what the node's answer says.

    A node may leave out anything, and what it says is not to be trusted.

    Attributes:
        came_s: When a prefill node's answer had arrived, or the first event of a stream, from the arrival.
        is_alone: It is asked without a prefill node.
        has_sent: The client was sent a part of its stream.
        is_split: The node reports how long the request waited, and its transfer, as nodes of `serve.py` do.
        ttft_s: 0 if it does not say.
        num_loaded_tokens, num_cached_tokens: Prompt tokens whose cache was loaded, or was there already.
        transfer_s: From the start of the first read to the end of the last one.
        exposed_s: The part of the transfer that computing the prompt did not hide.
    """

    came_s: float | None = None
    is_alone: bool = False
    has_sent: bool = False
    is_split: bool = False
    queue_s: float = 0.0
    ttft_s: float = 0.0
    num_prompt_tokens: int | None = None
    num_output_tokens: int | None = None
    num_loaded_tokens: int = 0
    num_cached_tokens: int = 0
    transport: str = ""
    mechanism: str = ""
    num_bytes: int = 0
    transfer_s: float = 0.0
    exposed_s: float = 0.0
    sums: str = ""
    transfer_error: str = ""


T = TypeVar("T", Marks, CallMarks)


def mark(span: Span, **marks: str | float | None) -> None:
    """Set fields of `Marks` or `CallMarks`. `kvferry explain` does not print what has their prefix."""
    span.set(**{PREFIX + name: value for name, value in marks.items() if value is not None})


def marks_of(kind: type[T], span: Span) -> T:
    """Return what `mark` has set."""
    found: dict[str, Any] = span.attributes
    return kind(**{name: found[key] for name, key in _KEYS[kind].items() if key in found})


def marked(span: Span, name: str) -> Any:
    """Return one field that `mark` has set; None if it has not."""
    return span.attributes.get(PREFIX + name)


#: Of the fields, in a span's attributes.
_KEYS: Final = {kind: {name: PREFIX + name for name in kind._fields} for kind in (Marks, CallMarks)}


def mark_answer(call: Span, answer: Mapping[str, Any], names: UsageNames) -> None:
    """Set the figures of a whole answer, or of the last event of a stream."""
    usage, metrics = usage_in(answer, names), mapping_in(answer, "metrics")
    transfer = mapping_in(metrics, "transfer")
    mark(
        call,
        is_split="queue_s" in metrics,
        queue_s=_number(metrics, "queue_s"),
        ttft_s=_number(metrics, "ttft_s"),
        num_prompt_tokens=_count(metrics, "num_prompt_tokens", num_prompt_of(usage, names)),
        num_output_tokens=_count(metrics, "num_output_tokens", count_of(usage.get(names.answer))),
        num_loaded_tokens=count_of(metrics.get("num_loaded_tokens")) or 0,
        num_cached_tokens=count_of(metrics.get("num_cached_tokens")) or 0,
        transport=text_in(transfer, "transport", MAX_ID_CHARS),
        mechanism=text_in(transfer, "mechanism", MAX_ID_CHARS),
        num_bytes=int(_number(transfer, "num_bytes")),
        transfer_s=_number(transfer, "seconds"),
        exposed_s=_number(transfer, "exposed_seconds"),
        sums=text_in(transfer, "sums", MAX_ID_CHARS),
        transfer_error=text_in(transfer, "error", MAX_ERROR_CHARS),
    )


class _Call(NamedTuple):
    """A call of a node. Times are in seconds from the request's arrival.

    Attributes:
        replaced_s: When it was lost, or another call took its place. None: neither has happened.
    """

    role: Role
    node: str
    sent_s: float
    replaced_s: float | None
    marks: CallMarks

    @property
    def first_token_s(self) -> float | None:
        """Of a decode node's answer."""
        if self.marks.came_s is not None:
            return self.marks.came_s
        return self.sent_s + self.marks.ttft_s if self.marks.ttft_s else None

    def whole_part(self, replaced_s: float) -> tuple[Kind, float, str, tuple[Kind, ...]]:
        """Return what a call was that has been replaced: kind, end, node, and what it includes."""
        if self.role == "decode" and self.marks.has_sent:
            # What it has sent is a part of the answer, also if another node gives the rest.
            return "decode", replaced_s, self.node, ("queue", "exposed")
        if self.role == "prefill" and self.marks.came_s is not None:
            return "prefill", self.marks.came_s, self.node, ("queue",)
        return "lost", replaced_s, self.node, ()


@dataclass
class RequestRecord:
    """The spans of one request for an answer to one prompt.

    Args:
        span: Of the request, from its arrival.
        calls: The latest calls of nodes, in their order.

    Attributes:
        num_pieces: Of a streamed answer, which the client was sent. Usually each is a token. These three
            change with each piece, so the span learns them at the end only.
        last_piece_s: From the arrival; None before the first one.
        longest_pause_s: Between two pieces.
    """

    request_id: str
    path: str
    span: Span
    calls: deque[Span] = field(default_factory=lambda: deque(maxlen=MAX_CALLS))
    num_pieces: int = 0
    last_piece_s: float | None = None
    longest_pause_s: float = 0.0

    @property
    def now_s(self) -> float:
        """Seconds since the arrival."""
        return self.span.now() - self.span.start

    @property
    def marks(self) -> Marks:
        """What the request's span has for the page."""
        return marks_of(Marks, self.span)

    def failed(self, status: int, why: str) -> None:
        """Note why the answer is missing or incomplete."""
        mark(self.span, status=status, failure=why[:MAX_ERROR_CHARS])

    def ended(self, status: int) -> None:
        """Note the end of the answer, once. A failure that was noted before keeps its own status."""
        if marked(self.span, "ended_s") is None:
            mark(self.span, ended_s=self.now_s, status=marked(self.span, "status") or status)


class View:
    """What the page shows of a request, by its spans as they are now.

    If a phase is repeated at another node, its figures are those of the last call.

    Attributes:
        figures: Those of the decode node, which end the story.
    """

    def __init__(self, record: RequestRecord) -> None:
        self._record = record
        self._marks = record.marks
        calls = list(record.calls)
        self._calls = [self._call(span, calls[at:]) for at, span in enumerate(calls, 1)]
        current = {call.role: call for call in self._calls if call.replaced_s is None}
        self._prefill, self._decode = current.get("prefill"), current.get("decode")
        self._last_s = record.now_s if self._marks.ended_s is None else self._marks.ended_s
        self.figures = self._decode.marks if self._decode else CallMarks()

    def _call(self, call: Span, later: Sequence[Span]) -> _Call:
        zero, role = self._record.span.start, call.name.removesuffix("_call")
        # A call of a prefill node begins another attempt. One of a decode node alone needs no prefill.
        ends = [
            each.start
            for each in later
            if each.name in ("prefill_call", call.name) or marked(each, "is_alone")
        ]
        events = (event for event in self._record.span.events if LOST_CALLS.get(str(event["name"])) == role)
        ends += [at for at in (float(event["at"]) for event in events) if at > call.start]
        return _Call(
            "prefill" if role == "prefill" else "decode",
            str(call.attributes.get("node", "")),
            call.start - zero,
            min(ends) - zero if ends else None,
            marks_of(CallMarks, call),
        )

    @property
    def prefill_node(self) -> str:
        """The URL of the node that computed the prompt; empty if none was asked to."""
        return self._prefill.node if self._prefill else ""

    @property
    def decode_node(self) -> str:
        """The URL of the node that answers."""
        return self._decode.node if self._decode else ""

    @property
    def has_failed(self) -> bool:
        """Whether the client has no whole answer."""
        return (self._marks.status or 0) >= 400

    @property
    def first_token_s(self) -> float | None:
        """Seconds from the arrival to the first token that the client saw or could see; None before that."""
        for call in self._calls:
            if call.role == "decode" and call.replaced_s is not None and call.marks.has_sent:
                return call.marks.came_s
        return self._decode.first_token_s if self._decode else None

    def parts(self) -> list[Part]:
        """Return what the time was spent on, from the arrival to the end, or until now.

        The order is fixed. A part that overlaps with an earlier one begins where that one ends, so what is
        hidden costs nothing.
        """
        parts: list[Part] = []
        cursor_s = 0.0

        def add(kind: Kind, until_s: float, node: str = "", includes: tuple[Kind, ...] = ()) -> None:
            nonlocal cursor_s
            until_s = min(until_s, self._last_s)
            if until_s > cursor_s:
                parts.append(Part(kind, node, cursor_s, until_s - cursor_s, includes))
                cursor_s = until_s

        if self._marks.admitted_s >= SHORTEST_QUEUE_S:
            add("queue", self._marks.admitted_s)
        first_s = self._decode.first_token_s if self._decode else None
        for call in self._calls:
            add("routing", call.sent_s)
            node, marks = call.node, call.marks
            if call.replaced_s is not None:
                add(*call.whole_part(call.replaced_s))
                continue
            if marks.is_split:
                add("queue", call.sent_s + marks.queue_s, node)
            if call.role == "prefill":
                # If both were asked at once, the prefill node's answer may come after the first token.
                until_s = self._last_s if marks.came_s is None else marks.came_s
                if first_s is not None:
                    until_s = min(until_s, first_s - self.figures.exposed_s)
                add("prefill", until_s, node, () if marks.is_split else ("queue",))
                continue
            if marks.is_split:
                add("exposed", cursor_s + marks.exposed_s, node)
                # It found nothing of the prompt. The last token it computes in any case.
                has_found = marks.num_loaded_tokens or marks.num_cached_tokens
                if not has_found and (marks.num_prompt_tokens or 0) > 1 and first_s is not None:
                    add("prefill", first_s, node)
            add("decode", self._last_s, node, () if marks.is_split else ("queue", "exposed"))
        add("routing", self._last_s)
        return parts

    def first_token_parts(self) -> list[Part]:
        """Return what the time until the first token was spent on, whose sum is `first_token_s`."""
        end_s = self.first_token_s or 0.0
        # The decode node's part begins with the step that gives the first token.
        return [
            part._replace(seconds=min(part.seconds, end_s - part.start_s))
            for part in self.parts()
            if part.start_s < end_s
        ]

    def hidden(self) -> tuple[float, float]:
        """Return when the hidden part of the transfer began, and for how many seconds; (0, 0) if none was.

        It is the part that happened while the prompt was still being computed.
        """
        hidden_s = self.figures.transfer_s - self.figures.exposed_s
        if self._decode is None or hidden_s <= 0:
            return 0.0, 0.0
        sent_s = self._decode.sent_s
        after = (part for part in self.parts() if part.kind in ("exposed", "decode"))
        ends = (part.start_s for part in after if part.start_s >= sent_s)
        start_s = max(sent_s, (end_s := next(ends, self._last_s)) - hidden_s)
        return (start_s, end_s - start_s) if end_s > start_s else (0.0, 0.0)

    def report(self, number: int) -> dict[str, Any]:
        """Return the record as JSON. Times are in milliseconds from the arrival.

        Args:
            number: Tells records apart, because clients may repeat request ids.
        """
        record, marks, figures = self._record, self._marks, self.figures
        prefill, decode = self._prefill, self._decode
        hidden_start_s, hidden_s = self.hidden()
        prompt_tokens = [call.marks.num_prompt_tokens for call in (decode, prefill) if call]
        return {
            "number": number,
            "id": record.request_id[:MAX_ID_CHARS],
            "path": record.path,
            "arrived_at": record.span.start,
            "is_done": marks.ended_s is not None,
            "status": marks.status,
            "error": marks.failure or figures.transfer_error,
            "attempts": marks.attempts,
            "placement": record.span.attributes.get("placement", ""),
            "prefill": self.prefill_node,
            "decode": self.decode_node,
            "prompt_tokens": next((count for count in prompt_tokens if count is not None), None),
            "output_tokens": figures.num_output_tokens,
            "pieces": record.num_pieces,
            "longest_pause_ms": _ms(record.longest_pause_s),
            "total_ms": _ms(self._last_s),
            "first_token_ms": None if self.first_token_s is None else _ms(self.first_token_s),
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


class RecentRequests:
    """The records of requests in flight and of the last `MAX_RECENT` finished ones, and the throughput."""

    def __init__(self) -> None:
        self.number_from(0)
        self._finished: deque[tuple[int, int, RequestRecord]] = deque(maxlen=MAX_RECENT)
        self._last = 0  # place of the latest finished one
        self._live: dict[int, RequestRecord] = {}
        self._seconds: deque[tuple[int, Counter[str]]] = deque(maxlen=HISTORY_S)  # what ended in each

    def number_from(self, process: int) -> None:
        """Give requests numbers that no other process of this router gives."""
        self._numbers = itertools.count(1 + (process % 4096 << 40))  # exact in JavaScript

    @contextlib.contextmanager
    def following(self, record: RequestRecord) -> Iterator[None]:
        """Keep the record of a request that is answered inside the block, which notes the answer's end."""
        number = next(self._numbers)
        self._live[number] = record
        try:
            yield
        except ApiError as error:
            record.failed(error.status, str(error))
            raise
        except (asyncio.CancelledError, ConnectionError):
            # A client may disconnect as soon as it has the last byte.
            if marked(record.span, "ended_s") is None:
                record.failed(CLIENT_LEFT, "the client left before the answer was complete")
            raise
        finally:
            record.ended(500)
            del self._live[number]
            # By the clock that the processes of a host share, so that one `last` is that of all.
            self._last = max(self._last + 1, clock_us())
            self._finished.append((self._last, number, record))
            self._count(View(record))

    def _count(self, view: View) -> None:
        second = int(time.monotonic())
        if not self._seconds or self._seconds[-1][0] != second:
            self._seconds.append((second, Counter()))
        figures, has_failed = view.figures, view.has_failed
        self._seconds[-1][1].update(
            done=not has_failed,
            failed=has_failed,
            output_tokens=figures.num_output_tokens or 0,
            bytes=figures.num_bytes,
        )

    def report(self, since: int, until: int | None = None) -> dict[str, Any]:
        """Return the requests in flight and those that finished after a former report, oldest first, as JSON.

        Args:
            since: The `last` of that report; 0 for none.
            until: The `last` of this one, by `clock_us`. None: of the latest request that has finished.
        """
        last = self._last if until is None else until
        live = itertools.islice(self._live.items(), MAX_LISTED)
        new = [(number, record) for place, number, record in self._finished if since < place <= last]
        return {
            "last": last,
            "keeps": MAX_RECENT,
            "finished": [View(record).report(number) for number, record in new],
            "num_in_flight": len(self._live),
            "in_flight": [View(record).report(number) for number, record in live],
            "history": self._history(int(time.monotonic()) if until is None else until // 1_000_000),
        }

    def _history(self, end: int) -> dict[str, list[int]]:
        """Return counts per second, oldest first. The last second is not over."""
        counts, none = dict(self._seconds), Counter[str]()
        entries = [counts.get(second, none) for second in range(end - HISTORY_S + 1, end + 1)]
        return {name: [entry[name] for entry in entries] for name in HISTORY}


def clock_us() -> int:
    """Return the microseconds of the host's clock, with which finished requests are numbered."""
    return time.monotonic_ns() // 1000


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def mapping_in(source: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return an object of JSON; empty in place of anything else."""
    value = source.get(name)
    return value if isinstance(value, dict) else {}


def _number(source: Mapping[str, Any], name: str) -> float:
    """Return a number from 0 to `MAX_FIGURE`; 0 in place of anything else."""
    value = source.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return 0.0
    return float(value) if 0 <= value <= MAX_FIGURE else 0.0


def _count(metrics: Mapping[str, Any], name: str, in_usage: Count) -> Count:
    """Return a number of tokens. None if the node does not report it, or reports none that can be true."""
    count = count_of(metrics.get(name))
    return in_usage if count is None else count


def text_in(source: Mapping[str, Any], name: str, max_chars: int) -> str:
    """Return a text's beginning; empty in place of anything else."""
    value = source.get(name)
    return value[:max_chars] if isinstance(value, str) else ""


# -- what writes a record ----------------------------------------------------------------------------


logger = logging.getLogger(__name__)

#: What the log says of a fact after the request's id, and how loudly.
_LINES: Final[Mapping[Fact, tuple[int, str]]] = {
    "prefill lost": (logging.WARNING, "prefill: {why}"),
    "decode lost": (logging.WARNING, "decode: {why}"),
    "prefill lost late": (logging.WARNING, "the prefill was lost after its decode had begun: {why}"),
    "alone": (logging.INFO, "a decode node computes the prompt itself: {why}"),
    "without offer": (logging.WARNING, "no KV cache was offered; {node} computes the prompt"),
    "answer moved": (logging.WARNING, "{why}; another node goes on after {tokens} tokens"),
    "answer stopped": (logging.INFO, "{node} has stopped the answer, for another node to go on"),
}


class Observer:
    """Learns what happens to the request of one exchange.

    Args:
        record: Of the request. Each call of a node gets a span below the record's.
        queue: The span until a node is called for the first time.
        times_pieces: Whether the metrics have the times of a stream's pieces.
    """

    def __init__(
        self,
        exchange: Exchange,
        record: RequestRecord,
        metrics: RouterMetrics,
        queue: Span = NO_SPAN,
        *,
        times_pieces: bool = True,
    ) -> None:
        self._exchange = exchange
        self._record = record
        self._span = record.span
        self._metrics = metrics
        self._queue = queue
        self._times_pieces = times_pieces
        self._calls: dict[Role, Span] = {}  # the last of each
        self._sends_from: Span | None = None  # the call whose pieces the client was sent last

    # -- nodes ---------------------------------------------------------------------------------------

    def placed(self, choice: Choice) -> None:
        """Note which way the request goes, and the estimates behind that."""
        self._span.set(placement=str(choice))
        self._metrics.placements.labels("local" if choice.is_local else "handover").inc()

    def asks_both(self) -> None:
        """Note that both nodes are asked at once."""
        self._metrics.asked_both.inc()

    def asks(self, role: Role, node: str) -> Span:
        """Note that a node is about to receive the request, and return the span of the call."""
        self._queue.end()
        span = self._span.child(f"{role}_call")
        span.set(node=node)
        if role == "prefill":
            mark(self._span, attempts=(marked(self._span, "attempts") or 0) + 1)
        elif self._exchange.is_alone:
            mark(span, is_alone=True)
        self._calls[role] = span
        self._record.calls.append(span)
        return span

    def prefill_answered(self, answer: Mapping[str, Any]) -> None:
        """Note the answer of the prefill node."""
        if (call := self._calls.get("prefill")) is not None:
            mark(call, came_s=self._record.now_s)
            mark_answer(call, answer, self._exchange.dialect.usage)

    def decode_began(self, answer: NodeAnswer) -> None:
        """Note a whole answer, or the first event of a stream."""
        if (call := self._calls.get("decode")) is None:
            return
        if answer.is_stream:
            mark(call, came_s=self._record.now_s)
        else:
            self._take_in(call, object_of(answer.payload))

    def decode_reported(self, tail: Iterable[Event]) -> None:
        """Note the last events of a whole stream, which have the node's figures."""
        if (call := self._calls.get("decode")) is not None:
            for event in tail:
                self._take_in(call, event.content)

    def _take_in(self, call: Span, answer: Mapping[str, Any]) -> None:
        names = self._exchange.dialect.usage
        if not answer.keys() & {"metrics", "usage", "error", names.inside}:
            return
        if "metrics" in answer or not marked(call, "is_split"):
            mark_answer(call, answer, names)
        if not marked(self._span, "failure"):
            mark(self._span, failure=text_in(mapping_in(answer, "error"), "message", MAX_ERROR_CHARS))

    def handoff_failed(self, why: str) -> None:
        """Note why a decode node could not load; empty if it has not said."""
        self._span.note("handoff failed", reason=why or NO_REASON, remedy=REMEDY)

    def happened(self, fact: Fact, why: Exception | None) -> None:
        """Note what the exchange says."""
        self._span.note(fact, reason=str(why or ""))
        self._metrics.facts[fact].inc()
        exchange = self._exchange
        level, line = _LINES[fact]
        node = "" if exchange.decode is None else exchange.decode.url
        tokens = 0 if exchange.sent.beginning is None else exchange.sent.beginning.num_tokens
        logger.log(level, "%s: %s", exchange.request_id, line.format(why=why, node=node, tokens=tokens))

    # -- the client ----------------------------------------------------------------------------------

    def sends(self, num: int) -> None:
        """Note pieces of a streamed answer that the client receives together. Usually each is a token."""
        record = self._record
        now_s, last_s = record.now_s, record.last_piece_s
        record.num_pieces, record.last_piece_s = record.num_pieces + num, now_s
        if last_s is not None:
            record.longest_pause_s = max(record.longest_pause_s, now_s - last_s)
        if (call := self._calls.get("decode")) is not self._sends_from and call is not None:
            mark(call, has_sent=True)
            self._sends_from = call
        if self._times_pieces:
            self._metrics.note_piece(self._exchange.source, now_s, last_s)

    def fails(self, error: ApiError) -> None:
        """Note the error that the client receives."""
        self._span.note("failed", reason=str(error))

    def left_out(self, num: int) -> None:
        """Count impossible values in the nodes' usage, which the client does not get."""
        self._metrics.nonsense.inc(num)

    def ended(self, status: int, failure: ApiError | None = None) -> None:
        """Note the end of the answer, and why it is none or a part."""
        if failure is not None:
            self._record.failed(failure.status, str(failure))
        self._record.ended(status)

    def closed(self) -> None:
        """Note what became of the placement's estimate, and what it was spent on, for `kvferry explain`."""
        view = View(self._record)
        if view.first_token_s is None:
            return
        self._span.set(ttft_s=view.first_token_s)
        mark(self._span, pieces=self._record.num_pieces, longest_pause_s=self._record.longest_pause_s)
        for part in view.first_token_parts():
            also = ", ".join(part.includes)
            self._span.note(PART, kind=part.kind, node=part.node, seconds=part.seconds, also=also)
