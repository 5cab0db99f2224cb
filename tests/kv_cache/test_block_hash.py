from __future__ import annotations

import itertools
import logging
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.runner_mixin.kv_cache import (
    BlockHash,
    MultiModalFeature,
    generate_block_hash_extra_keys,
    get_block_hash,
    get_group_id,
    get_request_block_hasher,
    hash_block_tokens,
    init_none_hash,
    make_block_hash_with_group_id,
    need_extra_keys,
    sha256,
)

MakeRequest = Callable[..., Any]
IMAGE = MultiModalFeature("image", offset=2, length=5)
SOUND = MultiModalFeature("sound", offset=9, length=2)
tokens = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=8)


# -- the hash of one block ---------------------------------------------------------------------------


@given(first=tokens, second=tokens)
@settings(deadline=None, derandomize=True)
def test_blocks_are_equal_exactly_if_their_tokens_are(first: list[int], second: list[int]) -> None:
    assert (hash_block_tokens(sha256, None, first) == hash_block_tokens(sha256, None, second)) == (
        first == second
    )


@given(
    parents=st.tuples(st.binary(min_size=32, max_size=32), st.binary(min_size=32, max_size=32)), block=tokens
)
@settings(deadline=None, derandomize=True)
def test_a_hash_covers_everything_before_the_block(parents: tuple[bytes, bytes], block: list[int]) -> None:
    one, other = (hash_block_tokens(sha256, BlockHash(parent), block) for parent in parents)
    assert (one == other) == (parents[0] == parents[1])


def test_extra_keys_change_the_hash() -> None:
    hashes = {
        hash_block_tokens(sha256, None, [1], keys) for keys in (None, (("salt", "a"),), (("lora", "a"),))
    }
    assert len(hashes) == 3


def test_a_lone_surrogate_in_a_salt_can_be_hashed() -> None:
    assert sha256("\ud800") != sha256("\ud801")


def test_a_value_without_a_canonical_encoding_is_refused() -> None:
    with pytest.raises(TypeError):
        sha256(object())


# -- the seed ----------------------------------------------------------------------------------------


def test_a_content_hash_without_a_seed_warns(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        init_none_hash(sha256, "")
    assert "hash_seed" in caplog.text


def test_a_seed_or_a_custom_hash_function_does_not_warn(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        init_none_hash(sha256, "seed")
        init_none_hash(lambda value: repr(value).encode(), "")
    assert not caplog.records


def _hashes_of_a_new_process() -> list[str]:
    """Return the hash of a block without a seed, and then with one."""
    program = (
        "from kvferry.runner_mixin.kv_cache import hash_block_tokens, init_none_hash, sha256\n"
        "for seed in (None, 'seed'):\n"
        "    if seed: init_none_hash(sha256, seed)\n"
        "    print(hash_block_tokens(sha256, None, [1, 2, 3], (('salt', 's'),)).hex())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    return done.stdout.split()


@pytest.mark.slow
def test_processes_agree_exactly_if_they_share_a_seed() -> None:
    (alone, seeded), (other_alone, other_seeded) = _hashes_of_a_new_process(), _hashes_of_a_new_process()
    assert seeded == other_seeded
    assert alone != other_alone


# -- groups ------------------------------------------------------------------------------------------


@given(value=st.binary(min_size=1, max_size=32), group_id=st.integers(0, 2**32 - 1))
@settings(deadline=None, derandomize=True)
def test_a_key_gives_back_hash_and_group(value: bytes, group_id: int) -> None:
    key = make_block_hash_with_group_id(BlockHash(value), group_id)
    assert (get_block_hash(key), get_group_id(key)) == (value, group_id)


# -- extra keys --------------------------------------------------------------------------------------


def test_a_plain_request_needs_no_extra_keys(make_request: MakeRequest) -> None:
    request = make_request("r", [1, 2, 3])
    assert not need_extra_keys(request)
    assert generate_block_hash_extra_keys(request, 0, 4, 0) == (None, 0)


@pytest.mark.parametrize("extra", [{"lora_id": "a"}, {"cache_salt": "a"}, {"mm_features": (IMAGE,)}])
def test_adapter_salt_and_items_need_extra_keys(make_request: MakeRequest, extra: dict[str, Any]) -> None:
    assert need_extra_keys(make_request("r", list(range(8)), **extra))


def test_the_adapter_is_in_every_block_and_the_salt_in_the_first(make_request: MakeRequest) -> None:
    request = make_request("r", list(range(8)), lora_id="a", cache_salt="s")
    assert generate_block_hash_extra_keys(request, 0, 4, 0)[0] == (("lora", "a"), ("salt", "s"))
    assert generate_block_hash_extra_keys(request, 4, 8, 0)[0] == (("lora", "a"),)


def test_a_salt_keeps_all_blocks_apart(make_request: MakeRequest) -> None:
    plain = make_request("r", list(range(12)))
    salted = make_request("r", list(range(12)), cache_salt="s")
    assert not set(plain.block_hashes) & set(salted.block_hashes)


def test_items_count_in_every_block_that_they_reach_into(make_request: MakeRequest) -> None:
    request = make_request("r", list(range(16)), mm_features=(IMAGE, SOUND))
    keys, mm_idx = generate_block_hash_extra_keys(request, 0, 4, 0)
    assert (keys, mm_idx) == ((("mm", "image", 2),), 0)  # it reaches into the next block
    keys, mm_idx = generate_block_hash_extra_keys(request, 4, 8, mm_idx)
    assert (keys, mm_idx) == ((("mm", "image", -2),), 1)
    keys, mm_idx = generate_block_hash_extra_keys(request, 8, 12, mm_idx)
    assert (keys, mm_idx) == ((("mm", "sound", 1),), 2)
    assert generate_block_hash_extra_keys(request, 12, 16, mm_idx) == (None, 2)


def test_one_can_resume_from_the_last_item(make_request: MakeRequest) -> None:
    request = make_request("r", list(range(16)), mm_features=(IMAGE, SOUND))
    assert generate_block_hash_extra_keys(request, 8, 12, -1) == ((("mm", "sound", 1),), 2)
    assert generate_block_hash_extra_keys(request, 12, 16, -1)[0] is None
    assert generate_block_hash_extra_keys(make_request("r", [1]), 4, 8, -1) == (None, 0)


# -- a request's blocks ------------------------------------------------------------------------------


def test_only_full_blocks_are_hashed(make_request: MakeRequest) -> None:
    assert [len(make_request("r", [7] * n).block_hashes) for n in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]


def test_only_new_blocks_are_hashed(make_request: MakeRequest) -> None:
    calls: list[object] = []

    def counting(value: object) -> bytes:
        calls.append(value)
        return sha256(value)

    request = make_request("r", list(range(8)))
    hasher = get_request_block_hasher(4, counting)
    assert hasher(request) == []
    request.all_token_ids += [8, 9, 10, 11]
    assert len(hasher(request)) == len(calls) == 1


@given(ids=st.lists(st.integers(0, 3), max_size=30), cuts=st.lists(st.integers(0, 30), max_size=4))
@settings(deadline=None, derandomize=True)
def test_hashes_do_not_depend_on_how_the_tokens_arrived(
    make_request: MakeRequest, ids: list[int], cuts: list[int]
) -> None:
    features = (IMAGE, SOUND, MultiModalFeature("end", 12, 40))
    at_once = make_request("r", list(ids), mm_features=features)
    bounds = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    in_parts = make_request("r", [], mm_features=features)
    for start, end in itertools.pairwise(bounds):
        in_parts.append(*ids[start:end])
    assert in_parts.block_hashes == at_once.block_hashes


@given(a=st.lists(st.integers(0, 1), max_size=20), b=st.lists(st.integers(0, 1), max_size=20))
@settings(deadline=None, derandomize=True)
def test_two_requests_share_exactly_the_blocks_of_their_common_prefix(
    make_request: MakeRequest, a: list[int], b: list[int]
) -> None:
    common = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    one, other = make_request("a", list(a)).block_hashes, make_request("b", list(b)).block_hashes
    shared = common // 4
    assert one[:shared] == other[:shared]
    assert not set(one[shared:]) & set(other[shared:])


def test_a_block_needs_a_size() -> None:
    with pytest.raises(ValueError, match="block_size=0"):
        get_request_block_hasher(0, sha256)
