"""Learn what happens to a request, and tell its spans, the metrics and the log.

The spans are the only record of a request; `records` computes from them what the page shows.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any, Final

from ...connector.spans import PART, Span
from ..answer.exchange import Exchange, Fact
from ..answer.handoffs import NO_REASON, REMEDY
from ..choice.placement import Choice
from ..http.errors import ApiError
from ..http.json_body import object_of
from ..http.sse import Event
from ..http.tracing import NO_SPAN
from ..nodes.membership import Role
from ..nodes.reading import NodeAnswer
from .metrics import RouterMetrics
from .records import (
    MAX_ERROR_CHARS,
    CallMarks,
    RequestRecord,
    View,
    mapping_in,
    mark,
    mark_answer,
    marks_of,
    text_in,
)

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
            mark(self._span, attempts=self._record.marks.attempts + 1)
        elif self._exchange.is_alone:
            mark(span, is_alone=True)
        self._calls[role] = span
        self._record.calls.append(span)
        return span

    def prefill_answered(self, answer: Mapping[str, Any]) -> None:
        """Note the answer of the prefill node."""
        if (call := self._calls.get("prefill")) is not None:
            mark(call, came_s=self._record.now_s)
            mark_answer(call, answer)

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
        if not answer.keys() & {"metrics", "usage", "error"}:
            return
        if "metrics" in answer or not marks_of(CallMarks, call).is_split:
            mark_answer(call, answer)
        if not self._record.marks.failure:
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
        tokens = 0 if exchange.beginning is None else exchange.beginning.num_tokens
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
