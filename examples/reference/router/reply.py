"""The router's answer to a client: a node's answer as it arrives, or an error that ends it early."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable

import aiohttp
from aiohttp import web

from ..web.errors import ApiError
from .nodes import NodeGoneError, UpstreamNode
from .phases import is_stream

#: The headers of a node's answer that the client receives.
PASSED_HEADERS = ("Content-Type", "Retry-After", "X-KV-Transfer", "X-Request-Id")
#: How much of a stream's end is kept. Its last events report the load of the cache.
TAIL_BYTES = 16 << 10
#: How long to try to send the error that ends a stream to a client that does not read.
ERROR_SEND_S = 1.0


class Reply:
    """The answer to one request.

    Args:
        note_piece: Called with each piece of a stream that has arrived.

    Attributes:
        tail: The last bytes of the stream.
        lost: Why the stream ended early. None if its node has not failed.
        error: What ended a stream that had begun. None if nothing did.
    """

    def __init__(self, request: web.Request, note_piece: Callable[[], None] = lambda: None) -> None:
        self._request = request
        self._note_piece = note_piece
        self._stream: web.StreamResponse | None = None
        self.tail = b""
        self.lost: NodeGoneError | None = None
        self.error: ApiError | None = None

    async def copy(
        self, node: UpstreamNode, upstream: aiohttp.ClientResponse, first: bytes
    ) -> web.StreamResponse:
        """Copy a node's answer to the client as it arrives. If the node is lost, end the stream with an error."""
        headers = {name: upstream.headers[name] for name in PASSED_HEADERS if name in upstream.headers}
        headers.setdefault("Content-Type", "application/json")
        if not is_stream(upstream):
            return web.Response(body=first, status=upstream.status, headers=headers)
        stream = web.StreamResponse(status=upstream.status, headers={**headers, "Cache-Control": "no-cache"})
        await stream.prepare(self._request)
        self._stream = stream
        chunk = first
        try:
            while chunk:
                self._note_piece()
                await stream.write(chunk)
                self.tail = (self.tail + chunk)[-TAIL_BYTES:]
                async with node.exchange():
                    chunk = await upstream.content.readany()
        except NodeGoneError as error:
            self.lost = error
            lost = f"the answer was lost in the middle: {await error.explained()}"
            return await self.fail(ApiError(502, lost, kind="server_error"))
        await stream.write_eof()
        return stream

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
                await self._stream.write_eof()
        return self._stream
