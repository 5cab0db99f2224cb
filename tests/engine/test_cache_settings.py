"""A user's settings for the KV cache take effect: its size, the length it must hold, and the seed of its
hashes.
"""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from kvferry.connector.config import CacheConfig
from kvferry.lab.engine.memory import plan_pool
from kvferry.runner_mixin.kv_cache import block_hash
from kvferry.transports.errors import ConfigurationError

SERVE = Path(__file__).parents[2] / "examples" / "serve.py"
PROMPT = list(range(40))


@pytest.fixture(autouse=True)
def same_seed_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_hash, "_none_hash", block_hash.none_hash())


def test_nodes_that_share_a_seed_agree_on_every_block(make_node: Any) -> None:
    hashes = {}
    for name, seed in (("prefill", "ferry"), ("other", "boat"), ("decode", "ferry")):
        node = make_node(hash_seed=seed)
        node.add("a", PROMPT)
        (request,) = node.core.parts.scheduler.waiting
        hashes[name] = list(request.block_hashes)
    assert len(hashes["prefill"]) == len(PROMPT) // 4
    assert hashes["prefill"] == hashes["decode"]
    assert not set(hashes["prefill"]) & set(hashes["other"])


def test_the_share_of_cached_tokens_is_reported(make_node: Any) -> None:
    node = make_node()
    first = node.answer(PROMPT, max_tokens=4)
    assert node.core.stats().prefix_cache_hit_rate == 0
    node.add("again", PROMPT, max_tokens=4)
    node.run()
    assert node.tokens("again") == first
    assert node.last("again").metrics.num_cached_tokens == 36, (
        "all full blocks except the one with the last token"
    )
    assert node.core.stats().prefix_cache_hit_rate == 36 / 80


def test_a_salt_keeps_caches_apart(make_node: Any) -> None:
    node = make_node()
    first = node.answer(PROMPT, max_tokens=4)
    for salt, num_cached in (("mine", 0), ("yours", 0), ("mine", 36), ("", 36)):
        node.add("b", PROMPT, max_tokens=4, cache_salt=salt)
        node.run()
        assert node.last("b").metrics.num_cached_tokens == num_cached
        assert node.tokens("b")[-4:] == first


def test_a_pool_that_does_not_hold_the_longest_sequence_is_refused(make_node: Any) -> None:
    with pytest.raises(ConfigurationError) as caught:
        make_node("gemma3", num_blocks=30, max_model_len=400)
    message = str(caught.value)
    assert caught.value.key == "max_model_len"
    assert "max_model_len=400 tokens needs 0.00021 GiB of KV cache (112 blocks)" in message
    assert "num_blocks_override=30 makes 5.7e-05 GiB" in message
    longest = int(message.partition("the longest that fits has ")[2].split()[0])
    node = make_node("gemma3", num_blocks=30, max_model_len=longest)
    node.answer(range(longest - 4), max_tokens=4)
    with pytest.raises(ConfigurationError):
        make_node("gemma3", num_blocks=30, max_model_len=longest + 1)


def test_too_little_memory_is_an_error_that_leaves_the_configuration_unchanged(make_node: Any) -> None:
    config = make_node(max_model_len=500, num_blocks=200).core.parts.config
    config = deepcopy(config.__class__(config.model, CacheConfig(4, memory_utilization=1e-6)))
    before = deepcopy(config)
    with pytest.raises(
        ConfigurationError, match=r"needs .* GiB of KV cache .* GiB are available; the longest"
    ):
        plan_pool(config, torch.device("cpu"), may_shorten=False)
    assert config == before


def test_the_number_of_requests_that_fit_at_once_is_logged(
    make_node: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "kvferry.lab.engine.memory"):
        make_node(num_blocks=101, max_model_len=200)
    assert "100 blocks of 4 tokens hold 2.0 requests of 200 tokens" in caplog.text


@pytest.mark.slow
def test_a_server_reports_a_pool_that_is_too_small_in_one_line(tiny_model: Callable[[str], Path]) -> None:
    model = ("--model", str(tiny_model("gemma3")))
    done = subprocess.run(
        [sys.executable, SERVE, *model, "--num-blocks", "30", "--max-model-len", "400", "--port", "0"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert "max_model_len=400 tokens needs" in line
    assert "the longest that fits has" in line
