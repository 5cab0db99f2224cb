"""How a request's prompt is computed before its decode begins: as a whole, or (overlapped) only its first part."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from typing import Any

import aiohttp

from .metrics import RouterMetrics
from .nodes import Node, NodePool
from .stages import NodeGoneError, gone_nodes, open_prefill, params_of, prefill_body

__all__ = ["Call", "OverlappedPrefill", "Prefill", "WholePrefill"]

logger = logging.getLogger(__name__)

#: An event of a prefill is its offer, which names a block for each few tokens of the prompt.
MAX_EVENT_BYTES = 16 << 20
#: Between the end of an answer and the end of the prefill that it came from, which both nodes know already.
LAST_EVENTS_S = 5.0

Params = Mapping[str, Any] | None
Events = AsyncGenerator[Mapping[str, Any], None]


@dataclass(frozen=True)
class Call:
    """A client's request on its way to the nodes."""

    session: aiohttp.ClientSession
    path: str
    body: Mapping[str, Any]
    headers: Mapping[str, str]

    @property
    def request_id(self) -> str:
        return self.headers["X-Request-Id"]


class Prefill(ABC):
    """Has prompts computed by the nodes of a pool; a node that is gone is replaced by another."""

    def __init__(self, pool: NodePool, metrics: RouterMetrics) -> None:
        self._pool = pool
        self._metrics = metrics

    @abstractmethod
    def prefilled(self, call: Call) -> AbstractAsyncContextManager[Params]:
        """Have a prompt computed for the block's time: leaving it early hangs up.

        Yields:
            What the decode node needs, None when it gets nothing from the prefill.

        Raises:
            ApiError: no node can do it (503), or a node refused the request.
        """

    def _note_gone(self, call: Call, error: NodeGoneError) -> None:
        logger.warning("%s: prefill: %s", call.request_id, error)
        self._metrics.retries.labels("prefill").inc()

    def _note_params(self, call: Call, node: Node, params: Params) -> None:
        if params is None:
            logger.warning("%s: %s offered no KV cache", call.request_id, node.url)
            self._metrics.without_handoff.inc()


class WholePrefill(Prefill):
    """The decode begins when the prompt is computed as a whole. Any node that speaks vLLM's protocol can do it."""

    @contextlib.asynccontextmanager
    async def prefilled(self, call: Call) -> AsyncIterator[Params]:
        yield await self._params(call)

    async def _params(self, call: Call) -> Params:
        tried: set[Node] = set()
        body = prefill_body(call.body, overlap=False)
        while True:
            try:
                with self._pool.use_one(tried) as node:
                    async with open_prefill(call.session, node, call.path, body, call.headers) as response:
                        with gone_nodes(node):
                            params = params_of(await response.read())
            except NodeGoneError as error:
                self._note_gone(call, error)
            else:
                self._note_params(call, node, params)
                return params


@dataclass(frozen=True)
class _Stream:
    """A prefill that goes on; closing `resources` hangs up."""

    node: Node
    params: Params
    events: Events
    resources: AsyncExitStack


class OverlappedPrefill(Prefill):
    """The decode begins when the first chunk of the prompt is computed; its cache crosses while the rest is.

    A node that says nothing early is waited for. What fails after the decode began is the decode node's to
    mend: it computes the prompt itself, or fails, as its policy says.
    """

    @contextlib.asynccontextmanager
    async def prefilled(self, call: Call) -> AsyncIterator[Params]:
        stream = await self._opened(call)
        follower = asyncio.create_task(self._follow(stream, call))
        try:
            yield stream.params
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(follower, LAST_EVENTS_S)
        finally:
            follower.cancel()
            await asyncio.gather(follower, return_exceptions=True)
            await stream.resources.aclose()

    async def _opened(self, call: Call) -> _Stream:
        tried: set[Node] = set()
        while True:
            try:
                stream = await self._open_one(call, tried)
            except NodeGoneError as error:
                self._note_gone(call, error)
            else:
                self._note_params(call, stream.node, stream.params)
                return stream

    async def _open_one(self, call: Call, tried: set[Node]) -> _Stream:
        body = prefill_body(call.body, overlap=True)
        async with AsyncExitStack() as resources:
            node = resources.enter_context(self._pool.use_one(tried))
            opened = open_prefill(call.session, node, call.path, body, call.headers)
            events = _events(node, await resources.enter_async_context(opened))
            params = await _first_params(events)
            return _Stream(node, params, events, resources.pop_all())

    async def _follow(self, stream: _Stream, call: Call) -> None:
        try:
            async for _ in stream.events:
                pass
        except NodeGoneError as error:
            logger.warning("%s: the prefill was lost while its cache crossed: %s", call.request_id, error)
            self._metrics.lost_prefills.inc()
        finally:
            await stream.resources.aclose()


async def _first_params(events: Events) -> Params:
    async for event in events:
        if isinstance(params := event.get("kv_transfer_params"), dict):
            return params
    return None


async def _events(node: Node, response: aiohttp.ClientResponse) -> Events:
    """The events of a stream, up to its end; the whole answer as one of them when it is no stream.

    Raises:
        NodeGoneError: the connection broke, the stream is none, or it tells of an error.
    """
    with gone_nodes(node):
        if response.content_type != "text/event-stream":
            yield {"kv_transfer_params": params_of(await response.read())}
            return
        rest = b""
        async for chunk in response.content.iter_any():
            *whole, rest = (rest + chunk).split(b"\n\n")
            if len(rest) > MAX_EVENT_BYTES:
                raise NodeGoneError(f"{node.url} sent an event of more than {MAX_EVENT_BYTES} bytes")
            for event in whole:
                if event == b"data: [DONE]":
                    return
                yield _parsed(node, event)
    raise NodeGoneError(f"{node.url} ended its stream early")


def _parsed(node: Node, event: bytes) -> Mapping[str, Any]:
    try:
        parsed = json.loads(event.removeprefix(b"data: "))
    except ValueError:
        raise NodeGoneError(f"{node.url} sent an event that is no JSON") from None
    if not isinstance(parsed, dict) or "error" in parsed:
        raise NodeGoneError(f"{node.url}: {json.dumps(parsed)[:200]}")
    return parsed
