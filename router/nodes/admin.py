"""The admin endpoints that add and remove nodes.

They must be served with a key: a node receives clients' prompts.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from ..http.errors import ApiError, bad_request
from ..http.json_body import Fields, read_json
from .membership import ADMIN, ROLES, BadNodesError, Role, parse_url
from .pool import NodePool


def name_node(pool: NodePool, url: str, is_named: bool) -> None:
    """Let the source `admin` name a node, or name it no more."""
    named = pool.named_by(ADMIN)
    pool.contribute(ADMIN, named | {url} if is_named else named - {url})


def node_routes(
    prefill_pool: NodePool,
    decode_pool: NodePool,
    report: Callable[[], Awaitable[list[dict[str, Any]]]],
    on_named: Callable[[Role, str, bool], None],
) -> list[web.RouteDef]:
    """Return the routes `/admin/nodes`. What they add is the contribution of the source `admin`.

    A node is given by `role` and `url`: in the JSON body of a POST, and in the query of a DELETE.

    Args:
        report: Returns all nodes.
        on_named: Called with what `name_node` was called with, for other processes of this router.
    """
    pools: dict[Role, NodePool] = {"prefill": prefill_pool, "decode": decode_pool}

    async def show(request: web.Request) -> web.Response:
        return web.json_response({"nodes": await report()})

    async def add(request: web.Request) -> web.Response:
        fields = Fields(await read_json(request))
        pool, url = _checked(pools, fields.text("role", ""), fields.text("url", ""))
        named = pool.named_by(ADMIN)
        name_node(pool, url, True)
        on_named(pool.role, url, True)
        return web.json_response(_report(pool, url), status=200 if url in named else 201)

    async def remove(request: web.Request) -> web.Response:
        query = request.query
        pool, url = _checked(pools, query.get("role", ""), query.get("url", ""))
        named, sources = pool.named_by(ADMIN), pool.sources_of(url)
        if url not in named:
            if not sources:
                raise _refusal(404, f"the router has no {pool.role} node {url!r}")
            others = ", ".join(map(repr, sources))
            raise _refusal(
                409, f"the admin API did not add {url!r}: remove it where it is named, which is {others}"
            )
        name_node(pool, url, False)
        on_named(pool.role, url, False)
        return web.json_response(_report(pool, url), status=202)

    return [
        web.get("/admin/nodes", show),
        web.post("/admin/nodes", add),
        web.delete("/admin/nodes", remove),
    ]


def _checked(pools: dict[Role, NodePool], role: str, url: str) -> tuple[NodePool, str]:
    for known in ROLES:
        if role == known:
            try:
                return pools[known], parse_url(url)
            except BadNodesError as error:
                raise bad_request(str(error), "url") from None
    raise bad_request(f"'role' must be 'prefill' or 'decode', got {role[:80]!r}", "role")


def _report(pool: NodePool, url: str) -> dict[str, Any]:
    return next(node for node in pool.report() if node["url"] == url)


def _refusal(status: int, message: str) -> ApiError:
    return ApiError(status, message, kind="invalid_request_error", param="url")
