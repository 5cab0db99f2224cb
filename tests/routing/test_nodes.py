"""When a node counts as ready, draining or gone, and what happens to its requests."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import ClientConnectorError, ConnectionTimeoutError, ServerDisconnectedError, web
from aiohttp.test_utils import TestClient

from kvferry.router.nodes.pool import NodeGoneError, UpstreamNode
from kvferry.router.nodes.reading import kept_alive_socket
from kvferry.router.nodes.states import Health, NodeState
from tests.support.fake_nodes import routed
from tests.support.patience import DEADLINE_S, until

#: Frequent checks with a short timeout.
CHECKS: dict[str, Any] = {"check_interval_s": 0.02, "check_timeout_s": 0.5}
#: Checks that succeed on a slow machine, too.
PATIENT_CHECKS: dict[str, Any] = {"check_interval_s": 0.02, "check_timeout_s": 10.0}
PARAMS = {"do_remote_prefill": True, "remote_engine_id": "e"}
EVENTS = [b'data: {"n": 1}\n\n', b'data: {"n": 2}\n\n', b"data: [DONE]\n\n"]

OK, FROZEN = "ok", "frozen"


@dataclass
class Player:
    """A node that answers `/health` as the test says, and completions when the test allows it."""

    says: str | dict[str, Any] = OK
    num_checks: int = 0
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    may_end: asyncio.Event = field(default_factory=asyncio.Event)
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    num_asked: int = 0
    dies: bool = False

    async def health(self, request: web.Request) -> web.StreamResponse:
        self.num_checks += 1
        if self.says == FROZEN:
            await asyncio.sleep(DEADLINE_S)
        if self.says == OK:
            return web.json_response({"status": "ok"})
        return web.json_response(self.says, status=503)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if (body.get("kv_transfer_params") or {}).get("do_remote_decode"):
            return web.json_response({"choices": [], "kv_transfer_params": PARAMS})
        self.num_asked += 1
        try:
            return await (self._stream(request) if body.get("stream") else self._whole(request))
        except asyncio.CancelledError:
            self.aborted.set()
            raise

    async def _whole(self, request: web.Request) -> web.StreamResponse:
        self.asked.set()
        await self._end(request)
        return web.json_response({"choices": [{"text": "answer"}]})

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(EVENTS[0])
        self.asked.set()
        await self._end(request)
        for event in EVENTS[1:]:
            await response.write(event)
        return response

    async def _end(self, request: web.Request) -> None:
        async with asyncio.timeout(DEADLINE_S):
            await self.may_end.wait()
        if self.dies:
            assert request.transport is not None
            request.transport.abort()


async def ask(client: TestClient[Any, Any], **fields: Any) -> tuple[int, str]:
    async with client.post("/v1/completions", json={"prompt": "p", **fields}) as response:
        return response.status, await response.text()


async def health_of(client: TestClient[Any, Any], role: str) -> dict[str, Any]:
    """Return what the router reports about its node with that role."""
    async with client.get("/health") as response:
        (node,) = (node for node in (await response.json())["nodes"] if node["role"] == role)
    return dict(node)


async def until_state(client: TestClient[Any, Any], state: str, role: str = "decode") -> None:
    async def is_there() -> bool:
        return bool((await health_of(client, role))["state"] == state)

    await until(is_there)


async def until_checked(node: Player, times: int) -> None:
    wanted = node.num_checks + times

    async def is_done() -> bool:
        return node.num_checks >= wanted

    await until(is_done)


def changes_of(caplog: pytest.LogCaptureFixture, role: str) -> list[str]:
    """Return the states in the log's lines about nodes with that role, in order."""
    lines = [record.getMessage() for record in caplog.records if record.name == "kvferry.router.nodes.pool"]
    return [line.split(" is ")[1].split(":")[0] for line in lines if line.startswith(f"{role} node")]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_may_take_as_long_as_its_node_is_healthy(
    stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    decode = Player()
    async with routed([Player()], [decode], **PATIENT_CHECKS) as client:
        asking = asyncio.create_task(ask(client, stream=stream))
        await decode.asked.wait()
        await until_checked(decode, 10)
        assert not asking.done()
        decode.may_end.set()
        assert (await asking)[0] == 200
    assert changes_of(caplog, "decode") == ["ready"]


@pytest.mark.parametrize("stream", [False, True])
async def test_the_limit_on_an_answer_ends_only_that_answer(stream: bool) -> None:
    slow, quick = Player(), Player()
    quick.may_end.set()
    async with routed([Player()], [slow, quick], answer_timeout_s=1.0, **PATIENT_CHECKS) as client:
        status, text = await ask(client, stream=stream)
        assert status == (200 if stream else 504)
        error = json.loads(text.split("\n\n")[-3].removeprefix("data: ") if stream else text)["error"]
        assert "1 s" in error["message"]
        assert "--answer-timeout-s" in error["message"]
        await asyncio.wait_for(slow.aborted.wait(), DEADLINE_S)
        assert (await ask(client, stream=stream))[0] == 200
        async with client.get("/health") as response:
            nodes = (await response.json())["nodes"]
        assert [node["state"] for node in nodes] == ["ready"] * 3


async def test_the_whole_answer_of_a_frozen_node_comes_from_another_node() -> None:
    frozen, other = Player(), Player()
    other.may_end.set()
    async with routed([Player()], [frozen, other], **CHECKS) as client:
        asking = asyncio.create_task(ask(client))
        await frozen.asked.wait()
        frozen.says = FROZEN
        assert (await asking)[0] == 200
        assert (frozen.num_asked, other.num_asked) == (1, 1)
        await asyncio.wait_for(frozen.aborted.wait(), DEADLINE_S)


async def test_the_stream_of_a_frozen_node_ends_with_the_result_of_the_health_check() -> None:
    frozen = Player()
    async with routed([Player()], [frozen], **CHECKS) as client:
        asking = asyncio.create_task(ask(client, stream=True))
        await frozen.asked.wait()
        frozen.says = FROZEN
        _, text = await asking
        assert "lost in the middle" in text
        assert "/health did not answer within 0.5 s" in text
        assert text.endswith("data: [DONE]\n\n")
        status, refusal = await ask(client)
        assert status == 503
        assert "/health did not answer" in refusal


async def test_a_frozen_prefill_node_is_replaced() -> None:
    frozen, other, decode = FrozenPrefill(), Player(), Player()
    decode.may_end.set()
    async with routed([frozen, other], [decode], **CHECKS) as client:
        asking = asyncio.create_task(ask(client))
        await frozen.asked.wait()
        frozen.says = FROZEN
        assert (await asking)[0] == 200


class FrozenPrefill(Player):
    """A prefill node that never answers."""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.asked.set()
        await asyncio.sleep(DEADLINE_S)
        raise AssertionError("the router waited too long")


async def test_one_broken_connection_does_not_make_a_node_gone(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    breaking = Player(dies=True)
    breaking.may_end.set()
    async with routed([Player()], [breaking], **PATIENT_CHECKS) as client:
        assert (await ask(client))[0] == 503
        breaking.dies = False
        assert (await ask(client))[0] == 200
    assert changes_of(caplog, "decode") == ["ready"]


async def test_a_draining_node_gets_no_new_requests_and_finishes_its_own(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    draining, other = Player(), Player()
    other.may_end.set()
    async with routed([Player()], [draining, other], **PATIENT_CHECKS) as client:
        asking = asyncio.create_task(ask(client, stream=True))
        await draining.asked.wait()
        draining.says = {"status": "draining"}
        await until_checked(draining, 3)
        for _ in range(3):
            assert (await ask(client))[0] == 200
        assert (draining.num_asked, other.num_asked) == (1, 3)
        draining.may_end.set()
        assert await asking == (200, b"".join(EVENTS).decode())
    assert changes_of(caplog, "decode") == ["ready", "ready", "draining"]


@pytest.mark.parametrize("word", ["starting", "failing"])
async def test_a_node_that_cannot_take_requests_finishes_those_it_has(word: str) -> None:
    node = Player()
    async with routed([Player()], [node], **PATIENT_CHECKS) as client:
        asking = asyncio.create_task(ask(client, stream=True))
        await node.asked.wait()
        node.says = {"status": word, "error": "the handoff thread ended"}
        await until_state(client, "gone")
        status, text = await ask(client)
        assert status == 503
        assert f"/health says {word}: the handoff thread ended" in text
        node.may_end.set()
        assert await asking == (200, b"".join(EVENTS).decode())


async def test_a_dead_engine_ends_the_requests_at_its_node() -> None:
    node = Player()
    async with routed([Player()], [node], **PATIENT_CHECKS) as client:
        asking = asyncio.create_task(ask(client))
        await node.asked.wait()
        node.says = {"status": "dead", "error": "out of memory"}
        status, text = await asking
        assert status == 503
        assert "/health says dead: out of memory" in text


@pytest.mark.parametrize("stream", [False, True])
async def test_when_a_node_dies_the_clients_error_contains_the_health_checks_reason(stream: bool) -> None:
    node = Player(dies=True)
    # Only the check after the broken connection can find the cause.
    async with routed([Player()], [node]) as client:
        asking = asyncio.create_task(ask(client, stream=stream))
        await node.asked.wait()
        node.says = {"status": "dead", "error": "a worker was killed"}
        node.may_end.set()
        status, text = await asking
        assert status == (200 if stream else 503)
        assert "/health says dead: a worker was killed" in text


async def test_a_nodes_last_health_is_remembered_when_its_process_is_gone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    node = UpstreamNode("decode", "http://dying")
    node.note(Health(NodeState.READY))
    node.note(Health(NodeState.DRAINING, "/health says draining", is_reported=True))
    node.note(Health(NodeState.GONE, "the process is gone: connection refused"))
    assert node.last_error.endswith("connection refused; before that /health says draining")
    node.note(Health(NodeState.READY))
    assert not node.last_error
    assert changes_of(caplog, "decode") == ["ready", "draining", "gone", "ready"]
    # No warning, because the node had announced its end.
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_a_node_that_starts_with_the_router_is_no_loss(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    node = UpstreamNode("decode", "http://young")
    node.note(Health(NodeState.GONE, "/health says starting", is_reported=True))
    node.note(Health(NodeState.READY))
    node.note(Health(NodeState.GONE, "connection refused"))
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", "decode node http://young is not ready yet: /health says starting"),
        ("INFO", "decode node http://young is ready"),
        ("WARNING", "decode node http://young is gone: connection refused"),
    ]


async def test_a_router_without_descriptors_does_not_consider_its_nodes_gone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    node = UpstreamNode("decode", "http://well")
    node.note(Health(NodeState.READY))
    for _ in range(5):
        node.note(Health(None, "Too many open files", is_local=True))
    assert node.state is NodeState.READY
    (line,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "the router cannot check" in line


def test_connections_to_nodes_are_probed() -> None:
    with kept_alive_socket((socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", 1))) as connection:
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) < 60
        assert not connection.getblocking()  # or the router would stand still while it connects


async def test_the_metrics_name_each_nodes_state() -> None:
    decode = Player()
    async with routed([Player()], [decode], **PATIENT_CHECKS) as client:
        decode.says = {"status": "draining"}
        await until_state(client, "draining")
        async with client.get("/metrics") as response:
            lines = [line for line in (await response.text()).splitlines() if "node_state{" in line]
        states = [line for line in lines if line.endswith(" 1.0")]
        assert len(lines) == 2 * len(NodeState)
        assert ['state="draining"' in line for line in states] == [False, True]


@pytest.mark.parametrize(
    ("error", "is_lost"),
    [
        (ServerDisconnectedError(), True),
        (ClientConnectorError(SimpleNamespace(ssl=None, host="h", port=1), OSError(111, "refused")), False),  # type: ignore[arg-type]
        (ConnectionTimeoutError(), False),
    ],
    ids=["lost", "refused", "no answer to a connection"],
)
async def test_only_nodes_that_had_a_request_count_as_lost_with_it(error: Exception, is_lost: bool) -> None:
    """In an outage the connection is refused by one node after the other, and a later one may answer."""
    with pytest.raises(NodeGoneError) as caught:
        async with UpstreamNode("decode", "http://d").exchange():
            raise error
    assert caught.value.is_lost == is_lost


async def test_nodes_that_checks_find_silent_do_not_count_as_lost() -> None:
    """A router whose machine stood still finds all of its nodes silent at once, and none has ended."""
    node = UpstreamNode("decode", "http://d")

    async def ask() -> None:
        async with node.exchange():
            node.end_exchanges()
            await asyncio.sleep(DEADLINE_S)

    with pytest.raises(NodeGoneError) as caught:
        await ask()
    assert not caught.value.is_lost


async def test_a_node_is_not_checked_again_before_the_interval_is_over() -> None:
    node = Player()
    async with routed([Player()], [node], check_interval_s=DEADLINE_S, check_timeout_s=DEADLINE_S) as client:
        num_checks = node.num_checks
        for _ in range(20):
            await client.get("/nodes")
    assert node.num_checks == num_checks


def test_a_node_that_is_overloaded_serves_the_models_that_it_served() -> None:
    node = UpstreamNode("decode", "http://d")
    node.note(Health(NodeState.READY, models=frozenset({"a"})))
    node.note(Health(NodeState.OVERLOADED, "/ready says overloaded", is_reported=True))
    assert node.serves("a")
    assert not node.serves("b")
