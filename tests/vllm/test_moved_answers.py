"""Three `vllm serve` processes behind the router: a stream outlives its decode server, completions and chats alike."""

from __future__ import annotations

import json
import os
import random
import signal

import pytest

from kvferry.reference.demo.launcher import Launcher
from kvferry.reference.demo.vllm_server import start_vllm
from tests.support.client import Client, wait_until
from tests.support.vllm_servers import Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900 + 30 * int(os.environ.get("KVFERRY_LOSSES", "4")))]

START_S = 400.0
#: Frozen servers. One more is killed.
NUM_LOSSES = int(os.environ.get("KVFERRY_LOSSES", "4"))
SEED = int(os.environ.get("KVFERRY_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 16)
ARGUMENTS = (
    *("--dtype", "float32", "--block-size", "32", "--max-model-len", "512", "--max-num-seqs", "4"),
    *("--enforce-eager", "--num-gpu-blocks-override", "128", "--max-num-batched-tokens", "64"),
)
NUM_TOKENS = 250
TEXT = "A ferry that sinks leaves its cargo to the next one. " * 3
USAGE = {"stream_options": {"include_usage": True}}
MOVED, LOADS = "kvferry_router_moved_answers_total", "kvferry_load_seconds_count"


@pytest.fixture(scope="module")
def servers(model):
    """The router, a server to compare with, and both decode servers."""
    with pytest.MonkeyPatch.context() as environment, Launcher() as launcher:
        environment.setenv("OMP_NUM_THREADS", "1")
        names = ("prefill", "decode 1", "decode 2")
        prefill, *decodes = [start_vllm(launcher, name, str(model), ARGUMENTS) for name in names]
        launcher.wait_ready([prefill, *decodes], START_S)
        checks = ("--check-interval-s", "0.3", "--check-timeout-s", "1")
        router = launcher.start_router("router", [prefill], decodes, *checks)
        launcher.wait_ready([router], START_S)
        client = Client(router)

        def is_known():
            """Whether the router knows what all servers are, so that their answers can go on elsewhere."""
            ask(client, {"prompt": "x", "max_tokens": 2})
            return all(node["models"] and node["kv_role"] for node in nodes_of(client))

        wait_until(is_known)
        yield client, Client(prefill), decodes


def nodes_of(router):
    return json.loads(router.get("/nodes")[1])["nodes"]


def busy_of(router, decodes):
    """Return the decode server that has a request."""
    urls = {node["url"] for node in nodes_of(router) if node["role"] == "decode" and node["in_flight"]}
    return next((each for each in decodes if each.url in urls), None)


def ask(client, body, on_event=lambda number: None):
    """Return the text of a stream, its end, and its usage. Calls `on_event` with the number of each event."""
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    whole = {"model": "model", "temperature": 0, "max_tokens": 12, "ignore_eos": True, "stream": True, **body}
    text, reasons, usage, heads, number = "", [], None, set(), 0
    with client.requesting(path, whole, {"X-Request-Id": "same"}) as response:
        assert response.status == 200, response.read()
        while line := response.readline():
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            assert "error" not in event, event
            assert b'token_ids":[' not in line
            heads.add((event["id"], event["object"], event["created"], event["model"]))
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                text += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
                reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
            number += 1
            on_event(number)
    assert len(heads) == 1
    counts = usage and {key: usage[key] for key in ("prompt_tokens", "completion_tokens", "total_tokens")}
    return text, reasons, counts


BODIES = (
    {"prompt": TEXT},
    {"messages": [{"role": "user", "content": TEXT}], **USAGE},
    {"prompt": TEXT, **USAGE, "repetition_penalty": 1.1},
    {"prompt": [65, 66, 67] * 40},
)


def asked(number):
    body = dict(BODIES[number % len(BODIES)], max_tokens=NUM_TOKENS)
    if "messages" in body:
        return {**body, "messages": [{"role": "user", "content": f"{number} {TEXT}"}]}
    return {
        **body,
        "prompt": f"{number} {TEXT}" if isinstance(body["prompt"], str) else [number, *body["prompt"]],
    }


def lose_at(router, decodes, at, lose):
    """Return what loses the busy decode server at an event."""

    def on_event(number):
        if number == at and (server := busy_of(router, decodes)) is not None:
            lose(server)

    return on_event


def test_a_stream_outlives_a_frozen_decode_server(servers):
    router, prefill, decodes = servers
    drawn = random.Random(SEED)
    stopped = []

    def freeze(server):
        stopped.append(server)
        for pid in family_of(server.pid):
            os.kill(pid, signal.SIGSTOP)

    try:
        for number in range(NUM_LOSSES):
            body = asked(number)
            expected = ask(prefill, body)
            before = router.metric(MOVED)
            found = ask(router, body, lose_at(router, decodes, drawn.randrange(2, 120), freeze))
            assert found == expected, f"seed {SEED}, loss {number}"
            assert router.metric(MOVED) == before + 1
            thaw(stopped)
            wait_until(lambda: all(node["state"] == "ready" for node in nodes_of(router)))
    finally:
        thaw(stopped)
    for server in decodes:
        Server(server).assert_no_block_is_in_use()
    Server(prefill.process).assert_no_block_is_in_use()


def thaw(stopped):
    while stopped:
        for pid in family_of(stopped.pop().pid):
            os.kill(pid, signal.SIGCONT)


def family_of(pid):
    """Return a process and its descendants."""
    with open(f"/proc/{pid}/task/{pid}/children") as children:
        return [pid, *(each for child in children.read().split() for each in family_of(int(child)))]


def test_a_stream_outlives_a_killed_decode_server(servers):
    """The last test of this module: the server does not come back."""
    router, prefill, decodes = servers
    body = asked(77)
    expected, before = ask(prefill, body), router.metric(MOVED)

    def kill(server):
        for pid in family_of(server.pid):
            os.kill(pid, signal.SIGKILL)
        decodes.remove(server)

    assert ask(router, body, lose_at(router, list(decodes), 40, kill)) == expected
    assert router.metric(MOVED) == before + 1
    (left,) = decodes
    assert Server(left).metric(LOADS) > 0  # it loaded the prompt from the prefill server
    Server(left).assert_no_block_is_in_use()
