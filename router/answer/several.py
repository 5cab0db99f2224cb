"""Requests with several prompts: each prompt has a handoff of its own, and the answers become one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from aiohttp import web

from ..http.direct import Stream
from ..http.errors import ApiError, note_answered
from ..http.json_body import Fields, object_of
from ..http.sse import DONE, Event
from ..nodes.reading import MAX_ANSWER_BYTES
from .bill import summed
from .performance import RECEIPTS, Performance, receipts_event, send_error, too_late

#: Most prompts of one request that are in flight at a time.
MAX_AT_ONCE = 16
#: The most bytes of all whole answers to the prompts of one request.
MAX_MERGED_BYTES = 4 * MAX_ANSWER_BYTES
#: Answers one prompt, given its number.
AnswerOne = Callable[[int], Awaitable[web.StreamResponse]]


class MergedAnswer:
    """The answer to a request with several prompts.

    Args:
        body: The request as the client sent it.
    """

    def __init__(self, request: web.Request, body: Mapping[str, Any], request_id: str) -> None:
        self._request = request
        self._id = f"cmpl-{request_id}"
        self._headers = {"X-Request-Id": request_id}
        self._num_answers = Fields(body).integer("n", 1)
        self._num_bytes = 0
        self._ends: list[Mapping[str, Any]] = []  # of the parts' streams: the events with their usage
        self._receipts: dict[int, Any] = {}  # by the prompt's number
        self._stream: Stream | None = None
        self._beginning = asyncio.Lock()

    async def answer(self, num_prompts: int, answer_one: AnswerOne, limit_s: float) -> web.StreamResponse:
        """Answer all prompts.

        Args:
            limit_s: For all of it. 0: there is no limit.

        Raises:
            ApiError: a prompt cannot be answered, and no part of a stream was sent yet.
        """
        slots = asyncio.Semaphore(MAX_AT_ONCE)

        async def answered(number: int) -> web.StreamResponse:
            async with slots:
                response = await answer_one(number)
            if response.status != 200:
                raise _RefusedError(response)
            self._num_bytes += len(_body_of(response))
            if self._num_bytes > MAX_MERGED_BYTES:
                message = f"the answers have more than {MAX_MERGED_BYTES} bytes together: send fewer prompts per request"
                raise ApiError(502, message, kind="server_error")
            return response

        tasks = [asyncio.create_task(answered(number)) for number in range(num_prompts)]
        try:
            async with asyncio.timeout(limit_s or None) as limit:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            failures = [task.exception() for task in tasks if task.done()]
            for failure in filter(None, failures):
                if isinstance(failure, _RefusedError):
                    if self._stream is None:
                        return failure.response
                    failure = ApiError(failure.response.status, failure.why, kind="server_error")
                if isinstance(failure, ApiError):
                    return await self._fail(failure)
                raise failure
            if self._stream is None:
                return self._merged([object_of(_body_of(task.result())) for task in tasks])
            if self._ends:
                missing: list[Mapping[str, Any]] = [{}] * (num_prompts - len(self._ends))
                usage = summed([*self._ends, *missing]) or None
                await self._send({**_common(self._ends), "id": self._id, "usage": usage})
            if self._receipts:
                await self._send(receipts_event(self._in_order()))
            await self._stream.write(DONE.raw)
            note_answered(self._request, self._stream.status)
            await self._stream.write_eof()
            return self._stream
        except TimeoutError:
            if not limit.expired():
                raise
            return await self._fail(too_late(limit_s))
        finally:
            for task in tasks:
                task.cancel()
            # A client that leaves now must not cancel a second time what was cancelled above.
            await asyncio.shield(asyncio.gather(*tasks, return_exceptions=True))

    async def _fail(self, error: ApiError) -> web.StreamResponse:
        if self._stream is None:
            raise error
        await send_error(self._request, self._stream, error)
        return self._stream

    def _merged(self, answers: Sequence[Mapping[str, Any]]) -> web.Response:
        if not all(answers):
            raise ApiError(502, "the answer of a decode node is not a JSON object", kind="server_error")
        choices = [
            self._renumbered(choice, number)
            for number, answer in enumerate(answers)
            for choice in _choices(answer)
        ]
        for number, answer in enumerate(answers):
            for one in answer.get(RECEIPTS, ()):
                self._receipts[number] = one
        body = {
            **_common(answers),
            **({RECEIPTS: self._in_order()} if self._receipts else {}),
            "id": self._id,
            "choices": choices,
            "usage": summed(answers) or None,
        }
        return web.json_response(body, headers=self._headers)

    def _in_order(self) -> list[Any]:
        """Return the receipts in the order of the prompts."""
        return [self._receipts[number] for number in sorted(self._receipts)]

    def _renumbered(self, choice: Mapping[str, Any], number: int) -> dict[str, Any]:
        index = choice.get("index", 0)
        return {**choice, "index": (index if type(index) is int else 0) + number * self._num_answers}

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
        if RECEIPTS in content:
            (self._receipts[number],) = content[RECEIPTS]
            return
        if content.get("choices") == []:
            # The end of one answer. The usage of all of them follows after the last one.
            self._ends.append(content)
            return
        choices = [self._renumbered(choice, number) for choice in _choices(content)]
        await self._send({**content, "id": self._id, "choices": choices}, headers)

    async def _send(self, content: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> None:
        if self._stream is None:
            # The parts run at the same time, and only one of them may begin the stream.
            async with self._beginning:
                if self._stream is None:
                    named = {**(headers or {}), **self._headers, "Cache-Control": "no-cache"}
                    stream = Stream(headers=named)
                    await stream.prepare(self._request)
                    self._stream = stream
        await self._stream.write(Event(b"data: " + json.dumps(content).encode() + b"\n\n").raw)


class _RefusedError(Exception):
    """A node has refused one of the prompts."""

    def __init__(self, response: web.StreamResponse) -> None:
        super().__init__(response.status)
        self.response = response
        self.why = _body_of(response)[:200].decode(errors="replace")


class Part(Performance):
    """Follows the exchange of one of the prompts, and passes its answer on to the whole. See `of`."""

    def of(self, merged: MergedAnswer, number: int) -> Part:
        """Say which part it is of what."""
        self._merged, self._number = merged, number
        self._headers: Mapping[str, str] = {}
        return self

    async def _begin(self, status: int, headers: Mapping[str, str]) -> None:
        self._headers = headers
        self._reply = web.Response()  # of a stream, the parts are all that there is

    async def _write(self, events: Sequence[Event]) -> None:
        for event in events:
            await self._merged.add_event(event, self._number, self._headers)

    async def _finish(self) -> None:
        return

    async def _fail(self, error: ApiError) -> None:
        self._reply = error


def _common(answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the fields that are true of the whole answer, because each part has the same.

    What a node says of its own part alone, such as its figures, is left out. The answer was created when its
    first part was.
    """
    first, *others = answers
    same = {key: value for key, value in first.items() if all(other.get(key) == value for other in others)}
    return {**same, "created": first["created"]} if "created" in first else same


def _choices(answer: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    choices = answer.get("choices")
    return [choice for choice in choices if isinstance(choice, dict)] if isinstance(choices, list) else []


def _body_of(response: web.StreamResponse) -> bytes:
    body = response.body if isinstance(response, web.Response) else b""
    return body if isinstance(body, bytes) else b""
