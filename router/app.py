"""The HTTP server of the router."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import socket
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import aiohttp
from aiohttp import ClientHandlerType, web
from aiohttp.typedefs import Handler
from yarl import URL

from ..web.access import NodeAccess
from ..web.admin import admin_application
from ..web.api_pages import add_api_pages
from ..web.connections import is_overloaded, turn_of
from ..web.errors import CLIENT_LEFT, ApiError, answered_status, bad_request, error_middleware
from ..web.json_body import MAX_BODY_BYTES, object_of, read_json
from ..web.serving import close_connections_while
from ..web.sse import Event
from ..web.tracing import current_span, name_request, observed
from .admin import node_routes
from .first_tokens import FirstToken, OtherTokenError
from .handoffs import TRANSFER_HEADER, Handoff, Handoffs, has_loaded
from .membership import Role
from .metrics import RouterMetrics, Way
from .nodes import (
    CAUSE_WAIT_S,
    MAX_SHOWN_CHARS,
    RETRY_AFTER_S,
    NodeGoneError,
    NodePool,
    NoNodeError,
    Tried,
    UpstreamNode,
)
from .page import Page
from .phases import Call, Offer, check_body, decode_body, open_answer
from .prefills import Prefill, WholePrefill
from .reading import ASKED_ENCODING, NodeAnswer, read_whole, refuse_no_answers
from .rendezvous import LostPrefillError, RendezvousPrefill
from .reply import Reply
from .sessions import Answer, Sessions
from .several import MergedReply, calls_of
from .sources import NodeSource
from .states import USABLE, NodeState
from .timelines import RecentRequests

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0
#: For a node's list of models, which it has at hand.
MODELS_TIMEOUT_S = 30.0
#: If the peer's host vanishes, the connection breaks after IDLE + COUNT * INTERVAL seconds without a byte. Health checks do
#: not notice a host that restarted meanwhile, so they cannot replace this.
KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S, KEEPALIVE_COUNT = 15, 5, 3

DecodeAlone = Literal["auto", "always", "never"]


class Router:
    """Sends each request to a prefill node, then to a decode node.

    If a node fails before any byte of the answer has reached the client, the router retries at another node. It retries a
    prefill on its own. It repeats the prefill before it retries a decode, because the first offer is used up.

    Args:
        rendezvous: Ask both nodes at once, if both can do that.
        first_token: Send the client the first token of an answer as soon as the prefill node has it, where the result is provably
            that of a single node.
        answer_timeout_s: An answer that takes longer ends with an error. 0 sets no limit.
        check_interval_s: Seconds between two health checks of a node.
        check_timeout_s: Seconds after which a health check has failed.
        decode_alone: Whether a decode node receives a request that no prefill node can take. `auto` means: if it reports the
            policy `recompute`.
        node_access: What the router presents to nodes, and how it verifies them. None: nothing, by the CAs of the system.
        passes_keys_on: Pass a client's `Authorization` header on to nodes. The router's own key replaces it.
        asks_for_answers: Ask a decode node for the offer of an answer that it has streamed, as vLLM's nodes need.
        sources: Where the router learns of nodes while it runs.
    """

    def __init__(
        self,
        prefill_pool: NodePool,
        decode_pool: NodePool,
        *,
        rendezvous: bool = True,
        first_token: bool = True,
        answer_timeout_s: float,
        check_interval_s: float,
        check_timeout_s: float,
        decode_alone: DecodeAlone,
        node_access: NodeAccess | None = None,
        passes_keys_on: bool = True,
        asks_for_answers: bool = False,
        sources: Sequence[NodeSource] = (),
    ) -> None:
        self._prefill_pool = prefill_pool
        self._decode_pool = decode_pool
        self._answer_timeout_s = answer_timeout_s
        self._check_times_s = check_interval_s, check_timeout_s
        self._decode_alone_mode = decode_alone
        self._node_access = node_access or NodeAccess()
        self._passes_keys_on = passes_keys_on
        self._asks_for_answers = asks_for_answers
        self._sources = sources
        self._handoffs = Handoffs()
        self._sessions = Sessions()
        self._recent = RecentRequests()
        for pool in (prefill_pool, decode_pool):
            pool.on_forgotten = self._handoffs.forget
        self._metrics = RouterMetrics(lambda: self._nodes, self._handoffs)
        self._metrics.kept_answers.set_function(lambda: self._sessions.num_answers)
        self._prefill: Prefill = WholePrefill(prefill_pool, self._metrics, first_token=first_token)
        if rendezvous:
            self._prefill = RendezvousPrefill(
                self._prefill, prefill_pool, decode_pool, self._metrics, first_token=first_token
            )
        self._session: aiohttp.ClientSession
        self._is_draining = False  # says `/ready`
        self._refuses = False  # new requests
        self._num_under_way = 0

    @property
    def _nodes(self) -> tuple[UpstreamNode, ...]:
        return self._prefill_pool.nodes + self._decode_pool.nodes

    def application(self) -> web.Application:
        """Return the routes for aiohttp."""
        app = web.Application(
            middlewares=[observed("kvferry.router"), self._count, error_middleware],
            client_max_size=MAX_BODY_BYTES,
        )
        app.router.add_post("/v1/completions", self._answer)
        app.router.add_post("/v1/chat/completions", self._answer)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{model:.+}", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/ready", self._ready)
        app.router.add_get("/nodes", self._nodes_seen)
        app.router.add_get("/metrics", self._metrics_text)
        add_api_pages(app, "kvferry router")
        Page(self._describe, self._recent).add_routes(app)
        app.cleanup_ctx.append(self._connected)
        close_connections_while(app, lambda: self._is_draining)
        return app

    def admin_application(self, on_drain: Callable[[], None]) -> web.Application:
        """Return the admin endpoints.

        Args:
            on_drain: Starts the drain, after which the process ends.
        """

        async def drain(request: web.Request) -> web.Response:
            on_drain()
            return web.json_response({"status": "draining", "requests": self._num_under_way}, status=202)

        nodes = node_routes(self._prefill_pool, self._decode_pool)
        return admin_application([web.post("/admin/drain", drain), *nodes])

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
            quiet_s: Wait until no request was in flight for this long, because the client of a stream that began before the drain
                cannot know that its connection is about to close, and may use it for its next request.
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
        for pool in (self._prefill_pool, self._decode_pool):
            pool.close()

    @property
    def _has_pair(self) -> bool:
        return self._prefill_pool.has_ready_node and self._decode_pool.has_ready_node

    async def _connected(self, app: web.Application) -> AsyncIterator[None]:
        connector = aiohttp.TCPConnector(
            limit=0,
            force_close=True,
            socket_factory=kept_alive_socket,
            ssl=self._node_access.ssl_context,
        )
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
        async with aiohttp.ClientSession(
            timeout=timeout,
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),  # a node's cookie for one client is not for the others
            headers=ASKED_ENCODING,
            auto_decompress=False,
            middlewares=(self._node_access.present, self._verify_by_name, refuse_no_answers),
        ) as self._session:
            pools = self._prefill_pool, self._decode_pool
            async with contextlib.AsyncExitStack() as stack:
                for pool in pools:
                    await stack.enter_async_context(pool.watching(self._session, *self._check_times_s))
                looking = [asyncio.create_task(source.run(self.contribute)) for source in self._sources]
                yield
                await self._handoffs.close()
                for task in looking:
                    task.cancel()
                await asyncio.gather(*looking, return_exceptions=True)

    # -- nodes ---------------------------------------------------------------------------------------

    def pool_of(self, role: Role) -> NodePool:
        """Return the nodes of a role."""
        return self._prefill_pool if role == "prefill" else self._decode_pool

    def contribute(self, source: str, nodes: Mapping[Role, Collection[str]]) -> None:
        """Replace what a source contributes to the roles in `nodes`."""
        for role, urls in nodes.items():
            self.pool_of(role).contribute(source, urls)

    async def _verify_by_name(
        self, request: aiohttp.ClientRequest, handler: ClientHandlerType
    ) -> aiohttp.ClientResponse:
        """Expect a DNS name in the certificate of a node that was found by it. Certificates rarely have addresses."""
        if request.url.scheme == "https":
            origin = str(request.url.origin())
            names = (pool.server_name(origin) for pool in (self._prefill_pool, self._decode_pool))
            request.server_hostname = next(filter(None, names), None)
        return await handler(request)

    async def _nodes_seen(self, request: web.Request) -> web.Response:
        return web.json_response(self.report())

    def report(self) -> dict[str, Any]:
        """Return the router's view of its nodes, as `GET /nodes` shows it."""
        return {
            "nodes": [*self._prefill_pool.report(), *self._decode_pool.report()],
            "sources": [source.report() for source in self._sources],
            "prefill_policy": self._prefill_pool.policy.report(),
        }

    # -- health, metrics, models ---------------------------------------------------------------------

    async def _health(self, request: web.Request) -> web.Response:
        nodes = [
            {
                "role": node.role,
                "url": node.url,
                "kv_role": node.kv_role or None,
                "models": sorted(node.models) or None,
                "state": node.state.value,
                "healthy": node.state is NodeState.READY,
                "error": node.last_error,
            }
            for node in self._nodes
        ]
        status, _ = self._status()
        # The router is alive, also without nodes: a restart would help none of them.
        return web.json_response({"status": status, "nodes": nodes, "handoffs": self._handoffs.report()})

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
        problems += self._handoffs.problems()
        if not self._has_pair:
            if self._prefill_pool.has_ready_node or not self._can_decode_alone({}, {}):
                return "no healthy pair of nodes", False
            problems.append("no prefill node is ready: decode nodes compute prompts themselves")
        return ", but ".join(filter(None, ("ok", "; ".join(problems)))), True

    def _describe(self) -> Mapping[str, Any]:
        """Return what the page shows of the router and its nodes."""
        status, is_ready = self._status()
        return {"status": status, "is_ready": is_ready, **self.report()}

    async def _metrics_text(self, request: web.Request) -> web.Response:
        return web.Response(body=self._metrics.text(), content_type="text/plain", charset="utf-8")

    async def _models(self, request: web.Request) -> web.StreamResponse:
        """Answer as a decode node does. If nodes serve different models, list those of all of them."""
        if name := request.match_info.get("model"):
            is_served = any(node.serves(name) for node in self._decode_pool.nodes)
            # If no node serves it, any node says so in its own words (404).
            return await self._got(request, lambda node: node.serves(name) or not is_served)
        kinds = {node.models for node in self._decode_pool.nodes if node.state in USABLE}
        if len(kinds) <= 1:
            return await self._got(request, lambda node: True)
        listed: dict[object, object] = {}
        answers = [await self._got_or_none(request, kind) for kind in sorted(kinds, key=sorted)]
        for answer in filter(None, answers):
            if answer.status != 200:
                return answer
            models = object_of(_bytes(answer.body)).get("data")
            for model in models if isinstance(models, list) else ():
                listed.setdefault(str(model.get("id")) if isinstance(model, dict) else None, model)
        return web.json_response({"object": "list", "data": list(listed.values())})

    async def _got_or_none(self, request: web.Request, models: frozenset[str]) -> web.Response | None:
        """Return the answer of a node with these models; None if no such node answers any more."""
        with contextlib.suppress(NoNodeError):
            return await self._got(request, lambda node: node.models == models)
        return None

    async def _got(self, request: web.Request, may_use: Callable[[UpstreamNode], bool]) -> web.Response:
        """Return the answer of a decode node to a GET."""
        tried: Tried = {}
        while True:
            with contextlib.suppress(NodeGoneError):
                async with self._decode_pool.use_one(tried, may_use) as node, node.exchange():
                    headers = self._headers(
                        request, request.headers.get("X-Request-Id", "") or uuid.uuid4().hex
                    )
                    url = URL(node.url + request.raw_path, encoded=True)
                    timeout = aiohttp.ClientTimeout(total=MODELS_TIMEOUT_S)
                    async with self._session.get(url, headers=headers, timeout=timeout) as response:
                        payload = await read_whole(response)
                # Never another type: a browser would run a node's page as one of the router's.
                return web.Response(body=payload, status=response.status, content_type="application/json")

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
                # aiohttp would write the response after this middleware. Write it here, so that a drain waits for its last byte.
                with contextlib.suppress(ConnectionError):
                    await response.prepare(request)
                    await response.write_eof()
            return response
        finally:
            self._num_under_way -= 1
            status = answered_status(request) or status
            self._metrics.requests.labels(str(status)).inc()
            if status != CLIENT_LEFT:
                self._metrics.request_duration.observe(time.monotonic() - began)

    # -- answers -------------------------------------------------------------------------------------

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if self._refuses:
            raise NoNodeError("the router is draining: send the request to another router, or retry later")
        arrived_s = time.monotonic()
        async with turn_of(request):
            return await self._admitted(request, arrived_s)

    async def _admitted(self, request: web.Request, arrived_s: float) -> web.StreamResponse:
        followed = functools.partial(self._followed, arrived_s=arrived_s, admitted_s=time.monotonic())
        body = await read_json(request)
        check_body(body)
        await self._check_model(body.get("model"))
        request_id = name_request(request.headers.get("X-Request-Id", "") or uuid.uuid4().hex)
        queue = current_span().child("kvferry.queue")
        call = Call(self._session, request.path, body, self._headers(request, request_id), queue)
        calls = calls_of(call)
        if len(calls) == 1:
            call = replace(calls[0], turn=await self._sessions.begin_informed(body, request.headers))
            return await followed(call, Reply(request, self._metrics.begin_stream(arrived_s)))
        merged = MergedReply(request, call)
        return await self._within_limit(merged, merged.answer(calls, followed))

    async def _check_model(self, model: object) -> None:
        """Check that a node serves the model of a request.

        Raises:
            ApiError: None does (404), or a request without a model could go to nodes with different ones (400).
        """
        known = [node.models for node in self._nodes if node.models]
        if known and not model and not frozenset.intersection(*known):
            served = ", ".join(sorted(frozenset().union(*known)))
            raise bad_request(f"'model' is missing: choose one of {served}", "model")
        if any(node.serves(model) for node in self._nodes) or not self._nodes:
            return
        # An adapter may have been loaded since the last check.
        ready = [node for node in self._nodes if node.state is NodeState.READY]
        await asyncio.gather(*(node.await_check(CAUSE_WAIT_S) for node in ready))
        if not any(node.serves(model) for node in self._nodes):
            message = f"the model {str(model)[:MAX_SHOWN_CHARS]!r} does not exist; GET /v1/models lists those that do"
            raise ApiError(404, message, kind="invalid_request_error", param="model", code="model_not_found")

    async def _followed(
        self, call: Call, reply: Reply, *, arrived_s: float, admitted_s: float
    ) -> web.StreamResponse:
        """Answer one prompt, and record where its time goes."""
        with self._recent.following(call.request_id, call.path, arrived_s, admitted_s) as timeline:
            call = replace(call, timeline=timeline)
            try:
                response = await self._within_limit(reply, self._routed(call, reply))
            except (asyncio.CancelledError, ConnectionError):
                if reply.is_complete:
                    timeline.ended(200)
                raise
            if reply.error is not None:
                timeline.failed(reply.error.status, str(reply.error))
            timeline.ended(response.status)
            return response

    async def _within_limit(
        self, reply: Reply, answer: Coroutine[Any, Any, web.StreamResponse]
    ) -> web.StreamResponse:
        try:
            async with asyncio.timeout(self._answer_timeout_s or None) as limit:
                return await answer
        except ApiError as error:
            if reply.first is not None and isinstance(error, NoNodeError):
                lost = f"the answer was lost in the middle: {error}"
                error = ApiError(502, lost, kind="server_error")
            return await reply.fail(error)  # as an event, if the client has part of a stream
        except TimeoutError:
            if not limit.expired():
                raise
            limit_s = self._answer_timeout_s
            message = f"the answer was not complete within {limit_s:g} s, the limit of the router's --answer-timeout-s"
            return await reply.fail(ApiError(504, message, kind="timeout_error", code="timeout"))

    async def _routed(self, call: Call, reply: Reply) -> web.StreamResponse:
        tried: Tried = {}
        while True:
            # Check before the prefill: without a decode node its offer would only hold blocks until the lease ends.
            await self._decode_pool.require_one(tried, call.body)
            try:
                async with contextlib.AsyncExitStack() as stack:
                    try:
                        offer = await stack.enter_async_context(self._prefill.prefilled(call))
                    except NoNodeError as error:
                        if not self._can_decode_alone(tried, call.body):
                            raise
                        logger.info(
                            "%s: a decode node computes the prompt itself: %s", call.request_id, error
                        )
                        self._metrics.decoded_alone.inc()
                        return await self._decoded(call, Handoff(None), reply, tried, is_alone=True)
                    handoff = stack.enter_context(self._handoffs.following(call, offer))
                    first = None if offer is None or reply.first else offer.first
                    if (
                        offer is not None
                        and first is not None
                        and first.is_all
                        and self._would_continue(first)
                    ):
                        return await self._ended(call, offer, first, reply)
                    return await self._decoded(call, handoff, reply, tried, is_alone=False)
            except LostPrefillError as lost:
                logger.warning("%s: prefill: %s", call.request_id, lost)
                self._metrics.retries.labels("prefill").inc()
                call = replace(call, may_meet=False)
                # A decode node that was only waiting for the prefill may be asked again.
                tried = {node: error for node, error in tried.items() if error is not None}
            except NodeGoneError as error:
                logger.warning("%s: decode: %s", call.request_id, error)
                self._metrics.retries.labels("decode").inc()
                # In a rendezvous a node chooses the first token, so it cannot continue after one that the client has.
                call = replace(call, may_meet=call.may_meet and reply.first is None)

    async def _decoded(
        self, call: Call, handoff: Handoff, reply: Reply, tried: Tried, *, is_alone: bool
    ) -> web.StreamResponse:
        def may_use(node: UpstreamNode) -> bool:
            continues = reply.first is None or reply.first.can_continue_at(node.abilities)
            meets = handoff.offer is None or not handoff.offer.is_rendezvous or node.has_rendezvous
            return continues and meets and (not is_alone or self._computes_alone(node))

        async with self._decode_pool.use_one(tried, may_use, body=call.body) as node:
            handoff.decode_url = node.url
            reply.way = _way_of(handoff.offer, is_alone=is_alone)
            known = await self._first_token(call, handoff.offer, node, reply)
            params = handoff.offer.params if handoff.offer else None
            try:
                return await self._decoded_at(
                    node, call, handoff, reply, known, params, tried, is_alone=is_alone
                )
            except OtherTokenError:
                # Two logits were almost equal. What the client has seen stays, and the node has the prompt by now.
                logger.info(
                    "%s: %s chose another first token than the prefill node; asking it to continue after that one",
                    *(call.request_id, node.url),
                )
                self._metrics.other_first_tokens.inc()
            return await self._decoded_at(
                node, call, handoff, reply, reply.first, None, tried, is_alone=is_alone
            )

    async def _decoded_at(
        self,
        node: UpstreamNode,
        call: Call,
        handoff: Handoff,
        reply: Reply,
        known: FirstToken | None,
        params: Mapping[str, Any] | None,
        tried: Tried,
        *,
        is_alone: bool,
    ) -> web.StreamResponse:
        """Let a decode node answer.

        Args:
            known: The token after which the node is to continue. None: it chooses the first one.
            params: Of the offer.
            tried: Receives the failure of a node that is lost in the middle of a stream.

        Raises:
            OtherTokenError: The client has received another first token than the node has chosen meanwhile.
        """
        body = decode_body(call.body, params) if known is None else known.decode_body(call.body, params)
        if not call.turn.is_remembered and "kv_transfer_params" in body:
            # Nothing would load the offer of this answer, which would hold the node's blocks until its lease ends.
            body["kv_transfer_params"] = {**body["kv_transfer_params"], "offer_answer": False}
        call.timeline.decode_sent(node.url, is_alone=is_alone)
        async with (
            self._passing_first(call, handoff.offer, node, reply) as stop_passing,
            open_answer(call, node, body) as upstream,
        ):
            await stop_passing()
            call.timeline.decode_began(upstream)
            self._handoffs.answered(call, handoff, upstream)
            self._explain_failure(handoff, node, upstream)
            # A store that both nodes share needs no offer: the decode node finds the prompt there by itself.
            if handoff.offer is None and not is_alone and not has_loaded(upstream):
                logger.warning(
                    "%s: no KV cache was offered; %s computes the prompt", call.request_id, node.url
                )
                self._metrics.without_handoff.inc()
            # While the answer is copied: a client may take its next turn as soon as it has read the last event.
            reply.taker.note = functools.partial(self._end_turn, call, node)
            reply.explain = functools.partial(self._explain_event, call, handoff, node, upstream)
            try:
                response = await reply.copy(node, upstream, continues=known is not None)
            except (asyncio.CancelledError, ConnectionError):
                if reply.is_complete:  # the client has left after the end of its answer
                    self._note_end(call, node, handoff, reply, upstream)
                raise
            finally:
                tried[node] = reply.lost  # the client has part of the answer, so no other node can give it
            self._note_end(call, node, handoff, reply, upstream)
            return response

    def _explain_event(
        self,
        call: Call,
        handoff: Handoff,
        node: UpstreamNode,
        upstream: NodeAnswer,
        events: list[Event],
    ) -> None:
        """Explain an error in the middle of a stream: vLLM begins a chat's stream before a load has ended.

        Raises:
            ApiError: See `_explain_failure`.
        """
        self._handoffs.ended(
            call, handoff, events
        )  # if the error is explained, nothing else ends the handoff
        self._explain_failure(handoff, node, upstream)

    def _explain_failure(self, handoff: Handoff, node: UpstreamNode, upstream: NodeAnswer) -> None:
        """Tell the client why a server of vLLM could not load its prompt, which the server itself only tells its log.

        Raises:
            ApiError: The two nodes have described different models, between which no cache is handed over.
        """
        has_failed = upstream.is_stream or upstream.status >= 500
        if handoff.offer is None or not handoff.error or not has_failed or has_loaded(upstream):
            return
        node.doubt_identity()  # it may have changed since it was asked
        if difference := node.difference_to(handoff.offer.node):
            raise ApiError(500, f"{handoff.error}: {difference}", kind="server_error")

    def _note_end(
        self,
        call: Call,
        node: UpstreamNode,
        handoff: Handoff,
        reply: Reply,
        upstream: NodeAnswer,
    ) -> None:
        """Note a decode node's answer that has been copied."""
        call.timeline.decode_ended(upstream.status, reply.tail)
        self._handoffs.ended(call, handoff, reply.tail)
        if reply.taker.params is None:
            asks = self._asks_for_answers and upstream.is_stream and call.turn.is_remembered
            question = self._handoffs.ask(call, node, reply.taker.note) if asks else None
            self._end_turn(call, node, None, question)

    def _end_turn(
        self,
        call: Call,
        node: UpstreamNode,
        offered: Mapping[str, Any] | None,
        question: asyncio.Task[None] | None = None,
    ) -> None:
        """Keep the offer of an answer for the next turn, and release one that no turn can use."""
        unused = call.turn.end(None if offered is None else Answer.of(node, offered), question)
        if unused is not None and unused.is_usable:
            self._metrics.answers.labels("unused").inc()
            self._handoffs.release(call, Offer(unused.node, unused.params))

    async def _first_token(
        self, call: Call, offer: Offer | None, node: UpstreamNode, reply: Reply
    ) -> FirstToken | None:
        """Return the token after which the decode node is to continue; None: it chooses the first one. Stream it, once."""
        if reply.first is not None:
            return reply.first
        first = None if offer is None else offer.first
        if offer is None or first is None or not first.can_continue_at(node.abilities):
            return None
        if call.body.get("stream"):
            await self._send_first(call, offer, first, reply)
        return first

    @contextlib.asynccontextmanager
    async def _passing_first(
        self, call: Call, offer: Offer | None, node: UpstreamNode, reply: Reply
    ) -> AsyncIterator[Callable[[], Awaitable[object]]]:
        """In a rendezvous, stream the first token inside the block, if the prefill node answers before the decode node does.

        Yields:
            What ends that before anything else is written to the client.
        """
        answered = None if offer is None else offer.answered
        if answered is None or reply.first is not None or not call.body.get("stream"):
            yield _nothing
            return

        async def pass_first() -> None:
            made = await answered
            # The decode node ends an answer of one token itself.
            if made.first and not made.first.is_all and made.first.can_continue_at(node.abilities):
                await self._send_first(call, made, made.first, reply)

        passing = asyncio.create_task(pass_first())

        async def stop() -> None:
            # Do not interrupt a write: what the client has must be known, because a decode node continues after it.
            if not answered.done():
                passing.cancel()
            # Without exceptions: if the client is gone, the next write says so.
            await asyncio.gather(passing, return_exceptions=True)

        try:
            yield stop
        finally:
            await stop()

    def _would_continue(self, first: FirstToken) -> bool:
        """Whether a decode node would have chosen this token too."""
        return any(first.can_continue_at(node.abilities) for node in self._decode_pool.nodes)

    async def _send_first(self, call: Call, offer: Offer, first: FirstToken, reply: Reply) -> None:
        call.timeline.first_token_sent()
        self._metrics.first_tokens.inc()
        await reply.begin(first, offer.headers)

    async def _ended(self, call: Call, offer: Offer, first: FirstToken, reply: Reply) -> web.StreamResponse:
        """Answer with the first token alone. No node will load the offer, so it is released."""
        if first.whole is not None:
            headers = {"X-Request-Id": offer.headers.get("X-Request-Id", call.request_id)}
            return web.json_response(first.whole, headers={**headers, TRANSFER_HEADER: "none"})
        await self._send_first(call, offer, first, reply)
        return await reply.end()

    def _headers(self, request: web.Request, request_id: str) -> dict[str, str]:
        """Return the headers for both nodes. They share one request id, as vLLM's nodes require."""
        headers = {"X-Request-Id": request_id}
        if self._passes_keys_on and "Authorization" in request.headers:
            headers["Authorization"] = request.headers["Authorization"]
        return headers

    def _can_decode_alone(self, tried: Tried, body: Mapping[str, Any]) -> bool:
        """Whether a ready decode node that was not tried yet would compute a whole prompt itself."""
        fitting = (node for node in self._decode_pool.nodes if node.serves(body.get("model")))
        nodes = (node for node in fitting if node not in tried)
        return any(node.state is NodeState.READY and self._computes_alone(node) for node in nodes)

    def _computes_alone(self, node: UpstreamNode) -> bool:
        match self._decode_alone_mode:
            case "always":
                return True
            case "never":
                return False
            case "auto":
                return node.load_failure_policy == "recompute"


def _way_of(offer: Offer | None, *, is_alone: bool) -> Way:
    if is_alone:
        return "alone"
    if offer is None:
        return "without_offer"
    return "rendezvous" if offer.is_rendezvous else "in_turn"


async def _nothing() -> None:
    pass


def _bytes(body: object) -> bytes:
    return body if isinstance(body, bytes) else b""


def kept_alive_socket(address: tuple[object, ...]) -> socket.socket:
    """Make a socket with TCP keep-alive: a prefill may send nothing for long, and its host may vanish meanwhile."""
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
