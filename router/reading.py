"""Read what nodes send, within bounds: a node that sends more than this, or something else than an answer, has failed.

Every failure is an error of aiohttp's client, as a broken connection is, so that `UpstreamNode.exchange` treats it alike.
"""

from __future__ import annotations

from collections.abc import Mapping

import aiohttp
from aiohttp import ClientHandlerType

#: The largest whole answer, and the largest event of a stream. The largest legitimate ones have log probabilities: this is
#: enough for about 25,000 tokens with 20 alternatives each. An answer without them has a few bytes per token.
MAX_ANSWER_BYTES = 64 << 20


class TooLongError(aiohttp.ClientPayloadError):
    """A node has sent more than it may."""

    def __init__(self, what: str, max_bytes: int) -> None:
        super().__init__(f"sent {what} of more than {max_bytes} bytes")


class NoAnswerError(aiohttp.ClientError):
    """A node has answered with something that no node of ours answers."""


#: What every request to a node says. A node could answer a few bytes that become gigabytes when they are decompressed.
ASKED_ENCODING: Mapping[str, str] = {"Accept-Encoding": "identity"}


async def refuse_no_answers(
    request: aiohttp.ClientRequest, handler: ClientHandlerType
) -> aiohttp.ClientResponse:
    """Fail if a node redirects, or compresses its answer. This is a middleware of the client session.

    To follow a redirect would send the prompt and the router's key to any address that the node names, and that address's answer
    to the client.

    Raises:
        NoAnswerError: The node does one of these.
    """
    response = await handler(request)
    why = ""
    encoding = response.headers.get("Content-Encoding", "identity")
    if 300 <= response.status < 400:
        why = f"answered {response.status}: the router follows no redirects; give the node's own URL"
    elif not 200 <= response.status < 600:
        why = f"answered {response.status}, which is no status of an answer"
    elif encoding.lower() != "identity":
        why = f"compressed its answer ({encoding[:40]!r}), for which the router did not ask"
    if why:
        response.close()
        raise NoAnswerError(why)
    return response


async def read_whole(response: aiohttp.ClientResponse, max_bytes: int = MAX_ANSWER_BYTES) -> bytes:
    """Return the body of a node's answer.

    Raises:
        aiohttp.ClientError: The connection broke, or the body has more than `max_bytes`. The rest of it is not read.
    """
    pieces: list[bytes] = []
    num_bytes = 0
    while piece := await response.content.readany():
        pieces.append(piece)
        num_bytes += len(piece)
        if num_bytes > max_bytes:
            raise TooLongError("an answer", max_bytes)
    return b"".join(pieces)


class EventBuffer:
    """The beginning of a stream's event whose end has not arrived."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def add(self, chunk: bytes) -> bytes:
        """Return the events that are complete with a chunk, each with the empty line that ends it.

        Raises:
            TooLongError: The next event has more than `MAX_ANSWER_BYTES`. What has arrived of it is dropped.
        """
        # Search only what is new, because a large event arrives in many chunks.
        begin = max(0, len(self._rest) - 1)
        self._rest += chunk
        end = self._rest.rfind(b"\n\n", begin)
        events = bytes(self._rest[: end + 2]) if end >= 0 else b""
        del self._rest[: len(events)]
        if len(self._rest) > MAX_ANSWER_BYTES:
            self._rest.clear()
            raise TooLongError("an event", MAX_ANSWER_BYTES)
        return events

    def rest(self) -> bytes:
        """Return what follows the last complete event, and forget it."""
        rest = bytes(self._rest)
        self._rest.clear()
        return rest
