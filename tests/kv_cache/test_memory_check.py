from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.connector.config import EngineConfig, ModelConfig, SchedulerConfig
from kvferry.connector.kv_cache_specs import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec
from kvferry.runner_mixin.kv_cache import (
    KVCacheManager,
    check_enough_kv_cache_memory,
    estimate_max_model_len,
    get_kv_cache_config,
    max_memory_usage_bytes,
)
from kvferry.transports.errors import ConfigurationError

Windowed = Callable[[int], SlidingWindowSpec]
MakeConfig = Callable[..., EngineConfig]


@pytest.fixture
def two_layers(full: FullAttentionSpec) -> dict[str, KVCacheSpec]:
    return {"layers.0": full, "layers.1": full}


def test_usage_is_the_sum_over_layers(
    full: FullAttentionSpec, windowed: Windowed, make_config: MakeConfig
) -> None:
    config = make_config(64, chunk=4)
    assert max_memory_usage_bytes(config, [full, windowed(1)]) == (16 + 2) * full.page_size_bytes
    assert max_memory_usage_bytes(config, []) == 0


def test_just_enough_is_enough(
    full: FullAttentionSpec, two_layers: dict[str, KVCacheSpec], make_config: MakeConfig
) -> None:
    enough = (16 + 1) * 2 * full.page_size_bytes  # the blocks of one request, and the null block
    check_enough_kv_cache_memory(make_config(64), two_layers, enough)
    with pytest.raises(ValueError, match="the longest that fits has 60 tokens"):
        check_enough_kv_cache_memory(make_config(64), two_layers, enough - 1)


def test_the_error_names_the_needed_and_the_available_memory(
    two_layers: dict[str, KVCacheSpec], make_config: MakeConfig
) -> None:
    config = make_config(4 * 2**20)
    before = deepcopy(config)
    with pytest.raises(ConfigurationError) as caught:
        check_enough_kv_cache_memory(config, two_layers, 2**29)
    message = str(caught.value)
    assert "max_model_len=4194304" in message
    assert "needs 1.00 GiB" in message
    assert "0.50 GiB are available" in message
    assert "the longest that fits has 2097148 tokens" in message
    assert config == before


@pytest.mark.parametrize("available", [0, -1])
def test_without_memory_nothing_fits(
    two_layers: dict[str, KVCacheSpec], make_config: MakeConfig, available: int
) -> None:
    assert estimate_max_model_len(make_config(64), two_layers, available) == 0
    with pytest.raises(ValueError, match=r"0\.00 GiB are available.*has 0 tokens"):
        check_enough_kv_cache_memory(make_config(64), two_layers, available)


def test_a_model_without_a_cache_needs_no_memory(make_config: MakeConfig) -> None:
    check_enough_kv_cache_memory(make_config(64), {}, 0)
    assert estimate_max_model_len(make_config(64), {}, 0) == 64


def test_a_pool_of_a_given_size_is_checked_in_blocks(
    two_layers: dict[str, KVCacheSpec], make_config: MakeConfig
) -> None:
    check_enough_kv_cache_memory(make_config(64, num_blocks_override=17), two_layers, 0)
    with pytest.raises(ValueError, match=r"\(17 blocks\), and num_blocks_override=16 makes .*60 tokens"):
        check_enough_kv_cache_memory(make_config(64, num_blocks_override=16), two_layers, 2**40)


class _Request:
    request_id = "r"
    num_computed_tokens = 0
    block_hashes = ()

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens


@given(
    num_windowed=st.integers(0, 3),
    window=st.integers(1, 20),
    length=st.integers(1, 80),
    chunk=st.integers(1, 20),
    num_pages=st.integers(0, 60),
)
@settings(deadline=None, derandomize=True, max_examples=200)
def test_a_request_of_the_estimated_length_can_be_computed(
    num_windowed: int, window: int, length: int, chunk: int, num_pages: int
) -> None:
    """Compare the estimate with the block manager, which must be able to run such a request."""
    import torch

    full = FullAttentionSpec(4, 1, 8, torch.float32)
    narrow = SlidingWindowSpec(4, 1, 8, torch.float32, sliding_window=window)
    specs: dict[str, KVCacheSpec] = {"layers.0": full}
    specs |= {f"layers.{i + 1}": narrow for i in range(num_windowed)}
    config = EngineConfig(
        ModelConfig("m", "float32", length), scheduler=SchedulerConfig(max_num_batched_tokens=chunk)
    )
    available = num_pages * full.page_size_bytes
    longest = estimate_max_model_len(config, specs, available)
    assert 0 <= longest <= length
    if longest == 0:
        return
    pool = get_kv_cache_config(config, specs, available)
    manager, request = KVCacheManager(pool, length), _Request(longest)
    while request.num_computed_tokens < longest:
        num_new = min(chunk, longest - request.num_computed_tokens)
        assert manager.allocate_slots(request, num_new) is not None
        request.num_computed_tokens += num_new
