"""Two `vllm serve` processes behind the router: the prefill server's first token and the rest are one server's answer."""

from __future__ import annotations

import http.client
import json
import re

import pytest

from kvferry.reference.demo.launcher import Launcher
from tests.support.client import Client, wait_until
from vllm_pair.cluster import KVFERRY, start_vllm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

START_S = 400.0
ARGUMENTS = (
    *("--dtype", "float32", "--block-size", "32", "--max-model-len", "512", "--max-num-seqs", "4"),
    *("--enforce-eager", "--num-gpu-blocks-override", "128"),
)
LONG = "A ferry carries a box from one quay to the other. " * 3
USAGE = {"stream_options": {"include_usage": True}}
COUNTER = "kvferry_router_first_tokens_total"
#: Answers of random bytes: their first tokens are whole characters, parts of characters, and tokens without text.
GREEDY = [{"prompt": f"{number}: {LONG}", **USAGE} for number in range(20)]
#: Requests that are always, or never, answered with the prefill server's token.
ALWAYS = {
    "one token": {"prompt": "o" + LONG, "max_tokens": 1, **USAGE},
    "one token, no usage": {"prompt": [70] * 40, "max_tokens": 1},
    "several prompts": {"prompt": ["1" + LONG, "2" + LONG], "max_tokens": 1},
}
NEVER = {
    "seeded": {"prompt": "s" + LONG, "temperature": 0.9, "seed": 4},
    "stop texts": {"prompt": "t" + LONG, "stop": ["qq"]},
    "longer than the model": {"prompt": [66] * 500, "max_tokens": 12},
    "penalties": {"prompt": "p" + LONG, "presence_penalty": 1.0},
    "token ids": {"prompt": "i" + LONG, "return_token_ids": True},
}


@pytest.fixture(scope="module")
def pair(model):
    """The router, and the decode server by itself."""
    with pytest.MonkeyPatch.context() as environment, Launcher() as launcher:
        environment.setenv("OMP_NUM_THREADS", "1")
        servers = [
            start_vllm(launcher, f"{role} server", str(model), ARGUMENTS, KVFERRY)
            for role in ("prefill", "decode")
        ]
        launcher.wait_listening(servers, START_S)
        launcher.wait_ready(servers, START_S)
        router = launcher.start_router("router", servers[:1], servers[1:])
        launcher.wait_ready([router], START_S)
        clients = Client(router), Client(servers[1])

        def has_learnt():
            """Whether the router knows by now that these are servers of vLLM."""
            ask(clients[0], {"prompt": "x", "max_tokens": 1}, "warm-up")
            return clients[0].metric(COUNTER) > 0

        wait_until(has_learnt)
        yield clients


def ask(client, body, name):
    """Return the status, and the raw stream without the time of the answer."""
    connection = http.client.HTTPConnection("127.0.0.1", client.process.port, timeout=120)
    try:
        whole = {"model": "model", "temperature": 0, "max_tokens": 12, "stream": True, **body}
        headers = {"Content-Type": "application/json", "X-Request-Id": name.replace(" ", "-")}
        connection.request("POST", "/v1/completions", json.dumps(whole), headers)
        response = connection.getresponse()
        payload = response.read()
    finally:
        connection.close()
    created = re.findall(rb'"created":\s?\d+', payload)
    assert len(set(created)) <= 1 or isinstance(body["prompt"][0], str)
    return response.status, re.sub(rb'"created":\s?\d+', b'"created":0', payload)


def unmerged(answer):
    """Return a stream as its texts together, and its events without them. A busy server joins events as it likes."""
    status, payload = answer
    *events, end, nothing = payload.decode().split("\n\n")
    assert (status, end, nothing) == (200, "data: [DONE]", "")
    text = "".join(json.loads(event[6:])["choices"][0]["text"] for event in events if '"text"' in event)
    blank = [re.sub(r'"text":"([^"\\]|\\.)*"', '"text":""', event) for event in events]
    return text, list(dict.fromkeys(blank))


def test_greedy_streams_are_one_servers_byte_for_byte(pair):
    router, alone = pair
    before = router.metric(COUNTER)
    for number, body in enumerate(GREEDY):
        name = f"greedy-{number}"
        found, expected = ask(router, body, name), ask(alone, body, name)
        assert unmerged(found) == unmerged(expected), (found, expected)
    # The tokens without a text of their own are left to the decode server.
    assert 0 < router.metric(COUNTER) - before < len(GREEDY)


@pytest.mark.parametrize("name", ALWAYS)
def test_an_answer_of_one_token_needs_no_decode_server(pair, name):
    router, _ = pair
    before = router.metric(COUNTER)
    found, expected = (ask(client, ALWAYS[name], name) for client in pair)
    if name != "several prompts":  # whose parts have one id, and come in any order
        assert unmerged(found) == unmerged(expected), (found, expected)
    assert found[0] == expected[0] == 200
    assert router.metric(COUNTER) > before


@pytest.mark.parametrize("name", NEVER)
def test_requests_that_could_differ_take_the_usual_path(pair, name):
    router, _ = pair
    before = router.metric(COUNTER)
    found, expected = (ask(client, NEVER[name], name) for client in pair)
    if found[0] == 200:
        found, expected = unmerged(found), unmerged(expected)
    assert found == expected
    assert router.metric(COUNTER) == before


def test_every_offer_ends(pair):
    _, alone = pair
    assert re.search(rb"kvferry_load_seconds_count\S* [1-9]", alone.get("/metrics")[1])
    assert not re.search(rb"kvferry_load_failures_total\S* [1-9]", alone.get("/metrics")[1])
