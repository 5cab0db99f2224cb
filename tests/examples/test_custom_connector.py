"""The example that an author starts from keeps a connector's promises; `tests/e2e` has it in a real node."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from kvferry.connector import (
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVConnectorFactory,
    KVConnectorRole,
    MambaSpec,
    SlidingWindowSpec,
)
from kvferry.connector.testing import (
    CacheShape,
    ConnectorConformance,
    ModelFreeNode,
    Request,
    engine_config,
)
from kvferry.transports.errors import ConfigurationError

SHAPE = CacheShape(layout="per-layer")


class TestAsAnyConnector(ConnectorConformance):
    @pytest.fixture
    def transfer(self, tmp_path: Path) -> dict[str, Any]:
        return {
            "kv_connector": "FileConnector",
            "kv_connector_module_path": "custom_connector",
            "kv_connector_extra_config": {"folder": str(tmp_path)},
        }


@contextmanager
def node(folder: Path, model: str = "tiny") -> Iterator[ModelFreeNode]:
    config = engine_config(
        "FileConnector",
        model=model,
        kv_connector_module_path="custom_connector",
        kv_connector_extra_config={"folder": str(folder)},
    )
    with ModelFreeNode(config, SHAPE) as made:
        yield made


def test_only_missing_blocks_are_loaded(tmp_path: Path) -> None:
    with node(tmp_path) as first:
        blocks, _ = first.prefill("a", 18, seed=1)
        expected = first.contents(blocks[:4])
        first.step()
        assert sorted(first.free_blocks) == list(range(1, SHAPE.num_blocks))
    with node(tmp_path) as second:
        cached = second.allocate(8)
        before = second.contents(cached)
        table, num_tokens = second.start_load(Request("b", 18), cached)
        second.step()
        assert num_tokens == 8
        assert torch.equal(second.contents(table[2:4]), expected[:, 2:])
        assert torch.equal(second.contents(cached), before)


def test_another_prompt_or_model_finds_nothing(tmp_path: Path) -> None:
    with node(tmp_path) as first:
        first.prefill("a", 18)
        first.step()
        assert first.scheduler.get_num_new_matched_tokens(Request("b", 22), 0) == (0, False)
    with node(tmp_path, model="another") as second:
        assert second.scheduler.get_num_new_matched_tokens(Request("b", 18), 0) == (0, False)


@dataclass(frozen=True)
class Image:
    identifier: str
    offset: int = 3
    length: int = 2


def test_adapters_salts_and_images_share_no_file(tmp_path: Path) -> None:
    with node(tmp_path) as first:
        first.prefill("a", 18)
        first.step()
        ask = first.scheduler.get_num_new_matched_tokens
        assert ask(Request("b", 18), 0) == (16, False)
        assert ask(Request("b", 18, lora_id="polite"), 0) == (0, False)
        assert ask(Request("b", 18, cache_salt="mine"), 0) == (0, False)
        assert ask(Request("b", 18, mm_features=(Image("a cat"),)), 0) == (0, False)


@pytest.mark.parametrize(
    "damage", [lambda path: path.unlink(), lambda path: path.write_bytes(b"PK\x03\x04 no")]
)
def test_a_file_that_cannot_be_read_is_a_failed_load(tmp_path: Path, damage: Any) -> None:
    with node(tmp_path) as first:
        first.prefill("a", 18)
        first.step()
        table, _ = first.start_load(Request("b", 18))
        for name in os.listdir(tmp_path):
            damage(tmp_path / name)
        first.step()
        assert first.invalid_block_ids == set(table[:4])
        (record,) = first.stats.transfers
        assert (record.request_id, record.transport) == ("b", "file")
        assert "cannot load" in record.error


def test_a_load_is_reported_with_its_figures(tmp_path: Path) -> None:
    with node(tmp_path) as first:
        first.prefill("a", 18)
        first.step()
        first.start_load(Request("b", 18), first.allocate(8))
        first.step()
        (record,) = first.stats.transfers
        assert (record.transport, record.mechanism, record.layout) == ("file", "safetensors", "per-layer")
        num_bytes = 2 * SHAPE.num_layers * SHAPE.spec.page_size_bytes
        assert (record.request_id, record.num_blocks, record.num_bytes) == ("b", 2, num_bytes)
        assert record.exposed_seconds == record.seconds > 0
        assert record.error == ""


def test_a_prompt_that_another_node_is_saving_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with node(tmp_path) as first, node(tmp_path) as second:
        _, params = first.prefill("a", 18)
        request = Request("b", 18, params)
        second.scheduler.on_new_request(request)
        assert second.scheduler.get_num_new_matched_tokens(request, 0) == (None, False)
        first.step()
        assert second.scheduler.get_num_new_matched_tokens(request, 0) == (16, False)
        monkeypatch.setattr("custom_connector.WAIT_S", 0.0)
        lost = Request("c", 22, params)
        second.scheduler.on_new_request(lost)
        assert second.scheduler.get_num_new_matched_tokens(lost, 0) == (0, False)


def test_a_save_that_fails_frees_the_blocks_and_costs_no_answer(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    with node(folder) as first:
        shutil.rmtree(folder)
        first.prefill("a", 18)
        first.step()
        assert sorted(first.free_blocks) == list(range(1, SHAPE.num_blocks))
        assert first.scheduler.get_num_new_matched_tokens(Request("b", 18), 0) == (0, False)


@pytest.mark.parametrize("options", [{}, {"folder": "x", "colour": "red"}])
def test_a_missing_folder_and_an_unknown_option_are_refused(options: dict[str, str]) -> None:
    config = engine_config(
        "FileConnector", kv_connector_module_path="custom_connector", kv_connector_extra_config=options
    )
    with pytest.raises(ConfigurationError, match="needs one option, folder"), ModelFreeNode(config, SHAPE):
        pass


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(SlidingWindowSpec(4, 2, 8, torch.float32, sliding_window=8), id="window"),
        pytest.param(MambaSpec(4, ((3,),), (torch.float32,)), id="state"),
    ],
)
def test_what_is_gone_when_an_answer_ends_is_not_kept(spec: KVCacheSpec, tmp_path: Path) -> None:
    config = engine_config(
        "FileConnector",
        kv_connector_module_path="custom_connector",
        kv_connector_extra_config={"folder": str(tmp_path)},
    )
    caches = KVCacheConfig(8, (), (KVCacheGroupSpec(("layers.0",), spec),))
    with pytest.raises(ConfigurationError, match="only one group of full attention"):
        KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, caches)
