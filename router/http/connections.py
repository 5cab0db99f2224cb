"""Limits on connections, on the time and size of a request's header, and on the number of requests.

aiohttp closes a connection that was idle for `keepalive_timeout`. It limits neither the number of connections
nor the time until the first header, and it limits the size of a header only line by line. So `LimitedRunner`
wraps aiohttp's protocol of each connection. The limit on requests is for handlers to apply, with `slot_of`.

Requests that `direct` reads never reach aiohttp. A connection changes between the two only where both agree
that the next byte begins a request.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import re
import resource
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler
from aiohttp.web_protocol import RequestHandler

from .direct import DirectRequest, direct_handlers
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
#: Seconds that requests have to end after a server has stopped accepting.
SHUTDOWN_GRACE_S = 1.0
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

    def share_of(self, num: int) -> ConnectionLimits:
        """Return the limits of one of `num` processes that together keep these."""
        names = ("max_connections", "max_concurrent_requests", "max_queued_requests")
        return replace(self, **{name: -(-getattr(self, name) // num) for name in names})


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
        self._admission = _Admission(limits, app, settings["keepalive_timeout"])
        app.middlewares.insert(0, _note_requests)
        super().__init__(app, **settings)
        #: asyncio accepts up to this many connections before it reports the first one, so they are not
        #: counted yet.
        self.accepted_at_once = min(128, max(8, limits.max_connections // 4))

    @property
    def server(self) -> Callable[[], asyncio.Protocol] | None:  # type: ignore[override]
        """Makes the protocol of a new connection: aiohttp's, wrapped."""
        make = super().server
        return None if make is None else lambda: _Connection(self._admission, partial(_explaining, make))

    async def cleanup(self) -> None:
        """End all connections. Direct requests have as long as aiohttp gives its own."""
        await self._admission.end_direct(SHUTDOWN_GRACE_S)
        await super().cleanup()


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


def _explaining(make: Callable[[], asyncio.Protocol]) -> RequestHandler:
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
    """Counts connections, and decides which ones stay.

    Attributes:
        handlers: Of direct requests, by path.
        keep_alive_s: How long a connection may be idle after a direct request.
    """

    def __init__(self, limits: ConnectionLimits, app: web.Application, keep_alive_s: float) -> None:
        self.limits, self.app, self.keep_alive_s = limits, app, keep_alive_s
        self.handlers = direct_handlers(app)
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

    async def end_direct(self, grace_s: float) -> None:
        """End the connections that aiohttp knows nothing of."""
        for connection in tuple(self._idle):
            connection.abort()
        if tasks := [each.answering for each in self._busy if each.answering is not None]:
            _, late = await asyncio.wait(tasks, timeout=grace_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

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
    """Reads direct requests of one connection, and passes all others on to aiohttp's protocol.

    Attributes:
        answering: The task that answers a direct request; None while there is none.
        is_open: The client has not left.
        is_paused: The client has to read before more is written.
    """

    def __init__(self, admission: _Admission, make_inner: Callable[[], RequestHandler]) -> None:
        self._admission = admission
        self._make_inner = make_inner
        self._loop = asyncio.get_running_loop()
        self._inner: RequestHandler | None = None  # made when it has something to read
        self._is_refused = False  # ignore what the client sends
        self._transport: asyncio.Transport
        self._num_requests = 0  # in flight
        self._timer: asyncio.TimerHandle | None = None  # runs while a header is due
        self._header: _HeaderSize | None = None  # None while no header is due, or after its end
        self._stall: asyncio.TimerHandle | None = None  # runs while the client reads nothing of its answer
        self._keep_alive: asyncio.TimerHandle | None = None  # runs while nothing is asked
        self._is_held = False
        self._may_be_direct = bool(admission.handlers)  # the next byte begins a request
        self._request: DirectRequest | None = None  # that is being read or answered
        self._next = b""  # what the client has sent after it
        self._writable: asyncio.Future[None] | None = None
        self.answering: asyncio.Task[None] | None = None
        self.is_open, self.is_paused = True, False

    @property
    def is_flushed(self) -> bool:
        """Whether the client's system has received the whole answer."""
        return self._transport.get_write_buffer_size() == 0

    def abort(self) -> None:
        """Close the connection now. Unsent bytes are lost."""
        self._transport.abort()

    # -- asyncio's side ------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        if not self._admission.admit(self, self._loop.time()):
            self._refuse(_TOO_MANY_CONNECTIONS)
            return
        self._expect_header()

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        if self._request is not None:
            self._go_on(self._request, data)
            return
        if self._num_requests == 0 and self._timer is None:
            self._stop(self._keep_alive)
            self._expect_header()  # another request begins
        is_first = self._header is not None and self._header.size == 0 and self._num_requests == 0
        if not is_first:
            self._may_be_direct = False
        elif self._may_be_direct:
            if (direct := self._read_direct(data)) is not None:
                self._begin(*direct)
                return
            # After a whole request without a body aiohttp expects another one, as this does. After anything
            # else it may know more than this about where the next one begins, so it keeps the connection.
            self._may_be_direct = _BARE.fullmatch(data) is not None
        if self._header is not None:
            self._header.add(data)
            if self._header.size > self._admission.limits.max_header_bytes:
                self._refuse(_LARGE_HEADER)
                return
            if self._header.is_complete:
                self._header = None
        if self._inner is None:
            self._inner = self._make_inner()
            self._inner.connection_made(self._transport)
        self._inner.data_received(data)

    def eof_received(self) -> None:
        if self._inner is not None:
            self._inner.eof_received()

    def pause_writing(self) -> None:
        self.is_paused = True
        self._stall = self._loop.call_later(ANSWER_STALL_S, self.abort)
        if self._inner is not None:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        self.is_paused = False
        self._stop(self._stall)
        self._wake()
        if self._inner is not None:
            self._inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        for timer in (self._timer, self._stall, self._keep_alive):
            self._stop(timer)
        self._admission.leave(self)
        if self.answering is not None:
            self.answering.cancel()
        self._wake()
        if self._inner is not None:
            self._inner.connection_lost(exc)

    # -- direct requests -----------------------------------------------------------------------------

    def _read_direct(self, data: bytes) -> tuple[DirectRequest, bytes] | None:
        limits, app = self._admission.limits, self._admission.app
        if (direct := DirectRequest.of(app, self, data)) is None:
            return None
        request, rest = direct
        is_small = request.content_length <= limits.max_body_bytes
        return direct if is_small and len(data) - len(rest) <= limits.max_header_bytes else None

    def _begin(self, request: DirectRequest, rest: bytes) -> None:
        self._request, self._header = request, None
        if self._inner is not None:
            # It would close the connection when it has read nothing for a while. The next one knows as much.
            self._inner.transport = None  # otherwise it closes it now
            self._inner.connection_lost(None)
            self._inner = None
        self.request_began()
        self._go_on(request, rest)
        self.answering = self._loop.create_task(self._answer(request))

    def _go_on(self, request: DirectRequest, data: bytes) -> None:
        """Take in what has arrived while a direct request is read or answered."""
        if rest := request.received(data):
            self._next += rest
            self.hold(True)  # until this request is answered

    async def _answer(self, request: DirectRequest) -> None:
        try:
            await request.send(await self._admission.handlers[request.path](request))
        except ConnectionError:
            pass  # the client has left
        except Exception:
            logger.exception("%s %s failed", request.method, request.path)
        finally:
            self.answering = self._request = None  # before `_end`, which may begin the next one
            self.request_ended()
            if self.is_open:
                self._end(request)

    def _end(self, request: DirectRequest) -> None:
        if not request.is_answered:
            self.abort()
        elif not request.is_whole:
            self._close_softly()
        elif not request.may_go_on:
            self._transport.close()  # after what was written
        else:
            data, self._next = self._next, b""
            self.hold(False)
            if data:
                # Not from here: a client that sends thousands of requests at once would fill the stack.
                self._loop.call_soon(self.data_received, data)
            else:
                self._keep_alive = self._loop.call_later(self._admission.keep_alive_s, self.abort)

    def write(self, data: bytes) -> None:
        """Write now."""
        self._transport.write(data)

    async def writable(self) -> None:
        """Wait until the client has read enough. Raises ConnectionError: it has left."""
        while self.is_paused and self.is_open:
            self._writable = self._writable or self._loop.create_future()
            await asyncio.shield(self._writable)
        if not self.is_open:
            raise ConnectionResetError("the client has left")

    def _wake(self) -> None:
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)
        self._writable = None

    def hold(self, is_held: bool) -> None:
        """Stop or go on reading."""
        if is_held != self._is_held and self.is_open and not self._transport.is_closing():
            self._is_held = is_held
            (self._transport.pause_reading if is_held else self._transport.resume_reading)()

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
        if not self._admission.may_explain(self):
            self._is_refused = True
            self.abort()
            return
        self._transport.write(answer)
        self._close_softly()

    def _close_softly(self) -> None:
        """Close the connection after what was written, and ignore what the client sends from now on."""
        self._stop(self._timer)
        self._is_refused = True
        self.hold(False)
        if self._transport.can_write_eof():
            self._transport.write_eof()
        # If we closed now, with unread bytes, the system would reset the connection and the client would lose
        # the answer.
        self._timer = self._loop.call_later(REFUSAL_S, self.abort)

    @staticmethod
    def _stop(timer: asyncio.TimerHandle | None) -> None:
        if timer is not None:
            timer.cancel()


#: One whole request that has no body.
_BARE = re.compile(
    rb"GET [!-~]+ HTTP/1\.1\r\n"
    rb"(?:(?!(?i:content-length|transfer-encoding|upgrade|expect))[!-9;-~]+:[^\x00-\x08\x0a-\x1f\x7f]*\r\n)*\r\n"
)


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
