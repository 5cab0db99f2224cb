"""Two `vllm serve` processes behind the router: their streams are those of one server, and equal models share
answers.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from contextlib import ExitStack

import pytest

from kvferry.lab.servers import Launcher
from tests.support.client import Client, wait_until
from tests.support.tiny_models import scale_tensor
from tests.support.vllm_servers import FAILURES, LOADS, Server
from tests.support.vllm_servers import USAGE as USAGE_OF_CACHE

from .conftest import START_S, service_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

#: More than one chunk, also by the router's estimate.
LONG = "A ferry carries a box from one quay to the other. " * 7
USAGE = {"stream_options": {"include_usage": True}}
#: The default `lease_s`, after which an offer that nothing loads ends by itself.
LEASE_S = 30.0
MET = "kvferry_router_rendezvous_total"
#: Answers of random bytes: their tokens are whole characters, parts of characters, and tokens without text.
GREEDY = [{"prompt": f"{number}: {LONG}", **USAGE} for number in range(10)]
MORE = {
    "one token": {"prompt": "o" + LONG, "max_tokens": 1, **USAGE},
    "one token, no usage": {"prompt": [70] * 40, "max_tokens": 1},
    # One chunk: vLLM 0.32 on the CPU dies of a seeded request with several ("CPU Generator does not use
    # offset").
    "seeded": {"prompt": "s" + LONG[:40], "temperature": 0.9, "seed": 4},
    "stop texts": {"prompt": "t" + LONG, "stop": ["qq"]},
    "longer than the model": {"prompt": [66] * 1524, "max_tokens": 12},
    "penalties": {"prompt": "p" + LONG, "presence_penalty": 1.0},
    "token ids": {"prompt": "i" + LONG, "return_token_ids": True},
}


@pytest.fixture(scope="module")
def servers(served):
    """A prefill and a decode server."""
    return [server.process for server in served[:2]]


@pytest.fixture(scope="module", autouse=True)
def num_failures(servers):
    """Loads of the decode server that have failed in other modules."""
    return Server(servers[1]).metric(FAILURES)


@pytest.fixture(scope="module", params=["auto", "off"])
def pair(request, servers):
    """A router, which asks both servers at once or one after the other, and the decode server by itself."""
    prefill, decode = servers
    with Launcher() as launcher:
        router = launcher.start_router("router", [prefill], [decode], "--rendezvous", request.param)
        clients = Client(router.wait_ready(START_S)), Client(decode)
        # The router knows after this where the prefill server can be reached.
        ask(clients[0], {"prompt": "x", "max_tokens": 1}, "warm-up")
        yield clients


def ask(client, body, name):
    """Return the status, and the raw stream without the time of the answer."""
    whole = {"model": "model", "temperature": 0, "max_tokens": 12, "stream": True, **body}
    headers = {"X-Request-Id": name.replace(" ", "-")}
    with client.requesting("/v1/completions", whole, headers) as response:
        payload = response.read()
    created = re.findall(rb'"created":\s?\d+', payload)
    assert len(set(created)) <= 1 or isinstance(body["prompt"][0], str)
    return response.status, re.sub(rb'"created":\s?\d+', b'"created":0', payload)


def unmerged(answer):
    """Return a stream as its texts and its token ids together, and its events without them.

    A busy server joins events as it likes.
    """
    status, payload = answer
    *events, end, nothing = payload.decode().split("\n\n")
    assert (status, end, nothing) == (200, "data: [DONE]", "")
    choices = [json.loads(event[6:])["choices"][0] for event in events if '"text"' in event]
    text = "".join(choice["text"] for choice in choices)
    token_ids = [token for choice in choices for token in choice["token_ids"] or ()]
    blank = [re.sub(r'"text":"([^"\\]|\\.)*"', '"text":""', event) for event in events]
    # What a server has cached depends on what it was asked before.
    blank = [re.sub(r'"cached_tokens":\d+', '"cached_tokens":0', event) for event in blank]
    blank = [re.sub(r'"token_ids":\[[\d,]*\]', '"token_ids":[]', event) for event in blank]
    return text, token_ids, list(dict.fromkeys(blank))


def test_greedy_streams_are_one_servers_byte_for_byte(pair):
    router, alone = pair
    met = router.metric(MET)
    for number, body in enumerate(GREEDY):
        name = f"greedy-{number}"
        found, expected = ask(router, body, name), ask(alone, body, name)
        assert unmerged(found) == unmerged(expected), (found, expected)
    assert router.metric(MET) - met in (0, len(GREEDY))


@pytest.mark.parametrize("name", MORE)
def test_other_streams_are_one_servers_too(pair, name):
    found, expected = (ask(client, MORE[name], name) for client in pair)
    if found[0] == 200:
        found, expected = unmerged(found), unmerged(expected)
    assert found == expected


@pytest.fixture(scope="module")
def others(model, tmp_path_factory):
    """Decode servers with other weights, as after half a rolling update; by their load failure policy."""
    folder = tmp_path_factory.mktemp("other") / "model"
    shutil.copytree(model, folder)
    for layer in range(2):
        scale_tensor(folder, f"model.layers.{layer}.mlp.up_proj.weight", -1.5)
    with ExitStack() as stack:
        started = {
            policy: stack.enter_context(
                service_of(policy, folder, "kv_consumer", policy, ("--enable-prompt-tokens-details",))
            )
            for policy in ("recompute", "fail")
        }
        for server in started.values():
            server.wait_ready(START_S)
        yield {policy: server.process for policy, server in started.items()}


@pytest.fixture
def other(others):
    return others["recompute"]


@pytest.fixture
def launcher():
    """Of routers that end with the test."""
    with Launcher() as launcher:
        yield launcher


@pytest.mark.parametrize("rendezvous", ["auto", "off"])
def test_servers_with_other_weights_share_no_answer(launcher, servers, other, rendezvous):
    prefill, _ = servers
    router = launcher.start_router("unequal", [prefill], [other], "--rendezvous", rendezvous)
    launcher.wait_ready([router], START_S)
    client, own, others = Client(router), Client(prefill), Client(other)
    num_contrary = 0
    for number in range(6):
        body = {"prompt": f"{number} unequal: {LONG}", **USAGE}
        found, expected = (ask(one, body, f"unequal-{number}") for one in (client, others))
        assert unmerged(found) == unmerged(expected)
        num_contrary += unmerged(ask(own, body, f"own-{number}"))[0][:1] != unmerged(expected)[0][:1]
    assert num_contrary, "both models begin each answer with the same text, so this shows nothing"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_the_offer_of_a_refused_stream_is_released_before_its_lease_ends(launcher, servers, others, path):
    prefill, _ = servers
    router = launcher.start_router("failing", [prefill], [others["fail"]]).wait_ready(START_S)
    wait_until(lambda: states(Client(router)) == ["ready", "ready"])
    # Servers that recompute what they refuse tell no router, so offers of earlier tests stay until their
    # leases end.
    Server(prefill).wait_for(USAGE_OF_CACHE, lambda usage: usage == 0)
    text = {"messages": [{"role": "user", "content": LONG}]} if "chat" in path else {"prompt": LONG}
    for number in range(3):
        body = {
            "model": "model",
            "stream": True,
            "temperature": 0,
            "max_tokens": 8,
            "cache_salt": f"{number}",
        }
        with Client(router).requesting(path, {**body, **text}, {}) as response:
            payload = response.read()
        assert b"cannot be handed over" in payload
        assert b"these nodes differ in weights; start both" in payload
    began = time.monotonic()
    Server(prefill).wait_for(USAGE_OF_CACHE, lambda usage: usage == 0)
    assert time.monotonic() - began < LEASE_S / 2


def states(client):
    return [node["state"] for node in json.loads(client.get("/nodes")[1])["nodes"]]


def test_every_offer_ends(pair, servers, num_failures):
    decode = Server(servers[1])
    assert decode.metric(LOADS) > 0
    assert decode.metric(FAILURES) == num_failures
