"""The router starts a decode while its prefill still runs, and handles failures of both."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient

from tests.support.fake_nodes import routed

EARLY = {"do_remote_prefill": True, "remote_engine_id": "e", "remote_num_tokens": 40}
DEADLINE_S = 10.0


@dataclass
class Prefill:
    """A node that streams events when the test allows it, and notices when the router hangs up."""

    events: Sequence[bytes]
    may_send: Sequence[asyncio.Event] = ()
    bodies: list[dict[str, Any]] = field(default_factory=list)
    hung_up: asyncio.Event = field(default_factory=asyncio.Event)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        try:
            for index, event in enumerate(self.events):
                if index < len(self.may_send):
                    await asyncio.wait_for(self.may_send[index].wait(), DEADLINE_S)
                if event == CRASH:
                    assert request.transport is not None
                    request.transport.abort()
                    break
                # In pieces, as a network may deliver them.
                await response.write(event[:5])
                await response.write(event[5:] + b"\n\n")
        except asyncio.CancelledError:
            self.hung_up.set()
            raise
        return response


@dataclass
class Decode:
    """A node that answers, and signals when it is asked."""

    status: int = 200
    bodies: list[dict[str, Any]] = field(default_factory=list)
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    may_answer: asyncio.Event | None = None

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        self.asked.set()
        if self.may_answer is not None:
            await asyncio.wait_for(self.may_answer.wait(), DEADLINE_S)
        return web.json_response({"choices": [{"text": "answer"}]}, status=self.status)


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps({"choices": [], **fields}).encode()


DONE, CRASH = b"data: [DONE]", b"crash"
EARLY_EVENT = event(kv_transfer_params=EARLY)


def set_event() -> asyncio.Event:
    ready = asyncio.Event()
    ready.set()
    return ready


async def ask(client: TestClient[Any, Any]) -> tuple[int, str]:
    async with client.post("/v1/completions", json={"prompt": "p", "max_tokens": 9}) as response:
        return response.status, await response.text()


async def lost_prefills(client: TestClient[Any, Any]) -> int:
    async with client.get("/metrics") as response:
        lines = (await response.text()).splitlines()
    (value,) = (line.split()[1] for line in lines if line.startswith("kvferry_router_lost_prefills_total "))
    return int(float(value))


async def test_the_decode_begins_while_the_prefill_runs() -> None:
    decode = Decode()
    # The prefill ends only after the decode has been asked.
    prefill = Prefill([EARLY_EVENT, event(finish=1), DONE], [set_event(), decode.asked])
    async with routed([prefill], [decode], overlap=True) as client:
        assert (await ask(client))[0] == 200
        assert await lost_prefills(client) == 0
    wish = prefill.bodies[0]["kv_transfer_params"]
    assert (wish["do_remote_decode"], wish["overlap"], prefill.bodies[0]["stream"]) == (True, True, True)
    assert decode.bodies == [
        {"prompt": "p", "max_tokens": 9, "kv_transfer_params": {**EARLY, "offer_answer": False}}
    ]
    assert not prefill.hung_up.is_set()


async def test_a_prefill_without_an_early_offer_is_waited_for() -> None:
    decode = Decode()
    prefill = Prefill([event(kv_transfer_params=None), event(kv_transfer_params=EARLY, finish=1), DONE])
    async with routed([prefill], [decode], overlap=True) as client:
        await ask(client)
    assert decode.bodies[0]["kv_transfer_params"] == {**EARLY, "offer_answer": False}


async def test_a_node_that_does_not_stream_is_understood() -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        return web.json_response({"choices": [], "kv_transfer_params": EARLY})

    decode = Decode()
    prefill = Decode()
    prefill.handle = handle  # type: ignore[method-assign]
    async with routed([prefill], [decode], overlap=True) as client:
        assert (await ask(client))[0] == 200
    assert decode.bodies[0]["kv_transfer_params"] == {**EARLY, "offer_answer": False}


@pytest.mark.parametrize(
    "ending", [[CRASH], [event(error={"message": "out of luck"})], []], ids=["crash", "error", "end"]
)
@pytest.mark.parametrize("is_early", [True, False], ids=["before the offer", "after the offer"])
async def test_a_prefill_that_fails_is_replaced_before_its_offer_and_left_to_the_decode_node_after_it(
    ending: list[bytes], is_early: bool
) -> None:
    decode = Decode()
    broken = Prefill(ending) if is_early else Prefill([EARLY_EVENT, *ending])
    broken.may_send = [set_event(), decode.asked]
    other = Prefill([EARLY_EVENT, DONE])
    async with routed([broken, other], [decode], overlap=True) as client:
        assert (await ask(client))[0] == 200
        assert await lost_prefills(client) == (0 if is_early else 1)
    assert (len(broken.bodies), len(other.bodies), len(decode.bodies)) == (1, int(is_early), 1)


async def test_when_the_decode_node_is_gone_its_prefill_is_cancelled_and_repeated() -> None:
    gone, other = Decode(status=503), Decode()
    never = asyncio.Event()
    first = Prefill([EARLY_EVENT, DONE], [set_event(), never])
    second = Prefill([EARLY_EVENT, DONE])
    async with routed([first, second], [gone, other], overlap=True) as client:
        assert (await ask(client))[0] == 200
        await asyncio.wait_for(first.hung_up.wait(), DEADLINE_S)
    assert (len(gone.bodies), len(other.bodies), len(second.bodies)) == (1, 1, 1)


async def test_a_client_that_hangs_up_ends_both() -> None:
    never = asyncio.Event()
    decode = Decode(may_answer=never)
    prefill = Prefill([EARLY_EVENT, DONE], [set_event(), never])
    async with routed([prefill], [decode], overlap=True) as client:
        asking = asyncio.create_task(ask(client))
        await asyncio.wait_for(decode.asked.wait(), DEADLINE_S)
        asking.cancel()
        await asyncio.wait_for(prefill.hung_up.wait(), DEADLINE_S)
