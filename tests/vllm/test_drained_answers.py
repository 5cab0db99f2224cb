"""`vllm serve` processes behind the router: a decode server that is removed has its running answers moved,
with their cache.
"""

from __future__ import annotations

import itertools
import json
import os
import random

import pytest
import requests

from kvferry.lab.servers import Launcher, free_port
from tests.support.client import Client, wait_until
from tests.support.losses import ask
from tests.support.vllm_servers import Server

from .conftest import START_S
from .test_moved_answers import STREAMS, asked

NUM_MOVES = int(os.environ.get("KVFERRY_MOVES", "12"))
SEED = int(os.environ.get("KVFERRY_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 16)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900 + 30 * NUM_MOVES)]

STOPPED, LOST = "kvferry_router_stopped_answers_total", "kvferry_router_moved_answers_total"
TOKENS = "vllm:prompt_tokens_by_source_total"
#: The tokens of letters, each of which is a whole character. If the text of a part of one is held back, the
#: next server computes more.
LETTERS = {"logit_bias": {str(token_id): 100 for token_id in range(64, 90)}}


class Fleet:
    """A router that learns of two decode servers by its admin endpoints."""

    def __init__(self, launcher, servers, key_file):
        self.prefill, *self.decodes = (server.process for server in servers)
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

    def nodes(self):
        return json.loads(self.router.get("/nodes")[1])["nodes"]

    def is_known(self):
        """Whether the router knows what all servers are, so that their answers can go on elsewhere."""
        known = [node["models"] and node["kv_role"] and node["state"] == "ready" for node in self.nodes()]
        return len(known) == 1 + len(self.decodes) and all(known)

    def busy(self):
        """The decode server that has a request."""
        urls = {node["url"] for node in self.nodes() if node["role"] == "decode" and node["in_flight"]}
        return next((each for each in self.decodes if each.url in urls), None)

    def num_moves(self):
        return self.router.metric(STOPPED), self.router.metric(LOST)


@pytest.fixture
def fleet(served, tmp_path):
    with Launcher() as launcher:
        yield Fleet(launcher, served, tmp_path / "key")


def test_answers_of_a_server_that_is_removed_go_on_elsewhere_with_their_cache(fleet):
    drawn, num_computed, pauses = random.Random(SEED), [], []
    for number in range(NUM_MOVES):
        has_letters = number % 4 != 3
        path, body = asked(number, STREAMS, **(LETTERS if has_letters else {}))
        expected, _ = ask(fleet.prefill.port, path, body)
        moves, lost = fleet.num_moves()
        before = {each.url: tokens_of(each) for each in fleet.decodes}
        removed, pieces, at = [], [], drawn.randrange(2, 80)

        def on_piece(piece, removed=removed, pieces=pieces, at=at):
            pieces.append(text_of(piece))
            # The router may not know yet that the server has the request.
            if len(pieces) >= at and not removed and (server := fleet.busy()) is not None:
                removed.append(server)
                fleet.remove(server)

        found, pause = ask(fleet.router.process.port, path, body, on_piece=on_piece)
        assert found == expected, f"seed {SEED}, move {number}"
        assert fleet.num_moves() == (moves + 1, lost)
        (left,) = removed
        (other,) = (each for each in fleet.decodes if each is not left)
        computed, loaded = (now - then for now, then in zip(tokens_of(other), before[other.url], strict=True))
        num_computed.append(computed)
        if has_letters and computed == 1:
            # All but the last token, whose keys and values no server has computed; the first server has
            # loaded the prompt alone.
            assert loaded > tokens_of(left)[1] - before[left.url][1]
        elif has_letters:
            # A busy server joins pieces. If the last one before the move has a token that has not come alone
            # before, the next server is told the tokens before this piece, and computes them.
            assert has_joined_piece_after(pieces, computed), (computed, pieces)
        pauses.append(pause)
        # Now the server could be stopped.
        wait_until(lambda left=left: left.url not in [node["url"] for node in fleet.nodes()])
        fleet.add(left)
        wait_until(fleet.is_known)
    print(f"\ntokens computed again: {num_computed}; pauses: {[round(pause * 1e3) for pause in pauses]} ms")
    assert fleet.busy() is None
    for server in (fleet.prefill, *fleet.decodes):
        Server(server).assert_no_block_is_in_use()


def text_of(piece):
    choice, *_ = piece["choices"] or [{}]
    return choice.get("text") or (choice.get("delta") or {}).get("content") or ""


def has_joined_piece_after(pieces, num_letters):
    ends = itertools.accumulate(map(len, pieces), initial=0)
    return any(end == num_letters and len(piece) > 1 for end, piece in zip(ends, pieces, strict=False))


def tokens_of(server):
    """Return how many tokens of prompts a server has computed and loaded; for it, the answer so far is part
    of the prompt.
    """
    sources = ("local_compute", "external_kv_transfer")
    return tuple(int(Server(server).metric(TOKENS, source=source)) for source in sources)
