"""What a node counts of requests that came with an offer: whether a pair did what it is for, behind any
router.
"""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.connector.config import KVRole
from kvferry.connector.stats import COUNTERS, METRICS
from kvferry.connector.testing import CacheShape, ModelFreeNode, Request, engine_config, load

PREFIX = "offered_requests_total/"


def counted(node: ModelFreeNode) -> dict[str, float]:
    """Return what a node has counted so far."""
    node.step()  # the worker half counts what the scheduler half has seen by the step before
    node.step()
    return {
        key.removeprefix(PREFIX): count
        for key, count in node.stats.counters.items()
        if key.startswith(PREFIX)
    }


def node(role: KVRole = "kv_both", policy: Any = "recompute") -> ModelFreeNode:
    return ModelFreeNode(engine_config("inproc", role=role, kv_load_failure_policy=policy), CacheShape())


def test_every_outcome_is_a_counter_from_the_start() -> None:
    (metric,) = (metric for metric in METRICS if metric.name == "kvferry_offered_requests_total")
    assert {f"{PREFIX}{value}" for value in metric.values} == {
        key for key in COUNTERS if key.startswith(PREFIX)
    }


def test_a_prompt_that_is_in_the_prefix_cache_already() -> None:
    with node() as producer, node() as consumer:
        _, params = producer.prefill("p", 18)
        request = Request("d", 18, params)
        consumer.scheduler.on_new_request(request)
        assert consumer.scheduler.get_num_new_matched_tokens(request, 17) == (0, False)
        consumer.scheduler.update_state_after_alloc(request, [[1, 2, 3, 4, 5]], 0)
        assert counted(consumer) == {"cached": 1}


@pytest.mark.parametrize(("policy", "counts"), [("recompute", {"failed": 1}), ("fail", {})])
def test_a_load_that_fails(policy: str, counts: dict[str, float]) -> None:
    with node() as producer, node(policy=policy) as consumer:
        _, params = producer.prefill("p", 18)
        load(consumer, producer, Request("d", 18, {**params, "remote_epoch": "1"}))
        assert counted(consumer) == counts
