"""Real engines that share one of the example stores answer rightly, whatever happens to their requests."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvferry.connector.config import KVTransferConfig
from tests.support.engines import MakeNode
from tests.support.engines import SteppedNode as Node

#: Several steps of prefill; its last block is not full.
PROMPT = [random.Random(5).randrange(256) for _ in range(45)]
NUM_TOKENS = 6

STORES = [
    pytest.param("FileConnector", "custom_connector", id="file"),
    pytest.param("BlockStoreConnector", "block_store", id="block"),
    pytest.param("LayerStoreConnector", "layer_store", id="layer"),
]

#: A pool in which several requests take each other's blocks, and chunks that end within a block.
TIGHT = {"num_blocks": 34, "max_num_batched_tokens": 14}


@pytest.fixture
def make_store(make_node: MakeNode, tmp_path: Path) -> Callable[..., Node]:
    """`(connector, module, **settings)` → a node whose store is in the test's folder."""

    def make(connector: str, module: str, **settings: Any) -> Node:
        transfer = KVTransferConfig(
            connector,
            "kv_both",
            kv_connector_module_path=module,
            kv_connector_extra_config={"folder": str(tmp_path)},
        )
        return make_node(kv_transfer=transfer, **settings)

    return make


LAYER = ("LayerStoreConnector", "layer_store")


@pytest.mark.parametrize(("connector", "module"), STORES)
def test_requests_that_take_each_others_blocks_leave_a_store_right(
    connector: str, module: str, make_store: Callable[..., Node], reference: Callable[..., list[int]]
) -> None:
    """Chunks that end within a block, requests that lose their blocks, and prefix hits of the node itself."""
    prompts = [PROMPT, [*PROMPT[:20], *range(20)], [7, *PROMPT[:30]], PROMPT[:40]]
    first, second = (make_store(connector, module, **settings) for settings in (TIGHT, {}))
    for index, tokens in enumerate(prompts):
        first.add(f"r{index}", tokens, max_tokens=24)
    first.run()
    assert first.core.stats().totals.num_preemptions > 0
    for index, tokens in enumerate(prompts):
        assert first.tokens(f"r{index}") == reference("llama", tokens, 24)
        assert second.answer(tokens, max_tokens=NUM_TOKENS) == reference("llama", tokens, NUM_TOKENS)
    assert second.num_loads[0] > 0
    assert second.num_loads[1] == 0
    assert first.is_whole
    assert second.is_whole


@pytest.mark.parametrize("failing_layer", [0, 2])
def test_a_step_that_fails_saves_nothing(
    failing_layer: int,
    make_store: Callable[..., Node],
    reference: Callable[..., list[int]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    first, second = (make_store(*LAYER) for _ in range(2))
    name = f"model.layers.{failing_layer}.self_attn"
    layer = first.core.parts.executor.runner._layers[name]  # type: ignore[attr-defined]
    with monkeypatch.context() as patch:

        def fail_once(*arguments: Any) -> Any:
            patch.undo()
            raise ArithmeticError("out of luck")

        patch.setattr(layer, "forward", fail_once)
        first.add("a", PROMPT, max_tokens=NUM_TOKENS)
        first.run()
    assert first.last("a").finish_reason == "error"
    assert not list(tmp_path.iterdir())
    expected = reference("llama", PROMPT, NUM_TOKENS)
    assert first.answer(PROMPT, max_tokens=NUM_TOKENS) == expected
    assert second.answer(PROMPT, max_tokens=NUM_TOKENS) == expected
    assert second.metrics.num_loaded_tokens == 44
