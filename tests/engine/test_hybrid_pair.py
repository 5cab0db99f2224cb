"""Models whose layers attend to different ranges are handed over from a prefill engine to a decode engine."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from kvferry.connector.kv_cache_specs import UniformTypeKVCacheSpecs
from kvferry.lab.engine.weights import load_model
from tests.support.tiny_models import generate_greedily, write_tiny_model

LAYOUTS = ["uniform", "per-layer"]
#: In tokens: the tiny models' window and chunk of chunked attention, and the nodes' blocks. A step has 16
#: tokens.
WINDOW, CHUNK, BLOCK = 24, 24, 4
#: Longer than the window and than several steps. The last block has only the last token.
PROMPT = [random.Random(21).randrange(256) for _ in range(61)]
#: The prompt's last token, which the decode node computes itself. The blocks before it are loaded, if this
#: token sees them.
LAST = len(PROMPT) - 1
NUM_BLOCKS = -(-LAST // BLOCK)
IN_WINDOW = NUM_BLOCKS - (LAST - WINDOW + 1) // BLOCK
IN_CHUNK = NUM_BLOCKS - LAST // CHUNK * CHUNK // BLOCK


@pytest.fixture
def make_pair(make_node: Any) -> Callable[..., tuple[Any, Any]]:
    def make(family: str, connector: str = "shm", **settings: Any) -> tuple[Any, Any]:
        return (
            make_node(family, connector=connector, role="kv_producer", **settings),
            make_node(family, connector=connector, role="kv_consumer", **settings),
        )

    return make


def _prefill(drive: Any, node: Any, prompt: Sequence[int], num_tokens: int = 1) -> Any:
    node.add("a", prompt, max_tokens=num_tokens, kv_transfer_params={"do_remote_decode": True})
    drive(node, until=lambda: node.is_over("a"))
    return node.last("a").kv_transfer_params


def _decode(drive: Any, prefill: Any, decode: Any, prompt: Sequence[int], params: Any) -> Any:
    """Hand the prompt over and let the decode node answer. Returns its last output."""
    decode.add("a", prompt, max_tokens=40, kv_transfer_params=params)
    drive(prefill, decode, until=lambda: not prefill.core.has_work and not decode.core.has_work)
    assert prefill.is_whole
    assert decode.is_whole
    return decode.last("a")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("family", "num_blocks", "layers_per_block"),
    [
        pytest.param("mistral", IN_WINDOW, 3, id="mistral, windows only"),
        pytest.param("gemma2", NUM_BLOCKS + IN_WINDOW, 2, id="gemma2, windows and full"),
        pytest.param("gemma3", NUM_BLOCKS + IN_WINDOW, 2, id="gemma3, windows and full"),
        pytest.param("gemma3n", NUM_BLOCKS + IN_WINDOW, 2, id="gemma3n, layers that read another's cache"),
        pytest.param("llama4", NUM_BLOCKS + IN_CHUNK, 2, id="llama4, chunks and full"),
    ],
)
def test_only_visible_blocks_are_transferred_and_the_answer_is_the_same(
    family: str,
    num_blocks: int,
    layers_per_block: int,
    layout: str,
    make_pair: Any,
    drive: Any,
    assert_same: Any,
) -> None:
    prefill, decode = make_pair(family, layout=layout)
    last = _decode(drive, prefill, decode, PROMPT, _prefill(drive, prefill, PROMPT))
    assert_same(decode.tokens("a"), family, PROMPT, 40)
    assert last.metrics.num_loaded_tokens == LAST
    transfer = last.metrics.transfer
    assert transfer.num_blocks == num_blocks
    # In the uniform layout a run of blocks is one region, however many layers there are. Per layer it is one
    # per layer.
    regions_per_run = 1 if layout == "uniform" else layers_per_block
    assert transfer.num_regions_per_layer * regions_per_run == transfer.num_regions * layers_per_block
    page_bytes = 2 * BLOCK * 2 * 16 * 4  # keys and values, slots, heads, elements, bytes
    assert transfer.num_bytes == num_blocks * layers_per_block * page_bytes


@pytest.mark.parametrize(
    "kinds",
    [
        pytest.param("wwwf", id="four groups of one layer"),
        pytest.param("wwfwwfw", id="four groups, some with a padding layer"),
    ],
)
def test_one_kind_may_make_several_groups(kinds: str, make_pair: Any, drive: Any, tmp_path: Path) -> None:
    layer_types = [{"w": "sliding_attention", "f": "full_attention"}[kind] for kind in kinds]
    write_tiny_model(tmp_path, "gemma3", num_hidden_layers=len(kinds), layer_types=layer_types)
    prefill, decode = make_pair("gemma3", model=str(tmp_path))
    last = _decode(drive, prefill, decode, PROMPT, _prefill(drive, prefill, PROMPT))
    model = load_model(tmp_path, torch.float32, torch.device("cpu"), "eager")
    assert decode.tokens("a") == generate_greedily(model, PROMPT, 40)
    assert len(decode.core.parts.kv_cache_config.kv_cache_groups) == 4
    assert last.metrics.transfer.num_blocks == NUM_BLOCKS + 3 * IN_WINDOW


@pytest.mark.parametrize("family", ["gemma3", "gemma3n", "llama4"])
def test_locally_cached_blocks_are_not_transferred_again(
    family: str, make_pair: Any, drive: Any, assert_same: Any
) -> None:
    prefill, decode = make_pair(family)
    decode.answer(PROMPT[:53], max_tokens=1)
    last = _decode(drive, prefill, decode, PROMPT, _prefill(drive, prefill, PROMPT))
    assert_same(decode.tokens("a"), family, PROMPT, 40)
    assert last.metrics.num_cached_tokens == 52
    assert last.metrics.transfer.num_blocks == 2 * (NUM_BLOCKS - 13)


def test_a_window_that_the_producer_has_freed_is_recomputed(
    make_pair: Any, drive: Any, assert_same: Any
) -> None:
    """A producer that goes on generating frees blocks that the prompt's last token sees.

    The consumer recomputes.
    """
    prefill, decode = make_pair("gemma3")
    params = _prefill(drive, prefill, PROMPT, num_tokens=30)
    _decode(drive, prefill, decode, PROMPT, params)
    assert_same(decode.tokens("a"), "gemma3", PROMPT, 40)
    assert decode.num_loads == (0, 1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layers_of_different_sizes_are_one_group_that_keeps_everything(
    layout: str, make_pair: Any, drive: Any, assert_same: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The two kinds have blocks of different sizes and cannot share them, so windowed layers cannot
    free any.
    """
    prefill, decode = make_pair("gemma4", layout=layout)
    assert "all layers keep the whole sequence" in caplog.text
    last = _decode(drive, prefill, decode, PROMPT, _prefill(drive, prefill, PROMPT))
    assert_same(decode.tokens("a"), "gemma4", PROMPT, 40)
    (group,) = decode.core.parts.kv_cache_config.kv_cache_groups
    assert isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs)
    sizes = [spec.page_size_bytes for spec in group.kv_cache_spec.kv_cache_specs.values()]
    assert sizes == [1024, 2048] * 2
    transfer = last.metrics.transfer
    num_blocks = NUM_BLOCKS + 1  # all of the prompt
    assert (transfer.num_blocks, transfer.num_bytes) == (num_blocks, num_blocks * sum(sizes))
