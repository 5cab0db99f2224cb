"""Requests to nodes over kept connections: a connection is used again only if nothing is left in it, and a
request that met its end is sent once more.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp
import pytest

from kvferry.router.http.access import NodeAccess
from kvferry.router.nodes import calls
from kvferry.router.nodes.calls import MAX_FRAME_BYTES, MAX_UNREAD_BYTES, NodeCalls, NodeResponse
from kvferry.router.nodes.reading import NoAnswerError, read_whole
from tests.support.patience import DEADLINE_S

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
#: Closes the connection.
CLOSE = b""


@dataclass
class Node:
    """Answers each request with the next of its answers.

    Attributes:
        requests: Of each connection, what was sent on it.
    """

    answers: list[Sequence[bytes]]
    requests: list[list[bytes]] = field(default_factory=list)
    url: str = ""
    num_sent: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked: list[bytes] = []
        self.requests.append(asked)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = re.search(rb"Content-Length: (\d+)", head)
                assert length is not None
                asked.append(head + await reader.readexactly(int(length[1])))
                for part in self.answers.pop(0):
                    if part == CLOSE:
                        return
                    writer.write(part)
                    await writer.drain()
                    self.num_sent += len(part)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    @property
    def num_requests(self) -> list[int]:
        """Of each connection."""
        return [len(each) for each in self.requests]


@asynccontextmanager
async def node(*answers: Sequence[bytes]) -> AsyncIterator[tuple[Node, NodeCalls]]:
    here = Node(list(answers))
    server = await asyncio.start_server(here.serve, "127.0.0.1", 0)
    here.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    own = NodeCalls(NodeAccess(), lambda url: "")
    async with asyncio.timeout(DEADLINE_S):
        yield here, own
    own.close()
    server.close()


async def ask(own: NodeCalls, here: Node, **headers: str) -> bytes:
    response = await own.post(here.url, "/v1/completions", b"{}", headers)
    try:
        return await read_whole(response)
    finally:
        response.close()


async def test_a_connection_is_used_again() -> None:
    async with node([OK], [CHUNKED, b"2\r\nok\r\n", b"0\r\n\r\n"], [OK]) as (here, own):
        assert [await ask(own, here) for _ in range(3)] == [b"ok"] * 3
        assert here.num_requests == [3]


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param([OK.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")], id="it says so"),
        pytest.param([b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok"], id="HTTP/1.0"),
        pytest.param([b"HTTP/1.1 200 OK\r\n\r\nok", CLOSE], id="the connection's end is the answer's"),
        pytest.param([OK + b"more"], id="more follows"),
        pytest.param([OK + OK], id="another answer follows"),
    ],
)
async def test_a_connection_is_not_used_again(answer: Sequence[bytes]) -> None:
    async with node(answer, [OK]) as (here, own):
        assert [await ask(own, here) for _ in range(2)] == [b"ok"] * 2
        assert here.num_requests == [1, 1]


async def test_an_answer_that_nobody_asked_for_is_given_to_no_request() -> None:
    async with node([OK, b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nwrong"], [OK]) as (here, own):
        assert await ask(own, here) == b"ok"
        while here.num_sent < 2 * len(OK):
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.05)  # for the loop to read it
        assert await ask(own, here) == b"ok"
        assert here.num_requests == [1, 1]


async def test_a_request_that_meets_the_end_of_its_connection_is_sent_once_more() -> None:
    async with node([OK], [CLOSE], [OK]) as (here, own):
        assert [await ask(own, here) for _ in range(2)] == [b"ok"] * 2
        assert here.num_requests == [2, 1]


async def test_a_request_is_not_sent_a_third_time() -> None:
    async with node([OK], [CLOSE], [CLOSE], [OK]) as (here, own):
        assert await ask(own, here) == b"ok"
        with pytest.raises(aiohttp.ServerDisconnectedError):
            await ask(own, here)
        assert here.num_requests == [2, 1]


@pytest.mark.parametrize("begun", [b"H", CHUNKED, CHUNKED + b"5\r\nhal"])
async def test_a_request_whose_answer_has_begun_is_not_sent_again(begun: bytes) -> None:
    async with node([OK], [begun, CLOSE], [OK]) as (here, own):
        assert await ask(own, here) == b"ok"
        with pytest.raises((aiohttp.ServerDisconnectedError, aiohttp.ClientPayloadError)):
            await ask(own, here)
        assert here.num_requests == [2]


async def test_a_request_of_a_new_connection_is_not_sent_again() -> None:
    async with node([CLOSE], [OK]) as (here, own):
        with pytest.raises(aiohttp.ServerDisconnectedError):
            await ask(own, here)
        assert here.num_requests == [1]


async def test_a_node_that_ends_with_a_request_has_had_it() -> None:
    """Although no connection can be made afterwards: the request may be what has ended it."""
    async with node([OK], [CLOSE]) as (here, own):
        assert await ask(own, here) == b"ok"
        own._origins[here.url].url = own._origins[here.url].url.with_port(1)
        with pytest.raises(aiohttp.ServerDisconnectedError):
            await ask(own, here)


async def test_a_connection_is_not_used_after_its_tls_files_have_changed() -> None:
    """Also if one that was opened later became idle before it."""
    async with node([OK], [OK], [OK]) as (here, own):
        await ask(own, here)
        origin = own._origins[here.url]
        (old,) = origin.idle
        origin.idle.clear()
        await ask(own, here)
        old.version = "before"
        origin.idle.append(old)
        await ask(own, here)
        assert here.num_requests == [1, 2]


async def test_an_idle_connection_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "IDLE_S", 0.05)
    async with node([OK], [OK]) as (here, own):
        await ask(own, here)
        while own._origins[here.url].idle:
            await asyncio.sleep(0.01)
        await ask(own, here)
        assert here.num_requests == [1, 1]


async def test_an_answer_that_is_not_wanted_ends_its_connection() -> None:
    async with node([CHUNKED + b"2\r\nok\r\n"], [OK]) as (here, own):
        response = await own.post(here.url, "/v1/completions", b"{}", {})
        response.close()
        assert await ask(own, here) == b"ok"
        assert here.num_requests == [1, 1]


async def test_what_comes_before_the_answer_is_skipped() -> None:
    async with node([b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: a\r\n\r\n" + OK]) as (
        here,
        own,
    ):
        response = await own.post(here.url, "/v1/completions", b"{}", {})
        assert (response.status, "Link" in response.headers) == (200, False)
        assert await read_whole(response) == b"ok"


ENDLESS = b"a" * 4096


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param([b"HTTP/1.1 200 OK\r\nX: ", *[ENDLESS] * 32], id="field"),
        pytest.param([b"HTTP/1.1 200 OK\r\n", *[b"X: " + ENDLESS + b"\r\n"] * 32], id="fields"),
        pytest.param([CHUNKED, b"2;", *[ENDLESS] * 32], id="chunk's extension"),
        pytest.param([CHUNKED, b"0\r\nX: ", *[ENDLESS] * 32], id="trailer"),
        pytest.param([b"HTTP/1.1 100 Continue\r\n\r\n"] * 4096, id="interim answers"),
        pytest.param(
            [b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n"], id="101"
        ),
        pytest.param(
            [b"HTTP/1.1 302 Found\r\nLocation: http://other\r\nContent-Length: 0\r\n\r\n"], id="redirect"
        ),
        pytest.param(
            [b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 0\r\n\r\n"], id="compressed"
        ),
        pytest.param([b"SSH-2.0-OpenSSH\r\n\r\n"], id="no HTTP"),
        pytest.param([CHUNKED, b"zz\r\n"], id="no chunk"),
        pytest.param(
            [
                b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n"
            ],
            id="both lengths",
        ),
    ],
)
async def test_what_is_no_answer_fails_within_bounds(answer: Sequence[bytes]) -> None:
    assert sum(map(len, answer)) > MAX_FRAME_BYTES or len(answer) < 3
    async with node(answer, [OK]) as (here, own):
        with pytest.raises(NoAnswerError):
            await ask(own, here)
        assert await ask(own, here) == b"ok"
        assert sum(here.num_requests) == 2


async def test_a_node_waits_for_an_answer_to_be_read() -> None:
    pieces = [b"10000\r\n" + b"x" * (1 << 16) + b"\r\n"] * 1024
    async with node([CHUNKED, *pieces, b"0\r\n\r\n"]) as (here, own):
        response: NodeResponse = await own.post(here.url, "/v1/completions", b"{}", {})
        before = -1
        while here.num_sent != before:
            before = here.num_sent
            await asyncio.sleep(0.1)  # longer than the node needs for another piece
        assert len(response._unread) <= 2 * MAX_UNREAD_BYTES
        assert here.num_sent < 32 << 20  # what sockets hold
        assert len(await read_whole(response, 1 << 30)) == 1024 << 16


@pytest.mark.parametrize("value", ["a\r\nX-Other: b", "a\nb", "a\rb", "a\0b"])
async def test_an_id_with_the_end_of_a_line_is_not_sent(value: str) -> None:
    async with node([OK]) as (here, own):
        with pytest.raises(aiohttp.ClientConnectionError, match="end of a line"):
            await ask(own, here, **{"X-Request-Id": value})
        assert here.num_requests == []


async def test_a_path_in_the_url_of_a_node_comes_before_the_endpoints() -> None:
    async with node([OK]) as (here, own):
        here.url += "/models/one/"
        await ask(own, here)
        assert here.requests[0][0].startswith(b"POST /models/one/v1/completions HTTP/1.1\r\n")
