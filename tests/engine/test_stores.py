"""Real engines that share one of the example stores: right answers, and figures of what was loaded."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvferry.connector.config import KVTransferConfig
from kvferry.lab.engine.settings import EngineSettings
from kvferry.lab.node.replies import transfer_outcome
from tests.support.engines import MakeNode, served_engine
from tests.support.engines import SteppedNode as Node
from tests.support.patience import DEADLINE_S

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
    return lambda connector, module, **settings: make_node(
        kv_transfer=transfer_config(connector, module, tmp_path), **settings
    )


def transfer_config(connector: str, module: str, folder: Path) -> KVTransferConfig:
    return KVTransferConfig(
        connector,
        "kv_both",
        kv_connector_module_path=module,
        kv_connector_extra_config={"folder": str(folder)},
    )


@pytest.mark.parametrize(("connector", "module"), STORES)
def test_what_one_node_saved_another_loads_and_reports(
    connector: str, module: str, make_store: Callable[..., Node], reference: Callable[..., list[int]]
) -> None:
    expected = reference("llama", PROMPT, NUM_TOKENS)
    first, second = (make_store(connector, module) for _ in range(2))
    assert first.answer(PROMPT, max_tokens=NUM_TOKENS) == expected
    assert first.metrics.transfer is None
    assert second.answer(PROMPT, max_tokens=NUM_TOKENS) == expected
    record = second.metrics.transfer
    assert record is not None
    assert (record.transport, record.layout, record.error) == ("file", "per-layer", "")
    assert (record.num_blocks, second.metrics.num_loaded_tokens) == (11, 44)
    assert record.num_bytes > 0
    assert record.seconds > 0
    assert transfer_outcome(second.metrics) == "loaded"
    assert (first.num_loads, second.num_loads) == ((0, 0), (1, 0))
    assert first.is_whole
    assert second.is_whole


@pytest.mark.parametrize(("connector", "module"), STORES)
def test_a_damaged_store_is_computed_around_and_reported(
    connector: str,
    module: str,
    make_store: Callable[..., Node],
    reference: Callable[..., list[int]],
    tmp_path: Path,
) -> None:
    expected = reference("llama", PROMPT, NUM_TOKENS)
    first, second = (make_store(connector, module) for _ in range(2))
    first.answer(PROMPT, max_tokens=NUM_TOKENS)
    for path in tmp_path.iterdir():
        path.write_bytes(path.read_bytes()[:-1])
    assert second.answer(PROMPT, max_tokens=NUM_TOKENS) == expected
    assert second.metrics.num_loaded_tokens == 0
    assert second.metrics.transfer is not None
    assert "cannot load" in second.metrics.transfer.error
    assert transfer_outcome(second.metrics) == "failed"
    assert second.num_loads == (0, 1)
    assert second.is_whole


async def test_a_node_shows_a_stores_loads_in_answers_and_metrics(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    settings = EngineSettings(
        str(tiny_model("llama")),
        block_size=4,
        num_blocks=60,
        enable_prefix_caching=False,
        kv_transfer=transfer_config("FileConnector", "custom_connector", tmp_path),
    )
    body = {"prompt": PROMPT, "max_tokens": 2, "temperature": 0}
    async with served_engine(settings) as (_, _, client):
        async with client.post("/v1/completions", json=body) as reply:
            assert reply.headers["X-KV-Transfer"] == "none"
        async with asyncio.timeout(DEADLINE_S):
            while not list(tmp_path.glob("*.safetensors")):
                await asyncio.sleep(0.01)
        async with client.post("/v1/completions", json=body) as reply:
            assert reply.headers["X-KV-Transfer"] == "loaded"
            transfer = (await reply.json())["metrics"]["transfer"]
        assert (transfer["transport"], transfer["mechanism"]) == ("file", "safetensors")
        async with client.get("/metrics") as page:
            labels = '{mechanism="safetensors",transport="file"}'
            text = await page.text()
        assert f"kvferry_load_seconds_count{labels} 1.0" in text
        assert f"kvferry_load_bytes_sum{labels} {float(transfer['num_bytes'])}" in text


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
