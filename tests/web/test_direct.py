"""Requests that are read without aiohttp are answered as aiohttp would, in their order, and nothing that a
client sends is read as two different requests.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import pytest
from aiohttp import web

from kvferry.router.http import serving as server
from kvferry.router.http.connections import ConnectionLimits
from kvferry.router.http.direct import DIRECT, DirectRequest, Stream
from kvferry.router.http.errors import error_middleware
from kvferry.router.http.json_body import read_json
from kvferry.router.http.serving import bind, serving
from tests.support.patience import DEADLINE_S

HEAD = b"POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
PIECE = b"x" * (64 << 10)


def post(body: bytes = b"1", *fields: bytes, path: bytes = b"/echo") -> bytes:
    lines = [
        b"Host: localhost",
        b"Content-Type: application/json",
        *fields,
        b"Content-Length: %d" % len(body),
    ]
    return b"POST %b HTTP/1.1\r\n%b\r\n\r\n%b" % (path, b"\r\n".join(lines), body)


def number(value: int) -> bytes:
    return json.dumps({"n": value}).encode()


GET = b"GET /page HTTP/1.1\r\nHost: localhost\r\n\r\n"


@dataclass
class Place:
    """A server that answers some paths directly, and notes who has read what.

    Attributes:
        read: Of each request, by whom, and its body.
        num_written: Bytes of the endless stream.
    """

    port: int
    stack: AsyncExitStack
    read: list[tuple[str, object]] = field(default_factory=list)
    num_written: int = 0
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    let_go: asyncio.Event = field(default_factory=asyncio.Event)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.stack.callback(writer.close)
        return reader, writer

    async def told(self, *raw: bytes, num: int) -> list[bytes]:
        """Send bytes in these segments, and return the next `num` answers."""
        reader, writer = await self.connect()
        for segment in raw:
            writer.write(segment)
            await writer.drain()
            await asyncio.sleep(0.02)  # so that they are not joined; nothing depends on it if they are
        async with asyncio.timeout(DEADLINE_S):
            return [await answer_of(reader) for _ in range(num)]

    async def echo(self, request: web.Request) -> web.Response:
        body = await read_json(request)
        self.read.append(("direct" if isinstance(request, DirectRequest) else "aiohttp", body["n"]))
        if body["n"] == 0:
            await self.let_go.wait()
        return web.json_response(body)

    async def page(self, request: web.Request) -> web.Response:
        self.read.append(("aiohttp", None))
        return web.json_response("page")

    async def endless(self, request: web.Request) -> web.StreamResponse:
        await read_json(request)
        stream = Stream()
        try:
            await stream.prepare(request)
            while True:
                while stream.may_write_now:
                    stream.write_now(PIECE)
                    self.num_written += len(PIECE)
                await stream.write(PIECE)
                self.num_written += len(PIECE)
        finally:
            self.ended.set()


async def answer_of(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = re.search(rb"(?i)content-length: (\d+)", head)
    assert length is not None
    return head.split(b" ", 2)[1] + b" " + await reader.readexactly(int(length[1]))


@asynccontextmanager
async def place(**limits: float) -> AsyncIterator[Place]:
    app = web.Application(middlewares=[error_middleware])
    with bind("127.0.0.1", 0) as listener:
        async with AsyncExitStack() as stack:
            here = Place(listener.getsockname()[1], stack)
            app.router.add_post("/echo", here.echo)
            app.router.add_get("/page", here.page)
            app.router.add_post("/endless", here.endless)
            app[DIRECT] = {"/echo": here.echo, "/endless": here.endless}
            await stack.enter_async_context(serving(app, listener, ConnectionLimits(**limits)))  # type: ignore[arg-type]
            stack.callback(here.let_go.set)
            yield here


# -- order -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("join", [lambda raw: [b"".join(raw)], list], ids=["at once", "one by one"])
async def test_requests_of_one_connection_are_answered_in_their_order(
    join: Callable[[list[bytes]], list[bytes]],
) -> None:
    async with place() as here:
        raw = [post(number(1)), GET, post(number(2)), post(number(3)), GET, GET, post(number(4))]
        answers = await here.told(*join(raw), num=len(raw))
        assert answers == [
            b'200 {"n": 1}',
            b'200 "page"',
            b'200 {"n": 2}',
            b'200 {"n": 3}',
            b'200 "page"',
            b'200 "page"',
            b'200 {"n": 4}',
        ]


async def test_what_comes_during_an_answer_waits_for_it_and_takes_no_memory() -> None:
    async with place() as here:
        reader, writer = await here.connect()
        writer.write(post(number(0)))
        flood = post(number(1)) * 1000
        writer.write(flood)
        while len(here.read) < 1:
            await asyncio.sleep(0.005)
        assert here.read == [("direct", 0)]
        here.let_go.set()
        async with asyncio.timeout(DEADLINE_S):
            answers = [await answer_of(reader) for _ in range(1001)]
        assert answers == [b'200 {"n": 0}'] + [b'200 {"n": 1}'] * 1000


async def test_after_a_get_a_connection_is_read_directly_again() -> None:
    async with place() as here:
        await here.told(GET, post(number(1)), num=2)
        assert here.read == [("aiohttp", None), ("direct", 1)]


# -- what is odd -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(post(number(1), b"Transfer-Encoding: chunked"), id="both lengths"),
        pytest.param(post(number(1), b"Content-Length: 5"), id="two lengths"),
        pytest.param(post(number(1), b"X-Odd: a\r\n b"), id="folded"),
        pytest.param(post(number(1), b"X-Odd : a"), id="space before the colon"),
        pytest.param(post(number(1), b"X-Odd: a\x00b"), id="nul"),
        pytest.param(post(number(1), b"X-Odd: a\nX-Other: b"), id="bare line feed"),
        pytest.param(post(number(1), b"X-Odd: a\rb"), id="bare carriage return"),
        pytest.param(post(number(1), b"Expect: 100-continue"), id="expect"),
        pytest.param(post(number(1), b"Connection: Upgrade", b"Upgrade: h2c"), id="upgrade"),
        pytest.param(post(number(1)).replace(b"HTTP/1.1", b"HTTP/1.0", 1), id="HTTP/1.0"),
        pytest.param(post(number(1), path=b"/echo?a=b"), id="query"),
        pytest.param(post(number(1), path=b" /echo"), id="two spaces"),
        pytest.param(post(number(1), path=b"/%65cho"), id="another name of the path"),
    ],
)
async def test_an_odd_header_is_left_to_aiohttp(raw: bytes) -> None:
    async with place() as here:
        reader, writer = await here.connect()
        writer.write(raw)
        async with asyncio.timeout(DEADLINE_S):
            assert await reader.read(1)
        assert [who for who, _ in here.read] in ([], ["aiohttp"])


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(
            GET + b"POST /page HTTP/1.1\r\nHost: localhost\r\nX: ", post(number(666)), id="in a header"
        ),
        pytest.param(post(b"a" * 200)[:-200], post(number(666)), id="in a body"),
        pytest.param(
            HEAD + b"Transfer-Encoding: chunked\r\n\r\n1;x=", post(number(666)), id="in a chunk's extension"
        ),
        pytest.param(HEAD[:60], b"\r\n\r\n" + post(number(666)), id="after a header without a length"),
    ],
)
async def test_what_belongs_to_one_request_is_not_read_as_another(first: bytes, second: bytes) -> None:
    async with place() as here:
        _, writer = await here.connect()
        writer.write(first)
        await writer.drain()
        # The server reads the first segment by itself: only then could it take the second for a request.
        await here.told(GET, num=1)
        writer.write(second)
        await writer.drain()
        await here.told(GET, num=1)
        assert ("direct", 666) not in here.read


async def test_a_header_in_pieces_is_answered() -> None:
    async with place() as here:
        raw = post(number(1))
        assert await here.told(raw[:20], raw[20:90], raw[90:], num=1) == [b'200 {"n": 1}']


async def test_an_id_with_the_end_of_a_line_begins_no_header() -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(headers={"X-Request-Id": "a\r\nX-Own: b"})

    app = web.Application(middlewares=[error_middleware])
    app.router.add_post("/echo", answer)
    app[DIRECT] = {"/echo": answer}
    with bind("127.0.0.1", 0) as listener:
        async with serving(app, listener, ConnectionLimits()):
            reader, writer = await asyncio.open_connection(*listener.getsockname()[:2])
            writer.write(post())
            async with asyncio.timeout(DEADLINE_S):
                assert b"X-Own" not in await reader.read()
            writer.close()


# -- clients that leave or do not read ---------------------------------------------------------------


async def test_a_client_that_does_not_read_stops_its_answer() -> None:
    async with place() as here:
        reader, writer = await here.connect()
        writer.write(post(number(1), path=b"/endless"))
        async with asyncio.timeout(DEADLINE_S):
            await reader.readexactly(1)
            before = -1
            while here.num_written != before:
                before = here.num_written
                await asyncio.sleep(0.1)  # longer than the server needs for another piece
        assert here.num_written < 16 << 20  # what sockets hold
        assert not here.ended.is_set()


@pytest.mark.parametrize("path", [b"/endless", b"/echo"])
async def test_a_client_that_leaves_ends_its_request(path: bytes) -> None:
    async with place() as here:
        reader, writer = await here.connect()
        writer.write(post(number(0), path=path))
        if path == b"/endless":
            await reader.readexactly(1)
        else:
            while not here.read:
                await asyncio.sleep(0.005)
            here.ended.set()  # nothing but its task would notice
        writer.transport.abort()
        async with asyncio.timeout(DEADLINE_S):
            await here.ended.wait()
            assert await here.told(GET, num=1) == [b'200 "page"']


async def test_a_body_that_nothing_reads_takes_no_memory() -> None:
    """It waits at the client, as one that waits for its turn does."""
    waits, let_go = asyncio.Event(), asyncio.Event()

    async def wait(request: web.Request) -> web.Response:
        waits.set()
        await let_go.wait()
        assert isinstance(request, DirectRequest)
        assert len(request._unread) < 2 << 20
        return web.json_response(len(await request.content.readany()) > 0)

    app = web.Application(middlewares=[error_middleware])
    app[DIRECT] = {"/echo": wait}
    with bind("127.0.0.1", 0) as listener:
        async with (
            serving(app, listener, ConnectionLimits(max_body_bytes=1 << 30)),
            asyncio.timeout(DEADLINE_S),
        ):
            reader, writer = await asyncio.open_connection(*listener.getsockname()[:2])
            writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % (1 << 29))
            writer.write(b"x" * (64 << 20))
            await waits.wait()
            await asyncio.sleep(0.3)  # real time, in which a server without a limit reads everything
            let_go.set()
            assert await answer_of(reader) == b"200 true"
            writer.transport.abort()


async def test_aiohttp_does_not_end_the_answer_that_follows_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """It closes a connection on which it has read nothing for a while."""
    monkeypatch.setattr(server, "KEEP_ALIVE_S", 0.1)
    async with place() as here:
        reader, writer = await here.connect()
        writer.write(GET)
        assert await answer_of(reader) == b'200 "page"'
        writer.write(post(number(0)))
        async with asyncio.timeout(DEADLINE_S):
            while not here.read[1:]:
                await asyncio.sleep(0.005)
        await asyncio.sleep(0.3)  # real time, in which it would
        here.let_go.set()
        async with asyncio.timeout(DEADLINE_S):
            assert await answer_of(reader) == b'200 {"n": 0}'
            writer.write(GET)
            assert await answer_of(reader) == b'200 "page"'
