"""What a node may send: whatever a broken or hostile one does costs its own requests, and neither the router
nor a client.
"""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from kvferry.router.answer.exchange import Exchange
from kvferry.router.http.json_body import MAX_VALUES, object_of
from kvferry.router.http.sse import Event
from kvferry.router.nodes.health import MAX_HEALTH_BYTES, Prober, ask_health
from kvferry.router.nodes.reading import MAX_ANSWER_BYTES, refuse_no_answers
from kvferry.router.nodes.states import Health, NodeState
from tests.support.fake_nodes import routed, serving
from tests.support.patience import DEADLINE_S

MIB = 1 << 20
#: What the sockets between the two may hold when the router stops reading, and more.
IN_FLIGHT_BYTES = 32 * MIB
STREAM = {"Content-Type": "text/event-stream"}
OFFER = {
    "do_remote_prefill": True,
    "remote_engine_id": "e",
    "remote_block_ids": [[3]],
    "remote_host": "h",
    "remote_port": 1,
}
#: With these, a later request asks both nodes at once.
WITH_PLACE = {
    **OFFER,
    "remote_epoch": "5",
    "remote_addresses": ["shm:x"],
    "tp_size": 1,
    "rendezvous_supported": True,
}
PROTOCOL = 'kvferry_build_info{protocol="7",version="0"} 1.0\n'

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def answer_200(request: web.Request) -> web.StreamResponse:
    return web.Response()


@dataclass
class Node:
    """Answers as the test says."""

    answer: Answer
    release: Answer = answer_200
    models: Answer = answer_200
    asked: list[dict[str, Any]] = field(default_factory=list)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(await request.json())
        return await self.answer(request)

    async def metrics(self, request: web.Request) -> web.StreamResponse:
        return web.Response(text=PROTOCOL)


@dataclass
class Endless:
    """Sends four times what an answer may have, unless the connection closes before.

    Attributes:
        num_bytes: Sent in one answer.
    """

    status: int = 200
    content_type: str = "application/json"
    prefix: bytes = b'{"text": "'
    num_bytes: int = 0
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(status=self.status, headers={"Content-Type": self.content_type})
        await response.prepare(request)
        try:
            await response.write(self.prefix)
            for number in range(1, 4 * MAX_ANSWER_BYTES // MIB):
                await response.write(b"x" * MIB)
                self.num_bytes = max(self.num_bytes, number * MIB)
        finally:
            self.ended.set()
        return response

    async def was_cut_off(self) -> bool:
        await asyncio.wait_for(self.ended.wait(), DEADLINE_S)
        return self.num_bytes < MAX_ANSWER_BYTES + IN_FLIGHT_BYTES


async def offer(request: web.Request) -> web.StreamResponse:
    return web.json_response({"choices": [{"text": "x"}], "kv_transfer_params": OFFER})


async def answer(request: web.Request) -> web.StreamResponse:
    return web.json_response({"choices": [{"text": "one two"}]})


async def post(client: Any, **body: Any) -> tuple[int, bytes]:
    async with client.post("/v1/completions", json={"prompt": "p", "max_tokens": 5, **body}) as response:
        return response.status, await response.read()


@pytest.mark.parametrize(
    ("role", "status"), [(role, status) for role in ("prefill", "decode") for status in (200, 400, 429, 500)]
)
async def test_a_node_whose_answer_does_not_end_has_failed(role: str, status: int) -> None:
    endless = Endless(status)
    nodes = {"prefill": [Node(offer)], "decode": [Node(answer)]}
    nodes[role].insert(0, Node(endless))
    async with routed(nodes["prefill"], nodes["decode"]) as client:
        answered, _ = await post(client)
        assert await endless.was_cut_off()
    assert answered == 200


@pytest.mark.parametrize("prompt", ["p", ["p", "q"]], ids=["one prompt", "several prompts"])
async def test_a_stream_with_an_event_that_does_not_end_ends_with_an_error(prompt: object) -> None:
    endless = Endless(content_type="text/event-stream", prefix=b'data: {"choices": []}\n\ndata: {"text": "')
    async with routed([Node(offer)], [Node(endless)]) as client:
        status, payload = await post(client, prompt=prompt, stream=True)
        assert await endless.was_cut_off()
    assert status in (200, 502)
    assert f"of more than {MAX_ANSWER_BYTES} bytes".encode() in payload
    assert len(payload) < MIB


async def test_in_a_rendezvous_a_prefill_answer_that_does_not_end_is_a_failure() -> None:
    endless = Endless()

    async def first_offer(request: web.Request) -> web.StreamResponse:
        if len(prefill.asked) == 2:
            assert prefill.asked[1]["kv_transfer_params"]["rendezvous"]
            return await endless(request)
        return web.json_response({"kv_transfer_params": WITH_PLACE})

    async def after_the_offer(request: web.Request) -> web.StreamResponse:
        if len(decode.asked) == 2:
            await endless.ended.wait()
            await asyncio.sleep(DEADLINE_S)  # until the router hangs up
        return await answer(request)

    prefill, decode = Node(first_offer), Node(after_the_offer)
    async with routed([prefill], [decode]) as client:
        assert [(await post(client))[0] for _ in range(2)] == [200, 200]
        assert await endless.was_cut_off()
    assert len(prefill.asked) == 3


async def test_a_release_is_not_read_for_ever() -> None:
    endless = Endless()

    async def refuse(request: web.Request) -> web.StreamResponse:
        return web.json_response({}, status=400)

    async with routed([Node(offer, release=endless)], [Node(refuse)]) as client:
        assert (await post(client))[0] == 400
        assert await endless.was_cut_off()


async def test_models_that_do_not_end_are_asked_of_another_node() -> None:
    endless = Endless()

    async def models(request: web.Request) -> web.StreamResponse:
        return web.json_response({"data": []})

    async with routed(
        [Node(offer)], [Node(answer, models=endless.__call__), Node(answer, models=models)]
    ) as client:
        async with client.get("/v1/models") as response:
            assert await response.json() == {"data": []}
        assert await endless.was_cut_off()


async def test_a_large_answer_passes_unchanged() -> None:
    whole = b'{"choices": [{"text": "' + b"x" * (MAX_ANSWER_BYTES // 2) + b'"}]}'

    async def large(request: web.Request) -> web.StreamResponse:
        return web.Response(body=whole, content_type="application/json")

    async with routed([Node(offer)], [Node(large)]) as client:
        assert await post(client) == (200, whole)


def stream_of(*events: dict[str, Any]) -> Answer:
    """Make a handler of streams that Python can read as far as they are not broken."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers=STREAM)
        await response.prepare(request)
        for event in events:
            await response.write(
                b"data: " + json.dumps(event).encode().replace(b'"HUGE"', b"9" * 5000) + b"\n\n"
            )
            await asyncio.sleep(0.01)
        await response.write(b"data: [DONE]\n\n")
        return response

    return answer


def chosen(token_id: object, reason: str | None = None) -> dict[str, Any]:
    choice = {"index": 0, "text": "t", "finish_reason": reason, "token_ids": [token_id]}
    return {"created": 7, "choices": [choice]}


@dataclass
class Continuing(Node):
    """A decode node that goes on with answers of others."""

    async def health(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"status": "ok", "continues_answers": "model"})


async def held(client: Any) -> int:
    """Return how many requests and offers the router counts at its nodes."""
    async with client.get("/nodes") as response:
        nodes = (await response.json())["nodes"]
    return sum(node["in_flight"] + node["offers"] for node in nodes)


GREEDY = {"stream": True, "temperature": 0}


@pytest.mark.parametrize("events", [[chosen("HUGE")], [chosen(5), chosen("HUGE")]], ids=["first", "later"])
async def test_a_node_that_sends_a_number_that_python_cannot_read_has_failed(
    events: list[dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = Continuing(stream_of(*events)), Continuing(stream_of(chosen(6), chosen(7, "stop")))
    async with routed([Node(offer)], [bad, good]) as client:
        status, payload = await post(client, **GREEDY)
    assert (status, payload.count(b'"text": "t"')) == (200, 1 + len(events))
    assert b"error" not in payload
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize(("num_events", "answered"), [(0, 500), (1, 200)], ids=["before", "in the middle"])
async def test_an_exchange_that_raises_ends_with_an_error_and_keeps_nothing(
    num_events: int, answered: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the router's own code raises, and however much of the answer the client has."""
    events_arrived, released = Exchange.events_arrived, asyncio.Event()
    calls: list[None] = []

    def fail(self: Exchange, events: Any) -> Any:
        calls.append(None)
        assert len(calls) <= num_events, "a bug"
        return events_arrived(self, events)

    async def release(request: web.Request) -> web.StreamResponse:
        released.set()
        return web.Response()

    monkeypatch.setattr(Exchange, "events_arrived", fail)
    async with routed([Node(offer, release)], [Node(stream_of(chosen(5), chosen(6)))]) as client:
        status, payload = await post(client, **GREEDY)
        assert status == answered
        assert b"AssertionError: a bug" in payload
        assert await held(client) == 0
        if not num_events:  # nothing has said that the decode node has loaded it
            await asyncio.wait_for(released.wait(), DEADLINE_S)


async def test_a_node_that_is_lost_in_the_middle_of_streams_is_ejected() -> None:
    async def lose(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers=STREAM)
        await response.prepare(request)
        await response.write(b"data: {}\n\n")
        assert request.transport is not None
        request.transport.abort()
        return response

    async with routed([Node(offer)], [Node(lose), Node(answer)], check_interval_s=0.05) as client:
        async with asyncio.timeout(DEADLINE_S):
            while not await _num_ejections(client):
                await post(client, stream=True)


async def _num_ejections(client: Any) -> int:
    async with client.get("/nodes") as response:
        return sum(node["ejections"] for node in (await response.json())["nodes"])


# -- redirects and encodings -----------------------------------------------------------------------


@dataclass
class Inner:
    """A service that only the router can reach."""

    num_requests: int = 0
    headers: list[dict[str, str]] = field(default_factory=list)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        return await self.health(request)

    async def health(self, request: web.Request) -> web.StreamResponse:
        self.num_requests += 1
        return web.json_response({"choices": [{"text": "inner secret"}], "data": "inner secret"})

    metrics = models = release = health


@pytest.mark.parametrize("status", [300, 301, 302, 303, 304, 307, 308])
@pytest.mark.parametrize("role", ["prefill", "decode", "models", "release"])
async def test_a_node_that_redirects_has_failed_and_nothing_goes_to_the_target(
    status: int, role: str
) -> None:
    inner = Inner()

    async def redirect(request: web.Request) -> web.StreamResponse:
        target = "/health" if role == "models" else "/v1/completions"
        asked.set()
        return web.Response(status=status, headers={"Location": url + target})

    async def refuse(request: web.Request) -> web.StreamResponse:
        return web.json_response({}, status=400)

    asked = asyncio.Event()
    good_prefill, good_decode = Node(offer), Node(answer, models=answer)
    prefill = {"prefill": Node(redirect), "release": Node(offer, release=redirect)}.get(role, good_prefill)
    decode = {
        "decode": Node(redirect),
        "models": Node(answer, models=redirect),
        "release": Node(refuse),
    }.get(role, good_decode)
    async with serving(inner) as url, routed([prefill], [decode]) as client:
        if role == "models":
            async with client.get("/v1/models") as response:
                answered, payload = response.status, await response.read()
        else:
            answered, payload = await post(client)
        await asyncio.wait_for(asked.wait(), DEADLINE_S)
    assert inner.num_requests == 0
    assert b"secret" not in payload
    if role == "release":
        assert answered == 400
    else:
        assert answered == 503
        assert f"answered {status}" in payload.decode()


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_node_that_compresses_its_answer_has_failed(role: str) -> None:
    async def compress(request: web.Request) -> web.StreamResponse:
        encodings.append(request.headers["Accept-Encoding"])
        raw = gzip.compress(b'{"text": "' + bytes(8 * MIB) + b'"}')
        return web.Response(body=raw, headers={"Content-Encoding": "gzip"})

    encodings: list[str] = []
    prefill = [Node(compress), Node(offer)] if role == "prefill" else [Node(offer)]
    decode = [Node(compress), Node(answer)] if role == "decode" else [Node(answer)]
    async with routed(prefill, decode) as client:
        assert [(await post(client))[0] for _ in range(2)] == [200, 200]
    assert set(encodings) == {"identity"}


# -- health checks ---------------------------------------------------------------------------------


@dataclass
class Healthy(Node):
    """Answers `/health` and `/metrics` as the test says."""

    health: Answer = answer
    metrics: Answer = answer  # type: ignore[assignment]


async def test_a_check_reads_answers_that_come_in_pieces() -> None:
    def in_pieces(*pieces: bytes) -> Answer:
        async def answer(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse()
            await response.prepare(request)
            await response.write(pieces[0])
            await asyncio.wait_for(has_arrived.wait(), DEADLINE_S)
            await response.write(pieces[1])
            return response

        return answer

    has_arrived = asyncio.Event()
    node = Healthy(
        answer,
        health=in_pieces(b'{"load_failure_policy": ', b'"recompute"}'),
        metrics=in_pieces(b"# HELP\n", PROTOCOL.encode()),
    )
    async with serving(node) as url, _session(has_arrived) as session:
        health = await ask_health(session, url, DEADLINE_S)
        has_arrived.clear()
        prober = Prober(url)
        await prober.completed(session, DEADLINE_S, Health(NodeState.READY))
    assert health is not None
    assert (health.state, health.load_failure_policy) == (NodeState.READY, "recompute")
    assert prober.protocol == 7


def _session(first_has_arrived: asyncio.Event) -> aiohttp.ClientSession:
    """Return a session that says when it has read something."""

    async def arrived(*_: object) -> None:
        first_has_arrived.set()

    trace = aiohttp.TraceConfig()
    trace.on_response_chunk_received.append(arrived)
    trace.on_request_end.append(arrived)
    return aiohttp.ClientSession(trace_configs=[trace])


@pytest.mark.parametrize(
    ("status", "said", "error"),
    [
        (200, " " * (MAX_HEALTH_BYTES + 1), f"more than {MAX_HEALTH_BYTES} bytes"),
        (302, "", "answered 302"),
        (
            503,
            json.dumps({"status": "failing", "error": "a\n\r b" + "x" * 10_000}),
            "/health says failing: a bxxx",
        ),
    ],
    ids=["too long", "redirect", "a long error"],
)
async def test_what_a_health_check_says_of_a_hostile_node_is_one_short_line(
    status: int, said: str, error: str
) -> None:
    inner = Inner()

    async def health(request: web.Request) -> web.StreamResponse:
        return web.Response(status=status, text=said, headers={"Location": inner_url + "/health"})

    async with serving(inner) as inner_url, serving(Healthy(answer, health=health)) as url:
        async with aiohttp.ClientSession(middlewares=[refuse_no_answers]) as session:
            found = await ask_health(session, url, DEADLINE_S)
    assert found is not None
    assert found.state is (NodeState.GONE if status == 503 else None)
    assert error in found.error
    assert len(found.error) < 500
    assert inner.num_requests == 0


def nested(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


@pytest.mark.parametrize("depth", [900, *range(955, 985, 3), 2000, 100_000])
async def test_answers_that_are_nested_deep_cost_their_request_alone(depth: int) -> None:
    """Python reads more levels of JSON than it writes, so what was read could fail anywhere later."""
    is_streamed = False

    async def deep_offer(request: web.Request) -> web.StreamResponse:
        prefix = b'{"kv_transfer_params": {"remote_engine_id": "e", "x": '
        return web.Response(body=prefix + nested(depth) + b"}}", content_type="application/json")

    async def deep_answer(request: web.Request) -> web.StreamResponse:
        prefix = b'data: {"choices": [{"x": ' if is_streamed else b'{"choices": [{"x": '
        body = prefix + nested(depth) + (b"}]}\n\ndata: [DONE]\n\n" if is_streamed else b"}]}")
        return web.Response(
            body=body, headers=STREAM if is_streamed else {"Content-Type": "application/json"}
        )

    async with routed([Node(deep_offer)], [Node(answer)]) as client:
        assert (await post(client))[0] == 200  # without the offer
    async with routed([Node(offer)], [Node(deep_answer)]) as client:
        for is_streamed in (False, True):
            status, payload = await post(client, prompt=["p", "q"], stream=is_streamed)
            assert (status, b"Error:" in payload) == (502, False)


async def test_choices_that_are_none_are_left_out_of_a_merged_answer() -> None:
    async def wrong_choices(request: web.Request) -> web.StreamResponse:
        return web.json_response({"choices": [3, {"index": "x"}], "usage": []})

    async with routed([Node(offer)], [Node(wrong_choices)]) as client:
        status, payload = await post(client, prompt=["p", "q"])
        assert (status, json.loads(payload)["choices"]) == (200, [{"index": 0}, {"index": 1}])


@pytest.mark.parametrize("value", [b"[]", b"{}", b"0"])
def test_json_with_too_many_values_is_none(value: bytes) -> None:
    assert object_of(b'{"a":[' + b",".join([value] * (MAX_VALUES // 64)) + b"]}")
    assert object_of(b'{"a":[' + b",".join([value] * (MAX_VALUES + 1)) + b"]}") == {}


# -- answers that end before their end -------------------------------------------------------------

IDENTITY = "fedcba9876543210"
TEXT = [("one ", 11), ("two ", 12), ("three", 13)]
ALL = "".join(text for text, _ in TEXT)
#: How many tokens the prompt has.
NUM_PROMPT = 5


def token(number: int, **more: Any) -> bytes:
    """Return the event with a token, as a reference node sends it."""
    text, token_id = TEXT[number]
    is_last = number == len(TEXT) - 1
    choice = {
        "index": 0,
        "text": text,
        "finish_reason": "length" if is_last else None,
        "token_ids": [token_id],
    }
    last = {"metrics": {"num_prompt_tokens": NUM_PROMPT}} if is_last else {}
    return Event.of({"id": "i", "created": 7, "choices": [choice | more], **last}).raw


def counts(num_tokens: int) -> bytes:
    usage = {"prompt_tokens": NUM_PROMPT, "completion_tokens": num_tokens}
    usage["total_tokens"] = sum(usage.values())
    return Event.of({"id": "i", "created": 7, "choices": [], "usage": usage}).raw


def error_event(message: str) -> bytes:
    return Event.of({"error": {"message": message, "code": 500}}).raw


@dataclass
class Closing(Node):
    """A node whose streams end after some tokens, with what it writes there, as if they were complete.

    Attributes:
        after: The number of tokens; more than there are: its answers are complete.
        last: What it writes then.
        as_http_1_0: Only the end of the connection ends an answer, as behind a proxy that speaks HTTP/1.0.
        aborts: It aborts the connection then.
    """

    answer: Answer = answer_200
    after: int = 99
    last: bytes = b""
    as_http_1_0: bool = False
    aborts: bool = False

    async def health(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"status": "ok", "continues_answers": IDENTITY})

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append(body)
        params = body.get("kv_transfer_params") or {}
        begin = len((params.get("continues") or {}).get("token_ids", ()))
        tokens = [token(number) for number in range(begin, len(TEXT))]
        is_whole = self.after > len(tokens)
        if not body.get("stream"):
            return await self._write(request, [whole_answer() if is_whole else self.last], "application/json")
        asks = (body.get("stream_options") or {}).get("include_usage")
        end = [*([counts(len(TEXT))] if asks else []), b"data: [DONE]\n\n"]
        events = [*tokens, *end] if is_whole else [*tokens[: self.after], self.last]
        return await self._write(request, events, "text/event-stream")

    async def _write(
        self, request: web.Request, pieces: list[bytes], content_type: str
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": content_type})
        if self.as_http_1_0:
            response.force_close()
            response.headers["Connection"] = "close"
            request._version = aiohttp.HttpVersion10  # type: ignore[attr-defined]
        await response.prepare(request)
        for piece in filter(None, pieces):
            await response.write(piece)
            await asyncio.sleep(0.005)  # pieces arrive one by one
        if self.aborts:
            assert request.transport is not None
            request.transport.abort()
        return response


def whole_answer() -> bytes:
    return json.dumps({"choices": [{"index": 0, "text": ALL, "finish_reason": "length"}]}).encode()


#: What a node may write where the rest of its stream should be.
ENDS = {
    "nothing": b"",
    "half an event": token(1)[:30],
    "done": b"data: [DONE]\n\n",
    "a comment and done": b": still here\n\ndata: [DONE]\n\n",
    "counts and done": counts(1) + b"data: [DONE]\n\n",
    "aborted": token(1, text="", token_ids=[], finish_reason="abort") + b"data: [DONE]\n\n",
}


async def streamed(client: Any, **fields: Any) -> tuple[int, str, list[Any], str]:
    """Return a stream's status, its text, its counts and its last error."""
    async with asyncio.timeout(DEADLINE_S):
        status, payload = await post(client, stream=True, temperature=0, **fields)
    found = [object_of(line.removeprefix(b"data: ")) for line in payload.split(b"\n\n")]
    if status == 200:
        assert payload.count(b"[DONE]") == 1
        assert payload.endswith(b"data: [DONE]\n\n")
    text = "".join(choice["text"] for one in found for choice in one.get("choices", ()))
    errors = [one["error"]["message"] for one in found if "error" in one]
    return status, text, [one["usage"] for one in found if one.get("usage")], "".join(errors)


@pytest.mark.parametrize("as_http_1_0", [False, True], ids=["chunked", "HTTP/1.0"])
@pytest.mark.parametrize("after", [0, 1, 2])
@pytest.mark.parametrize("end", ENDS)
async def test_a_stream_that_ends_before_its_last_token_goes_on_elsewhere(
    end: str, after: int, as_http_1_0: bool
) -> None:
    broken, well = Closing(after=after, last=ENDS[end], as_http_1_0=as_http_1_0), Closing()
    async with routed([Node(offer)], [broken, well]) as client:
        for _ in range(2):
            found = await streamed(client, stream_options={"include_usage": True})
            assert found == (200, ALL, [json.loads(counts(len(TEXT))[6:])["usage"]], "")
    assert broken.asked


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("end", ENDS)
async def test_a_stream_that_no_node_can_go_on_with_ends_with_an_error(end: str, n: int) -> None:
    """With two answers, one of them has all its tokens."""
    after = 1 if n == 1 else len(TEXT)
    async with routed(
        [Node(offer)], [Closing(after=after, last=ENDS[end])], continue_answers=False
    ) as client:
        status, text, _, error = await streamed(client, n=n)
    assert (status, bool(text)) in ((200, True), (503, False))
    assert "ended it" in error or "aborted" in error


@pytest.mark.parametrize("end", ENDS)
async def test_an_answer_that_has_moved_moves_again(end: str) -> None:
    """The next node is stopping, and sends nothing of the answer."""
    nodes = [Closing(after=1), Closing(after=0, last=ENDS[end]), Closing(after=0, last=ENDS[end]), Closing()]
    async with routed([Node(offer)], nodes) as client:
        for _ in range(4):
            assert (await streamed(client))[1:] == (ALL, [], "")


@dataclass
class FailsTheRest(Closing):
    """Begins answers, and fails if it is to go on with one of another node.

    Attributes:
        status: Of the error. 200: it is an event.
    """

    status: int = 200

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if "token_ids" not in body["kv_transfer_params"]["continues"]:
            return await super().handle(request)
        self.asked.append(body)
        if self.status != 200:
            return web.json_response({"error": {"message": "the load failed"}}, status=self.status)
        events = [error_event("the load failed"), b"data: [DONE]\n\n"]
        return await self._write(request, events, "text/event-stream")


@pytest.mark.parametrize("status", [200, 400, 500])
async def test_an_error_of_the_next_node_is_not_the_end_of_an_answer(status: int) -> None:
    nodes = [FailsTheRest(after=1, status=status) for _ in range(3)]
    async with routed([Node(offer)], [*nodes, Closing()]) as client:
        assert [(await streamed(client))[1:] for _ in range(4)] == [(ALL, [], "")] * 4
    assert any("token_ids" in str(node.asked) for node in nodes)


@pytest.mark.parametrize("as_http_1_0", [False, True], ids=["chunked", "HTTP/1.0"])
async def test_an_answer_without_its_counts_gets_them_from_the_router(as_http_1_0: bool) -> None:
    """The node is lost after the last token. What the client waits for is known."""
    lost = Closing(after=len(TEXT), as_http_1_0=as_http_1_0)
    async with routed([Node(offer)], [lost]) as client:
        found = await streamed(client, stream_options={"include_usage": True})
        assert found == (200, ALL, [json.loads(counts(len(TEXT))[6:])["usage"]], "")
        assert await streamed(client) == (200, ALL, [], "")


@pytest.mark.parametrize(
    "how", [{}, {"as_http_1_0": True}, {"aborts": True}], ids=["chunked", "HTTP/1.0", "aborted"]
)
@pytest.mark.parametrize("cut_at", [0, 1, 40, -1])
async def test_a_whole_answer_that_is_cut_off_is_given_by_another_node(
    cut_at: int, how: dict[str, bool]
) -> None:
    broken = Closing(after=0, last=whole_answer()[:cut_at], **how)  # type: ignore[arg-type]
    async with routed([Node(offer)], [broken, Closing()]) as client:
        assert [await post(client) for _ in range(2)] == [(200, whole_answer())] * 2
    assert broken.asked
    async with routed([Node(offer)], [broken]) as client:
        status, payload = await post(client)
    assert status == 503
    assert "aborts" in how or "not one JSON object" in payload.decode()


async def test_a_prefill_answer_that_is_cut_off_is_asked_of_another_node() -> None:
    cut = Closing(after=0, last=b'{"kv_transfer_params": {"remote', as_http_1_0=True)
    decode = Node(answer)
    async with routed([cut, Node(offer)], [decode]) as client:
        assert [(await post(client))[0] for _ in range(2)] == [200, 200]
    assert cut.asked
    assert all("kv_transfer_params" in asked for asked in decode.asked)
