"""Read what nodes send, within bounds: a node that sends more than this, or something else than an answer,
has failed.

Every failure is an error of aiohttp's client, as a broken connection is, so that `UpstreamNode.exchange`
treats it alike.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import aiohttp
from aiohttp import ClientHandlerType, ClientMiddlewareType

from ..http.access import NodeAccess
from ..http.json_body import object_of
from ..http.sse import Event, EventTooLongError, Splitter

if TYPE_CHECKING:
    from .calls import NodeResponse, Take

#: The largest whole answer, and the largest event of a stream. The largest legitimate ones have log
#: probabilities: this is enough for about 25,000 tokens with 20 alternatives each. An answer without them has
#: a few bytes per token.
MAX_ANSWER_BYTES = 64 << 20
#: The first event of an answer is searched for an error up to this size; it may have the prompt's log
#: probabilities.
MAX_FIRST_EVENT_BYTES = 1 << 20
#: No vocabulary has ids of 20 digits or more, and Python does not convert a text of thousands of digits.
_NO_TOKEN_ID = re.compile(rb'"token_ids":\s*\[[\d,\s]*\d{20}')


class TooLongError(aiohttp.ClientPayloadError):
    """A node has sent more than it may."""

    def __init__(self, what: str, max_bytes: int) -> None:
        super().__init__(f"sent {what} of more than {max_bytes} bytes")


class NoAnswerError(aiohttp.ClientError):
    """A node has answered with something that no node of ours answers, or with nothing."""


#: What every request to a node says. A node could answer a few bytes that become gigabytes when they are
#: decompressed.
ASKED_ENCODING: Mapping[str, str] = {"Accept-Encoding": "identity"}


async def refuse_no_answers(
    request: aiohttp.ClientRequest, handler: ClientHandlerType
) -> aiohttp.ClientResponse:
    """Fail if a node redirects, or compresses its answer. This is a middleware of the client session.

    To follow a redirect would send the prompt and the router's key to any address that the node names, and
    that address's answer to the client.

    Raises:
        NoAnswerError: The node does one of these.
    """
    response = await handler(request)
    if why := why_no_answer(response.status, response.headers):
        response.close()
        raise NoAnswerError(why)
    return response


def why_no_answer(status: int, headers: Mapping[str, str]) -> str:
    """Return why a response is no answer, by its header; empty if it may be one."""
    encoding = headers.get("Content-Encoding", "identity")
    if 300 <= status < 400:
        return f"answered {status}: the router follows no redirects; give the node's own URL"
    if not 200 <= status < 600:
        return f"answered {status}, which is no status of an answer"
    if encoding.lower() != "identity":
        return f"compressed its answer ({encoding[:40]!r}), for which the router did not ask"
    return ""


class Readable(Protocol):
    """The body of a response."""

    async def readany(self) -> bytes:
        """Return bytes that were not read yet; none at its end."""


async def read_whole(body: Readable, max_bytes: int = MAX_ANSWER_BYTES) -> bytes:
    """Return the body of a node's answer.

    Raises:
        aiohttp.ClientError: The connection broke, or the body has more than `max_bytes`. The rest of it is
            not read.
    """
    pieces: list[bytes] = []
    num_bytes = 0
    while piece := await body.readany():
        pieces.append(piece)
        num_bytes += len(piece)
        if num_bytes > max_bytes:
            raise TooLongError("an answer", max_bytes)
    return b"".join(pieces)


class NodeAnswer:
    """A node's answer as it arrives: whole, or event by event.

    Attributes:
        is_stream: It comes as events.
        payload: A whole answer; of a stream, what has arrived with the first event.
        content: A whole answer, parsed; empty if it is no JSON object.
        events: Of a stream, those that have arrived with the first one: it says whether the answer has
            failed.
    """

    def __init__(self, response: NodeResponse) -> None:
        self.response = response
        self.status = response.status
        self.headers: Mapping[str, str] = response.headers
        self.is_stream = response.content_type == "text/event-stream"
        self.payload = b""
        self.content: Mapping[str, Any] = {}
        self.events: list[Event] = []
        self._num_bytes = 0  # of a stream
        self._splitter = Splitter(MAX_ANSWER_BYTES)

    async def begin(self) -> None:
        """Wait for the whole answer, or for the first event of a stream that is more than a comment.

        Raises:
            aiohttp.ClientError: The connection broke or ended before that, or the node has sent more than it
                may.
        """
        if not self.is_stream:
            self.payload = await read_whole(self.response)
            self.content = object_of(self.payload)
            return
        while all(event.is_comment for event in self.events) and self._num_bytes < MAX_FIRST_EVENT_BYTES:
            if (events := await self.more()) is None:
                raise NoAnswerError("ended its answer before the first event")
            self.events += events
        self.payload = b"".join(event.raw for event in self.events)

    async def more(self, take: Take | None = None) -> list[Event] | None:
        """Return the next events of a stream, which may be none yet. None: it has ended.

        Args:
            take: Is offered what arrives meanwhile, if it is whole events, and may take it.

        Raises:
            aiohttp.ClientError: See `begin`; or an event is none of an answer.
        """
        chunk = await self.response.readany(None if self._splitter.has_rest else take)
        self._num_bytes += len(chunk)
        try:
            events = self._splitter.add(chunk) if chunk else self.rest()
        except EventTooLongError:
            raise TooLongError("an event", MAX_ANSWER_BYTES) from None
        if any(_NO_TOKEN_ID.search(event.raw) for event in events):
            raise NoAnswerError("sent a token id of more than 19 digits")
        return events if chunk else events or None

    def rest(self) -> list[Event]:
        """Return the last event, if all of it has arrived but the empty line after it.

        Half an event is none.
        """
        last = (Event(event.raw.rstrip() + b"\n\n") for event in self._splitter.rest())
        return [event for event in last if event.is_done or event.content]

    def contents(self) -> Iterator[Mapping[str, Any]]:
        """Yield the JSON objects of what has arrived in the beginning."""
        if self.is_stream:
            yield from (event.content for event in self.events)
        else:
            yield self.content


CONNECT_TIMEOUT_S = 5.0
#: If the peer's host vanishes, the connection breaks after IDLE + COUNT * INTERVAL seconds without a byte.
#: Health checks do not notice a host that restarted meanwhile, so they cannot replace this.
KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S, KEEPALIVE_COUNT = 15, 5, 3


def node_session(access: NodeAccess, middlewares: Sequence[ClientMiddlewareType]) -> aiohttp.ClientSession:
    """Make the session of all requests to nodes.

    Args:
        middlewares: Of each request.
    """
    connector = aiohttp.TCPConnector(
        limit=0, force_close=True, socket_factory=kept_alive_socket, ssl=access.ssl_context
    )
    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
        connector=connector,
        cookie_jar=aiohttp.DummyCookieJar(),  # a node's cookie for one client is not for the others
        headers=ASKED_ENCODING,
        auto_decompress=False,
        middlewares=middlewares,
    )


def kept_alive_socket(address: tuple[object, ...]) -> socket.socket:
    """Make a socket with TCP keep-alive: a prefill may send nothing for long, and its host may vanish
    meanwhile.
    """
    family, kind, protocol = address[:3]
    connection = socket.socket(family, kind, protocol)  # type: ignore[arg-type]
    connection.setblocking(False)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    times = {
        "TCP_KEEPIDLE": KEEPALIVE_IDLE_S,
        "TCP_KEEPINTVL": KEEPALIVE_INTERVAL_S,
        "TCP_KEEPCNT": KEEPALIVE_COUNT,
    }
    for name, value in times.items():
        if hasattr(socket, name):  # not every system has these names; its defaults apply there
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection
