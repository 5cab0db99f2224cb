"""The HTTP server of a node: routes, answers and streams."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from aiohttp import ClientConnectionResetError, web

from ...connector.errors import ConnectorError
from ...connector.p2p.params import CONTINUES, KV_EVENTS, MOVE
from ...connector.spans import RecentSpans
from ...connector.stats import KVConnectorStats
from ...router.http.access import HAS_KEY
from ...router.http.admin import admin_application
from ...router.http.api_pages import add_api_pages
from ...router.http.connections import is_overloaded, slot_of
from ...router.http.errors import (
    RETRY_AFTER_S,
    ApiError,
    bad_request,
    error_middleware,
    note_answered,
    unavailable,
)
from ...router.http.json_body import MAX_BODY_BYTES, read_json
from ...router.http.recent_spans import span_routes
from ...router.http.serving import close_connections_while
from ...router.http.tracing import current_span, name_request, observed, span_of_work, traced_params
from ..engine.engine import Engine
from ..engine.errors import EngineDeadError, InvalidRequestError, PromptTooLongError
from ..engine.types import GenerationRequest, RequestOutput
from .fan_out import Piece, pieces_of
from .metrics import MeasuredRequest, NodeMetrics
from .openai_request import ClientRequest, KnownAnswer, parse_chat, parse_completion
from .phases import Phases
from .prompts import PromptReader
from .replies import (
    TRANSFER_HEADER,
    ChatFormat,
    Choice,
    CompletionFormat,
    Envelope,
    ReplyFormat,
    TokenNames,
    failure,
    transfer_outcome,
)

#: Most characters of a client's `X-Request-Id`. The rest is cut off. vllm-router puts both nodes' addresses
#: into an id, before the part that makes it unique.
MAX_REQUEST_ID_CHARS = 640
SSE_HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}

#: What `kvferry explain` calls a node, by its role.
_PROCESSES = {"kv_producer": "prefill", "kv_consumer": "decode"}

logger = logging.getLogger(__name__)

Parser = Callable[[Mapping[str, Any]], ClientRequest]


class NodeServer:
    """Serves OpenAI's API over one engine. Before the engine runs it answers too, with status `starting`.

    `/health` says whether the process is alive, and `/ready` whether it should receive new requests. Both
    answer `{"status": ...}` and, if something is wrong, `"error"`. The status is one of

                   /health  /ready
        starting   503      503    the model is being loaded
        ok         200      200
        overloaded 200      503    as many requests wait as may; the next one would be answered 429
        draining   200      503    the node is stopping; it finishes what it has accepted, and delivers its
        offers failing    503      503    the node can no longer transfer caches; `"error"` says why, and it
        must be restarted dead       503      503    the engine ended; `"error"` says why, and the process is
        about to exit

    Args:
        engine: The engine. The caller starts it, and then calls `engine_is_ready`.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._metrics = NodeMetrics(engine.stats)
        self._spans = RecentSpans()
        engine.on_handoffs = self._observe_handoffs
        self._prompts: PromptReader
        self._names: TokenNames
        self._is_ready = False
        self._is_draining = False  # says `/ready`
        self._refuses = False  # new requests
        self._num_answering = 0
        self._admin_port: int | None = None
        self._created = int(time.time())

    def engine_is_ready(self) -> None:
        """Serve requests from now on."""
        # The longest prompt leaves room for an answer of one token.
        self._prompts = PromptReader(self._engine.tokenizer, self._engine.max_model_len - 1)
        self._names = TokenNames(self._engine.tokenizer)
        self._is_ready = True

    def announce_drain(self) -> None:
        """Answer 503 on `/ready` from now on, and still accept requests."""
        self._is_draining = True

    def drain(self) -> None:
        """Refuse new requests from now on. Requests in flight continue."""
        self._is_draining = self._refuses = True

    @property
    def num_answering(self) -> int:
        """The number of accepted requests whose answers are not completely written."""
        return self._num_answering

    def application(self) -> web.Application:
        """Return the routes for aiohttp."""
        app = web.Application(
            middlewares=[observed("node", self._spans.keep), error_middleware],
            client_max_size=MAX_BODY_BYTES,
        )
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/chat/completions", self._chat_completions)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{model:.+}", self._model)
        app.router.add_get("/health", self._health)
        app.router.add_get("/ready", self._ready)
        app.router.add_get("/metrics", self._metrics_text)
        add_api_pages(app, "kvferry node")
        app.on_cleanup.append(self._close_prompts)
        close_connections_while(app, lambda: self._is_draining)
        return app

    def admin_application(self, on_drain: Callable[[], None], port: int | None) -> web.Application:
        """Return the admin endpoints.

        Args:
            on_drain: Starts the drain, after which the process ends.
            port: Where they are served, for `/health`. None: they are not.
        """
        self._admin_port = port

        async def drain(request: web.Request) -> web.Response:
            on_drain()
            return web.json_response({"status": "draining", "requests": self._num_answering}, status=202)

        kv_transfer = self._engine.settings.kv_transfer
        role, engine_id = (kv_transfer.kv_role, kv_transfer.engine_id) if kv_transfer else ("", "")
        routes = span_routes(self._spans, _PROCESSES.get(role, "node"), engine_id)
        return admin_application([web.post("/admin/drain", drain), *routes])

    async def _close_prompts(self, app: web.Application) -> None:
        if self._is_ready:
            await self._prompts.close()

    # -- small answers -------------------------------------------------------------------------------

    async def _health(self, request: web.Request) -> web.Response:
        status, error = self._status()
        # A node that drains is alive: a supervisor that restarted it now would cut off its last requests.
        is_alive = status in ("ok", "draining")
        # `kvferry explain` asks for spans at this port.
        admin = {"admin_port": self._admin_port} if self._admin_port is not None else {}
        return self._described(status, error, is_alive, **admin)

    async def _ready(self, request: web.Request) -> web.Response:
        status, error = self._status()
        if status == "ok" and is_overloaded(request):
            status, error = "overloaded", "as many requests wait as --max-queued-requests allows"
        is_up = status in ("ok", "overloaded")
        told = {**self._what_it_is(), "load": self._load()} if is_up else {}
        if is_up and request.get(HAS_KEY, False):
            # Where a decode node can reach this one: a router names both in the first request, for which it
            # needs a key.
            told["kv_transfer_params"] = {**self._engine.connector_description, **self._publisher()}
        return self._described(status, error, status == "ok", **told)

    def _load(self) -> dict[str, float]:
        """Say what the node has to do. Routers that share it choose by this."""
        stats = self._engine.stats()
        return {
            "running": stats.num_running + stats.num_loading,
            "waiting": stats.num_waiting,
            "pool_usage": round(1 - stats.num_free_blocks / max(1, stats.num_blocks), 3),
        }

    def _publisher(self) -> dict[str, Any]:
        """Say where a router can follow what the prefix cache stores and removes."""
        if not (port := self._engine.kv_events_port):
            return {}
        return {KV_EVENTS: {"port": port, "models": [self._engine.model_name]}}

    def _what_it_is(self) -> dict[str, Any]:
        """Say which requests fit: a router refuses a node that cannot do what it was named for."""
        settings = self._engine.settings
        role = {"kv_role": settings.kv_transfer.kv_role} if settings.kv_transfer else {}
        return {**role, "models": [self._engine.model_name]}

    def _described(self, status: str, error: str, is_well: bool, **facts: Any) -> web.Response:
        body = {"status": status, **({"error": error} if error else {}), **facts}
        if status == "ok":
            kv_transfer = self._engine.settings.kv_transfer
            # If no prefill node is ready, a router sends whole prompts to a decode node, if the node's policy
            # is to recompute.
            if kv_transfer:
                # An answer goes on only at a node that would have chosen the same tokens.
                body |= {
                    "load_failure_policy": kv_transfer.kv_load_failure_policy,
                    "continues_answers": self._engine.model_digest,
                }
            warning = self._engine.stats().transfer_warning
            body |= {"warning": warning} if warning else {}
        headers = {"Retry-After": str(RETRY_AFTER_S)} if status in ("starting", "overloaded") else {}
        return web.json_response(body, status=200 if is_well else 503, headers=headers)

    def _status(self) -> tuple[str, str]:
        """Return the status, and what is wrong."""
        if not self._is_ready:
            return "starting", ""
        if self._is_draining:
            return "draining", ""
        stats = self._engine.stats()
        if not stats.healthy:
            return "dead", stats.error
        # The node could only recompute or fail every handoff, so routers should use another one.
        return ("failing", stats.transfer_error) if stats.transfer_error else ("ok", "")

    async def _metrics_text(self, request: web.Request) -> web.Response:
        return web.Response(body=self._metrics.text(), content_type="text/plain", charset="utf-8")

    def _observe_handoffs(self, stats: KVConnectorStats) -> None:
        self._metrics.observe_handoffs(stats)
        for span in stats.spans:
            self._spans.keep(span, _client_id_of(span.request_id))

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [self._served_model()]})

    async def _model(self, request: web.Request) -> web.Response:
        name = request.match_info["model"]
        model = self._served_model()
        if model["id"] != name:
            raise self._no_such_model(name)
        return web.json_response(model)

    def _served_model(self) -> dict[str, Any]:
        engine = self._running_engine()
        return {
            "id": engine.model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "kvferry",
            "max_model_len": engine.max_model_len,
        }

    # -- answers -------------------------------------------------------------------------------------

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._admit(request, parse_completion, CompletionFormat())

    async def _chat_completions(self, request: web.Request) -> web.StreamResponse:
        return await self._admit(request, parse_chat, ChatFormat())

    async def _admit(
        self, request: web.Request, parse: Parser, reply_format: ReplyFormat
    ) -> web.StreamResponse:
        """Answer, and count the answer until its last byte is written, so that a drain waits for it."""
        body = None
        if self._refuses:
            body = await read_json(request)
            params = _params_of(body)
            if params.get(MOVE) is not None:
                # Not in the queue for a slot, which comes free when the answer has moved.
                return self._move(params[MOVE])
            # Without the release the drain would wait for this offer until its lease ends. An answer that
            # this node has given up for another one comes back if that one is lost, and this node still has
            # its cache.
            if params.get("do_release") is not True and not _goes_on(params):
                # Do not decline the offer that the request names: a router may send it to another node.
                return unavailable(
                    "the node is stopping and accepts no new requests; send the request to another node"
                ).response()
        self._num_answering += 1
        try:
            async with slot_of(request):
                response = await self._answer(request, body, parse, reply_format)
                if not response.prepared:
                    await response.prepare(request)
                    await response.write_eof()
            return response
        finally:
            self._num_answering -= 1

    async def _answer(
        self,
        request: web.Request,
        body: Mapping[str, Any] | None,
        parse: Parser,
        reply_format: ReplyFormat,
    ) -> web.StreamResponse:
        """Answer a request. A body of None has not been read yet."""
        engine = self._running_engine()
        body = await read_json(request) if body is None else body
        if (name := _params_of(body).get(MOVE)) is not None:
            return self._move(name)
        try:
            with span_of_work(request, body.get("kv_transfer_params")):
                return await self._answer_to(request, body, parse, reply_format)
        except Exception as error:
            # The engine has not seen the request, or has failed it. Either way nothing here will load the
            # offer, so tell the node that made it. The exception is an error with which a router may send the
            # offer to another node.
            may_retry_elsewhere = isinstance(error, ApiError) and error.status >= 500
            params = body.get("kv_transfer_params")
            if not may_retry_elsewhere and isinstance(params, dict):
                engine.decline(params)
            raise

    async def _answer_to(
        self, request: web.Request, body: Mapping[str, Any], parse: Parser, reply_format: ReplyFormat
    ) -> web.StreamResponse:
        engine = self._engine
        with _refusals_as_api_errors():
            client = parse(body)
            self._refuse_another_model(client.known)
            self._check_model(client.model)
            try:
                prompts = [await self._prompts.read(prompt) for prompt in client.prompts]
            except asyncio.CancelledError:  # the client left before the engine got the request
                if client.kv_transfer_params is not None:
                    engine.decline(client.kv_transfer_params)
                raise
            if len(prompts) > 1:  # an answer that has begun could not be refused any more
                self._prompts.refuse_too_long(prompts)
        client_request_id = name_request(_client_request_id(request))
        request_id = f"{reply_format.id_prefix}-{client_request_id}"
        requests = [
            [
                # A node loads a prompt once; further answers to it find it in the prefix cache.
                self._generation(request_id, client, prompt, number)
                for number in range(client.num_answers)
            ]
            for prompt in prompts
        ]
        choices = [
            Choice(index, prompts[index // client.num_answers])
            for index in range(len(prompts) * client.num_answers)
        ]
        envelope = Envelope(
            reply_format,
            request_id,
            engine.model_name,
            int(time.time())
            if client.known is None or client.known.created is None
            else client.known.created,
            self._names.id_of if client.return_tokens_as_token_ids else self._names.text_of,
            client.return_token_ids,
            client.sampling.num_logprobs is not None,
            client.num_answers,
        )
        async with contextlib.aclosing(pieces_of(requests, self._followed)) as outputs:
            with _refusals_as_api_errors():
                first = await anext(outputs)
            pieces = _uncut(_prepend(first, outputs))
            if client.stream:
                # A load has ended before the first piece arrives.
                outcome = transfer_outcome(first[1].metrics)
                return await self._stream(request, pieces, choices, envelope, client, outcome)
            return await self._whole(pieces, choices, envelope, client)

    def _move(self, name: object) -> web.Response:
        """Stop the answer of this name for another node.

        If it has ended, that is no error: the order came too late.
        """
        if not isinstance(name, str) or not name:
            raise bad_request(f"'{MOVE}' must be the name of an answer", "kv_transfer_params")
        self._running_engine().move(name)
        return web.json_response({"status": "ok"})

    def _refuse_another_model(self, known: KnownAnswer | None) -> None:
        """Check that this node would have chosen the tokens after which it is to continue.

        Raises:
            ApiError: it has another model than the router knew (503).
        """
        if known is not None and known.model and known.model != self._engine.model_digest:
            raise unavailable(
                "the answer is that of another model: this node may have been restarted with other weights; "
                "send the request to another node"
            )

    def _generation(
        self, request_id: str, client: ClientRequest, prompt: tuple[int, ...], number: int
    ) -> GenerationRequest:
        """Return the request for the answer of this number to a prompt."""
        sampling = client.sampling
        if number and sampling.seed is not None:  # otherwise all answers would be the same
            sampling = replace(sampling, seed=(sampling.seed + number) % (1 << 63))
        return GenerationRequest(
            # A client may use an id twice, and a router may retry with the same id. The suffix makes ids
            # unique.
            request_id=f"{request_id}-{uuid.uuid4().hex[:8]}",
            prompt_token_ids=prompt,
            sampling=sampling,
            kv_transfer_params=None if number else traced_params(client.kv_transfer_params, current_span()),
            cache_salt=client.cache_salt,
            known_token_ids=() if client.known is None else client.known.token_ids,
            move_as="" if client.known is None else client.known.move_as,
        )

    async def _followed(self, generation: GenerationRequest) -> AsyncGenerator[RequestOutput, None]:
        """Generate, and on the way measure the answer and note its phases."""
        phases = Phases(generation, current_span())
        measured = MeasuredRequest(self._metrics)
        try:
            async with contextlib.aclosing(self._engine.generate(generation)) as outputs:
                async for output in outputs:
                    phases.observe(output)
                    measured.observe(output)
                    yield output
        except Exception as error:
            phases.end("error", f"{type(error).__name__}: {error}")
            raise
        finally:
            phases.end("the client left")

    async def _whole(
        self,
        pieces: AsyncGenerator[Piece, None],
        choices: Sequence[Choice],
        envelope: Envelope,
        client: ClientRequest,
    ) -> web.Response:
        with _refusals_as_api_errors():
            async for index, output in pieces:
                choices[index].add(output)
        outcome = transfer_outcome(choices[0].last.metrics)
        headers = {"X-Request-Id": envelope.request_id, TRANSFER_HEADER: outcome}
        for choice in choices:
            if choice.last.finish_reason == "error":
                refusal = failure(choice.last).response()
                refusal.headers.update(headers)
                return refusal
        return web.json_response(envelope.whole(choices), headers=headers)

    async def _stream(
        self,
        request: web.Request,
        pieces: AsyncGenerator[Piece, None],
        choices: Sequence[Choice],
        envelope: Envelope,
        client: ClientRequest,
        outcome: str,
    ) -> web.StreamResponse:
        headers = {**SSE_HEADERS, "X-Request-Id": envelope.request_id, TRANSFER_HEADER: outcome}
        response = web.StreamResponse(headers=headers)
        try:
            async for event in self._events(pieces, choices, envelope, client):
                if not response.prepared:
                    await response.prepare(request)
                await response.write(event)
        except EngineDeadError as error:
            if not response.prepared:
                raise _engine_ended(error) from error
            await response.write(_event(_engine_ended(error).body()))
        except ClientConnectionResetError:
            raise
        except Exception as error:
            if not response.prepared:
                raise
            # The status has been sent, so an error response is no longer possible. Send the error as the last
            # event.
            logger.exception("%s %s failed in the middle of its answer", request.method, request.path)
            failed = ApiError(500, f"{type(error).__name__}: {error}", kind="server_error")
            await response.write(_event(failed.body()))
        await response.write(b"data: [DONE]\n\n")
        note_answered(request, response.status)
        await response.write_eof()
        return response

    async def _events(
        self,
        pieces: AsyncGenerator[Piece, None],
        choices: Sequence[Choice],
        envelope: Envelope,
        client: ClientRequest,
    ) -> AsyncGenerator[bytes, None]:
        async for index, output in pieces:
            delta = choices[index].add(output)
            if output.is_known:
                choices[index].has_begun = True  # the router has sent this piece
            elif output.new_token_ids or output.text_delta or output.finish_reason:
                yield _event(envelope.chunk(choices[index], delta))
        if client.include_usage:
            yield _event(envelope.usage_chunk(choices))

    def _running_engine(self) -> Engine:
        if not self._is_ready:
            raise unavailable("the node is still starting")
        return self._engine

    def _check_model(self, model: str) -> None:
        """Check that the model that a client named is the one that is served."""
        if model and model not in (self._engine.model_name, self._engine.settings.model):
            raise self._no_such_model(model)

    def _no_such_model(self, model: str) -> ApiError:
        message = f"the model {model!r} does not exist; this node serves {self._engine.model_name!r}"
        return ApiError(404, message, kind="invalid_request_error", param="model", code="model_not_found")


@contextlib.contextmanager
def _refusals_as_api_errors() -> Iterator[None]:
    """Turn the engine's errors into errors of the API, for the whole server in one place."""
    try:
        yield
    except InvalidRequestError as error:
        code = "context_length_exceeded" if isinstance(error, PromptTooLongError) else None
        raise bad_request(str(error), error.param, code) from error
    except ConnectorError as error:
        raise bad_request(f"kv_transfer_params: {error}", "kv_transfer_params") from error
    except EngineDeadError as error:
        raise _engine_ended(error) from error


def _engine_ended(error: EngineDeadError) -> ApiError:
    return unavailable(f"the engine does not run: {error}", retry_after_s=None)  # only a restart would help


async def _prepend(first: Piece, rest: AsyncGenerator[Piece, None]) -> AsyncGenerator[Piece, None]:
    yield first
    async for piece in rest:
        yield piece


async def _uncut(pieces: AsyncGenerator[Piece, None]) -> AsyncGenerator[Piece, None]:
    """Yield the pieces of answers until they are complete.

    Raises:
        EngineDeadError: the node stopped in the middle of an answer.
    """
    async for piece in pieces:
        if piece[1].finish_reason == "abort":
            raise EngineDeadError("the node stopped before the answer was complete")
        yield piece


def _params_of(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the `kv_transfer_params` of a request; empty without them."""
    params = body.get("kv_transfer_params")
    return params if isinstance(params, dict) else {}


def _goes_on(params: Mapping[str, Any]) -> bool:
    """Return whether a request is to go on with an answer."""
    known = params.get(CONTINUES)
    return isinstance(known, dict) and bool(known.get("token_ids"))


def _client_request_id(request: web.Request) -> str:
    given = request.headers.get("X-Request-Id", "").strip()
    printable = "".join(char for char in given if char.isascii() and char.isprintable())
    return printable[:MAX_REQUEST_ID_CHARS] or uuid.uuid4().hex


def _client_id_of(engine_id: str) -> str:
    """Return the `X-Request-Id` of a request that the connector knows as `KIND-ID-SUFFIX-NUMBER`; see
    `_generation`.
    """
    # The engine appends the number, which makes ids unique for the connector.
    return engine_id.rpartition("-")[0].rpartition("-")[0].partition("-")[2] or engine_id


def _event(payload: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(payload).encode() + b"\n\n"
