"""Requests to nodes that begin an answer, over connections that are kept open.

A router does this twice per request and once per token, so it is done without aiohttp's client (decision 44).
`httptools` reads HTTP. This module owns the connections: it opens, keeps, bounds and closes them. Every
failure is an error of aiohttp's client, as those of the session's requests are.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import aiohttp
import httptools
from aiohttp.client_reqrep import ConnectionKey
from multidict import CIMultiDict
from yarl import URL

from ..http.access import NodeAccess
from .reading import ASKED_ENCODING, CONNECT_TIMEOUT_S, NoAnswerError, kept_alive_socket, why_no_answer

logger = logging.getLogger(__name__)

#: A connection that was idle for this long is closed. Servers close theirs later, uvicorn after 5 s, so a
#: request hardly ever meets the end of its connection.
IDLE_S: Final = 3.0
#: Nodes whose connections are kept. One that was not asked for longest is forgotten.
MAX_ORIGINS: Final = 4096
#: What a node may send without a byte of an answer: a header, the frames of chunks, or trailers.
MAX_FRAME_BYTES: Final = 64 << 10
#: As soon as this much of an answer waits to be read, the node has to wait.
MAX_UNREAD_BYTES: Final = 256 << 10

#: Takes bytes of an answer as they arrive, or leaves them to be read.
Take = Callable[[bytes], bool]


class NodeCalls:
    """Sends requests to nodes.

    Args:
        access: What nodes are shown, and how they are verified.
        server_name: Returns the name in a node's certificate; empty: that of its URL.
    """

    def __init__(self, access: NodeAccess, server_name: Callable[[str], str]) -> None:
        self._access, self._server_name = access, server_name
        self._origins: OrderedDict[str, _Origin] = OrderedDict()
        self._context: ssl.SSLContext | None = None

    async def post(self, url: str, path: str, payload: bytes, headers: Mapping[str, str]) -> NodeResponse:
        """Send a request, and return the response as soon as its header has arrived.

        If a kept connection turns out to be closed before a byte of the response, the request is sent once
        more over a new one: a server may close a connection that is idle at any time.

        Args:
            url: Of the node.
            payload: JSON.

        Raises:
            aiohttp.ClientError: No connection, or it broke, or what came is no answer.
        """
        origin = self._origin(url)
        access = self._access
        access.prepare(origin.url)
        request = _request(origin, path, {**ASKED_ENCODING, **headers, **access.key_headers}, payload)
        if (kept := origin.kept(access.tls_version)) is not None:
            response = kept.send(request)
            try:
                return await _begun(response)
            except aiohttp.ServerDisconnectedError as error:
                if response.has_arrived:
                    raise
                lost = error
            try:
                return await _begun((await self._connected(origin)).send(request))
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):
                raise lost from None  # the node may have had the request, and ended by it
        return await _begun((await self._connected(origin)).send(request))

    def close(self) -> None:
        """Close the connections that are kept. Those with a request under way are closed by its caller."""
        for origin in self._origins.values():
            origin.close()
        self._origins.clear()

    def _origin(self, url: str) -> _Origin:
        if (origin := self._origins.get(url)) is None:
            while len(self._origins) >= MAX_ORIGINS:
                self._origins.popitem(last=False)[1].close()
            origin = self._origins[url] = _Origin(URL(url))
        self._origins.move_to_end(url)
        return origin

    async def _connected(self, origin: _Origin) -> _Connection:
        """Open a connection: to the first address of the node's name that accepts one."""
        loop, url = asyncio.get_running_loop(), origin.url
        host, port = url.host or "", url.port or 0
        context = self._tls_context() if url.scheme == "https" else None
        name = (self._server_name(str(url.origin())) or host) if context else None
        version = self._access.tls_version
        error: OSError = OSError("the name has no address")
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                for address in await loop.getaddrinfo(host, port, type=1):
                    opened = kept_alive_socket(address)
                    try:
                        await loop.sock_connect(opened, address[4])
                        _, connection = await loop.create_connection(
                            lambda: _Connection(origin, version),
                            sock=opened,
                            ssl=context,
                            server_hostname=name,
                        )
                        return connection
                    except ssl.SSLCertVerificationError as failure:
                        opened.close()
                        raise aiohttp.ClientConnectorCertificateError(_key(url), failure) from failure
                    except OSError as failure:
                        opened.close()
                        error = failure
                    except BaseException:
                        opened.close()
                        raise
        except TimeoutError:
            message = f"Connection timeout to host {url.origin()}"
            raise aiohttp.ConnectionTimeoutError(message) from None
        except OSError as failure:  # the name cannot be looked up
            error = failure
        raise aiohttp.ClientConnectorError(_key(url), error) from error

    def _tls_context(self) -> ssl.SSLContext:
        if (own := self._access.ssl_context) is not True:
            assert isinstance(own, ssl.SSLContext), "a context, or that of the system"
            return own
        if self._context is None:
            self._context = ssl.create_default_context()
        return self._context


def _key(url: URL) -> ConnectionKey:
    """Return what aiohttp's errors name a connection by."""
    return ConnectionKey(url.host or "", url.port, url.scheme == "https", True, None, None, None)


def _request(origin: _Origin, path: str, headers: Mapping[str, str], payload: bytes) -> bytes:
    """Return a request as bytes.

    Raises:
        aiohttp.ClientConnectionError: A header cannot be sent.
    """
    lines = [f"{name}: {value}" for name, value in headers.items()]
    head = "\r\n".join(
        (
            f"POST {origin.prefix}{path} HTTP/1.1",
            f"Host: {origin.host}",
            "Content-Type: application/json",
            f"Content-Length: {len(payload)}",
            *lines,
        )
    )
    if head.count("\n") != 3 + len(lines) or head.count("\r") != 3 + len(lines) or "\0" in head:
        # A client's id is among them, and could end the header to begin a request of its own.
        raise aiohttp.ClientConnectionError("a header of the request has the end of a line inside")
    return head.encode(errors="surrogateescape") + b"\r\n\r\n" + payload


async def _begun(response: NodeResponse) -> NodeResponse:
    try:
        await response.begun()
        if why := why_no_answer(response.status, response.headers):
            raise NoAnswerError(why)
    except BaseException:
        response.close()
        raise
    return response


@dataclass(slots=True)
class _Origin:
    """A node's URL, and the connections to it that are kept: the one that was used last is at the end."""

    url: URL
    host: str = field(init=False)
    prefix: str = field(init=False)
    idle: list[_Connection] = field(default_factory=list)
    is_closed: bool = False
    _sweep: asyncio.TimerHandle | None = None

    def __post_init__(self) -> None:
        self.host = self.url.host_port_subcomponent or ""
        self.prefix = self.url.raw_path.rstrip("/")

    def kept(self, version: object) -> _Connection | None:
        """Take a connection that can be used again, unless the files of TLS have changed since."""
        self._close_old()
        while self.idle:
            # The latest first, so that those of a busy time become old and are closed.
            connection = self.idle.pop()
            if connection.version == version:
                return connection
            connection.abort()
        return None

    def keep(self, connection: _Connection) -> None:
        """Keep a connection whose answer has ended."""
        if self.is_closed:
            connection.abort()
            return
        self.idle.append(connection)
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(IDLE_S, self._swept)

    def _close_old(self) -> None:
        since = asyncio.get_running_loop().time() - IDLE_S
        while self.idle and self.idle[0].idle_since <= since:
            self.idle.pop(0).abort()

    def _swept(self) -> None:
        self._sweep = None
        self._close_old()
        if self.idle:
            self._sweep = asyncio.get_running_loop().call_later(IDLE_S, self._swept)

    def close(self) -> None:
        self.is_closed = True
        if self._sweep is not None:
            self._sweep.cancel()
        for connection in self.idle:
            connection.abort()
        self.idle.clear()


class _Connection(asyncio.Protocol):
    """One connection to a node, which has at most one request at a time."""

    __slots__ = ("_is_lost", "_origin", "_response", "_transport", "idle_since", "version")

    def __init__(self, origin: _Origin, version: object) -> None:
        self._origin, self.version = origin, version
        self._transport: asyncio.Transport
        self._response: NodeResponse | None = None
        self._is_lost = False
        self.idle_since = 0.0

    def send(self, request: bytes) -> NodeResponse:
        """Send a request, and return its response, of which nothing has arrived."""
        self._response = response = NodeResponse(self)
        if self._is_lost:
            response.lost(None)
        else:
            self._transport.write(request)
        return response

    def ended(self, *, is_reusable: bool) -> None:
        """Note that the response has come to its end, or is not wanted any more."""
        self._response = None
        if is_reusable and not self._is_lost and not self._transport.is_closing():
            self.idle_since = asyncio.get_running_loop().time()
            self._transport.resume_reading()
            self._origin.keep(self)
        else:
            self.abort()

    def abort(self) -> None:
        """Close it now."""
        if not self._is_lost:
            self._transport.abort()

    def pause(self) -> None:
        if not self._is_lost:
            self._transport.pause_reading()

    def resume(self) -> None:
        if not self._is_lost:
            self._transport.resume_reading()

    # -- asyncio's side ------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        if self._response is None:
            self.abort()  # nothing was asked
        else:
            self._response.received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_lost = True
        if self in self._origin.idle:
            self._origin.idle.remove(self)
        if self._response is not None:
            self._response.lost(exc)


class NodeResponse:
    """A node's response as it arrives.

    Attributes:
        status: 0 until its header has arrived.
        has_arrived: A byte of it has arrived.
    """

    __slots__ = (
        "_arrived",
        "_connection",
        "_error",
        "_has_end",
        "_has_head",
        "_is_complete",
        "_is_paused",
        "_may_go_on",
        "_num_frame_bytes",
        "_parser",
        "_take",
        "_unread",
        "_waiter",
        "has_arrived",
        "headers",
        "status",
    )

    def __init__(self, connection: _Connection) -> None:
        self.status, self.headers, self.has_arrived = 0, CIMultiDict[str](), False
        self._connection: _Connection | None = connection
        self._parser: httptools.HttpResponseParser | None = httptools.HttpResponseParser(self)
        self._has_head = self._has_end = self._is_complete = self._is_paused = False
        self._may_go_on = False  # the connection can be used again
        self._num_frame_bytes = 0  # since the last byte of the answer
        self._arrived: list[bytes] = []  # of the answer, by one call of the parser
        self._unread = bytearray()
        self._take: Take | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._error: Exception | None = None

    @property
    def content_type(self) -> str:
        """The media type, without parameters."""
        return self.headers.get("Content-Type", "").partition(";")[0].strip().lower()

    # -- the reader ----------------------------------------------------------------------------------

    async def begun(self) -> None:
        """Wait for the header.

        Raises:
            aiohttp.ClientError: The connection broke, or what came is no answer.
        """
        while not self._has_head and self._error is None:
            await self._woken()
        if self._error is not None and not self._has_head:
            raise self._error

    async def readany(self, take: Take | None = None) -> bytes:
        """Return bytes of the answer that were not read yet; none at its end.

        Args:
            take: Is offered what arrives while this waits, and may take it. Called outside of any task.

        Raises:
            aiohttp.ClientError: See `begun`.
        """
        self._take = take
        try:
            while not (self._unread or self._is_complete or self._error is not None):
                await self._woken()
        finally:
            self._take = None
        if self._unread:
            unread = bytes(self._unread)
            self._unread.clear()
            if self._is_paused and self._connection is not None:
                self._is_paused = False
                self._connection.resume()
            return unread
        if self._error is not None:
            raise self._error
        return b""

    async def _woken(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def close(self) -> None:
        """Need no more of the response: its connection is closed, unless all of it has arrived."""
        if self._connection is not None:
            connection, self._connection = self._connection, None
            connection.ended(is_reusable=False)
        self._let_go()

    def _let_go(self) -> None:
        self._parser = None  # which refers to this object

    # -- the connection ------------------------------------------------------------------------------

    def received(self, data: bytes) -> None:
        """Take in what has arrived."""
        self.has_arrived = True
        assert self._parser is not None, "it goes with the connection"
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._fail(NoAnswerError("answered 101, which is no status of an answer"))
        except httptools.HttpParserError as error:
            if self._is_complete:
                self._may_go_on = False  # what follows the answer is none
            else:
                self._fail(NoAnswerError(f"sent what is no HTTP: {' '.join(str(error).split())[:200]}"))
        if self._arrived:
            self._num_frame_bytes = 0
            self._deliver(self._arrived[0] if len(self._arrived) == 1 else b"".join(self._arrived))
            self._arrived.clear()
        elif not self._is_complete:
            self._num_frame_bytes += len(data)
            if self._num_frame_bytes > MAX_FRAME_BYTES:
                self._fail(NoAnswerError(f"sent more than {MAX_FRAME_BYTES} bytes of HTTP around its answer"))
        if self._is_complete and self._connection is not None:
            # Before the reader wakes: it may ask the node again, and should find this connection.
            connection, self._connection = self._connection, None
            connection.ended(is_reusable=self._may_go_on)
            self._let_go()
            self._wake()

    def _deliver(self, data: bytes) -> None:
        # Only if nothing waits to be read: what is taken would overtake it.
        if self._take is not None and not self._unread and self._take(data):
            return
        self._unread += data
        if len(self._unread) > MAX_UNREAD_BYTES and not self._is_paused and self._connection is not None:
            self._is_paused = True
            self._connection.pause()
        self._wake()

    def lost(self, exc: Exception | None) -> None:
        """Note that the connection has ended."""
        self._connection = None
        if not self._has_head:
            self._fail(aiohttp.ServerDisconnectedError())
        elif exc is not None and not isinstance(exc, OSError):
            self._fail(aiohttp.ClientPayloadError(f"the connection broke: {exc}"))
        elif self._has_end and not self._is_complete:
            self._fail(aiohttp.ClientPayloadError("the connection ended before the answer was complete"))
        elif exc is not None and not self._is_complete:
            self._fail(aiohttp.ClientOSError(*exc.args))
        else:
            self._is_complete = True
        self._let_go()
        self._wake()

    def _fail(self, error: Exception) -> None:
        self._error = self._error or error
        if self._connection is not None:
            connection, self._connection = self._connection, None
            connection.ended(is_reusable=False)
        self._wake()

    # -- the parser ----------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._is_complete:
            self._may_go_on = False  # it says more than it was asked

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._has_head:
            self.headers.add(name.decode("latin-1"), value.decode(errors="surrogateescape"))

    def on_headers_complete(self) -> None:
        if self._has_head or self._parser is None:
            return
        status = self._parser.get_status_code()
        if 100 <= status < 200:
            self.headers.clear()  # one with the answer follows
            return
        self.status, self._has_head = status, True
        is_chunked = "chunked" in self.headers.get("Transfer-Encoding", "").lower()
        self._has_end = is_chunked or "Content-Length" in self.headers or status in (204, 304)
        self._wake()

    def on_body(self, body: bytes) -> None:
        if not self._is_complete:
            self._arrived.append(body)

    def on_message_complete(self) -> None:
        if self._has_head and not self._is_complete and self._parser is not None:
            self._is_complete = True
            self._may_go_on = self._has_end and self._parser.should_keep_alive()
