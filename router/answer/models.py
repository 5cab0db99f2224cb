"""Which models the nodes serve: answers `/v1/models`, and refuses requests for others."""

from __future__ import annotations

import contextlib

from aiohttp import web

from ..http.json_body import object_of
from ..nodes.pool import NoNodeError
from ..nodes.states import USABLE
from .one_node import OneNode
from .performance import Services


class Models:
    """The models of all nodes."""

    def __init__(self, services: Services, node: OneNode) -> None:
        self._services = services
        self._node = node

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Answer as a decode node does. If nodes serve different models, list those of all of them."""
        if name := request.match_info.get("model"):
            is_served = any(node.serves(name) for node in self._services.decode_pool.nodes)
            # If no node serves it, any node says so in its own words (404).
            return await self._node.answer(request, may_use=lambda node: node.serves(name) or not is_served)
        kinds = {node.said.models for node in self._services.decode_pool.nodes if node.state in USABLE}
        if len(kinds) <= 1:
            return await self._node.answer(request)
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
            return await self._node.answer(request, may_use=lambda node: node.said.models == models)
        return None
