"""Limits on connections, on the time and size of a request's header, and on the number of requests.

aiohttp closes a connection that was idle for `keepalive_timeout`. It limits neither the number of connections
nor the time until the first header, and it limits the size of a header only line by line. So `LimitedRunner`
wraps aiohttp's protocol of each connection. The limit on requests is for handlers to apply, with `slot_of`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import resource
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler
from aiohttp.web_protocol import RequestHandler

from .errors import ApiError, too_many_requests, unavailable
from .json_body import MAX_BODY_BYTES

#: The number of connections is at most this, whatever the limit of open files.
MOST_CONNECTIONS = 4096
#: Seconds that a refused client has to read the refusal.
REFUSAL_S = 1.0
#: If the event loop is late by more than LATE_S, wait CATCH_UP_S for it to read what has arrived.
LATE_S = 0.1
CATCH_UP_S = 0.5
#: Close the connection of a client that reads nothing of its answer for this long.
ANSWER_STALL_S = 60.0
#: Seconds between two log lines about refused connections.
LOG_INTERVAL_S = 60.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits on the clients of a server.

    Attributes:
        header_timeout_s: Seconds from the connection, or from the first byte of a later request, to the end
            of the header.
        body_timeout_s: Seconds from the end of the header to the end of the body.
        max_connections: Connections served at a time.
        max_header_bytes: Largest header: the request line and all fields.
        max_body_bytes: Largest body.
        max_concurrent_requests: Completions answered at a time.
        max_queued_requests: Completions that wait for a slot.
    """

    header_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    max_connections: int = 512
    max_header_bytes: int = 16 << 10
    max_body_bytes: int = MAX_BODY_BYTES
    max_concurrent_requests: int = 1024
    max_queued_requests: int = 1024

    @classmethod
    def of_options(cls, options: argparse.Namespace, descriptors_each: int) -> ConnectionLimits:
        """Read the options that `add_serving_arguments` declares.

        Args:
            descriptors_each: Open files per connection, its own included.

        Raises:
            ValueError: A value is out of range. The message names its option.
        """
        numbers = {}
        for name, least in _LEAST.items():
            numbers[name] = getattr(options, name)
            if numbers[name] < least:
                flag = "--" + name.replace("_", "-")
                raise ValueError(f"{flag} {numbers[name]}: it must be at least {least}")
        return cls(max_connections=min(_most_connections(descriptors_each), MOST_CONNECTIONS), **numbers)


#: The least values of limits that are numbers.
_LEAST = {
    "max_body_bytes": 1,
    "max_concurrent_requests": 1,
    "max_queued_requests": 0,
}


class RequestGate:
    """Lets a limited number of requests be answered at a time.

    More wait in order, and further ones are refused.
    """

    def __init__(self, limits: ConnectionLimits) -> None:
        self._limits = limits
        self._slots = asyncio.Semaphore(limits.max_concurrent_requests)
        self._num_waiting = 0

    @property
    def is_full(self) -> bool:
        """Whether the next request would be refused."""
        return self._slots.locked() and self._num_waiting >= self._limits.max_queued_requests

    @contextlib.asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Wait for a slot, and hold it inside the block.

        Raises:
            ApiError: As many requests wait as may (429).
        """
        if self.is_full:
            raise too_many_requests(
                f"too many requests: {self._limits.max_concurrent_requests} are being answered and {self._num_waiting} wait; "
                "retry later"
            )
        self._num_waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self._num_waiting -= 1
        try:
            yield
        finally:
            self._slots.release()


#: The gate of a server's application. An application that is served by itself, as in tests, has none.
GATE = web.AppKey("request_gate", RequestGate)


def slot_of(request: web.Request) -> contextlib.AbstractAsyncContextManager[None]:
    """Return the block in which a completion may be answered. Raises ApiError: see `RequestGate.slot`."""
    gate = request.app.get(GATE)
    return contextlib.nullcontext() if gate is None else gate.slot()


def is_overloaded(request: web.Request) -> bool:
    """Return whether the server of a request would refuse the next completion with 429."""
    gate = request.app.get(GATE)
    return gate is not None and gate.is_full


def _most_connections(descriptors_each: int) -> int:
    """Return how many connections fit in half of the process's open files. Handoffs need the other half."""
    return max(1, _open_file_limit() // 2 // descriptors_each)


def _open_file_limit() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 20 if soft == resource.RLIM_INFINITY else soft


class LimitedRunner(web.AppRunner):
    """Runs an application with limits on its connections and on the time of a header.

    At `max_connections`, a new connection replaces the connection that has been idle for the longest. If none
    is idle, the new connection is answered 503 and closed.
    """

    def __init__(self, app: web.Application, limits: ConnectionLimits, **settings: Any) -> None:
        app.middlewares.insert(0, _note_requests)
        super().__init__(app, **settings)
        self._admission = _Admission(limits)
        #: asyncio accepts up to this many connections before it reports the first one, so they are not
        #: counted yet.
        self.accepted_at_once = min(128, max(8, limits.max_connections // 4))

    @property
    def server(self) -> Callable[[], asyncio.Protocol] | None:  # type: ignore[override]
        """Makes the protocol of a new connection: aiohttp's, wrapped."""
        make = super().server
        return None if make is None else lambda: _Connection(self._admission, partial(_explaining, make))


class _Handler(RequestHandler):
    """Answers bytes that are no HTTP with an error object, as middleware answers every other error."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        super().handle_error(request, status, exc, message)  # logs it
        kind = "invalid_request_error" if status < 500 else "server_error"
        why = " ".join((message or "internal error").split())
        answer = ApiError(status, f"the request is not valid HTTP: {why}", kind=kind).response()
        answer.force_close()
        return answer


def _explaining(make: Callable[[], asyncio.Protocol]) -> asyncio.Protocol:
    handler = make()
    assert isinstance(handler, RequestHandler), "aiohttp makes them"
    handler.__class__ = _Handler  # aiohttp lets no caller choose the class
    return handler


@web.middleware
async def _note_requests(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Note on the connection when a request begins and when its handler has ended."""
    connection = None if request.transport is None else request.transport.get_protocol()
    if not isinstance(connection, _Connection):
        return await handler(request)
    connection.request_began()
    try:
        return await handler(request)
    finally:
        connection.request_ended()


class _Admission:
    """Counts connections, and decides which ones stay."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self._busy: set[_Connection] = set()
        self._idle: dict[_Connection, None] = {}  # in the order in which they became idle
        self._refused: set[_Connection] = set()
        self._num_refused = 0
        self._logged_s = float("-inf")

    def admit(self, connection: _Connection, now: float) -> bool:
        """Whether to serve a new connection. May close the one that has been idle for the longest."""
        if len(self._busy) + len(self._idle) >= self.limits.max_connections:
            victim = next((other for other in self._idle if other.is_flushed), None)
            if victim is None:
                self._log_refusal(now)
                return False
            del self._idle[victim]  # remove it now, because asyncio reports the end later
            victim.abort()
        self._idle[connection] = None
        return True

    def may_explain(self, connection: _Connection) -> bool:
        """Whether a refused connection may stay open until the client has read the refusal."""
        if len(self._refused) >= max(8, self.limits.max_connections // 8):
            return False
        self._refused.add(connection)
        return True

    def note_busy(self, connection: _Connection) -> None:
        if connection in self._idle:
            del self._idle[connection]
            self._busy.add(connection)

    def note_idle(self, connection: _Connection) -> None:
        if connection in self._busy:
            self._busy.remove(connection)
            self._idle[connection] = None

    def leave(self, connection: _Connection) -> None:
        self._busy.discard(connection)
        self._idle.pop(connection, None)
        self._refused.discard(connection)

    def _log_refusal(self, now: float) -> None:
        self._num_refused += 1
        if now - self._logged_s >= LOG_INTERVAL_S:
            self._logged_s = now
            logger.warning(
                "refused a connection: all %d connections have requests in flight; refused %d since the start; "
                "raise the limit of open files (`ulimit -n`) or add nodes",
                self.limits.max_connections,
                self._num_refused,
            )


class _Connection(asyncio.Protocol):
    """Wraps aiohttp's protocol for one connection, and passes everything on to it."""

    def __init__(self, admission: _Admission, make_inner: Callable[[], asyncio.Protocol]) -> None:
        self._admission = admission
        self._make_inner = make_inner
        self._loop = asyncio.get_running_loop()
        self._inner: asyncio.Protocol | None = None  # None if the connection was refused when it was made
        self._is_refused = False  # ignore what the client sends
        self._transport: asyncio.Transport
        self._num_requests = 0  # in flight
        self._timer: asyncio.TimerHandle | None = None  # runs while a header is due
        self._header: _HeaderSize | None = None  # None while no header is due, or after its end
        self._stall: asyncio.TimerHandle | None = None  # runs while the client reads nothing of its answer

    @property
    def is_flushed(self) -> bool:
        """Whether the client's system has received the whole answer."""
        return self._transport.get_write_buffer_size() == 0

    def abort(self) -> None:
        """Close the connection now. Unsent bytes are lost."""
        self._transport.abort()

    # -- asyncio's side ------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if not self._admission.admit(self, self._loop.time()):
            self._refuse(_TOO_MANY_CONNECTIONS)
            return
        self._expect_header()
        self._inner = self._make_inner()
        self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if self._inner is None or self._is_refused:
            return
        if self._num_requests == 0 and self._timer is None:
            self._expect_header()  # another request begins
        if self._header is not None:
            self._header.add(data)
            if self._header.size > self._admission.limits.max_header_bytes:
                self._refuse(_LARGE_HEADER)
                return
            if self._header.is_complete:
                self._header = None
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return None if self._inner is None else self._inner.eof_received()

    def pause_writing(self) -> None:
        self._stall = self._loop.call_later(ANSWER_STALL_S, self.abort)
        if self._inner is not None:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._stop(self._stall)
        if self._inner is not None:
            self._inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop(self._timer)
        self._stop(self._stall)
        self._admission.leave(self)
        if self._inner is not None:
            self._inner.connection_lost(exc)

    # -- the application's side ----------------------------------------------------------------------

    def request_began(self) -> None:
        """Note that the header of a request is complete."""
        self._num_requests += 1
        self._stop(self._timer)
        self._timer = None
        self._admission.note_busy(self)

    def request_ended(self) -> None:
        """Note that the handler of a request has ended. Part of its answer may still be unsent."""
        self._num_requests -= 1
        if self._num_requests == 0:
            self._admission.note_idle(self)

    def _expect_header(self) -> None:
        self._header = _HeaderSize()
        due = self._loop.time() + self._admission.limits.header_timeout_s
        self._timer = self._loop.call_at(due, self._header_is_late, due)

    def _header_is_late(self, due: float) -> None:
        # If the loop was busy or the process was stopped, the header may have arrived unread. Do not blame
        # the client.
        if self._loop.time() - due > LATE_S:
            again = self._loop.time() + CATCH_UP_S
            self._timer = self._loop.call_at(again, self._header_is_late, again)
            return
        logger.debug(
            "closed a connection: no complete header within %g s", self._admission.limits.header_timeout_s
        )
        self.abort()

    def _refuse(self, answer: bytes) -> None:
        """Send an answer and ignore what the client sends from now on."""
        self._stop(self._timer)
        self._is_refused = True
        if not self._admission.may_explain(self):
            self.abort()
            return
        self._transport.write(answer)
        if self._transport.can_write_eof():
            self._transport.write_eof()
        # If we closed now, with unread bytes, the system would reset the connection and the client would lose
        # the answer.
        self._timer = self._loop.call_later(REFUSAL_S, self.abort)

    @staticmethod
    def _stop(timer: asyncio.TimerHandle | None) -> None:
        if timer is not None:
            timer.cancel()


class _HeaderSize:
    """Counts the bytes of a header as they arrive."""

    def __init__(self) -> None:
        self.size = 0
        self.is_complete = False
        self._end = b""  # the last bytes, because the empty line may arrive in pieces

    def add(self, data: bytes) -> None:
        """Count bytes up to the empty line that ends the header."""
        known = len(self._end)
        found = (self._end + data).find(b"\r\n\r\n")
        self.is_complete = found >= 0
        self.size += found + 4 - known if self.is_complete else len(data)
        self._end = (self._end + data)[-3:]


def _raw(status: str, error: ApiError) -> bytes:
    """Return an answer as bytes, for a connection that aiohttp does not serve."""
    body = json.dumps(error.body()).encode()
    retry = "" if error.retry_after_s is None else f"Retry-After: {error.retry_after_s}\r\n"
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n{retry}Connection: close\r\n\r\n"
    )
    return head.encode() + body


_TOO_MANY_CONNECTIONS = _raw(
    "503 Service Unavailable",
    unavailable(
        "the server has reached its limit of connections, and all of them have requests: retry later"
    ),
)
_LARGE_HEADER = _raw(
    "431 Request Header Fields Too Large",
    ApiError(
        431,
        "the request's header is too large: send a smaller one",
        kind="invalid_request_error",
    ),
)
