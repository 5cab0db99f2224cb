"""The HTTP server of the router."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any

import aiohttp
import orjson
from aiohttp import ClientHandlerType, web
from aiohttp.typedefs import Handler

from ..connector.spans import RecentSpans
from .answer.bodies import body_for_nodes, check_body, headers_of, prompts_of
from .answer.dialects import dialect_of
from .answer.exchange import Exchange
from .answer.handoffs import Handoffs
from .answer.models import Models
from .answer.one_node import OneNode, not_served
from .answer.performance import DecodeAlone, Performance, Services, UpstreamAnswer, explained_difference
from .answer.several import MergedAnswer, Part
from .choice.fleet import Fleet, Mode
from .choice.kv_events import EventFollower, Follow
from .choice.placement import Limits
from .choice.ways import Options
from .http.access import ApiKeys, NodeAccess
from .http.admin import admin_application
from .http.api_pages import add_api_pages
from .http.connections import is_overloaded, slot_of
from .http.direct import DIRECT, send_whole
from .http.endpoints import COMPLETIONS, ENDPOINTS, Endpoint, endpoint_at
from .http.errors import CLIENT_LEFT, ApiError, answered_status, error_middleware
from .http.json_body import MAX_BODY_BYTES, read_json
from .http.recent_spans import LATEST, SPANS, AskOthers, no_others, span_routes
from .http.serving import close_connections_while
from .http.tracing import current_span, name_request, observed
from .nodes.admin import node_routes
from .nodes.calls import NodeCalls
from .nodes.membership import Role
from .nodes.pool import RETRY_AFTER_S, NodePool, NoNodeError, UpstreamNode, check_model
from .nodes.reading import node_session, refuse_no_answers
from .nodes.sources import NodeSource
from .nodes.states import NodeState
from .seen.accounts import Accounts
from .seen.merged import merged_health, merged_metrics, merged_nodes, merged_recent, merged_status
from .seen.metrics import RouterMetrics
from .seen.page import Page
from .seen.receipts import RECEIPT_HEADER, Receipts, receipt_of
from .seen.records import Observer, RecentRequests, RequestRecord, clock_us, mark
from .workers import Siblings, share_knowledge

logger = logging.getLogger(__name__)


class Router:
    """Sends each request to a prefill node, then to a decode node.

    If a node fails before any byte of the answer has reached the client, the router retries at another node.
    It retries a prefill on its own. It repeats the prefill before it retries a decode, because the first
    offer is used up.

    Args:
        options: Which ways requests may go.
        answer_timeout_s: An answer that takes longer ends with an error. 0 sets no limit.
        check_interval_s: Seconds between two health checks of a node.
        check_timeout_s: Seconds after which a health check has failed.
        decode_alone: Whether a decode node receives a request that no prefill node can take. `auto` means: if
            it reports the policy `recompute`.
        node_access: What the router presents to nodes, and how it verifies them. None: nothing, by the CAs of
            the system.
        passes_keys_on: Pass a client's `Authorization` header on to nodes. The router's own key replaces it.
        placement: Where prompts are computed, of nodes that compute and answer.
        limits: Which times the choice keeps if it can.
        follow: Whose KV events are followed.
        sources: Where the router learns of nodes while it runs.
        admin_keys: The keys that `/page/explain` asks for, as the admin endpoints do; if empty, none. None:
            it answers no client.
        receipts: Which answers say how their cache came.
    """

    def __init__(
        self,
        prefill_pool: NodePool,
        decode_pool: NodePool,
        *,
        options: Options | None = None,
        answer_timeout_s: float,
        check_interval_s: float,
        check_timeout_s: float,
        decode_alone: DecodeAlone,
        node_access: NodeAccess | None = None,
        passes_keys_on: bool = True,
        placement: Mode = "auto",
        limits: Limits | None = None,
        follow: Follow = "auto",
        sources: Sequence[NodeSource] = (),
        admin_keys: ApiKeys | None = None,
        receipts: Receipts = "asked",
    ) -> None:
        self._check_times_s = check_interval_s, check_timeout_s
        self._node_access = node_access or NodeAccess()
        self._passes_keys_on = passes_keys_on
        self._sources = sources
        self._gives_receipts = receipts
        self._recent = RecentRequests()
        self._spans = RecentSpans()
        self._admin_port: int | None = None
        handoffs, fleet = Handoffs(), Fleet(placement, limits or Limits(), time.monotonic)
        self._follower = EventFollower(fleet.prefixes, follow)
        for pool in (prefill_pool, decode_pool):
            pool.on_forgotten = handoffs.forget
            pool.on_ended = self._process_ended
            pool.on_occupancy = fleet.note_all
        self._metrics = RouterMetrics(lambda: self._nodes, handoffs)
        self._metrics.followed_nodes.set_function(lambda: self._follower.num_followed)
        services = self._services = Services(
            *(prefill_pool, decode_pool, handoffs, options or Options()),
            *(answer_timeout_s, decode_alone, fleet),
        )
        self._one_node = OneNode(services, passes_keys_on=passes_keys_on)
        self._models = Models(services, self._one_node)
        # Made here and not with the routes, so that all processes of the router are one run for the page.
        self._page = Page(self._page_state, self._explain, admin_keys)
        self._siblings: Siblings | None = None
        self._ask_others: AskOthers = no_others
        self._is_draining = False  # says `/ready`
        self._refuses = False  # new requests
        self._num_under_way = 0

    @property
    def _nodes(self) -> tuple[UpstreamNode, ...]:
        return self._services.prefill_pool.nodes + self._services.decode_pool.nodes

    def application(self) -> web.Application:
        """Return the routes for aiohttp."""
        app = web.Application(
            middlewares=[observed("router", self._spans.keep), self._count, error_middleware],
            client_max_size=MAX_BODY_BYTES,
        )
        for endpoint in ENDPOINTS:
            for method in endpoint.methods:
                app.router.add_route(method, endpoint.path, self._answer)
        app[DIRECT] = {each.path: self._answer for each in ENDPOINTS if each.way != "refused"}
        app.router.add_get("/v1/models", self._models.answer)
        app.router.add_get("/v1/models/{model:.+}", self._models.answer)
        app.router.add_get("/health", self._health)
        app.router.add_get("/ready", self._ready)
        app.router.add_get("/nodes", self._nodes_seen)
        app.router.add_get("/metrics", self._metrics_text)
        add_api_pages(app, "kvferry router")
        self._accounts = Accounts(
            self._spans,
            lambda: {node.url: self._server_name(node.url) for node in self._nodes},
            self._ask_others,
        )
        self._page.add_routes(app)
        app.cleanup_ctx.append(self._connected)
        close_connections_while(app, lambda: self._is_draining)
        return app

    def admin_application(self, on_drain: Callable[[], None], port: int | None = None) -> web.Application:
        """Return the admin endpoints.

        Args:
            on_drain: Starts the drain, after which the process ends.
            port: Where they are served, for `/health`. None: they are not.
        """
        self._admin_port = port

        async def drain(request: web.Request) -> web.Response:
            num = self._num_under_way + sum(await self._others("requests under way"))
            on_drain()
            return web.json_response({"status": "draining", "requests": num}, status=202)

        async def report() -> list[dict[str, Any]]:
            nodes: list[dict[str, Any]] = (await self._merged_report())["nodes"]
            return nodes

        def on_named(role: Role, url: str, is_named: bool) -> None:
            if self._siblings is not None:
                self._siblings.tell("node", role, url, is_named)

        nodes = node_routes(self._services.prefill_pool, self._services.decode_pool, report, on_named)
        spans = span_routes(self._spans, "router", ask_others=self._ask_others)
        return admin_application([web.post("/admin/drain", drain), *spans, *nodes])

    def share(self, siblings: Siblings) -> None:
        """Share what this process knows with the others of its router, and show theirs with its own."""
        self._siblings, self._ask_others = siblings, siblings.ask
        self._recent.number_from(siblings.seat.number)
        services = self._services
        pools: dict[Role, NodePool] = {"prefill": services.prefill_pool, "decode": services.decode_pool}
        share_knowledge(siblings, services.fleet, services.sessions, pools)
        siblings.answer("metrics", lambda _: self._kept_metrics(siblings))
        siblings.answer("nodes", lambda _: self.report()["nodes"])
        siblings.answer("health", lambda _: self._own_health())
        siblings.answer("page", lambda times: self._page_part(*times))
        siblings.answer("requests under way", lambda _: self._num_under_way)
        siblings.answer(LATEST, lambda _: self._spans.latest())
        siblings.answer(SPANS, lambda wanted: self._spans.find(wanted))

    async def _others(self, topic: str, argument: Any = None) -> list[Any]:
        """Return what the other processes of this router answer."""
        return [orjson.loads(answer) for answer in await self._ask_others(topic, argument)]

    async def _explain(self, request_id: str, own_url: str) -> list[str]:
        return await self._accounts.lines(request_id, own_url, self._services.session)

    async def wait_until_ready(self) -> None:
        """Return as soon as a prefill node and a decode node are ready."""
        while not self._has_pair:
            await asyncio.sleep(self._check_times_s[0] / 4)

    def announce_drain(self) -> None:
        """Answer 503 on `/ready` from now on, and still accept requests."""
        self._is_draining = True

    def refuse_requests(self) -> None:
        """Refuse new requests from now on. Requests in flight continue."""
        self._is_draining = self._refuses = True

    async def finish(self, timeout_s: float, quiet_s: float = 0.0) -> None:
        """Wait at most `timeout_s` for the end of the requests in flight.

        Args:
            quiet_s: Wait until no request was in flight for this long, because the client of a stream that
                began before the drain cannot know that its connection is about to close, and may use it for
                its next request.
        """
        now = asyncio.get_running_loop().time
        deadline, quiet_since = now() + timeout_s, now()
        while now() < deadline and (self._num_under_way or now() - quiet_since < quiet_s):
            await asyncio.sleep(min(0.05, timeout_s))
            if self._num_under_way:
                quiet_since = now()

    def stop(self) -> None:
        """End the requests in flight; each client receives an error."""
        self._is_draining = self._refuses = True
        for pool in (self._services.prefill_pool, self._services.decode_pool):
            pool.close()

    def _process_ended(self, url: str) -> None:
        self._services.fleet.forget(url)
        self._follower.restart(url)

    @property
    def _has_pair(self) -> bool:
        return self._services.prefill_pool.has_ready_node and self._services.decode_pool.has_ready_node

    async def _connected(self, app: web.Application) -> AsyncIterator[None]:
        access = self._node_access
        async with node_session(access, (access.present, self._verify_by_name, refuse_no_answers)) as session:
            self._services.session = session
            calls = self._services.calls = NodeCalls(access, self._server_name)
            pools = self._services.prefill_pool, self._services.decode_pool
            async with contextlib.AsyncExitStack() as stack:
                for pool in pools:
                    await stack.enter_async_context(pool.watching(session, *self._check_times_s))
                looking = [asyncio.create_task(source.run(self.contribute)) for source in self._sources]
                looking.append(asyncio.create_task(self._follower.run(lambda: self._nodes)))
                yield
                await self._services.handoffs.close()
                for task in looking:
                    task.cancel()
                await asyncio.gather(*looking, return_exceptions=True)
            calls.close()

    # -- nodes ---------------------------------------------------------------------------------------

    def pool_of(self, role: Role) -> NodePool:
        """Return the nodes of a role."""
        return self._services.prefill_pool if role == "prefill" else self._services.decode_pool

    def contribute(self, source: str, nodes: Mapping[Role, Collection[str]]) -> None:
        """Replace what a source contributes to the roles in `nodes`."""
        for role, urls in nodes.items():
            self.pool_of(role).contribute(source, urls)

    async def _verify_by_name(
        self, request: aiohttp.ClientRequest, handler: ClientHandlerType
    ) -> aiohttp.ClientResponse:
        """Expect a DNS name in the certificate of a node that was found by it.

        Certificates rarely have addresses.
        """
        if request.url.scheme == "https":
            request.server_hostname = self._server_name(str(request.url.origin())) or None
        return await handler(request)

    def _server_name(self, url: str) -> str:
        # A node with both roles may have been found by its name for one of them only.
        return self._services.prefill_pool.server_name(url) or self._services.decode_pool.server_name(url)

    async def _nodes_seen(self, request: web.Request) -> web.Response:
        return web.json_response(await self._merged_report())

    async def _merged_report(self) -> dict[str, Any]:
        own = self.report()
        return {**own, "nodes": merged_nodes(own["nodes"], await self._others("nodes"))}

    def report(self) -> dict[str, Any]:
        """Return the router's view of its nodes, as `GET /nodes` shows it."""
        fleet = self._services.fleet
        return {
            "nodes": [
                {
                    **node,
                    "cached_blocks": fleet.prefixes.num_blocks(node["url"]),
                    "kept_for_prompts": fleet.load(node["url"]).is_kept,
                }
                for node in (*self._services.prefill_pool.report(), *self._services.decode_pool.report())
            ],
            "sources": [source.report() for source in self._sources],
        }

    # -- health, metrics, models ---------------------------------------------------------------------

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response(merged_health(self._own_health(), await self._others("health")))

    def _own_health(self) -> dict[str, Any]:
        nodes = [
            {
                "role": node.role,
                "url": node.url,
                "kv_role": node.said.kv_role or None,
                "models": sorted(node.said.models) or None,
                "state": node.state.value,
                "healthy": node.state is NodeState.READY,
                "error": node.last_error,
            }
            for node in self._nodes
        ]
        status, _ = self._status()
        # The router is alive, also without nodes: a restart would help none of them.
        # `kvferry explain` asks for spans at this port.
        admin = {"admin_port": self._admin_port} if self._admin_port is not None else {}
        return {"status": status, "nodes": nodes, "handoffs": self._services.handoffs.report(), **admin}

    async def _ready(self, request: web.Request) -> web.Response:
        status, is_ready = self._status()
        if is_ready and is_overloaded(request):
            status, is_ready = "overloaded", False
        headers = {} if is_ready else {"Retry-After": str(RETRY_AFTER_S)}
        return web.json_response({"status": status}, status=200 if is_ready else 503, headers=headers)

    def _status(self) -> tuple[str, bool]:
        """Return the status, and whether requests can be answered."""
        if self._is_draining:
            return "draining", False
        refused = [node for node in self._nodes if node.state is NodeState.REFUSED]
        problems = [f"{node.role} node {node.url} is refused: {node.why}" for node in refused]
        problems += self._services.handoffs.problems()
        if not self._has_pair:
            if self._services.prefill_pool.has_ready_node or not self._services.can_decode_alone({}, {}):
                return "no healthy pair of nodes", False
            problems.append("no prefill node is ready: decode nodes compute prompts themselves")
        return ", but ".join(filter(None, ("ok", "; ".join(problems)))), True

    async def _page_state(self, since: int) -> Mapping[str, Any]:
        """Return what the page shows of the router, its nodes and its requests."""
        if self._siblings is None:
            until, others = None, []
        else:
            # What ends from now on is for the next answer, in whichever process.
            until = clock_us() - 1
            others = await self._others("page", (since, until))
        own = self._page_part(since, until)
        return {
            "status": merged_status([own, *others]),
            "is_ready": self._status()[1],
            "latencies": self._metrics.latencies(other["counted"] for other in others),
            **self.report(),
            "nodes": merged_nodes(own["nodes"], [other["nodes"] for other in others]),
            **merged_recent(own["recent"], [other["recent"] for other in others]),
        }

    def _page_part(self, since: int, until: int | None) -> dict[str, Any]:
        return {
            "status": self._status()[0],
            "nodes": self.report()["nodes"],
            "counted": self._metrics.counted(),
            "recent": self._recent.report(since, until),
        }

    async def _metrics_text(self, request: web.Request) -> web.Response:
        text = self._metrics.text()
        if self._siblings is not None:
            own, others = self._kept_metrics(self._siblings), await self._ask_others("metrics", None)
            text = merged_metrics([own, *others, self._siblings.ended_metrics])
        return web.Response(body=text, content_type="text/plain", charset="utf-8")

    def _kept_metrics(self, siblings: Siblings) -> bytes:
        """Return this process's metrics, which the router keeps showing if it ends."""
        text = self._metrics.text()
        siblings.keep_metrics(text)
        return text

    @web.middleware
    async def _count(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.method != "POST":
            return await handler(request)
        self._num_under_way += 1
        began = time.monotonic()
        status = CLIENT_LEFT
        try:
            response = await handler(request)
            status = response.status
            if not response.prepared:
                # aiohttp would write the response after this middleware. Write it here, so that a drain waits
                # for its last byte.
                with contextlib.suppress(ConnectionError):
                    await send_whole(request, response)
            return response
        finally:
            self._num_under_way -= 1
            status = answered_status(request) or status
            self._metrics.requests.labels(str(status)).inc()
            if status != CLIENT_LEFT:
                self._metrics.request_duration.observe(time.monotonic() - began)

    # -- answers -------------------------------------------------------------------------------------

    def _receipt(
        self, request: web.Request, exchange: Exchange, record: RequestRecord
    ) -> Callable[[], Awaitable[Mapping[str, Any]]] | None:
        """Return what writes the receipt of an answer; None if the client gets none."""
        if self._gives_receipts != "always" and (
            RECEIPT_HEADER not in request.headers or self._gives_receipts == "keyed"
        ):
            return None

        async def written() -> Mapping[str, Any]:
            node, told = exchange.decode, None
            if node is not None and node.abilities.vllm_max_model_len:
                told = await self._accounts.of_vllm(exchange.request_id, node.url, self._services.session)
            return receipt_of(exchange, record, told)

        return written

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        resource = request.match_info.route.resource
        endpoint = None if resource is None else endpoint_at(resource.canonical)
        assert endpoint is not None, "the table made the route"
        if endpoint.way == "refused":
            message = f"{request.method} {endpoint.path}: {endpoint.why}"
            raise ApiError(404, message, kind="invalid_request_error", code="not_served")
        if self._refuses:
            raise NoNodeError("the router is draining: send the request to another router, or retry later")
        async with slot_of(request):
            try:
                response = await self._admitted(request, endpoint)
            except UpstreamAnswer as refusal:
                raise not_served(endpoint, refusal.status, refusal.payload) or refusal from None
        payload = response.body if isinstance(response, web.Response) else None
        if isinstance(payload, bytes) and (error := not_served(endpoint, response.status, payload)):
            raise error
        return response

    async def _admitted(self, request: web.Request, endpoint: Endpoint) -> web.StreamResponse:
        span = current_span()
        admitted_s = span.now() - span.start
        mark(span, admitted_s=admitted_s)
        body = await read_json(request)
        if endpoint.way == "to one node":
            await check_model(self._nodes, body.get("model"))
            body.pop("kv_transfer_params", None)  # no client may name where a node connects to
            return await self._one_node.answer(request, body)
        dialect = dialect_of(endpoint.path)
        check_body(body, dialect)
        body = body_for_nodes(body, dialect)
        await check_model(self._nodes, body.get("model"))
        request_id = name_request(request.headers.get("X-Request-Id", "") or uuid.uuid4().hex)
        headers = headers_of(request.headers, request_id, passes_keys_on=self._passes_keys_on)
        queue = span.child("queue")
        services, path = self._services, request.path
        prompts = prompts_of(body) if path == COMPLETIONS else [None]
        if len(prompts) == 1:
            turn = services.sessions.begin(body, request.headers)
            exchange = Exchange(path, body, headers, explain=explained_difference)
            record = RequestRecord(request_id, path, span)
            with self._recent.following(record):
                observer = Observer(exchange, record, self._metrics, queue)
                receipt = self._receipt(request, exchange, record)
                return await Performance(services, exchange, request, observer, turn, receipt).run()
        merged = MergedAnswer(request, body, request_id)

        async def answer_one(number: int) -> web.StreamResponse:
            own = {**headers, "X-Request-Id": f"{request_id}-{number}"}
            exchange = Exchange(path, {**body, "prompt": prompts[number]}, own, explain=explained_difference)
            with span.child("prompt", at=span.start) as own_span:
                mark(own_span, admitted_s=admitted_s)
                record = RequestRecord(exchange.request_id, path, own_span)
                observer = Observer(exchange, record, self._metrics, queue, times_pieces=False)
                with self._recent.following(record):
                    receipt = self._receipt(request, exchange, record)
                    part = Part(services, exchange, request, observer, receipt=receipt)
                    return await part.of(merged, number).run()

        return await merged.answer(len(prompts), answer_one, services.answer_timeout_s)
