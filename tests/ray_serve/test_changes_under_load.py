"""Real Ray Serve with real vLLM while replicas come, go and die: no wrong answer, and nothing is left."""

from __future__ import annotations

import threading
import urllib.error
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import ray
from ray import serve
from ray.util.state import list_actors

from tests.support.ray_serving import App, Serving, prompts, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800), pytest.mark.filterwarnings("default")]

REPLACED_S = 300.0


class Load:
    """Clients that ask until the end of a block. What they got is checked then."""

    def __init__(self, app: App) -> None:
        self.outcomes: Counter[str] = Counter()
        self.answers: list[tuple[str, str]] = []
        self._app = app
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(seed,)) for seed in range(10, 13)]

    def _run(self, seed: int) -> None:
        for prompt in prompts(seed):
            if self._is_over.is_set():
                return
            try:
                self.answers.append((prompt, self._app.ask(prompt)))
                self.outcomes["answered"] += 1
            except urllib.error.HTTPError as error:
                self.outcomes[f"status {error.code}"] += 1
            except OSError:
                self.outcomes["broken"] += 1

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def wait_for_answers(self) -> None:
        """Wait until there are some more."""
        num_before = self.outcomes["answered"]
        wait_until(lambda: self.outcomes["answered"] > num_before + 5, REPLACED_S)

    def stop(self) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()


@contextmanager
def load(serving: Serving) -> Iterator[Load]:
    """Keep the pair busy inside the block.

    Afterwards every answer must have been right, and nothing may be left.
    """
    asking = Load(serving.pair)
    asking.start()
    try:
        yield asking
    finally:
        asking.stop()
    assert asking.outcomes["answered"] > 5
    wrong = [prompt for prompt, answer in asking.answers if serving.alone.ask(prompt) != answer]
    assert not wrong
    wait_until(lambda: serving.metric("kvferry_live_leases") == 0)
    wait_until(lambda: serving.metric("kvferry_live_loads") == 0)


def replicas_of(deployment: str) -> list[Any]:
    """Return the actors of a deployment's replicas that live."""
    alive = list_actors(filters=[("state", "=", "ALIVE")])
    return [actor for actor in alive if actor.class_name.startswith(f"ServeReplica:pair:{deployment}")]


def test_decode_replicas_come_and_go(serving: Serving) -> None:
    with load(serving) as asking:
        serving.deploy(num_decodes=2)
        asking.wait_for_answers()
        serving.deploy(num_decodes=1)
    assert set(asking.outcomes) == {"answered"}, asking.outcomes


def test_a_new_version_replaces_all_replicas(serving: Serving) -> None:
    before = {actor.actor_id for actor in (*replicas_of("Prefill"), *replicas_of("Decode"))}
    assert len(before) == 2
    with load(serving) as asking:
        serving.deploy(num_decodes=1, max_num_batched_tokens=128)
    assert set(asking.outcomes) == {"answered"}, asking.outcomes
    assert before.isdisjoint(actor.actor_id for actor in (*replicas_of("Prefill"), *replicas_of("Decode")))


@pytest.mark.parametrize("deployment", ["Prefill", "Decode"])
def test_a_killed_replica_costs_answers_and_gives_no_wrong_one(serving: Serving, deployment: str) -> None:
    with load(serving) as asking:
        (victim,) = replicas_of(deployment)
        ray.kill(ray.get_actor(victim.name, namespace="serve"), no_restart=True)
        asking.wait_for_answers()
    assert serve.status().applications["pair"].status == "RUNNING"


def test_a_lost_raylet_costs_answers_and_gives_no_wrong_one(serving: Serving) -> None:
    with load(serving) as asking:
        serving.lose_decode_raylet()
        asking.wait_for_answers()
    assert serve.status().applications["pair"].status == "RUNNING"
