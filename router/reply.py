"""The router's answer to a client: a node's answer as it arrives, or an error that ends it early."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Mapping

import aiohttp
from aiohttp import web

from ..web.errors import ApiError, note_answered
from ..web.json_body import object_of
from .first_tokens import DONE, FirstToken
from .handoffs import error_event
from .metrics import NotePiece, Way
from .nodes import NodeGoneError, UpstreamNode
from .phases import is_stream
from .sessions import AnswerTaker

#: The headers of a node's answer that the client receives.
PASSED_HEADERS = ("Content-Type", "Retry-After", "X-KV-Transfer", "X-Request-Id")
#: How much of a stream's end is kept. Its last events report the load of the cache.
TAIL_BYTES = 16 << 10
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
        tail: The last bytes of the stream.
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
        self.tail = b""
        self.lost: NodeGoneError | None = None
        self.error: ApiError | None = None
        self.first: FirstToken | None = None
        self.way: Way = "in_turn"
        self.explain: Callable[[bytes], object] = lambda events: None

    @property
    def is_complete(self) -> bool:
        """Whether the client has been sent the end of a stream, so that it may leave."""
        return self.tail.endswith(DONE)

    async def begin(self, first: FirstToken, upstream: Mapping[str, str]) -> None:
        """Begin a stream with the answer's first token.

        Args:
            upstream: The headers of the prefill node's answer.
        """
        self.first = first
        await self._start(web.StreamResponse(headers=stream_headers(upstream)))
        self._note_piece(self.way, "prefill")
        await self._write(b"".join(first.events))

    async def end(self) -> web.StreamResponse:
        """End a stream that had nothing but the first token."""
        assert self._stream is not None, "begun before"
        await self._write(DONE)
        await self._stream.write_eof()
        return self._stream

    async def _start(self, stream: web.StreamResponse) -> None:
        await stream.prepare(self._request)
        self._stream = stream

    async def _write(self, piece: bytes) -> None:
        assert self._stream is not None, "begun before"
        await self._stream.write(piece)
        self.tail = (self.tail + piece)[-TAIL_BYTES:]
        if self.is_complete:
            note_answered(self._request, self._stream.status)

    async def copy(
        self, node: UpstreamNode, upstream: aiohttp.ClientResponse, first: bytes, *, continues: bool
    ) -> web.StreamResponse:
        """Copy a node's answer to the client as it arrives. If the node is lost, end the stream with an error.

        Args:
            continues: The node was asked to continue after the first token. Otherwise it has chosen all tokens itself.

        Raises:
            ApiError: The stream began with the first token, and the node refused to continue it; or `explain` raised it.
            OtherTokenError: The stream began with another first token than the node's. Nothing of the node's was sent.
        """
        rewritten = self._continued(upstream, first, continues=continues)
        headers = {name: upstream.headers[name] for name in PASSED_HEADERS if name in upstream.headers}
        headers.setdefault("Content-Type", "application/json")
        if not is_stream(upstream):
            return web.Response(body=self.taker.whole(first), status=upstream.status, headers=headers)
        if self._stream is None:
            headers["Cache-Control"] = "no-cache"
            await self._start(web.StreamResponse(status=upstream.status, headers=headers))
        chunk = first
        try:
            while chunk:
                async with node.exchange():
                    events = rewritten(self.taker.events(chunk))
                if error_event(events):
                    self.explain(events)
                if events:
                    self._note_piece(self.way, "decode")
                    await self._write(events)
                async with node.exchange():
                    chunk = await upstream.content.readany()
        except NodeGoneError as error:
            self.lost = error
            await self._write(rewritten(self.taker.rest()))
            lost = f"the answer was lost in the middle: {await error.explained()}"
            return await self.fail(ApiError(502, lost, kind="server_error"))
        if rest := self.taker.rest():
            await self._write(rewritten(rest))
        assert self._stream is not None, "begun above"
        await self._stream.write_eof()
        return self._stream

    def _continued(
        self, upstream: aiohttp.ClientResponse, first: bytes, *, continues: bool
    ) -> Callable[[bytes], bytes]:
        """Return what makes the pieces of a node's answer those of the client's.

        Raises:
            ApiError: The client has the first token already, and this is not the rest of a stream.
        """
        if self.first is None:
            return lambda piece: piece
        if upstream.status != 200 or not is_stream(upstream):
            error = object_of(first).get("error")
            message = error.get("message") if isinstance(error, dict) else ""
            raise ApiError(
                upstream.status if upstream.status >= 400 else 502,
                f"the decode node did not continue the answer: {message or first[:200].decode(errors='replace')}",
                kind="server_error",
            )
        return self.first.rewriter() if continues else self.first.remover()

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
