"""The router's answer to a client: a node's answer as it arrives, or an error that ends it early."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from aiohttp import web

from ..web.errors import ApiError, note_answered
from ..web.json_body import object_of
from ..web.sse import DONE, Event, passing
from .first_tokens import FirstToken
from .handoffs import error_event
from .metrics import NotePiece, Way
from .nodes import NodeGoneError, UpstreamNode
from .reading import NodeAnswer
from .sessions import AnswerTaker

#: The headers of a node's answer that the client receives.
PASSED_HEADERS = ("Content-Type", "Retry-After", "X-KV-Transfer", "X-Request-Id")
#: Of the events that report on an answer, the last ones are kept; a longer one is not a report.
MAX_TAIL_EVENTS, MAX_TAIL_EVENT_BYTES = 16, 16 << 10
_REPORTS = re.compile(rb'"(?:metrics|usage|error)"')
#: How long to try to send the error that ends a stream to a client that does not read.
ERROR_SEND_S = 1.0


def stream_headers(upstream: Mapping[str, str]) -> dict[str, str]:
    """Return the headers of a stream that begins before the decode node's.

    Args:
        upstream: The headers of the prefill node's answer.
    """
    known = {name: upstream[name] for name in ("X-Request-Id",) if name in upstream}
    return {**known, "Content-Type": "text/event-stream", "Cache-Control": "no-cache"}


class Reply:
    """The answer to one request.

    Args:
        note_piece: Called with each piece of a stream that has arrived.

    Attributes:
        taker: Takes the offer of the answer out of what is copied.
        tail: The last events of the stream with a report of the node: figures, or an error.
        is_complete: The client has been sent the end of a stream, so that it may leave.
        lost: Why the stream ended early. None if its node has not failed.
        error: What ended a stream that had begun. None if nothing did.
        way: How the decode node gets the cache of the prompt.
        explain: Called with events of a stream of which one is an error. It may raise an `ApiError` that says more.
        first: The first token, if the client has it from the prefill node. Every decode node must continue after it.
    """

    def __init__(self, request: web.Request, note_piece: NotePiece = lambda way, role: None) -> None:
        self._request = request
        self._note_piece = note_piece
        self._stream: web.StreamResponse | None = None
        self.taker = AnswerTaker()
        self.tail: deque[Event] = deque(maxlen=MAX_TAIL_EVENTS)
        self.is_complete = False
        self.lost: NodeGoneError | None = None
        self.error: ApiError | None = None
        self.first: FirstToken | None = None
        self.way: Way = "in_turn"
        self.explain: Callable[[list[Event]], object] = lambda events: None

    async def begin(self, first: FirstToken, upstream: Mapping[str, str]) -> None:
        """Begin a stream with the answer's first token.

        Args:
            upstream: The headers of the prefill node's answer.
        """
        self.first = first
        await self._start(web.StreamResponse(headers=stream_headers(upstream)))
        self._note_piece(self.way, "prefill")
        await self._write(first.events)

    async def end(self) -> web.StreamResponse:
        """End a stream that had nothing but the first token."""
        assert self._stream is not None, "begun before"
        await self._write([DONE])
        await self._stream.write_eof()
        return self._stream

    async def _start(self, stream: web.StreamResponse) -> None:
        await stream.prepare(self._request)
        self._stream = stream

    def _note(self, events: Iterable[Event]) -> None:
        for event in events:
            if len(event.raw) <= MAX_TAIL_EVENT_BYTES and _REPORTS.search(event.raw):
                self.tail.append(event)
            self.is_complete = event.is_done

    async def _write(self, events: Sequence[Event]) -> None:
        assert self._stream is not None, "begun before"
        await self._stream.write(b"".join(event.raw for event in events))
        self._note(events)
        if self.is_complete:
            note_answered(self._request, self._stream.status)

    async def copy(self, node: UpstreamNode, upstream: NodeAnswer, *, continues: bool) -> web.StreamResponse:
        """Copy a node's answer to the client as it arrives. If the node is lost, end the stream with an error.

        Args:
            continues: The node was asked to continue after the first token. Otherwise it has chosen all tokens itself.

        Raises:
            ApiError: The stream began with the first token, and the node refused to continue it; or `explain` raised it.
            OtherTokenError: The stream began with another first token than the node's. Nothing of the node's was sent.
        """
        rewritten = self._continued(upstream, continues=continues)
        headers = {name: upstream.headers[name] for name in PASSED_HEADERS if name in upstream.headers}
        headers.setdefault("Content-Type", "application/json")
        if not upstream.is_stream:
            return web.Response(
                body=self.taker.whole(upstream.payload), status=upstream.status, headers=headers
            )
        if self._stream is None:
            headers["Cache-Control"] = "no-cache"
            await self._start(web.StreamResponse(status=upstream.status, headers=headers))
        arrived: list[Event] | None = upstream.events
        try:
            while arrived is not None:
                events = rewritten(arrived)
                if error_event(events):
                    self.explain(events)
                if events:
                    self._note_piece(self.way, "decode")
                    await self._write(events)
                async with node.exchange():
                    arrived = await upstream.more()
        except NodeGoneError as error:
            self.lost = error
            await self._write(rewritten(upstream.rest()))
            lost = f"the answer was lost in the middle: {await error.explained()}"
            return await self.fail(ApiError(502, lost, kind="server_error"))
        assert self._stream is not None, "begun above"
        await self._stream.write_eof()
        return self._stream

    def _continued(
        self, upstream: NodeAnswer, *, continues: bool
    ) -> Callable[[Iterable[Event]], list[Event]]:
        """Return what makes the events of a node's answer those of the client's.

        Raises:
            ApiError: The client has the first token already, and this is not the rest of a stream.
        """
        if self.first is None:
            return passing(self.taker)
        if upstream.status != 200 or not upstream.is_stream:
            error = object_of(upstream.payload).get("error")
            message = error.get("message") if isinstance(error, dict) else ""
            raise ApiError(
                upstream.status if upstream.status >= 400 else 502,
                f"the decode node did not continue the answer: {message or upstream.payload[:200].decode(errors='replace')}",
                kind="server_error",
            )
        return passing(self.taker, self.first.continued() if continues else self.first.removed())

    async def fail(self, error: ApiError) -> web.StreamResponse:
        """End the answer with an error, as an event if part of a stream was sent.

        Raises:
            ApiError: Nothing was sent yet; the error becomes the whole answer.
        """
        if self._stream is None:
            raise error
        self.error = error
        event = b"\n\ndata: " + json.dumps(error.body()).encode() + b"\n\ndata: [DONE]\n\n"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ERROR_SEND_S):
                await self._stream.write(event)
                note_answered(self._request, self._stream.status)
                await self._stream.write_eof()
        return self._stream
