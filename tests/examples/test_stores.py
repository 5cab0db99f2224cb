"""The stores that an author starts from: what each of them promises, on nodes without a model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvferry.connector import (
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVConnectorFactory,
    KVConnectorMetadata,
    KVConnectorRole,
    MambaSpec,
    SchedulerOutput,
    SlidingWindowSpec,
)
from kvferry.connector.testing import Request, engine_config
from kvferry.transports.errors import ConfigurationError

from .stores import BLOCK, LAYER, SHAPE, STORES, answer, prompt, store_node, transfer_of

BY_BLOCK = [pytest.param(*BLOCK, id="block"), pytest.param(*LAYER, id="layer")]
BLOCK_BYTES = SHAPE.num_layers * SHAPE.spec.page_size_bytes


@pytest.mark.parametrize(("connector", "module"), STORES)
@pytest.mark.parametrize("num_tokens", [4, 5, 15, 16, 17, 18])
def test_a_prompt_of_any_length_is_loaded_but_for_its_last_token(
    num_tokens: int, connector: str, module: str, tmp_path: Path
) -> None:
    with store_node(connector, module, tmp_path) as first, store_node(connector, module, tmp_path) as second:
        assert answer(first, Request("a", num_tokens)) == 0
        assert answer(second, Request("b", num_tokens)) == (num_tokens - 1) // 4 * 4


@pytest.mark.parametrize(("connector", "module"), STORES)
@pytest.mark.parametrize("max_step_tokens", [3, 5, 8])
def test_a_prompt_that_was_computed_in_chunks_is_loaded_as_a_whole(
    max_step_tokens: int, connector: str, module: str, tmp_path: Path
) -> None:
    with store_node(connector, module, tmp_path, max_step_tokens=max_step_tokens) as first:
        assert answer(first, Request("a", 18), max_answer_tokens=3) == 0
        assert answer(first, Request("b", 18)) == 16


@pytest.mark.parametrize(("connector", "module"), STORES)
def test_what_the_node_has_is_not_loaded(connector: str, module: str, tmp_path: Path) -> None:
    with store_node(connector, module, tmp_path) as first, store_node(connector, module, tmp_path) as second:
        answer(first, Request("a", 18))
        assert answer(second, Request("b", 18), num_local_tokens=8) == 8
        (record,) = second.stats.transfers
        assert (record.request_id, record.transport, record.layout) == ("b", "file", "per-layer")
        assert (record.num_blocks, record.num_bytes) == (2, 2 * BLOCK_BYTES)
        assert record.seconds > 0
        assert record.exposed_seconds > 0
        assert record.error == ""


@dataclass(frozen=True)
class Image:
    identifier: str
    offset: int = 3
    length: int = 2


@pytest.mark.parametrize(("connector", "module"), STORES)
@pytest.mark.parametrize(
    "other",
    [
        {"lora_id": "polite"},
        {"cache_salt": "mine"},
        {"mm_features": (Image("a cat"),)},
        {"prompt_embeds": torch.zeros(18, 4)},
    ],
    ids=lambda other: next(iter(other)),
)
def test_adapters_salts_images_and_vectors_share_nothing(
    other: dict[str, Any], connector: str, module: str, tmp_path: Path
) -> None:
    with store_node(connector, module, tmp_path) as first:
        answer(first, Request("a", 18))
        assert answer(first, Request("b", 18, **other)) == 0
        assert answer(first, Request("c", 18, **other)) == 16
        assert answer(first, Request("d", 18)) == 16


@pytest.mark.parametrize(("connector", "module"), STORES)
def test_another_model_finds_nothing(connector: str, module: str, tmp_path: Path) -> None:
    with store_node(connector, module, tmp_path) as first:
        answer(first, Request("a", 18))
    with store_node(connector, module, tmp_path, model="another") as second:
        assert answer(second, Request("b", 18)) == 0


@pytest.mark.parametrize(("connector", "module"), BY_BLOCK)
def test_prompts_share_the_blocks_with_which_they_begin(connector: str, module: str, tmp_path: Path) -> None:
    with store_node(connector, module, tmp_path) as first, store_node(connector, module, tmp_path) as second:
        answer(first, Request("a", 16))
        other = prompt((0, 10), (500, 12))
        assert answer(second, Request("b", 22, token_ids=other)) == 8
        # Exact multiples of the block size: the longer prompt uses the last block, too.
        assert answer(second, Request("c", 17)) == 16
        assert answer(second, Request("d", 16, first_token_id=1)) == 0
        assert answer(second, Request("e", 22, token_ids=other), num_local_tokens=4) == 16


@pytest.mark.parametrize(("connector", "module"), BY_BLOCK)
def test_the_nodes_own_prefix_hit_is_saved_as_well(connector: str, module: str, tmp_path: Path) -> None:
    """A store finds a block only if it has those before it."""
    with store_node(connector, module, tmp_path) as first:
        answer(first, Request("a", 18), num_local_tokens=8)
        assert answer(first, Request("b", 18)) == 16


@pytest.mark.parametrize(("connector", "module"), STORES)
def test_a_request_that_loses_its_blocks_leaves_nothing_wrong(
    connector: str, module: str, tmp_path: Path
) -> None:
    with store_node(connector, module, tmp_path, max_step_tokens=6) as first:
        first.add(Request("a", 22))
        first.step()
        first.step()
        first.preempt("a")
        first.step_until(lambda: not first.is_busy)
        assert answer(first, Request("b", 22)) == 20


@pytest.mark.parametrize(("connector", "module"), STORES)
@pytest.mark.parametrize("damage", ["missing", "shorter", "changed", "another file"])
def test_a_damaged_store_fails_the_load_and_recovers(
    damage: str, connector: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (connector, damage) == ("FileConnector", "changed"):
        pytest.skip("its files have no checksum")

    def harm(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        contents = {"missing": b"", "shorter": data[:-9], "changed": data, "another file": b"PK\x03\x04"}
        path.write_bytes(contents[damage])
        if damage == "missing":
            path.unlink()

    with store_node(connector, module, tmp_path) as first, store_node(connector, module, tmp_path) as second:
        answer(first, Request("a", 18))
        second.add(Request("b", 18))
        order, harmed = second.scheduler.build_connector_meta, min(tmp_path.iterdir())

        def order_after_harm(step: SchedulerOutput) -> KVConnectorMetadata:
            monkeypatch.undo()
            harm(harmed)  # between the connector's answer and the load
            return order(step)

        monkeypatch.setattr(second.scheduler, "build_connector_meta", order_after_harm)
        second.step_until(lambda: not second.is_busy)
        assert (second.failed_loads, second.num_loaded_tokens) == ({"b"}, {})
        (record,) = second.stats.transfers
        assert (record.request_id, record.transport) == ("b", "file")
        assert "cannot load" in record.error
        assert second.stats.counters["load_failures_total"] == 1
    with store_node(connector, module, tmp_path) as third:
        answer(third, Request("c", 18))  # computes what is missing, and saves it again
        assert answer(third, Request("d", 18)) == 16


@pytest.mark.parametrize(("connector", "module"), STORES)
def test_a_store_that_cannot_save_costs_no_answer(connector: str, module: str, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    with store_node(connector, module, folder) as first:
        folder.rmdir()
        assert answer(first, Request("a", 18)) == 0
        assert first.worker.warning == "" or "cannot save" in first.worker.warning
        folder.mkdir()
        assert answer(first, Request("b", 18)) == 0
        assert answer(first, Request("c", 18)) == 16
        assert first.worker.warning == ""


@pytest.mark.parametrize(("connector", "module"), STORES)
def test_nothing_unfinished_stays_in_the_folder(connector: str, module: str, tmp_path: Path) -> None:
    with store_node(connector, module, tmp_path) as first:
        answer(first, Request("a", 18))
    names = [path.name for path in tmp_path.iterdir()]
    assert len(names) == (1 if connector == "FileConnector" else 4)
    assert all(name.partition(".")[0].isalnum() and "-" not in name for name in names)


@pytest.mark.parametrize(("connector", "module"), STORES)
@pytest.mark.parametrize("options", [{}, {"folder": "x", "colour": "red"}])
def test_a_missing_folder_and_an_unknown_option_are_refused(
    options: dict[str, str], connector: str, module: str
) -> None:
    transfer = {**transfer_of(connector, module, Path()), "kv_connector_extra_config": options}
    config = engine_config(transfer.pop("kv_connector"), **transfer)
    for role in KVConnectorRole:
        with pytest.raises(ConfigurationError, match="needs .* option"):
            KVConnectorFactory.create_connector(config, role, SHAPE.kv_cache_config())


@pytest.mark.parametrize(("connector", "module"), STORES)
@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(SlidingWindowSpec(4, 2, 8, torch.float32, sliding_window=8), id="window"),
        pytest.param(MambaSpec(4, ((3,),), (torch.float32,)), id="state"),
    ],
)
def test_what_a_store_cannot_keep_is_refused(
    spec: KVCacheSpec, connector: str, module: str, tmp_path: Path
) -> None:
    transfer = transfer_of(connector, module, tmp_path)
    config = engine_config(transfer.pop("kv_connector"), **transfer)
    caches = KVCacheConfig(8, (), (KVCacheGroupSpec(("layers.0",), spec),))
    two_ranks = replace(config, parallel=replace(config.parallel, tensor_parallel_size=2))
    for refused, pool in ((config, caches), (two_ranks, SHAPE.kv_cache_config())):
        with pytest.raises(ConfigurationError, match="only one group of full attention on one rank"):
            KVConnectorFactory.create_connector(refused, KVConnectorRole.SCHEDULER, pool)
