"""What each node did for a request, for the page: the router asks what `kvferry explain` asks, and answers
what it prints.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

import aiohttp

from ...connector.spans import MAX_REQUESTS, RecentSpans
from ...transports.checked import printable
from ..http.recent_spans import AskOthers, find_spans, no_others
from ..nodes.reading import read_whole, refuse_no_answers
from .explain import Asking, NotToldError, Question, Told, ask, ask_vllm, tell

#: Seconds that a receipt waits for a server of vLLM.
_RECEIPT_S: Final = 5.0
#: More than the spans of one request have.
_MAX_BYTES: Final = 16 << 20


class Accounts:
    """Asks the nodes of a request for their spans.

    The router presents its key to a node's API, as with any request. It has no key of the nodes' admin
    endpoints: one that it presented to every node would let each of them command the others. So a node that
    asks for one tells nothing here.

    Args:
        spans: The router's own.
        nodes: Returns the URL of each node → the name that its certificate must have, empty for the host of
            the URL. Only these are asked, because a former node's address may belong to any process.
        ask_others: Asks the router's other processes.
    """

    def __init__(
        self,
        spans: RecentSpans,
        nodes: Callable[[], Mapping[str, str]],
        ask_others: AskOthers = no_others,
    ) -> None:
        self._spans = spans
        self._ask_others = ask_others
        self._nodes = nodes

    async def lines(self, request_id: str, own_url: str, session: aiohttp.ClientSession) -> list[str]:
        """Return what `kvferry explain` prints of a request and of the nodes that it was sent to.

        Args:
            own_url: What to call this router.
        """
        spans = await find_spans(self._spans, request_id, self._ask_others)
        named = {str(span.attributes.get("node", "")) for span in spans}
        nodes = self._nodes()
        told = await asyncio.gather(
            *(_answered(ask(request_id, url), session, nodes[url]) for url in sorted(named & nodes.keys()))
        )
        error = (
            "" if spans else f"no spans of this request; the router keeps those of the latest {MAX_REQUESTS}"
        )
        lines = tell(request_id, [Told(own_url, "router", spans=spans, error=error), *told])
        return [printable(line) for line in lines]

    async def of_vllm(self, request_id: str, url: str, session: aiohttp.ClientSession) -> Told:
        """Return what a node that is a server of vLLM knows of a request."""
        # The end of an answer waits for this, so it may not take as long as `kvferry explain` may.
        try:
            async with asyncio.timeout(_RECEIPT_S):
                return await _answered(ask_vllm(request_id, url), session, self._nodes().get(url, ""))
        except TimeoutError:
            return Told(url, error=f"timed out after {_RECEIPT_S:g} s waiting for the server's figures")


async def _answered(asking: Asking[Told], session: aiohttp.ClientSession, server_name: str) -> Told:
    # Each question has a deadline of its own, and a server gets four at most, so this ends before the page's
    # own timeout.
    try:
        question = next(asking)
        while True:
            try:
                text = await _fetch(question, session, server_name)
            except NotToldError as error:
                question = asking.throw(error)
            else:
                question = asking.send(text)
    except StopIteration as end:
        told: Told = end.value
        return told


async def _fetch(question: Question, session: aiohttp.ClientSession, server_name: str) -> str:
    """Return the text of the answer.

    Raises:
        NotToldError: There is none in time, or it is an error.
    """
    # Of the session's middlewares, one presents the router's key, which is none of the admin endpoints.
    middlewares = (refuse_no_answers,) if question.is_admin else None
    method, headers = ("POST", {"Content-Type": "application/json"}) if question.body else ("GET", {})
    body = question.body or None
    try:
        async with (
            asyncio.timeout(question.timeout_s),
            session.request(
                *(method, question.url),
                data=body,
                headers=headers,
                middlewares=middlewares,
                server_hostname=server_name or None,
            ) as response,
        ):
            text = (await read_whole(response.content, _MAX_BYTES)).decode(errors="replace")
    except TimeoutError as error:
        raise NotToldError(
            f"timed out after {question.timeout_s:g} s waiting for the whole answer"
        ) from error
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise NotToldError(str(error) or type(error).__name__) from error
    if question.is_admin and response.status == 401:
        raise NotToldError(
            "its admin endpoints ask for a key, which the router does not have: run `kvferry explain` with --admin-api-key-file"
        )
    if not 200 <= response.status < 300:
        raise NotToldError(f"HTTP status {response.status}: {text[:2000].strip() or response.reason}")
    return text
