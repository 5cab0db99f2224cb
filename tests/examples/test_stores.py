"""What the example stores promise beyond the connector contract, on nodes without a model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

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
from kvferry.connector.testing import Request, engine_config
from kvferry.transports.errors import ConfigurationError

from .stores import BLOCK, LAYER, SHAPE, STORES, answer, prompt, store_node, transfer_of

BY_BLOCK = [pytest.param(*BLOCK, id="block"), pytest.param(*LAYER, id="layer")]


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
