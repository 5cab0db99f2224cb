"""Requests with several prompts: each prompt has a handoff of its own, and the answers become one."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

from aiohttp import web

from ..web.errors import ApiError, bad_request, note_answered
from ..web.fields import Fields
from ..web.json_body import object_of
from ..web.sse import DONE, Event
from .first_tokens import FirstToken
from .handoffs import error_event
from .nodes import NodeGoneError, UpstreamNode
from .phases import Call
from .reading import MAX_ANSWER_BYTES, NodeAnswer
from .reply import PASSED_HEADERS, Reply, stream_headers

#: Most prompts per request.
MAX_PROMPTS = 256
#: Most prompts of one request that are in flight at a time.
MAX_AT_ONCE = 16
#: The most bytes of all whole answers to the prompts of one request.
MAX_MERGED_BYTES = 4 * MAX_ANSWER_BYTES
#: Token counts that add up.
_COUNTS = ("prompt_tokens", "completion_tokens", "total_tokens")

Routed = Callable[[Call, Reply], Awaitable[web.StreamResponse]]


def calls_of(call: Call) -> list[Call]:
    """Split a request into one per prompt.

    Raises:
        ApiError: it has too many (400).
    """
    prompts = call.body.get("prompt")
    if (
        not isinstance(prompts, list)
        or not prompts
        or not all(isinstance(one, str | list) for one in prompts)
    ):
        return [call]
    if len(prompts) > MAX_PROMPTS:
        message = f"'prompt' has {len(prompts)} prompts: at most {MAX_PROMPTS} per request are possible"
        raise bad_request(message, "prompt")
    if len(prompts) == 1:
        return [call]
    return [
        dataclasses.replace(
            call,
            body={**call.body, "prompt": prompt},
            headers={**call.headers, "X-Request-Id": f"{call.request_id}-{number}"},
        )
        for number, prompt in enumerate(prompts)
    ]


class MergedReply(Reply):
    """The answer to a request with several prompts.

    Args:
        call: The request as the client sent it.
    """

    def __init__(self, request: web.Request, call: Call) -> None:
        super().__init__(request)
        self._id = f"cmpl-{call.request_id}"
        self._headers = {"X-Request-Id": call.request_id}
        self._num_answers = Fields(call.body).integer("n", 1)
        self._num_bytes = 0
        self._usage: dict[str, Any] = {}
        self._closing: Mapping[str, Any] | None = None
        self._begun: asyncio.Future[Any]

    async def answer(self, calls: Sequence[Call], routed: Routed) -> web.StreamResponse:
        """Answer all prompts.

        Raises:
            ApiError: a prompt cannot be answered, and no part of a stream was sent yet.
        """
        turns = asyncio.Semaphore(MAX_AT_ONCE)

        async def answer_one(number: int, call: Call) -> web.StreamResponse:
            async with turns:
                response = await routed(call, _Part(self, number))
            if response.status != 200:
                raise _RefusedError(response)
            self._num_bytes += len(_body_of(response))
            if self._num_bytes > MAX_MERGED_BYTES:
                message = f"the answers have more than {MAX_MERGED_BYTES} bytes together: send fewer prompts per request"
                raise ApiError(502, message, kind="server_error")
            return response

        tasks = [asyncio.create_task(answer_one(number, call)) for number, call in enumerate(calls)]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            failures = [task.exception() for task in tasks if task.done()]
            for failure in filter(None, failures):
                if isinstance(failure, _RefusedError):
                    if self._stream is None:
                        return failure.response
                    failure = ApiError(failure.response.status, failure.why, kind="server_error")
                if isinstance(failure, ApiError):
                    return await self.fail(failure)
                raise failure
            if self._stream is None:
                return self._merged([object_of(_body_of(task.result())) for task in tasks])
            if self._closing is not None:
                await self._send({**self._closing, "id": self._id, "usage": self._usage})
            await self._stream.write(DONE.raw)
            note_answered(self._request, self._stream.status)
            await self._stream.write_eof()
            return self._stream
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _merged(self, answers: Sequence[Mapping[str, Any]]) -> web.Response:
        if not all(answers):
            raise ApiError(502, "the answer of a decode node is not a JSON object", kind="server_error")
        for answer in answers:
            self._add_usage(answer.get("usage"))
        choices = [
            self._renumbered(choice, number)
            for number, answer in enumerate(answers)
            for choice in _choices(answer)
        ]
        body = {**answers[0], "id": self._id, "choices": choices, "usage": self._usage}
        return web.json_response(body, headers=self._headers)

    def _renumbered(self, choice: Mapping[str, Any], number: int) -> dict[str, Any]:
        index = choice.get("index", 0)
        return {**choice, "index": (index if type(index) is int else 0) + number * self._num_answers}

    def _add_usage(self, usage: object) -> None:
        for name in _COUNTS:
            count = usage.get(name) if isinstance(usage, dict) else None
            self._usage[name] = self._usage.get(name, 0) + (count if isinstance(count, int) else 0)

    async def add_event(self, event: Event, number: int, headers: Mapping[str, str]) -> None:
        """Pass on an event of the answer to one prompt.

        Raises:
            ApiError: it is an error, which ends the whole answer.
        """
        if not (content := event.content):
            return  # [DONE], or a comment
        if isinstance(error := content.get("error"), dict):
            raise ApiError(
                500, str(error.get("message")), kind=str(error.get("type")), code=error.get("code")
            )
        if not content.get("choices") and content.get("usage"):
            # The end of one answer. The usage of all of them follows after the last one.
            self._add_usage(content["usage"])
            self._closing = content
            return
        choices = [self._renumbered(choice, number) for choice in _choices(content)]
        await self._send({**content, "id": self._id, "choices": choices}, headers)

    async def _send(self, content: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> None:
        if self._stream is None:
            # Before anything waits: the parts run at the same time, and only one of them may begin the stream.
            stream = web.StreamResponse(
                headers={**(headers or {}), **self._headers, "Cache-Control": "no-cache"}
            )
            self._begun = asyncio.ensure_future(stream.prepare(self._request))
            self._stream = stream
        await asyncio.shield(self._begun)
        await self._stream.write(Event(b"data: " + json.dumps(content).encode() + b"\n\n").raw)


class _RefusedError(Exception):
    """A node has refused one of the prompts."""

    def __init__(self, response: web.StreamResponse) -> None:
        super().__init__(response.status)
        self.response = response
        self.why = _body_of(response)[:200].decode(errors="replace")


class _Part(Reply):
    """The answer to one of the prompts."""

    def __init__(self, merged: MergedReply, number: int) -> None:
        super().__init__(merged._request)
        self._merged_reply = merged
        self._number = number

    async def begin(self, first: FirstToken, upstream: Mapping[str, str]) -> None:
        """Pass on the first token of the answer to the prompt."""
        self.first = first
        await self._pass_on(first.events, stream_headers(upstream))

    async def end(self) -> web.StreamResponse:
        """End an answer that had nothing but the first token."""
        return web.Response()

    async def _pass_on(self, events: Iterable[Event], headers: Mapping[str, str]) -> None:
        for event in events:
            await self._merged_reply.add_event(event, self._number, headers)

    async def copy(self, node: UpstreamNode, upstream: NodeAnswer, *, continues: bool) -> web.StreamResponse:
        """Pass a stream's events on, or return a whole answer. If the node is lost in the middle, the answer fails.

        Raises:
            ApiError: the stream broke, or an event of it is an error.
            OtherTokenError: See `Reply.copy`.
        """
        rewritten = self._continued(upstream, continues=continues)
        headers = {name: upstream.headers[name] for name in PASSED_HEADERS if name in upstream.headers}
        if not upstream.is_stream:
            headers.setdefault("Content-Type", "application/json")
            return web.Response(
                body=self.taker.whole(upstream.payload), status=upstream.status, headers=headers
            )
        arrived: list[Event] | None = upstream.events
        try:
            while arrived is not None:
                events = rewritten(arrived)
                if error_event(events):
                    self.explain(events)
                self._note(events)
                await self._pass_on(events, headers)
                async with node.exchange():
                    arrived = await upstream.more()
        except NodeGoneError as error:
            self.lost = error
            lost = f"the answer was lost in the middle: {await error.explained()}"
            raise ApiError(502, lost, kind="server_error") from error
        return web.Response()


def _choices(answer: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    choices = answer.get("choices")
    return [choice for choice in choices if isinstance(choice, dict)] if isinstance(choices, list) else []


def _body_of(response: web.StreamResponse) -> bytes:
    body = response.body if isinstance(response, web.Response) else b""
    return body if isinstance(body, bytes) else b""
