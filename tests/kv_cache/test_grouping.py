from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from kvferry.connector.config import EngineConfig
from kvferry.connector.kv_cache_specs import (
    ChunkedLocalAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from kvferry.runner_mixin.kv_cache import (
    create_kv_cache_group_specs,
    get_kv_cache_groups,
    get_num_blocks,
    get_uniform_page_size,
    is_kv_cache_page_size_uniform,
    is_kv_cache_type_attention_free,
    is_kv_cache_type_uniform,
    num_blocks_per_request,
    padding_share,
    unify_hybrid_kv_cache_specs,
)
from kvferry.transports.errors import ConfigurationError

Windowed = Callable[[int], SlidingWindowSpec]
Chunked = Callable[[int], ChunkedLocalAttentionSpec]
MakeConfig = Callable[..., EngineConfig]
ENCODER = EncoderOnlyAttentionSpec(4, 2, 8, torch.float32)


def layers(*specs: KVCacheSpec) -> dict[str, KVCacheSpec]:
    return {f"layers.{i}": spec for i, spec in enumerate(specs)}


# -- what kind of model it is ------------------------------------------------------------------------


def test_a_model_without_a_cache_is_attention_free(full: FullAttentionSpec) -> None:
    assert is_kv_cache_type_attention_free({})
    assert is_kv_cache_type_attention_free(layers(ENCODER))
    assert not is_kv_cache_type_attention_free(layers(ENCODER, full))


def test_types_are_uniform_when_all_merge(full: FullAttentionSpec, windowed: Windowed) -> None:
    assert is_kv_cache_type_uniform({})
    assert is_kv_cache_type_uniform(layers(full, full))
    assert is_kv_cache_type_uniform(layers(full, replace(full, sliding_window=8)))
    assert is_kv_cache_type_uniform(layers(windowed(8), windowed(8)))
    assert not is_kv_cache_type_uniform(layers(windowed(8), windowed(4)))
    assert not is_kv_cache_type_uniform(layers(full, windowed(8)))
    assert not is_kv_cache_type_uniform(layers(windowed(8), full))
    assert not is_kv_cache_type_uniform(layers(full, replace(full, num_kv_heads=4)))


def test_page_sizes_are_uniform_when_equal(full: FullAttentionSpec, windowed: Windowed) -> None:
    assert is_kv_cache_page_size_uniform(layers(full, windowed(8)))
    assert not is_kv_cache_page_size_uniform(layers(full, replace(full, num_kv_heads=4)))
    assert not is_kv_cache_page_size_uniform({})
    assert get_uniform_page_size(layers(full, windowed(8))) == full.page_size_bytes


def test_the_page_size_of_unequal_or_no_layers_is_an_error(full: FullAttentionSpec) -> None:
    with pytest.raises(ValueError, match=r"got \[512, 1024\]"):
        get_uniform_page_size(layers(full, replace(full, num_kv_heads=4)))
    with pytest.raises(ValueError, match=r"got \[\]"):
        get_uniform_page_size({})


# -- groups ------------------------------------------------------------------------------------------


def test_groups_are_made_as_asked(full: FullAttentionSpec, windowed: Windowed) -> None:
    specs = layers(full, windowed(8), replace(full, sliding_window=4))
    groups = create_kv_cache_group_specs(specs, [["layers.0", "layers.2"], ["layers.1"]])
    assert [group.layer_names for group in groups] == [("layers.0", "layers.2"), ("layers.1",)]
    assert [group.kv_cache_spec for group in groups] == [replace(full, sliding_window=4), windowed(8)]


def test_a_group_needs_layers_that_merge(full: FullAttentionSpec, windowed: Windowed) -> None:
    with pytest.raises(ValueError, match="layers of one group"):
        create_kv_cache_group_specs(layers(full, windowed(8)), [["layers.0", "layers.1"]])
    with pytest.raises(ValueError, match="KV cache group without layers"):
        create_kv_cache_group_specs({}, [[]])


def test_one_kind_with_different_pages_is_one_composite_group(
    full: FullAttentionSpec, make_config: MakeConfig
) -> None:
    specs = layers(full, replace(full, num_kv_heads=4))
    (group,) = get_kv_cache_groups(make_config(), specs)
    assert group.kv_cache_spec == UniformTypeKVCacheSpecs(4, specs)


def test_encoder_layers_are_in_no_group(full: FullAttentionSpec, make_config: MakeConfig) -> None:
    (group,) = get_kv_cache_groups(make_config(), layers(ENCODER, full))
    assert group.layer_names == ("layers.1",)
    assert get_kv_cache_groups(make_config(), layers(ENCODER)) == ()


def test_several_kinds_are_groups_of_equal_layer_count(
    full: FullAttentionSpec, windowed: Windowed, make_config: MakeConfig
) -> None:
    pattern = [windowed(8)] * 2 + [full]
    groups = get_kv_cache_groups(make_config(), layers(*pattern * 2))
    assert [group.layer_names for group in groups] == [
        ("layers.0", "layers.3"),
        ("layers.1", "layers.4"),
        ("layers.2", "layers.5"),
    ]
    assert [type(group.kv_cache_spec).__name__ for group in groups] == [
        "SlidingWindowSpec",
        "SlidingWindowSpec",
        "FullAttentionSpec",
    ]
    assert padding_share(groups) == 0.0


def test_a_kind_that_does_not_divide_is_padded(
    full: FullAttentionSpec, windowed: Windowed, make_config: MakeConfig
) -> None:
    groups = get_kv_cache_groups(make_config(), layers(*[full] * 2, *[windowed(8)] * 3))
    assert [len(group.layer_names) for group in groups] == [2, 2, 1]
    assert padding_share(groups) == pytest.approx(1 / 6)


def test_kinds_with_almost_equal_layer_counts_are_one_group_each(
    full: FullAttentionSpec, windowed: Windowed, make_config: MakeConfig
) -> None:
    groups = get_kv_cache_groups(make_config(), layers(*[full] * 9, *[windowed(8)] * 10))
    assert [len(group.layer_names) for group in groups] == [9, 10]


def test_a_state_padded_to_the_attention_page_joins_the_pool(
    full: FullAttentionSpec, make_config: MakeConfig
) -> None:
    state = MambaSpec(64, shapes=((4, 4),), dtypes=(torch.float32,), page_size_padded=full.page_size_bytes)
    groups = get_kv_cache_groups(make_config(), layers(full, state))
    assert len(groups) == 2
    assert num_blocks_per_request(make_config(64), groups) == 16 + 1


# -- the hybrid manager off --------------------------------------------------------------------------


def test_windowed_and_full_layers_become_one_kind(
    full: FullAttentionSpec, windowed: Windowed, make_config: MakeConfig
) -> None:
    given = layers(full, windowed(8))
    unified = unify_hybrid_kv_cache_specs(given)
    assert unified == layers(full, replace(full, sliding_window=8))
    assert given == layers(full, windowed(8))
    (group,) = get_kv_cache_groups(make_config(hybrid=False), given)
    assert group.kv_cache_spec == replace(full, sliding_window=8)


def test_chunked_layers_become_full_attention(full: FullAttentionSpec, chunked: Chunked) -> None:
    assert unify_hybrid_kv_cache_specs(layers(full, chunked(8))) == layers(
        full, replace(full, attention_chunk_size=8)
    )


def test_one_kind_stays_as_it_is(windowed: Windowed) -> None:
    assert unify_hybrid_kv_cache_specs(layers(windowed(8), windowed(8))) == layers(windowed(8), windowed(8))


def test_kinds_that_cannot_become_one_are_an_error(
    full: FullAttentionSpec, windowed: Windowed, chunked: Chunked
) -> None:
    state = MambaSpec(4, shapes=((1,),), dtypes=(torch.float32,))
    for specs in (layers(full, state), layers(windowed(8), chunked(8), state)):
        with pytest.raises(ConfigurationError, match="set enable_hybrid_kv_cache_manager to True"):
            unify_hybrid_kv_cache_specs(specs)


def test_different_windows_and_sizes_make_one_composite_group(
    make_config: MakeConfig, full: FullAttentionSpec, windowed: Windowed, chunked: Chunked
) -> None:
    """As full attention, the layers differ only in the size of a block."""
    specs = layers(replace(full, num_kv_heads=4), windowed(8), windowed(4), chunked(8))
    config = make_config(hybrid=False)
    (group,) = get_kv_cache_groups(config, specs)
    assert isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs)
    members = list(group.kv_cache_spec.kv_cache_specs.values())
    assert {type(member) for member in members} == {FullAttentionSpec}
    assert [(m.sliding_window, m.attention_chunk_size) for m in members] == [  # type: ignore[attr-defined]
        (None, None),
        (8, None),
        (4, None),
        (None, 8),
    ]
    assert group.kv_cache_spec.page_size_bytes == sum(spec.page_size_bytes for spec in specs.values())


# -- blocks ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("available", "expected"), [(0, 0), (99, 0), (100, 1), (1099, 10), (-5, 0)])
def test_as_many_blocks_as_fit(make_config: MakeConfig, available: int, expected: int) -> None:
    assert get_num_blocks(make_config(), 10, available, 10) == expected


def test_the_override_takes_precedence(make_config: MakeConfig) -> None:
    assert get_num_blocks(make_config(num_blocks_override=7), 10, 1000, 10) == 7
