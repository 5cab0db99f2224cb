"""Loads that fail together in a small pool, and storms of random requests: every request ends, and no answer
is wrong.
"""

from __future__ import annotations

import json
import os
import random
import time

import pytest

from kvferry.connector.p2p.params import draw_offer_name, rendezvous_params

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

#: Seeds of the storms, separated by blanks.
SEEDS = [int(seed) for seed in os.environ.get("KVFERRY_STORMS", "1").split()]
NUM_REQUESTS = 60
#: Requests under way at a time, of which the decode node's pool holds about a third.
MOST_OPEN = 24
#: Longest time without an end of any request. Every wait of the protocol is shorter.
STALLED_S = 120.0


@pytest.fixture(scope="module")
def running_pair(start_module_pair, tmp_path_factory):
    from tests.support.tiny_models import write_tiny_model

    shape = {"hidden_size": 128, "head_dim": 32, "max_position_embeddings": 2048}
    model = write_tiny_model(tmp_path_factory.mktemp("storm"), "gemma3", sliding_window=64, **shape)
    return start_module_pair(
        model=model,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        decode={"num_gpu_blocks_override": 90},
        extra={"rendezvous_wait_s": 4},
    )


def _release(pair, offer):
    params = {**offer, "do_remote_prefill": False, "do_release": True}
    pair.prefill.ask(next(pair.names), [3], params=params)


def test_loads_that_fail_together_do_not_wait_for_each_other(pair, prompt):
    """Each holds what it was to load.

    To compute its prompt it needs more: blocks of the windows that it would not load.
    """
    pair.decode.order("policy", policy="recompute")
    where = pair.prefilled([7] * 40)
    _release(pair, where)
    prompts = [prompt(400, seed) for seed in range(10)]
    # Nothing answers to these names, so all loads fail at the same time.
    claims = [rendezvous_params(draw_offer_name(), where) for _ in prompts]
    answers = pair.answers(pair.decode, prompts, 8, claims)
    assert pair.decode.metric("kvferry_rendezvous_failures_total") >= 5
    pair.assert_all_like_alone(prompts, answers)


class Storm:
    """Random requests at both nodes: offers that are loaded, lost, released or loaded twice, meetings with
    one half, and aborts.
    """

    def __init__(self, pair, seed):
        self._pair = pair
        self._random = random.Random(seed)
        self._where = pair.prefilled([7] * 40)
        _release(pair, self._where)
        # Prompts share beginnings, so that both prefix caches have parts of them.
        self._beginnings = [self._random.choices(range(256), k=length) for length in (64, 160, 320)]
        self._open = {}  # request → its node, prompt and number of tokens; None if its answer does not matter
        self._offers = []
        self._last_end = time.monotonic()
        self.ended = []  # prompt, answer

    def run(self):
        for _ in range(NUM_REQUESTS):
            while len(self._open) >= MOST_OPEN:
                self._look()
            act = self._random.choices(
                (self.prefill, self.decode, self.plain, self.meet, self.abort, self.release),
                (5, 5, 2, 5, 3, 1),
            )[0]
            act()
            self._look()
        while self._open:
            self._look()
        for offer, _ in self._offers:
            _release(self._pair, offer)

    def _prompt(self):
        own = self._random.choices(range(256), k=self._random.randrange(2, 300))
        return (self._random.choice(self._beginnings) + own) if self._random.random() < 0.7 else own

    def _start(self, node, prompt, num_tokens, params, *, matters=True):
        name = next(self._pair.names)
        node.start(name, prompt, num_tokens, params)
        self._open[name] = (node, prompt, num_tokens if matters else None)

    def _look(self):
        """Take the answers that have come."""
        for name in [name for name, (node, *_) in self._open.items() if node.has_finished(name)]:
            node, prompt, num_tokens = self._open.pop(name)
            answer = node.result(name)
            self._last_end = time.monotonic()
            if node is self._pair.prefill:
                self._offers += [(answer["params"], prompt)] if answer["params"] else []
            elif num_tokens is not None:
                assert len(answer["tokens"]) == num_tokens, answer
                self.ended.append((prompt, answer))
        if time.monotonic() - self._last_end > STALLED_S:
            nodes = {"prefill": self._pair.prefill, "decode": self._pair.decode}
            told = {name: node.order("state") for name, node in nodes.items()}
            pytest.fail(f"no request has ended for {STALLED_S} s: {json.dumps(told, indent=1)}")
        self._pair.decode.order("status")  # lets a step of the engine pass

    def prefill(self):
        self._start(self._pair.prefill, self._prompt(), 1, {"do_remote_decode": True})

    def decode(self):
        """Load an offer. Some stay, and are loaded twice or lost."""
        if self._offers:
            offer, prompt = self._random.choice(self._offers)
            if self._random.random() < 0.8:
                self._offers.remove((offer, prompt))
            self._start(self._pair.decode, prompt, 8, offer)

    def plain(self):
        self._start(self._pair.decode, self._prompt(), 8, None)

    def meet(self):
        """Make a rendezvous. Each half comes with a chance of four in five."""
        prompt, name = self._prompt(), draw_offer_name()
        halves = [
            (self._pair.prefill, 1, {"do_remote_decode": True, "rendezvous": name}),
            (self._pair.decode, 8, rendezvous_params(name, self._where)),
        ]
        self._random.shuffle(halves)
        for node, num_tokens, params in halves:
            if self._random.random() < 0.8:
                self._start(node, prompt, num_tokens, params)

    def abort(self):
        if self._open:
            name = self._random.choice(list(self._open))
            node, *_ = self._open.pop(name)
            node.order("abort", request=name)

    def release(self):
        if self._offers:
            offer = self._random.choice(self._offers)
            self._offers.remove(offer)
            _release(self._pair, offer[0])


@pytest.mark.full
@pytest.mark.parametrize("seed", SEEDS)
def test_every_request_of_a_storm_ends(pair, seed):
    pair.decode.order("policy", policy="recompute")
    storm = Storm(pair, seed)
    storm.run()
    assert storm.ended
    sample = storm.ended[:: max(1, len(storm.ended) // 8)]
    pair.assert_all_like_alone([prompt for prompt, _ in sample], [answer for _, answer in sample])
