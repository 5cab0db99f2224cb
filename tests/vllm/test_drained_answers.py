"""`vllm serve` processes behind the router: a decode server that is removed has its running answers moved,
with their cache.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import time
from contextlib import ExitStack

import pytest
import requests

from kvferry.lab.client import Answer, events_of
from kvferry.lab.servers import Launcher, free_port, start_vllm
from tests.support.client import Client, wait_until
from tests.support.vllm_servers import Server
from tests.vllm.test_moved_answers import ARGUMENTS, START_S

NUM_MOVES = int(os.environ.get("KVFERRY_MOVES", "12"))
SEED = int(os.environ.get("KVFERRY_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 16)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900 + 30 * NUM_MOVES)]

STOPPED, LOST = "kvferry_router_stopped_answers_total", "kvferry_router_moved_answers_total"
TOKENS = "vllm:prompt_tokens_by_source_total"
NUM_TOKENS, LIMIT = 250, 120
TEXT = "A ferry that sinks leaves its cargo to the next one. " * 3
USAGE = {"stream_options": {"include_usage": True}}
MOVED, LOADS = "kvferry_router_moved_answers_total", "kvferry_load_seconds_count"


#: The tokens of letters, each of which is a whole character. If the text of a part of one is held back, the
#: next server computes more.
LETTERS = {"logit_bias": {str(token_id): 100 for token_id in range(64, 90)}}


class Fleet:
    """A prefill server, two decode servers, and a router that learns of these by its admin endpoints."""

    def __init__(self, launcher, model, key_file, *more):
        arguments = (*ARGUMENTS, *more)
        names = ("prefill", "decode 1", "decode 2")
        self.prefill, *self.decodes = [start_vllm(launcher, name, model, arguments) for name in names]
        launcher.wait_ready([self.prefill, *self.decodes], START_S)
        key_file.write_text("sk-admin\n")
        key_file.chmod(0o600)
        self._admin = f"http://127.0.0.1:{(port := free_port())}/admin/nodes"
        options = ("--admin-port", str(port), "--admin-api-key-file", str(key_file))
        router = launcher.start_router("router", [self.prefill], [], *options)
        launcher.wait_listening([router], START_S)
        self.router = Client(router)
        for server in self.decodes:
            self.add(server)
        wait_until(self.is_known)

    def add(self, server):
        self._tell("POST", json={"role": "decode", "url": server.url})

    def remove(self, server):
        self._tell("DELETE", params={"role": "decode", "url": server.url})

    def _tell(self, method, **about):
        headers = {"Authorization": "Bearer sk-admin"}
        requests.request(method, self._admin, headers=headers, timeout=20, **about).raise_for_status()

    def is_known(self):
        """Whether the router knows what all servers are, so that their answers can go on elsewhere."""
        nodes = nodes_of(self.router)
        known = [node["models"] and node["kv_role"] and node["state"] == "ready" for node in nodes]
        return len(known) == 1 + len(self.decodes) and all(known)

    def num_moves(self):
        return self.router.metric(STOPPED), self.router.metric(LOST)


@pytest.fixture(scope="module")
def start(model, tmp_path_factory):
    """Start a fleet, with further arguments of its servers."""
    with pytest.MonkeyPatch.context() as environment, ExitStack() as stack:
        environment.setenv("OMP_NUM_THREADS", "1")

        def make(*more):
            launcher = stack.enter_context(Launcher())
            return Fleet(launcher, str(model), tmp_path_factory.mktemp("router") / "key", *more)

        yield make


@pytest.fixture(scope="module")
def fleet(start):
    return start()


@pytest.fixture(scope="module")
def limited(start):
    """Servers that end each answer after some tokens."""
    return start("--override-generation-config", json.dumps({"max_new_tokens": LIMIT}))


def test_answers_of_a_server_that_is_removed_go_on_elsewhere_with_their_cache(fleet):
    drawn, prefill = random.Random(SEED), Client(fleet.prefill)
    num_computed, pauses = [], []
    for number in range(NUM_MOVES):
        has_letters = number % 4 != 3
        body = {**asked(number), **(LETTERS if has_letters else {})}
        expected = ask(prefill, body)
        moves, lost = fleet.num_moves()
        before = {each.url: tokens_of(each) for each in fleet.decodes}
        removed, times = [], []

        def remove(server, removed=removed):
            removed.append(server)
            fleet.remove(server)

        at = lose_at(fleet.router, fleet.decodes, drawn.randrange(2, 120), remove)

        def on_event(number, at=at, times=times):
            times.append(time.monotonic())
            at(number)

        assert ask(fleet.router, body, on_event) == expected, f"seed {SEED}, move {number}"
        assert fleet.num_moves() == (moves + 1, lost)
        (left,) = removed
        (other,) = (each for each in fleet.decodes if each is not left)
        computed, loaded = (now - then for now, then in zip(tokens_of(other), before[other.url], strict=True))
        num_computed.append(computed)
        if has_letters:
            # All but the last token, whose keys and values no server has computed; the first server has
            # loaded the prompt alone.
            assert computed == 1
            assert loaded > tokens_of(left)[1] - before[left.url][1]
        pauses.append(max(later - earlier for earlier, later in itertools.pairwise(times)))
        # Now the server could be stopped.
        wait_until(lambda left=left: left.url not in [node["url"] for node in nodes_of(fleet.router)])
        fleet.add(left)
        wait_until(fleet.is_known)
    print(f"\ntokens computed again: {num_computed}; pauses: {[round(pause * 1e3) for pause in pauses]} ms")
    assert busy_of(fleet.router, fleet.decodes) is None
    for server in (fleet.prefill, *fleet.decodes):
        Server(server).assert_no_block_is_in_use()


def test_the_limit_of_the_servers_holds_for_an_answer_that_moves(limited):
    """Each server would begin to count anew."""
    body = {**asked(1), **LETTERS}
    expected = ask(Client(limited.prefill), body)
    assert expected[2]["completion_tokens"] == LIMIT
    at = lose_at(limited.router, limited.decodes, 70, limited.remove)
    assert ask(limited.router, body, at) == expected
    assert limited.num_moves() == (1, 0)


def tokens_of(server):
    """Return how many tokens of prompts a server has computed and loaded; for it, the answer so far is part
    of the prompt.
    """
    sources = ("local_compute", "external_kv_transfer")
    return tuple(int(Server(server).metric(TOKENS, source=source)) for source in sources)


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
    answer, reasons, heads = Answer(), [], set()
    with client.requesting(path, whole, {"X-Request-Id": "same"}) as response:
        assert response.status == 200, response.read()
        for number, event in enumerate(events_of(response), 1):
            assert "error" not in event, event
            heads.add((event["id"], event["object"], event["created"], event["model"]))
            answer.add(event)
            reasons += [choice["finish_reason"] for choice in event["choices"] if choice["finish_reason"]]
            on_event(number)
    assert (len(heads), answer.token_ids) == (1, [])
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    counts = {name: answer.usage[name] for name in names} if answer.usage else None
    return answer.text, reasons, counts


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
