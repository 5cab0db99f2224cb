"""No client can block a server, exhaust its resources, or make it work for nothing, whatever the client
sends.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import resource
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web

from kvferry.lab.node.cli import parse_arguments
from kvferry.router.http.connections import ConnectionLimits
from kvferry.router.http.direct import DIRECT
from kvferry.router.http.errors import error_middleware
from kvferry.router.http.json_body import MAX_BODY_BYTES, read_json
from kvferry.router.http.serving import StartupError, bind, serving
from tests.support.patience import DEADLINE_S
from tests.support.zygote import EXAMPLES

HEAD = b"POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@dataclass
class Reply:
    """An answer as it arrived over the wire."""

    status: int
    headers: dict[str, str]
    body: Any


@dataclass
class Client:
    """A connection to which a test writes arbitrary bytes."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def ask(self, raw: bytes) -> Reply:
        self.writer.write(raw)
        return await self.reply()

    async def reply(self) -> Reply:
        async with asyncio.timeout(DEADLINE_S):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
            body = await self.reader.readexactly(int(headers["content-length"]))
        return Reply(int(head[0].split()[1]), headers, json.loads(body))

    async def is_closed(self) -> bool:
        """Wait until the server closes. Returns false if it sends something instead."""
        async with asyncio.timeout(DEADLINE_S):
            try:
                return await self.reader.read(1) == b""
            except ConnectionError:
                return True

    async def trickle(self, rest: bytes) -> None:
        """Send single bytes until the server closes."""
        for byte in rest:
            if self.reader.at_eof() or self.writer.is_closing():
                return
            self.writer.write(bytes([byte]))
            await asyncio.sleep(0.01)
        raise AssertionError("the server accepted all bytes")


@dataclass
class Place:
    """A server whose `/held` handler answers when the test allows it."""

    port: int
    stack: AsyncExitStack
    let_go: asyncio.Event = field(default_factory=asyncio.Event)
    num_held: int = 0

    async def connect(self) -> Client:
        client = Client(*await asyncio.open_connection("127.0.0.1", self.port))
        self.stack.callback(client.writer.close)
        return client

    async def hold(self) -> Client:
        """A connection whose request is in progress."""
        client, before = await self.connect(), self.num_held
        client.writer.write(b"GET /held HTTP/1.1\r\nHost: localhost\r\n\r\n")
        async with asyncio.timeout(DEADLINE_S):
            while self.num_held == before:
                await asyncio.sleep(0.005)
        return client

    async def held(self, request: web.Request) -> web.Response:
        self.num_held += 1
        await self.let_go.wait()
        return web.json_response("done")


async def echo(request: web.Request) -> web.Response:
    return web.json_response(await read_json(request))


#: Whether requests to `/echo` are read directly, as a router reads those for answers, or by aiohttp.
READ_DIRECTLY: ContextVar[bool] = ContextVar("READ_DIRECTLY", default=False)


@pytest.fixture(autouse=True, params=[False, True], ids=["aiohttp", "direct"])
def read_by(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.param and "router_with_few" in request.node.name:
        pytest.skip("it has a server of its own")
    token = READ_DIRECTLY.set(request.param)
    yield
    READ_DIRECTLY.reset(token)


@asynccontextmanager
async def place(**limits: Any) -> AsyncIterator[Place]:
    app = web.Application(middlewares=[error_middleware], client_max_size=MAX_BODY_BYTES)
    with bind("127.0.0.1", 0) as listener:
        async with AsyncExitStack() as stack:
            place = Place(listener.getsockname()[1], stack)
            app.router.add_post("/echo", echo)
            app.router.add_get("/held", place.held)
            if READ_DIRECTLY.get():
                app[DIRECT] = {"/echo": echo}
            await stack.enter_async_context(serving(app, listener, ConnectionLimits(**limits)))
            stack.callback(place.let_go.set)
            yield place


def post(body: bytes, *headers: bytes, length: int | None = None) -> bytes:
    lines = (*headers, b"Content-Length: %d" % (len(body) if length is None else length))
    return HEAD + b"\r\n".join(lines) + b"\r\n\r\n" + body


# -- time ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sent", [b"", HEAD], ids=["nothing", "half a header"])
async def test_a_connection_without_a_complete_header_is_closed(sent: bytes) -> None:
    async with place(header_timeout_s=0.1) as here:
        client = await here.connect()
        client.writer.write(sent)
        assert await client.is_closed()


async def test_the_header_timeout_applies_to_a_header_that_trickles_and_to_that_of_a_later_request() -> None:
    async with place(header_timeout_s=0.6) as here:
        first, further = await here.connect(), await here.connect()
        assert (await further.ask(post(b"{}"))).status == 200
        many = HEAD + b"X-Name: a\r\n" * 500
        await asyncio.gather(first.trickle(many), further.trickle(many))


async def test_between_requests_a_connection_may_be_idle_for_longer_than_the_header_timeout() -> None:
    async with place(header_timeout_s=1) as here:
        client = await here.connect()
        assert (await client.ask(post(b"{}"))).status == 200
        await asyncio.sleep(1.2)  # real time must pass, and there is no event to wait for
        assert (await client.ask(post(b"{}"))).status == 200


async def test_a_body_that_trickles_is_answered_408_and_closed() -> None:
    async with place(body_timeout_s=0.2) as here:
        client = await here.connect()
        client.writer.write(post(b"{", length=5000))
        trickling = asyncio.create_task(client.trickle(b" " * 4000))
        reply = await client.reply()
        trickling.cancel()
        assert (reply.status, reply.headers["connection"]) == (408, "close")
        assert reply.body["error"]["message"] == "the request body did not arrive within 0.2 s"
        assert await client.is_closed()


async def test_a_server_that_was_busy_does_not_blame_its_clients() -> None:
    async with place(header_timeout_s=0.5) as here:
        client = await here.connect()
        await asyncio.sleep(0)
        client.writer.write(post(b"{}"))
        time.sleep(1.2)  # blocks the event loop, so that nothing is read meanwhile  # noqa: ASYNC251
        assert (await client.reply()).status == 200


# -- bodies --------------------------------------------------------------------------------------------


BOMB = gzip.compress(b" " * (MAX_BODY_BYTES + 1))


@pytest.mark.parametrize(
    ("raw", "status", "message"),
    [
        *(
            (post(BOMB, b"Content-Encoding: " + encoding), 415, repr(encoding.decode()))
            for encoding in (b"gzip", b"deflate", b"br", b"identity, gzip")
        ),
        (post(b"", length=MAX_BODY_BYTES + 1), 413, "--max-body-bytes"),
        (HEAD + b"X: " + b"a" * 2000 + b"\r\n\r\n", 431, "header is too large"),
        (HEAD + b"X: a\r\n" * 300 + b"\r\n\r\n", 431, "header is too large"),
    ],
    ids=["gzip", "deflate", "br", "identity, gzip", "too large", "one line", "many lines"],
)
async def test_what_is_too_large_or_encoded_is_refused_before_it_is_read(
    raw: bytes, status: int, message: str
) -> None:
    async with place(max_header_bytes=1024) as here:
        client = await here.connect()
        reply = await client.ask(raw)
        assert (reply.status, reply.headers["connection"]) == (status, "close")
        assert message in reply.body["error"]["message"]
        assert await client.is_closed()


async def test_a_body_that_does_not_say_how_large_it_is_is_read_up_to_the_limit() -> None:
    async with place() as here:
        client = await here.connect()
        client.writer.write(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        chunk = b"100000\r\n" + b" " * (1 << 20) + b"\r\n"
        client.writer.write(chunk * (MAX_BODY_BYTES // (1 << 20) + 1))
        reply = await client.reply()
        assert (reply.status, reply.headers["connection"]) == (413, "close")


async def test_a_connection_is_closed_after_a_bad_request_and_kept_after_a_good_one() -> None:
    async with place() as here:
        client = await here.connect()
        for _ in range(2):
            assert (await client.ask(post(b'{"a": 1}'))).body == {"a": 1}
        reply = await client.ask(post(b"{"))
        assert (reply.status, reply.headers["connection"]) == (400, "close")
        assert await client.is_closed()


async def test_bytes_that_are_not_http_are_answered_400_without_a_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with place() as here:
        client = await here.connect()
        client.writer.write(b"\x16\x03\x01\x02\r\n\r\n")
        assert (await client.reader.readline()).startswith(b"HTTP/1.0 400")
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("coding", [b"gzip", b"chunked, gzip", b"odd", b"chunked\r\nContent-Length: 2"])
async def test_a_bad_transfer_encoding_is_answered_with_an_error_object(coding: bytes) -> None:
    async with place() as here:
        client = await here.connect()
        reply = await client.ask(HEAD + b"Transfer-Encoding: " + coding + b"\r\n\r\n{}")
        assert (reply.status, reply.headers["content-type"]) == (400, "application/json; charset=utf-8")
        assert reply.body["error"]["type"] == "invalid_request_error"
        assert "not valid HTTP" in reply.body["error"]["message"]
        assert "Encoding" in reply.body["error"]["message"]
        assert await client.is_closed()


async def test_the_limit_of_a_header_counts_neither_bodies_nor_earlier_requests() -> None:
    async with place(max_header_bytes=1024) as here:
        client = await here.connect()
        for _ in range(3):
            head = HEAD + b"X: " + b"a" * 500 + b"\r\nContent-Length: 5002\r\n\r\n"
            client.writer.write(head[:300])
            await client.writer.drain()
            client.writer.write(head[300:-2])
            await client.writer.drain()
            assert (await client.ask(head[-2:] + b'"' + b"b" * 5000 + b'"')).status == 400  # not an object
            client = await here.connect()


# -- numbers -------------------------------------------------------------------------------------------


async def test_a_new_connection_takes_the_place_of_the_longest_idle_one() -> None:
    async with place(max_connections=3) as here:
        idle = [await here.connect() for _ in range(3)]
        assert (await idle[0].ask(post(b"{}"))).status == 200  # the second is idle longest
        new = await here.connect()
        assert (await new.ask(post(b"{}"))).status == 200
        assert await idle[1].is_closed()
        for client in (idle[0], idle[2]):
            assert (await client.ask(post(b"{}"))).status == 200


async def test_at_the_limit_with_requests_on_all_connections_one_more_is_asked_to_retry_later() -> None:
    async with place(max_connections=2) as here:
        busy = [await here.hold() for _ in range(2)]
        refused = await here.connect()
        reply = await refused.ask(post(b"{}"))
        assert (reply.status, reply.headers["retry-after"]) == (503, "1")
        assert reply.body["error"]["code"] == "unavailable"
        assert await refused.is_closed()
        here.let_go.set()
        for client in busy:
            assert (await client.reply()).body == "done"
        assert (await (await here.connect()).ask(post(b"{}"))).status == 200


async def test_a_router_with_few_descriptors_keeps_serving_despite_many_idle_connections(
    tmp_path: Any,
) -> None:
    log = tmp_path / "log"
    nodes = ("--prefill", "http://127.0.0.1:1", "--decode", "http://127.0.0.1:1")
    limited = ("sh", "-c", 'ulimit -n 128 && exec "$@"', "sh")
    router = (sys.executable, str(EXAMPLES / "router.py"), "--port", "0", *nodes)
    with log.open("wb") as stderr:
        process = await asyncio.create_subprocess_exec(*limited, *router, stdout=PIPE, stderr=stderr)
    try:
        assert process.stdout is not None
        port = int((await process.stdout.readline()).rsplit(b":", 1)[1])
        async with AsyncExitStack() as stack:
            for _ in range(300):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                stack.callback(writer.close)
            client = Client(*await asyncio.open_connection("127.0.0.1", port))
            stack.callback(client.writer.close)
            reply = await client.ask(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert reply.body["status"] == "no healthy pair of nodes"
    finally:
        process.terminate()
        async with asyncio.timeout(DEADLINE_S):
            await process.communicate()
    assert process.returncode == 0
    assert "out of system resource" not in log.read_text()
    assert "Too many open files" not in log.read_text()


# -- options -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--max-body-bytes", "0"], "--max-body-bytes 0: it must be at least 1"),
        (["--max-queued-requests", "-1"], "--max-queued-requests -1: it must be at least 0"),
    ],
)
def test_limits_that_cannot_work_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(StartupError) as caught:
        parse_arguments(words)
    assert message in str(caught.value)


def test_the_limit_of_connections_leaves_half_of_the_descriptors_to_handoffs() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (600, hard))
        assert parse_arguments([]).limits.max_connections == 300
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
