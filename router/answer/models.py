"""Which models the nodes serve: answers `/v1/models`, and refuses requests for others."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable

import aiohttp
from aiohttp import web
from yarl import URL

from ..http.json_body import object_of
from ..nodes.pool import NodeGoneError, NoNodeError, Tried, UpstreamNode
from ..nodes.reading import read_whole
from ..nodes.states import USABLE
from .bodies import headers_of
from .performance import Services

#: For a node's list of models, which it has at hand.
MODELS_TIMEOUT_S = 30.0


class Models:
    """The models of all nodes.

    Args:
        passes_keys_on: Pass a client's `Authorization` header on to nodes.
    """

    def __init__(self, services: Services, *, passes_keys_on: bool) -> None:
        self._services = services
        self._passes_keys_on = passes_keys_on

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Answer as a decode node does. If nodes serve different models, list those of all of them."""
        if name := request.match_info.get("model"):
            is_served = any(node.serves(name) for node in self._services.decode_pool.nodes)
            # If no node serves it, any node says so in its own words (404).
            return await self._got(request, lambda node: node.serves(name) or not is_served)
        kinds = {node.said.models for node in self._services.decode_pool.nodes if node.state in USABLE}
        if len(kinds) <= 1:
            return await self._got(request, lambda node: True)
        listed: dict[object, object] = {}
        answers = [await self._got_or_none(request, kind) for kind in sorted(kinds, key=sorted)]
        for answer in filter(None, answers):
            if answer.status != 200:
                return answer
            models = object_of(answer.body if isinstance(answer.body, bytes) else b"").get("data")
            for model in models if isinstance(models, list) else ():
                listed.setdefault(str(model.get("id")) if isinstance(model, dict) else None, model)
        return web.json_response({"object": "list", "data": list(listed.values())})

    async def _got_or_none(self, request: web.Request, models: frozenset[str]) -> web.Response | None:
        """Return the answer of a node with these models; None if no such node answers any more."""
        with contextlib.suppress(NoNodeError):
            return await self._got(request, lambda node: node.said.models == models)
        return None

    async def _got(self, request: web.Request, may_use: Callable[[UpstreamNode], bool]) -> web.Response:
        """Return the answer of a decode node to a GET."""
        tried: Tried = {}
        while True:
            pool = self._services.decode_pool
            if (node := next(iter(pool.usable(tried, {}, may_use)), None)) is None:
                raise await pool.no_node(tried, {})
            with contextlib.suppress(NodeGoneError), pool.using(node, tried):
                async with node.exchange():
                    request_id = request.headers.get("X-Request-Id", "") or uuid.uuid4().hex
                    headers = headers_of(request.headers, request_id, passes_keys_on=self._passes_keys_on)
                    url = URL(node.url + request.raw_path, encoded=True)
                    timeout = aiohttp.ClientTimeout(total=MODELS_TIMEOUT_S)
                    async with self._services.session.get(url, headers=headers, timeout=timeout) as response:
                        payload = await read_whole(response)
                node.note_answered()
                # Never another type: a browser would run a node's page as one of the router's.
                return web.Response(body=payload, status=response.status, content_type="application/json")
