"""Failed handoffs: the producer is told at once, and the router reports between which nodes, how often and
why.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient

from kvferry.router.answer.handoffs import RESULTS
from tests.support.fake_nodes import let_rendezvous, routed
from tests.support.patience import DEADLINE_S, until

PARAMS = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "e",
    "remote_block_ids": [[3]],
}
WHY = "shm cannot connect to zeromq://127.0.0.1:4000"

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class Prefill:
    """A node that makes offers, and records which of them are released.

    In a rendezvous its prefill does not end.
    """

    releases: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""
    hung_up: asyncio.Event = field(default_factory=asyncio.Event)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.url = f"http://{request.host}"
        try:
            if "rendezvous" in (await request.json())["kv_transfer_params"]:
                await asyncio.sleep(DEADLINE_S)
        except asyncio.CancelledError:
            self.hung_up.set()
            raise
        return web.json_response({"choices": [], "kv_transfer_params": PARAMS})

    async def release(self, request: web.Request) -> web.StreamResponse:
        self.releases.append(await request.json())
        return web.json_response({"choices": []})

    async def is_released(self) -> bool:
        return bool(self.releases)


@dataclass
class Decode:
    """A node that answers with the test's function."""

    answer: Answer
    url: str = ""
    policy: str = ""

    async def health(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"status": "ok", "load_failure_policy": self.policy})

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.url = f"http://{request.host}"
        return await self.answer(request)


def whole(told: str = "", error: str = "", status: int = 200) -> Answer:
    """Make a handler of whole answers that say in header and body how the load ended."""

    async def answer(request: web.Request) -> web.StreamResponse:
        headers = {"X-KV-Transfer": told} if told else {}
        transfer = {"error": error} if error else None
        body = {"choices": [{"text": "x"}], "metrics": {"transfer": transfer}}
        return web.json_response(body, status=status, headers=headers)

    return answer


async def refuse(request: web.Request) -> web.StreamResponse:
    return web.json_response({"error": {"message": "max_tokens is too large"}}, status=400)


async def die(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def ask(client: TestClient[Any, Any], **fields: Any) -> tuple[int, str]:
    body = {"prompt": "p", "model": "m", **fields}
    async with client.post("/v1/completions", json=body) as response:
        return response.status, await response.text()


async def health_of(client: TestClient[Any, Any]) -> dict[str, Any]:
    async with client.get("/health") as response:
        assert response.status == 200
        return dict(await response.json())


async def handoffs(client: TestClient[Any, Any]) -> dict[str, int]:
    """Return the counts of the only pair from `/metrics`. Check that `/health` has the same."""
    (pair,) = (await health_of(client))["handoffs"]
    async with client.get("/metrics") as response:
        text = await response.text()
    counts = {}
    for line in text.splitlines():
        if line.startswith("kvferry_router_handoffs_total{"):
            assert f'prefill="{pair["prefill"]}"' in line
            assert f'decode="{pair["decode"]}"' in line
            result = line.split('result="')[1].split('"')[0]
            counts[result] = int(float(line.split()[-1]))
    assert counts == {result: pair[result] for result in counts}
    return {result: number for result, number in counts.items() if number}


def assert_release(prefill: Prefill) -> None:
    """Check the release: an ordinary request that contains the node's params, so that every node understands
    it.
    """
    (release,) = prefill.releases
    assert (release["prompt"], release["max_tokens"], release["model"]) == ([0], 1, "m")
    flags = {"do_remote_prefill": False, "do_remote_decode": False, "do_release": True}
    released = release["kv_transfer_params"]
    expected = PARAMS if released.get("rendezvous") is None else {"rendezvous": released["rendezvous"]}
    assert {**expected, **flags}.items() <= released.items()


@pytest.mark.parametrize("told", ["failed", ""], ids=["by the header", "by the answer alone"])
async def test_a_pair_that_never_hands_over_is_reported_in_health_metrics_and_log(
    told: str, caplog: pytest.LogCaptureFixture
) -> None:
    prefill, decode = Prefill(), Decode(whole(told, WHY))
    async with routed([prefill], [decode]) as client:
        for _ in range(12):
            assert (await ask(client))[0] == 200
        assert await handoffs(client) == {"failed": 12}
        status = (await health_of(client))["status"]
        assert status.startswith(
            f"ok, but 12 of 12 handoffs from {prefill.url} to {decode.url} failed: {WHY}"
        )
        assert "same --connector" in status
    assert len(prefill.releases) == 12
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    for part in (prefill.url, decode.url, WHY, "same --connector"):
        assert part in warning


@pytest.mark.parametrize("told", ["loaded", "none", ""])
async def test_a_successful_handoff_is_counted_and_not_released(told: str) -> None:
    prefill = Prefill()
    async with routed([prefill], [Decode(whole(told))]) as client:
        await ask(client)
        assert await handoffs(client) == {told or "unknown": 1}
        assert (await health_of(client))["status"] == "ok"
    assert not prefill.releases


async def test_a_pair_that_hands_over_again_is_healthy() -> None:
    decode = Decode(whole("failed", WHY))
    async with routed([Prefill()], [decode]) as client:
        await ask(client)
        decode.answer = whole("loaded")
        await ask(client)
        assert await handoffs(client) == {"failed": 1, "loaded": 1}
        health = await health_of(client)
        assert (health["status"], health["handoffs"][0]["last_error"]) == ("ok", WHY)


async def test_the_producer_is_told_about_a_failed_handoff_before_the_answer_ends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    prefill = Prefill()

    async def answer(request: web.Request) -> web.StreamResponse:
        headers = {"Content-Type": "text/event-stream", "X-KV-Transfer": "failed"}
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        await response.write(b'data: {"choices": [{"text": "t"}]}\n\n')
        await until(prefill.is_released)
        last = {"choices": [], "metrics": {"transfer": {"error": WHY}}}
        await response.write(b"data: " + json.dumps(last).encode() + b"\n\ndata: [DONE]\n\n")
        return response

    async with routed([prefill], [Decode(answer)]) as client:
        async with client.post(
            "/v1/completions", json={"prompt": "p", "model": "m", "stream": True}
        ) as reply:
            assert reply.headers["X-KV-Transfer"] == "failed"
            assert (await reply.text()).endswith("[DONE]\n\n")
        assert await handoffs(client) == {"failed": 1}
        assert WHY in (await health_of(client))["status"]
    assert_release(prefill)
    assert WHY in caplog.text


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize(
    ("answer", "status"),
    [(refuse, 400), (die, 503), (whole(status=503), 503), (whole(status=500), 500)],
    ids=["refuses", "is lost", "is out of service", "fails"],
)
async def test_an_offer_that_the_decode_node_does_not_take_is_released(
    answer: Answer, status: int, at_once: bool
) -> None:
    prefill, decode = Prefill(), Decode(answer)
    if at_once:
        let_rendezvous(prefill, decode)
    async with routed([prefill], [decode]) as client:
        assert (await ask(client))[0] == status
        await until(prefill.is_released)
        assert await handoffs(client) == {"unanswered": 1}
        if at_once:
            await asyncio.wait_for(prefill.hung_up.wait(), DEADLINE_S)
    assert_release(prefill)


async def test_a_prefill_whose_handoff_fails_is_not_computed_to_its_end() -> None:
    prefill, decode = Prefill(), Decode(whole("failed", WHY))
    let_rendezvous(prefill, decode)
    async with routed([prefill], [decode]) as client:
        assert (await ask(client))[0] == 200
        await asyncio.wait_for(prefill.hung_up.wait(), DEADLINE_S)
        await until(prefill.is_released)
        assert await handoffs(client) == {"failed": 1}
    assert_release(prefill)


@pytest.mark.parametrize("at_once", [False, True])
async def test_an_offer_whose_client_left_is_released(at_once: bool) -> None:
    prefill, asked = Prefill(), asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        asked.set()
        await asyncio.sleep(DEADLINE_S)
        raise AssertionError("the router did not hang up")

    decode = Decode(answer)
    if at_once:
        let_rendezvous(prefill, decode)
    async with routed([prefill], [decode]) as client:
        asking = asyncio.create_task(ask(client))
        await asked.wait()
        asking.cancel()
        await until(prefill.is_released)
    assert_release(prefill)


async def test_an_offer_whose_answer_is_on_its_way_when_the_client_leaves_is_released() -> None:
    """The router does not know the offer, so it releases it by the name that it gave to the request."""
    names: list[str] = []

    class Answering(Prefill):
        async def handle(self, request: web.Request) -> web.StreamResponse:
            names.append((await request.json())["kv_transfer_params"]["release_as"])
            asking.cancel()
            await asyncio.sleep(DEADLINE_S)
            raise AssertionError("the router did not hang up")

    prefill = Answering()
    async with routed([prefill], [Decode(whole())]) as client:
        asking = asyncio.create_task(ask(client))
        await until(prefill.is_released)
    (release,) = prefill.releases
    assert (release["prompt"], release["max_tokens"], release["model"]) == ([0], 1, "m")
    flags = {"do_remote_prefill": False, "do_remote_decode": False, "do_release": True}
    assert release["kv_transfer_params"] == {"release_as": names[0], **flags}


async def test_a_release_that_is_not_answered_delays_nothing() -> None:
    class Deaf(Prefill):
        async def release(self, request: web.Request) -> web.StreamResponse:
            await asyncio.sleep(DEADLINE_S)
            raise AssertionError("the router waited too long")

    async with routed([Deaf()], [Decode(whole("failed", WHY))]) as client:
        for _ in range(3):
            assert (await ask(client))[0] == 200


@pytest.mark.parametrize("prompt", [["a", "b"], [[1, 2], [3]]], ids=["texts", "token ids"])
async def test_each_of_several_prompts_has_a_handoff_of_its_own(prompt: list[Any]) -> None:
    prefill = Prefill()
    async with routed([prefill], [Decode(whole())]) as client:
        status, text = await ask(client, prompt=prompt)
        assert status == 200, text
        report = await (await client.get("/health")).json()
        assert sum(report["handoffs"][0][result] for result in RESULTS) == 2
        for one in (prompt[:1], [1, 2, 3]):
            assert (await ask(client, prompt=one))[0] == 200
        too_many = json.loads((await ask(client, prompt=["a"] * 257))[1])["error"]
        assert too_many["param"] == "prompt"
        assert "at most 256" in too_many["message"]


@pytest.mark.parametrize("prompt", [[[1], "a"], ["a", [1]], ["a", 1], [1, [1]], ["a", None]], ids=str)
async def test_prompts_of_different_kinds_are_refused(prompt: list[Any]) -> None:
    prefill = Prefill()
    async with routed([prefill], [Decode(whole())]) as client:
        status, text = await ask(client, prompt=prompt)
        report = await (await client.get("/health")).json()
    assert (status, json.loads(text)["error"]["param"]) == (400, "prompt")
    assert not report["handoffs"] or not any(report["handoffs"][0][result] for result in RESULTS)


@pytest.mark.parametrize(
    ("mode", "policy", "status"),
    [
        ("auto", "recompute", 200),
        ("auto", "fail", 503),
        ("auto", "", 503),
        ("always", "", 200),
        ("never", "recompute", 503),
    ],
)
async def test_a_decode_node_is_used_alone_as_its_policy_and_the_option_say(
    mode: Any, policy: str, status: int
) -> None:
    bodies = []

    async def answer(request: web.Request) -> web.StreamResponse:
        bodies.append(await request.json())
        return web.json_response({"choices": [{"text": "alone"}]})

    class Down(Prefill):
        async def handle(self, request: web.Request) -> web.StreamResponse:
            return await die(request)

    async with routed([Down()], [Decode(answer, policy=policy)], decode_alone=mode) as client:
        got, text = await ask(client, kv_transfer_params={"from": "the client"})
        assert got == status
        assert ("no prefill node" in text) == (status == 503)
    assert bodies == ([{"prompt": "p", "model": "m"}] if status == 200 else [])


async def test_a_router_with_only_decode_nodes_is_in_service_and_says_so() -> None:
    class Leaving(Prefill):
        is_leaving = False

        async def health(self, request: web.Request) -> web.StreamResponse:
            return web.json_response({"status": "draining"}, status=503 if self.is_leaving else 200)

    leaving, decode = Leaving(), Decode(whole(), policy="recompute")
    async with routed([leaving], [decode], check_interval_s=0.02, check_timeout_s=10) as client:
        leaving.is_leaving = True

        async def says_so() -> bool:
            return "no prefill node is ready" in (await health_of(client))["status"]

        await until(says_so)
        assert (await ask(client))[0] == 200
