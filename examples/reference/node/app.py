"""The HTTP server of a node: routes, answers and streams."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from typing import Any

from aiohttp import ClientConnectionResetError, web

from kvferry.connector.errors import ConnectorError

from ..engine.engine import Engine
from ..engine.errors import EngineDeadError, InvalidRequestError
from ..engine.types import GenerationRequest, RequestOutput
from ..web.errors import RETRY_AFTER_S, ApiError, bad_request, error_middleware, unavailable
from ..web.json_body import MAX_BODY_BYTES, read_json
from .metrics import NodeMetrics
from .openai_request import ClientRequest, parse_chat, parse_completion
from .prompts import PromptReader
from .replies import (
    TRANSFER_HEADER,
    ChatWording,
    CompletionWording,
    Envelope,
    Wording,
    failure,
    transfer_outcome,
)

#: What a client may put into `X-Request-Id`; longer ones are cut.
MAX_REQUEST_ID_CHARS = 128
SSE_HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}

logger = logging.getLogger(__name__)

Parser = Callable[[Mapping[str, Any]], ClientRequest]


class NodeServer:
    """OpenAI's API over one engine. It answers before the engine runs, with status `starting`.

    `/health` answers `{"status": ...}` and, if the node is not well, `"error"`. The status is one of

        starting   503   the model is loaded
        ok         200
        draining   503   the node is stopping; it finishes what it began, and refuses new requests
        failing    503   it can no longer hand caches over; `"error"` says why, and it must be restarted
        dead       503   the engine ended; `"error"` says why, and the process is about to exit

    Args:
        engine: The caller starts it, and then calls `engine_is_ready`.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._metrics = NodeMetrics(engine.stats)
        engine.on_handoffs = self._metrics.observe_handoffs
        self._prompts: PromptReader
        self._is_ready = False
        self._is_draining = False
        self._num_answering = 0
        self._created = int(time.time())

    def engine_is_ready(self) -> None:
        """From now on requests are served."""
        # Room for an answer of one token is always kept.
        self._prompts = PromptReader(self._engine.tokenizer, self._engine.max_model_len - 1)
        self._is_ready = True

    def drain(self) -> None:
        """From now on new requests are refused; those that were begun go on."""
        self._is_draining = True

    @property
    def num_answering(self) -> int:
        """Requests that were let in and whose answers are not wholly written."""
        return self._num_answering

    def application(self) -> web.Application:
        """The routes, for aiohttp."""
        app = web.Application(middlewares=[error_middleware], client_max_size=MAX_BODY_BYTES)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/chat/completions", self._chat_completions)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics_text)
        app.on_cleanup.append(self._close_prompts)
        return app

    async def _close_prompts(self, app: web.Application) -> None:
        if self._is_ready:
            await self._prompts.close()

    # -- small answers -------------------------------------------------------------------------------

    async def _health(self, request: web.Request) -> web.Response:
        if not self._is_ready:
            headers = {"Retry-After": str(RETRY_AFTER_S)}
            return web.json_response({"status": "starting"}, status=503, headers=headers)
        if self._is_draining:
            return web.json_response({"status": "draining"}, status=503)
        stats = self._engine.stats()
        if not stats.healthy:
            return web.json_response({"status": "dead", "error": stats.error}, status=503)
        if (
            stats.transfer_error
        ):  # it could only compute or fail what another node offers: not what it is there for
            return web.json_response({"status": "failing", "error": stats.transfer_error}, status=503)
        warning = {"warning": stats.transfer_warning} if stats.transfer_warning else {}
        kv_transfer = self._engine.settings.kv_transfer
        # A router asks a node that may recompute alone when no prefill node is there.
        policy = {"load_failure_policy": kv_transfer.kv_load_failure_policy} if kv_transfer else {}
        return web.json_response({"status": "ok", **policy, **warning})

    async def _metrics_text(self, request: web.Request) -> web.Response:
        return web.Response(body=self._metrics.text(), content_type="text/plain", charset="utf-8")

    async def _models(self, request: web.Request) -> web.Response:
        engine = self._running_engine()
        model = {
            "id": engine.model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "kvferry",
            "max_model_len": engine.max_model_len,
        }
        adapters = [
            {**model, "id": name, "parent": engine.model_name} for name in engine.settings.lora_modules
        ]
        return web.json_response({"object": "list", "data": [model, *adapters]})

    # -- answers -------------------------------------------------------------------------------------

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._admit(request, parse_completion, CompletionWording())

    async def _chat_completions(self, request: web.Request) -> web.StreamResponse:
        return await self._admit(request, parse_chat, ChatWording())

    async def _admit(self, request: web.Request, parse: Parser, wording: Wording) -> web.StreamResponse:
        """Answer, and count the answer until its last byte is written, so that a drain waits for it."""
        if self._is_draining:
            # An offer that the request names is not declined: a router may try it on another node.
            return unavailable(
                "the node is stopping and takes no new requests; send the request to another node"
            ).response()
        self._num_answering += 1
        try:
            response = await self._answer(request, parse, wording)
            if not response.prepared:
                await response.prepare(request)
                await response.write_eof()
            return response
        finally:
            self._num_answering -= 1

    async def _answer(self, request: web.Request, parse: Parser, wording: Wording) -> web.StreamResponse:
        engine = self._running_engine()
        body = await read_json(request)
        try:
            return await self._answer_to(request, body, parse, wording)
        except Exception as error:
            # The engine has not seen the request, or has ended it as failed. In either case the other node is to know.
            is_elsewhere = isinstance(error, ApiError) and error.status >= 500
            params = body.get("kv_transfer_params")
            if not is_elsewhere and isinstance(params, dict):
                engine.decline(params)
            raise

    async def _answer_to(
        self, request: web.Request, body: Mapping[str, Any], parse: Parser, wording: Wording
    ) -> web.StreamResponse:
        engine = self._engine
        with _refusals_as_api_errors():
            self._prompts.refuse_by_size(body.get("prompt"))
            client = parse(body)
            lora_name = self._lora_name(client.model)
            try:
                prompt_token_ids = await self._prompts.read(client.prompt)
            except asyncio.CancelledError:  # the client left, and the engine never heard of the request
                if client.kv_transfer_params is not None:
                    engine.decline(client.kv_transfer_params)
                raise
        request_id = f"{wording.id_prefix}-{_client_request_id(request)}"
        generation = GenerationRequest(
            # A client may use an id twice, and a router may retry with it: only the suffix makes it unique.
            request_id=f"{request_id}-{uuid.uuid4().hex[:8]}",
            prompt_token_ids=prompt_token_ids,
            sampling=client.sampling,
            kv_transfer_params=client.kv_transfer_params,
            cache_salt=client.cache_salt,
            lora_name=lora_name,
            items=client.items,
        )
        model = lora_name or engine.model_name
        envelope = Envelope(wording, request_id, model, int(time.time()), client.return_token_ids)
        async with contextlib.aclosing(engine.generate(generation)) as outputs:
            with _refusals_as_api_errors():
                first = await anext(outputs)
            pieces = _uncut(_prepend(first, outputs))
            if client.stream:
                outcome = transfer_outcome(first.metrics)  # a load is over before the first piece comes
                return await self._stream(request, pieces, envelope, client.include_usage, outcome)
            return await self._whole(pieces, envelope)

    async def _whole(self, outputs: AsyncGenerator[RequestOutput, None], envelope: Envelope) -> web.Response:
        texts: list[str] = []
        token_ids: list[int] = []
        last: RequestOutput | None = None
        with _refusals_as_api_errors():
            async for output in outputs:
                texts.append(output.text_delta)
                token_ids += output.new_token_ids
                last = output
        assert last is not None, "an answer has at least one piece"
        self._metrics.observe(last.metrics)
        headers = {"X-Request-Id": envelope.request_id, TRANSFER_HEADER: transfer_outcome(last.metrics)}
        if last.finish_reason == "error":
            refusal = failure(last).response()
            refusal.headers.update(headers)
            return refusal
        return web.json_response(envelope.whole("".join(texts), token_ids, last), headers=headers)

    async def _stream(
        self,
        request: web.Request,
        outputs: AsyncGenerator[RequestOutput, None],
        envelope: Envelope,
        include_usage: bool,
        outcome: str,
    ) -> web.StreamResponse:
        headers = {**SSE_HEADERS, "X-Request-Id": envelope.request_id, TRANSFER_HEADER: outcome}
        response = web.StreamResponse(headers=headers)
        try:
            async for event in self._events(outputs, envelope, include_usage):
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
            # Another answer cannot begin in the middle of this one, so the error is its last event.
            logger.exception("%s %s failed in the middle of its answer", request.method, request.path)
            failed = ApiError(500, f"{type(error).__name__}: {error}", kind="server_error")
            await response.write(_event(failed.body()))
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def _events(
        self, outputs: AsyncGenerator[RequestOutput, None], envelope: Envelope, include_usage: bool
    ) -> AsyncGenerator[bytes, None]:
        is_first = True
        async for output in outputs:
            if output.new_token_ids or output.text_delta or output.finish_reason:
                yield _event(envelope.chunk(output, is_first=is_first))
                is_first = False
            elif output.kv_transfer_params is not None:
                yield _event(envelope.early_chunk(output.kv_transfer_params))
            if output.finish_reason:
                self._metrics.observe(output.metrics)
                if include_usage:
                    yield _event(envelope.usage_chunk(output.metrics))

    def _running_engine(self) -> Engine:
        if not self._is_ready:
            raise unavailable("the node is still starting")
        return self._engine

    def _lora_name(self, model: str) -> str:
        """The adapter that a client means by the name of a model; empty for the model itself."""
        if model in self._engine.settings.lora_modules:
            return model
        if model and model not in (self._engine.model_name, self._engine.settings.model):
            message = f"the model {model!r} does not exist; this node serves {self._engine.model_name!r}"
            raise ApiError(404, message, kind="invalid_request_error", param="model", code="model_not_found")
        return ""


@contextlib.contextmanager
def _refusals_as_api_errors() -> Iterator[None]:
    """The one table from the engine's errors to HTTP."""
    try:
        yield
    except InvalidRequestError as error:
        raise bad_request(str(error), error.param) from error
    except ConnectorError as error:
        raise bad_request(f"kv_transfer_params: {error}", "kv_transfer_params") from error
    except EngineDeadError as error:
        raise _engine_ended(error) from error


def _engine_ended(error: EngineDeadError) -> ApiError:
    return unavailable(f"the engine does not run: {error}", retry_after_s=None)


async def _prepend(
    first: RequestOutput, rest: AsyncGenerator[RequestOutput, None]
) -> AsyncGenerator[RequestOutput, None]:
    yield first
    async for output in rest:
        yield output


async def _uncut(outputs: AsyncGenerator[RequestOutput, None]) -> AsyncGenerator[RequestOutput, None]:
    """The pieces of an answer that comes to its own end.

    Raises:
        EngineDeadError: the node stops in the middle of it.
    """
    async for output in outputs:
        if output.finish_reason == "abort":
            raise EngineDeadError("the node stopped before the answer was complete")
        yield output


def _client_request_id(request: web.Request) -> str:
    given = request.headers.get("X-Request-Id", "").strip()
    printable = "".join(char for char in given if char.isascii() and char.isprintable())
    return printable[:MAX_REQUEST_ID_CHARS] or uuid.uuid4().hex


def _event(payload: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(payload).encode() + b"\n\n"
