"""What an answer's usage may say, and how a router mends what nodes send."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from aiohttp import web

from kvferry.connector.p2p.params import MOVED
from kvferry.router.answer.bill import MAX_TOKENS, Bill, Loaded, least, num_prompt_of, summed, usage_in
from kvferry.router.answer.dialects import dialect_of
from kvferry.router.answer.exchange import Begun, Exchange, State
from kvferry.router.answer.handoffs import params_of
from kvferry.router.choice.ways import Offer
from kvferry.router.http.endpoints import GENERATE, MESSAGES, RESPONSES
from kvferry.router.http.sse import Event, events_of
from tests.support.exchange_simulator import Told
from tests.support.fake_nodes import PLACE, let_rendezvous, routed
from tests.support.patience import DEADLINE_S

NUM_PROMPT = 220
Step = Callable[[Bill], object]


def usage(cached: object = None, **changes: Any) -> dict[str, Any]:
    counts = {"prompt_tokens": NUM_PROMPT, "completion_tokens": 4, "total_tokens": NUM_PROMPT + 4}
    details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
    return {**counts, **details, **changes}


def last(cached: object = None, **changes: Any) -> Event:
    """Return the last event of a stream but one."""
    return Event.of({"choices": [], "usage": usage(cached, **changes)})


def told(bill: Bill, event: Event) -> Any:
    """Return the cached tokens that the client is told; None: it is not."""
    details = bill.event(event).content["usage"].get("prompt_tokens_details") or {}
    return details.get("cached_tokens")


def prefilled(cached: object) -> Step:
    return lambda bill: bill.prefilled({"usage": usage(cached)})


def answers(loaded: Loaded = "unsaid", *, vllm: bool = False, again: bool = False, on: bool = False) -> Step:
    return lambda bill: bill.answered(loaded, adds_loads=vllm, computes_again=again, is_continued=on)


def stops(cached: int) -> Step:
    return lambda bill: bill.heard(Event.of({"metrics": {"num_cached_tokens": cached}}))


def lost(bill: Bill) -> None:
    bill.lost()


def pair(bill: Bill) -> None:
    bill.begins("prefill")


def alone(bill: Bill) -> None:
    bill.begins("alone")


def moved(bill: Bill) -> None:
    bill.begins("moved")


VLLM, FAILS_SILENTLY = answers(vllm=True), answers(vllm=True, again=True)
#: What happens, what the last node counts itself, and what the client is told.
BILLS: Mapping[str, tuple[list[Step], int | None, int | None]] = {
    "alone": ([alone, answers("none")], 48, 48),
    "alone, at a server of vLLM": ([alone, VLLM], 48, 48),
    "the prefill node has more": ([pair, prefilled(208), answers("loaded")], 0, 208),
    "the decode node has more": ([pair, prefilled(16), answers("loaded")], 48, 48),
    "the decode node has all": ([pair, answers("none")], 208, 208),
    "the prefill node has said nothing": ([pair, answers("loaded")], 16, None),
    "the prefill node tells nonsense": ([pair, prefilled(-3), answers("loaded")], 16, None),
    "the load failed": ([pair, prefilled(208), answers("failed")], 16, 16),
    "the kind of node is not known": ([pair, prefilled(208), answers()], 16, None),
    "vllm": ([pair, prefilled(208), VLLM], 219, 208),
    "vllm, without the decode server's count": ([pair, prefilled(208), VLLM], None, 208),
    "vllm, without the prefill server's count": ([pair, prefilled(None), VLLM], 219, None),
    "vllm, a load may fail silently": ([pair, prefilled(208), FAILS_SILENTLY], 219, 208),
    "vllm, a load has failed silently": ([pair, prefilled(208), FAILS_SILENTLY], 16, 16),
    "vllm, that it fails is not told": ([pair, prefilled(208), FAILS_SILENTLY], None, None),
    "moved": (
        [pair, prefilled(16), answers("loaded"), stops(48), moved, answers("loaded", on=True)],
        208,
        48,
    ),
    "moved, and computed again": (
        [pair, prefilled(16), answers("loaded"), stops(48), moved, answers("failed", on=True)],
        32,
        32,
    ),
    "moved between servers of vllm": (
        [pair, prefilled(16), VLLM, moved, answers(vllm=True, on=True)],
        240,
        16,
    ),
    "lost, and found in the cache that it left": (
        [pair, prefilled(0), answers("loaded"), lost, pair, prefilled(208), answers("loaded", on=True)],
        0,
        0,
    ),
    "lost twice, never more": (
        [pair, prefilled(64), VLLM, pair, prefilled(32), VLLM, pair, prefilled(208), VLLM],
        219,
        32,
    ),
    "lost after the last token": ([pair, prefilled(16), answers("loaded"), stops(48)], None, 48),
    "a prefill node that has computed and offers nothing": (
        [pair, prefilled(0), Bill.no_prefill, pair, prefilled(208), answers("loaded")],
        0,
        0,
    ),
    "the first count is lost with its node": (
        [alone, answers("none"), lost, alone, answers("none", on=True)],
        64,
        None,
    ),
    "what a lost node had computed is not known": ([alone, lost, alone, answers("none")], 64, None),
    "nothing is less than nothing": ([alone, lost, alone, answers("none")], 0, 0),
    "a prefill that was ended": ([pair, pair, prefilled(208), answers("loaded")], 0, None),
    "a prefill that was refused": (
        [pair, Bill.no_prefill, pair, prefilled(208), answers("loaded")],
        0,
        208,
    ),
    "the answer so far is no part of the prompt": ([alone, answers(vllm=True, on=True)], 240, NUM_PROMPT),
}


@pytest.mark.parametrize("name", BILLS)
def test_the_client_is_told_what_no_node_had_to_compute(name: str) -> None:
    steps, own, expected = BILLS[name]
    bill = Bill()
    for step in steps:
        step(bill)
    assert told(bill, last(own)) == expected
    content = {"choices": [{}], "usage": usage(own)}
    whole = json.loads(bill.whole(json.dumps(content).encode(), content))
    assert (whole["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") == expected
    assert {key: whole["usage"][key] for key in usage()} == usage()


def test_what_is_true_passes_as_the_same_bytes() -> None:
    bill = Bill()
    bill.begins("alone")
    answers("none")(bill)
    for raw in (
        b'data: {"choices": [{"text": "a"}]}\n\n',
        b'data: {"choices": [{"text": "a"}], "usage": null}\n\n',
        b'data: {"choices": [],  "usage": {"prompt_tokens": 5, "completion_tokens": 1, "total_tokens": 6}}\n\n',
        b'data: {"choices": [], "usage": {"prompt_tokens": 5, "prompt_tokens_details":  null}}\n\n',
        b'data: {"choices": [], "usage": {"prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens":4}}}\n\n',
    ):
        assert bill.event(Event(raw)).raw == raw
    event = Event(b'data: {"choices": [{"text": "say \\"usage\\""}]}\n\n')
    assert bill.event(event) is event
    assert event._content is None, "an event without counts is not parsed"
    assert bill.num_left_out == 0


def test_a_continuous_stream_has_no_details_until_they_are_known() -> None:
    bill = Bill()
    bill.begins("prefill")
    answers("loaded")(bill)
    token = Event.of({"choices": [{"text": "a"}], "usage": usage(0)})
    assert "prompt_tokens_details" not in bill.event(token).content["usage"]
    assert not bill.awaits_prefill(token)
    assert bill.awaits_prefill(last(0))
    prefilled(208)(bill)
    assert not bill.awaits_prefill(last(0))
    assert told(bill, token) == told(bill, last(0)) == 208
    plain = Event.of({"choices": [{"text": "a"}], "usage": usage()})
    assert bill.event(plain) is plain, "a server that gives details at the end alone goes on so"


NONSENSE: Mapping[str, tuple[object, object, int]] = {
    "text": ("many", None, 1),
    "a list": ([1], None, 1),
    "a negative count": (usage(0, completion_tokens=-1), {"prompt_tokens", "total_tokens"}, 1),
    "a bool": (usage(0, prompt_tokens=True), {"completion_tokens", "total_tokens"}, 1),
    "huge": (usage(0, total_tokens=MAX_TOKENS + 1), {"prompt_tokens", "completion_tokens"}, 1),
    "a float": (usage(0, total_tokens=1e300), {"prompt_tokens", "completion_tokens"}, 1),
    "text for a count": (usage(0, prompt_tokens="9"), {"completion_tokens", "total_tokens"}, 1),
    "more cached than there is": (usage(NUM_PROMPT + 1), set(usage()), 1),
    "negative cached": (usage(-1), set(usage()), 1),
    "text for cached": (usage("all"), set(usage()), 1),
    "details that are a list": (usage(prompt_tokens_details=[4]), set(usage()), 1),
    "details of the answer": (
        usage(completion_tokens_details={"reasoning_tokens": -1}),
        {*usage(), "completion_tokens_details"},
        1,
    ),
    "all of them": (usage(-1, prompt_tokens=-1, completion_tokens="x", total_tokens=[]), set(), 4),
}


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_is_left_out_and_counted(name: str) -> None:
    said, kept, num_left_out = NONSENSE[name]
    bill = Bill()
    bill.begins("alone")
    answers("none")(bill)
    got = bill.event(Event.of({"choices": [], "usage": said})).content.get("usage")
    names = None if got is None else got.keys() - {"prompt_tokens_details"}
    assert names == kept
    assert (got or {}).get("prompt_tokens_details", {}).get("cached_tokens", 0) == 0
    assert bill.num_left_out == num_left_out


def test_counts_add_up_if_all_are_known() -> None:
    assert summed([{"usage": usage(16)}, {"usage": usage(0)}]) == {
        "prompt_tokens": 2 * NUM_PROMPT,
        "completion_tokens": 8,
        "total_tokens": 2 * (NUM_PROMPT + 4),
        "prompt_tokens_details": {"cached_tokens": 16},
    }
    assert "prompt_tokens_details" not in summed([{"usage": usage(16)}, {"usage": usage()}])
    assert summed([{"usage": usage(16)}, {}]) == {}
    assert least([5, None]) is None
    assert least([0, None]) == 0


@pytest.mark.parametrize(("loaded", "expected"), [("loaded", 48), ("failed", 32)])
def test_an_answer_that_moves_keeps_the_count_of_its_first_node(loaded: Any, expected: int) -> None:
    first, second = Node(None), Node(None)
    exchange = Exchange("/v1/completions", {"stream": True}, {"X-Request-Id": "r"})
    exchange.placed()
    exchange.bill.prefilled({"usage": usage(16)})
    exchange.prefill_answered(Offer(first, {"n": 1}))  # type: ignore[arg-type]
    exchange.decode_chosen(first)  # type: ignore[arg-type]
    exchange.decode_answered(Begun(200, {}, True, b"", [], "loaded", beginning=Told()))  # type: ignore[arg-type]
    choice = {"index": 0, "text": "a", "token_ids": [7], "finish_reason": MOVED}
    figures = {"kv_transfer_params": {"n": 2}, "metrics": {"num_cached_tokens": 48}}
    exchange.events_arrived([Event.of({"choices": [choice], **figures})])
    assert exchange.state is State.MOVING
    exchange.decode_chosen(second)  # type: ignore[arg-type]
    exchange.decode_answered(Begun(200, {}, True, b"", [], loaded))
    assert told(exchange.bill, last(32 if loaded == "failed" else 208)) == expected


@pytest.mark.parametrize("is_lost", [False, True], ids=["refused", "lost"])
def test_what_a_lost_prefill_node_had_computed_is_not_known(is_lost: bool) -> None:
    exchange = Exchange("/v1/completions", {}, {"X-Request-Id": "r"})
    exchange.placed()
    exchange.prefill_lost(RuntimeError("gone"), is_lost=is_lost)
    exchange.bill.prefilled({"usage": usage(208)})
    exchange.bill.answered("loaded", adds_loads=False, computes_again=True, is_continued=False)
    assert told(exchange.bill, last(0)) == (None if is_lost else 208)


def test_what_a_decode_server_keeps_for_itself_is_not_on_the_bill_of_a_pair() -> None:
    bill = Bill()
    for step in (pair, prefilled(208), VLLM):
        step(bill)
    details = {"cached_tokens": 219, "created_cache_tokens": 1, "multimodal_tokens": {"image": 9}}
    event = Event.of({"choices": [], "usage": usage(prompt_tokens_details=details)})
    kept = {"cached_tokens": 208, "multimodal_tokens": {"image": 9}}
    assert bill.event(event).content["usage"] == usage(prompt_tokens_details=kept)


def test_a_server_of_vllm_is_not_told_the_prefill_servers_count() -> None:
    """It would report it in place of its own, which says whether a load has failed."""
    params = {"remote_engine_id": "e", "remote_prefill_cached_tokens": 208}
    assert params_of({"kv_transfer_params": params}) == {"remote_engine_id": "e"}


def usage_of_responses(cached: object, **changes: Any) -> dict[str, Any]:
    counts = {"input_tokens": NUM_PROMPT, "output_tokens": 4, "total_tokens": NUM_PROMPT + 4}
    details = {"cached_tokens": cached, "cache_write_tokens": 0}
    reasons = {"reasoning_tokens": 2}
    return {**counts, "input_tokens_details": details, "output_tokens_details": reasons, **changes}


def usage_of_messages(cached: int | None, written: int | None = None) -> dict[str, Any]:
    told = {"cache_read_input_tokens": cached, "cache_creation_input_tokens": written}
    known = {name: count for name, count in told.items() if count is not None}
    return {"input_tokens": NUM_PROMPT - sum(known.values()), "output_tokens": 4, **known}


def usage_of_generate(cached: int | None) -> dict[str, Any]:
    return usage(cached)


NAMED: Mapping[str, Callable[[Any], dict[str, Any]]] = {
    RESPONSES: usage_of_responses,
    MESSAGES: usage_of_messages,
    GENERATE: usage_of_generate,
}


def ends(path: str, said: object) -> tuple[dict[str, Any], Event]:
    """Return a whole answer of an endpoint, and the event that ends one with the counts."""
    whole = {"id": "a", "usage": said}
    if path == RESPONSES:
        return whole, Event.of({"type": "response.completed", "response": whole}, "response.completed")
    if path == MESSAGES:
        return whole, Event.of({"type": "message_delta", "delta": {}, "usage": said}, "message_delta")
    return whole, Event.of({"choices": [], "usage": said})


def told_both(bill: Bill, path: str, said: object) -> Any:
    """Return the usage that a client is told, which is the same in a whole answer and in a stream."""
    whole, event = ends(path, said)
    told = json.loads(bill.whole(json.dumps(whole).encode(), whole)).get("usage")
    assert usage_in(bill.event(event).content, dialect_of(path).usage) == (told or {})
    assert bill.event(event).name == event.name
    return told


@pytest.mark.parametrize("path", NAMED)
def test_each_endpoint_has_the_count_by_its_own_names(path: str) -> None:
    named, dialect = NAMED[path], dialect_of(path)
    bill = Bill(dialect)
    bill.begins("prefill")
    bill.prefilled({"usage": named(208)})
    VLLM(bill)
    assert told_both(bill, path, named(219)) == named(208)
    assert bill.num_left_out == 0
    assert num_prompt_of(named(219), dialect.usage) == NUM_PROMPT
    raw = ends(path, named(208))[1]
    assert bill.event(raw) is raw
    for found, expected in ((None, None), (300, None)):
        bill = Bill(dialect)
        bill.begins("prefill")
        bill.prefilled({"usage": named(found)} if found is None or path != MESSAGES else {})
        VLLM(bill)
        assert told_both(bill, path, named(219)) == named(0 if path == RESPONSES else expected)


def test_what_servers_of_vllm_add_to_details_is_not_of_the_pair() -> None:
    bill = Bill(dialect_of(RESPONSES))
    for step in (pair, VLLM):
        step(bill)
    bill.prefilled({"usage": usage_of_responses(208)})
    details = {"cached_tokens": 219, "cache_write_tokens": 1, "cached_tokens_per_turn": [219]}
    said = usage_of_responses(0, input_tokens_details=details)
    assert told_both(bill, RESPONSES, said) == usage_of_responses(208)
    bill = Bill(dialect_of(MESSAGES))
    pair(bill)
    bill.prefilled({"usage": usage_of_messages(208, 12)})
    VLLM(bill)
    assert told_both(bill, MESSAGES, usage_of_messages(219, 1)) == usage_of_messages(208)


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
def test_the_frame_of_a_stream_waits_for_no_count(path: str) -> None:
    bill = Bill(dialect_of(path))
    pair(bill)
    VLLM(bill)
    message = {"usage": {"input_tokens": NUM_PROMPT, "output_tokens": 0}}
    frame = {
        RESPONSES: Event.of({"response": {"usage": None}}, "response.created"),
        MESSAGES: Event.of({"type": "message_start", "message": message}, "message_start"),
    }[path]
    assert not bill.awaits_prefill(frame)
    assert bill.event(frame) is frame
    assert bill.awaits_prefill(ends(path, NAMED[path](219))[1])


def test_nonsense_of_other_endpoints_is_left_out_and_counted() -> None:
    for path, said, kept, num in (
        (RESPONSES, usage_of_responses(0, output_tokens=-1), {"output_tokens"}, 1),
        (RESPONSES, usage_of_responses("all"), set(), 1),
        (RESPONSES, usage_of_responses(NUM_PROMPT + 1), set(), 1),
        (RESPONSES, usage_of_responses(0, output_tokens_details=[1]), {"output_tokens_details"}, 1),
        (MESSAGES, {**usage_of_messages(0), "output_tokens": True}, {"output_tokens"}, 1),
        (MESSAGES, usage_of_messages(None) | {"input_tokens": 1e300}, {"input_tokens"}, 1),
        # How much of the prompt the rest is cannot be known either.
        (
            MESSAGES,
            usage_of_messages(0) | {"cache_read_input_tokens": "9"},
            {"input_tokens", "cache_read_input_tokens"},
            1,
        ),
    ):
        bill = Bill(dialect_of(path))
        alone(bill)
        VLLM(bill)
        content = ends(path, said)[0]
        got = json.loads(bill.whole(json.dumps(content).encode(), content))["usage"]
        assert said.keys() - got.keys() == kept, (path, said)
        assert bill.num_left_out == num
        if path == RESPONSES:
            assert got["input_tokens_details"] == {"cached_tokens": 0, "cache_write_tokens": 0}
    bill = Bill(dialect_of(RESPONSES))
    both = {"usage": {}, "response": {"usage": [1]}}
    assert bill.event(Event.of(both, "response.completed")).content["response"] == {}


# -- through a router --------------------------------------------------------------------------------


class Node:
    """Answers with this usage, once it may."""

    paths = (RESPONSES, MESSAGES, GENERATE)

    def __init__(self, said: object, **more: Any) -> None:
        self.said, self.more = said, more
        self.is_asked, self.may_answer = asyncio.Event(), asyncio.Event()
        self.may_answer.set()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.is_asked.set()
        await self.may_answer.wait()
        reason = {"index": 0, "text": "a", "finish_reason": "length"}
        headers = {"X-KV-Transfer": "loaded"}
        counts = {} if self.said is None else {"usage": self.said}
        if not body.get("stream"):
            whole = {"choices": [reason], **counts, **self.more}
            # In all forms at once, so that each endpoint finds its own.
            return web.json_response({"stop_reason": "x", "status": "completed", **whole}, headers=headers)
        stream = web.StreamResponse(headers={**headers, "Content-Type": "text/event-stream"})
        await stream.prepare(request)
        if request.path in (RESPONSES, MESSAGES):
            _, last_one = ends(request.path, self.said)
            for event in (last_one, *([Event.of({}, "message_stop")] if request.path == MESSAGES else ())):
                await stream.write(event.raw)
            return stream
        for content in ({"choices": [reason]}, *([{"choices": [], **counts}] if counts else ())):
            await stream.write(Event.of(content).raw)
        await stream.write(b"data: [DONE]\n\n")
        return stream


async def asked(client: Any, **fields: Any) -> Any:
    """Return the usage that the client is told."""
    async with asyncio.timeout(DEADLINE_S), client.post("/v1/completions", json=fields) as response:
        assert response.status == 200, await response.text()
        payload = await response.text()
    if not fields.get("stream"):
        return json.loads(payload).get("usage")
    events = [json.loads(line.removeprefix("data: ")) for line in payload.split("\n\n") if "{" in line]
    return events[-1].get("usage")


async def left_out(client: Any) -> float:
    async with client.get("/metrics") as response:
        page = await response.text()
    return next(float(line.split()[-1]) for line in page.splitlines() if line.startswith(METRIC))


METRIC = "kvferry_router_nonsense_usage_total "


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", NONSENSE)
async def test_a_node_that_tells_nonsense_costs_no_answer(name: str, is_stream: bool) -> None:
    said, _, num_left_out = NONSENSE[name]
    prefill, decode = Node(said, kv_transfer_params=PLACE), Node(said)
    async with routed([prefill], [decode]) as client:
        told = await asked(client, prompt="p", stream=is_stream)
        assert told is None or all(type(told[key]) is int for key in usage() if key in told)
        assert "cached_tokens" not in json.dumps(told) or name not in ("negative cached", "text for cached")
        assert await left_out(client) == 2 * num_left_out
        async with client.get("/page/state") as response:
            (one,) = (await response.json())["finished"]
        assert one["prompt_tokens"] in (None, NUM_PROMPT)
        assert one["output_tokens"] in (None, 4)


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", NAMED)
async def test_clients_and_the_page_have_the_counts_of_each_endpoint(path: str, is_stream: bool) -> None:
    prefill, decode = Node(NAMED[path](208), kv_transfer_params=PLACE), Node(NAMED[path](0))
    bodies: Mapping[str, Any] = {
        RESPONSES: {"input": "p"},
        MESSAGES: {"model": "", "messages": [{"role": "user", "content": "p"}], "max_tokens": 4},
        GENERATE: {"token_ids": [1], "sampling_params": {}},
    }
    async with routed([prefill], [decode]) as client:
        body = {**bodies[path], "stream": is_stream}
        async with asyncio.timeout(DEADLINE_S), client.post(path, json=body) as response:
            assert response.status == 200, await response.text()
            payload = await response.read()
        contents = [event.content for event in events_of(payload)] if is_stream else [json.loads(payload)]
        assert NAMED[path](208) in [usage_in(content, dialect_of(path).usage) for content in contents]
        async with client.get("/page/state") as response:
            (one,) = (await response.json())["finished"]
        assert (one["prompt_tokens"], one["output_tokens"]) == (NUM_PROMPT, 4)


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "streamed"])
async def test_the_end_of_an_answer_waits_a_moment_for_the_prefill_nodes_count(is_stream: bool) -> None:
    prefill, decode = Node(usage(208), kv_transfer_params=PLACE), Node(usage(0))
    let_rendezvous(prefill, decode)
    async with routed([prefill], [decode]) as client:
        prefill.may_answer.clear()
        asking = asyncio.create_task(asked(client, prompt="p", stream=is_stream))
        await decode.is_asked.wait()
        asyncio.get_running_loop().call_later(0.1, prefill.may_answer.set)
        assert (await asking)["prompt_tokens_details"] == {"cached_tokens": 208}


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "streamed"])
async def test_the_answer_to_several_prompts_has_what_is_true_of_all(is_stream: bool) -> None:
    prefill = Node(usage(208), kv_transfer_params=PLACE)
    decode = Node(usage(0), model="m", metrics={"ttft_s": 1}, kv_transfer_params=None)
    numbers = iter(range(9))
    handle = decode.handle

    async def numbered(request: web.Request) -> web.StreamResponse:
        number = next(numbers)
        decode.more |= {"metrics": {"ttft_s": number}, "created": 7 + number}
        return await handle(request)

    decode.handle = numbered  # type: ignore[method-assign]
    async with routed([prefill], [decode], rendezvous=False) as client:
        told = await asked(client, prompt=["p", "q"], stream=is_stream)
        assert told == summed([{"usage": usage(208)}] * 2)
        async with client.post("/v1/completions", json={"prompt": ["p", "q"]}) as response:
            body = await response.json()
        assert "metrics" not in body
        assert body["model"] == "m"
        assert body["created"] >= 7
        kept, decode.said = decode.said, None
        assert await asked(client, prompt=["p", "q"], stream=is_stream) is None
        counts = iter([kept, None])

        async def halved(request: web.Request) -> web.StreamResponse:
            decode.said = next(counts)
            return await handle(request)

        decode.handle = halved  # type: ignore[method-assign]
        assert await asked(client, prompt=["p", "q"], stream=is_stream) is None
