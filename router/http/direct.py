"""Requests for answers, read and answered without aiohttp, which would cost as much as the rest of the
router.

Only what every client sends is read here: a POST request to one of `DIRECT`'s paths, with a body of known
length, whose header comes in one piece and has nothing unusual. Everything else goes to aiohttp, byte for
byte, so there is one way to treat what is odd. Decision 44 has the reasons, and what keeps the two apart.

`DirectRequest` has what our handlers use of aiohttp's request, and takes its place.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from email.utils import formatdate
from functools import lru_cache, partial
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any, Final, Protocol, cast

from aiohttp import ClientConnectionResetError, web
from aiohttp.typedefs import Handler
from multidict import CIMultiDict

#: The handlers of paths whose POST requests are read here.
DIRECT: web.AppKey[Mapping[str, Handler]] = web.AppKey("direct", dict)
#: As soon as this much of a body waits for its handler, the client has to wait.
MAX_UNREAD_BYTES: Final = 256 << 10

#: One line of a field, without control characters; a line that continues another one is none.
_FIELD = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+:[ \t]*[^\x00-\x08\x0a-\x1f\x7f]*\r\n"
_HEAD: Final = re.compile(rb"POST (/[!-~]*) HTTP/1\.1\r\n((?:" + _FIELD + rb")+)\r\n")
_LENGTH: Final = re.compile(r"[0-9]{1,12}")
#: With one of these a request is not read here.
_UNUSUAL: Final = ("Transfer-Encoding", "Expect", "Upgrade", "Trailer", "TE")
_LAST_CHUNK: Final = b"0\r\n\r\n"


class Link(Protocol):
    """The connection of a request."""

    @property
    def is_open(self) -> bool:
        """Whether the client is there."""

    @property
    def is_paused(self) -> bool:
        """Whether the client has to read before more is written."""

    def write(self, data: bytes) -> None:
        """Write now."""

    async def writable(self) -> None:
        """Wait until the client has read enough. Raises ConnectionError: it has left."""

    def hold(self, is_held: bool) -> None:
        """Stop or go on reading."""


class DirectRequest:
    """A request with what our handlers use of aiohttp's.

    Args:
        link: Its connection.

    Attributes:
        may_go_on: The connection can be used for another request after this one.
        is_answered: All of its answer was written.
    """

    method = "POST"

    def __init__(
        self, app: web.Application, link: Link, path: str, headers: CIMultiDict[str], length: int
    ) -> None:
        self.app, self.link, self.path, self.raw_path, self.headers = app, link, path, path, headers
        self.content_length = length
        self.content = self  # the body is read from here
        self.match_info = _match_of(path)
        self.may_go_on = headers.get("Connection", "").lower() != "close"
        self.is_answered = False
        self._state: dict[Any, Any] = {}
        self._num_due = length  # bytes of the body that have not arrived
        self._unread = bytearray()
        self._waiter: asyncio.Future[None] | None = None

    @classmethod
    def of(cls, app: web.Application, link: Link, data: bytes) -> tuple[DirectRequest, bytes] | None:
        """Read the header of a request. None: it is to be read by aiohttp.

        Returns:
            The request, and what follows its header.
        """
        if (found := _HEAD.match(data)) is None or (path := found[1].decode()) not in app[DIRECT]:
            return None
        headers = CIMultiDict[str]()
        for line in found[2].split(b"\r\n")[:-1]:
            name, _, value = line.partition(b":")
            headers.add(name.decode(), value.strip(b" \t").decode(errors="surrogateescape"))
        lengths = headers.getall("Content-Length", ())
        if (
            len(lengths) != 1
            or _LENGTH.fullmatch(lengths[0]) is None
            or any(map(headers.__contains__, _UNUSUAL))
        ):
            return None
        if headers.get("Connection", "keep-alive").lower() not in ("keep-alive", "close"):
            return None
        return cls(app, link, path, headers, int(lengths[0])), data[found.end() :]

    # -- what handlers use ---------------------------------------------------------------------------

    @property
    def content_type(self) -> str:
        """The media type of the body, without parameters."""
        return self.headers.get("Content-Type", "application/octet-stream").partition(";")[0].strip().lower()

    def __getitem__(self, key: Any) -> Any:
        return self._state[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._state[key] = value

    def get(self, key: Any, default: Any = None) -> Any:
        """Return what middleware has noted."""
        return self._state.get(key, default)

    async def readany(self) -> bytes:
        """Return bytes of the body that were not read yet; none at its end."""
        if not self._unread and self._num_due:
            self.link.hold(False)
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        unread = bytes(self._unread)
        self._unread.clear()
        return unread

    # -- the connection's side -----------------------------------------------------------------------

    @property
    def is_whole(self) -> bool:
        """Whether all of the body has arrived."""
        return self._num_due == 0

    def received(self, data: bytes) -> bytes:
        """Take in bytes of the body. Returns those that follow it."""
        own, rest = data[: self._num_due], data[self._num_due :]
        self._num_due -= len(own)
        self._unread += own
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        elif len(self._unread) > MAX_UNREAD_BYTES and self._num_due:
            self.link.hold(True)
        return rest

    async def send(self, response: web.StreamResponse) -> None:
        """Write a whole answer, unless the request has one."""
        if self.is_answered or response.prepared:
            return
        body = response.body if isinstance(response, web.Response) else b""
        assert body is None or isinstance(body, bytes), "our handlers answer with bytes"
        response.headers["Content-Length"] = str(len(body or b""))
        head = await self._head(response)
        if not self.link.is_open:
            raise ClientConnectionResetError("the client has left")
        self.is_answered = True  # a client that leaves during the wait has its answer
        self.link.write(head + (body or b""))
        await self.link.writable()

    async def begin(self, response: web.StreamResponse) -> None:
        """Write the header of an answer that comes in pieces."""
        response.headers["Transfer-Encoding"] = "chunked"
        head = await self._head(response)
        self.write(head, is_piece=False)

    def write(self, data: bytes, *, is_piece: bool = True) -> None:
        """Write a piece of an answer. Raises ConnectionError: the client has left."""
        if not self.link.is_open:
            raise ClientConnectionResetError("the client has left")
        self.link.write(b"%x\r\n%b\r\n" % (len(data), data) if is_piece else data)

    def end(self) -> None:
        """Write the end of an answer that comes in pieces."""
        self.is_answered = True
        self.write(_LAST_CHUNK, is_piece=False)

    async def _head(self, response: web.StreamResponse) -> bytes:
        await self.app.on_response_prepare.send(cast("web.Request", self), response)
        self.may_go_on = self.may_go_on and response.keep_alive is not False
        headers = response.headers
        headers["Date"] = _date(int(time.time()))
        headers["Connection"] = "keep-alive" if self.may_go_on else "close"
        lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
        if lines.count("\n") != len(headers) or lines.count("\r") != len(headers):
            raise ValueError("a header of the answer has the end of a line inside")
        reason = response.reason or HTTPStatus(response.status).phrase
        return f"HTTP/1.1 {response.status} {reason}\r\n{lines}\r\n".encode(errors="surrogateescape")


@lru_cache(maxsize=1)
def _date(second: int) -> str:
    return formatdate(second, usegmt=True)


@lru_cache(maxsize=64)
def _match_of(path: str) -> Any:
    """Return what middleware asks of the route of a path."""
    return SimpleNamespace(
        route=SimpleNamespace(resource=SimpleNamespace(canonical=path)), http_exception=None
    )


async def send_whole(request: web.Request, response: web.StreamResponse) -> None:
    """Write a whole answer to a request of either kind."""
    if isinstance(request, DirectRequest):
        await request.send(response)
    else:
        await response.prepare(request)
        await response.write_eof()


def direct_handlers(
    app: web.Application,
) -> Mapping[str, Callable[[DirectRequest], Awaitable[web.StreamResponse]]]:
    """Return what answers direct requests: the handlers of `DIRECT` behind an application's middleware."""
    handlers = dict[str, Any]()
    for path, handler in app.get(DIRECT, {}).items():
        for middleware in reversed(app.middlewares):
            handler = partial(middleware, handler=handler)
        handlers[path] = handler
    return handlers


class Stream(web.StreamResponse):
    """An answer that is written piece by piece, to a request of either kind."""

    _direct: DirectRequest | None = None

    @property
    def prepared(self) -> bool:
        """Whether its header was written."""
        return self._direct is not None or super().prepared

    @property
    def may_write_now(self) -> bool:
        """Whether `write_now` may be called: the client is there, and reads."""
        direct = self._direct
        return direct is not None and direct.link.is_open and not direct.link.is_paused

    async def prepare(self, request: web.BaseRequest) -> Any:
        """Write the header."""
        if not isinstance(request, DirectRequest):
            return await super().prepare(request)
        await request.begin(self)
        self._direct = request
        return None

    def write_now(self, data: bytes) -> None:
        """Write a piece without waiting; see `may_write_now`."""
        assert self._direct is not None, "it was asked before"
        self._direct.write(data)

    async def write(self, data: Any) -> None:
        """Write a piece, and wait until the client has read enough.

        Raises:
            ConnectionError: The client has left.
        """
        if self._direct is None:
            return await super().write(data)
        if data:  # an empty chunk would be the last one
            self._direct.write(data)
        await self._direct.link.writable()

    async def write_eof(self, data: bytes = b"") -> None:
        """Write the end."""
        if self._direct is None:
            return await super().write_eof(data)
        if not self._direct.is_answered:
            self._direct.end()
            await self._direct.link.writable()
