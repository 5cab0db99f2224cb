"""The example stores, and nodes without a model that use them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvferry.connector.testing import CacheShape, ModelFreeNode, Request, engine_config

SHAPE = CacheShape(layout="per-layer")

FILE = ("FileConnector", "custom_connector")
BLOCK = ("BlockStoreConnector", "block_store")
LAYER = ("LayerStoreConnector", "layer_store")
STORES = [pytest.param(*FILE, id="file"), pytest.param(*BLOCK, id="block"), pytest.param(*LAYER, id="layer")]


def transfer_of(connector: str, module: str, folder: Path, **options: Any) -> dict[str, Any]:
    """Return the fields of `KVTransferConfig` for a store in a folder."""
    return {
        "kv_connector": connector,
        "kv_connector_module_path": module,
        "kv_connector_extra_config": {"folder": str(folder), **options},
    }


@contextmanager
def store_node(
    connector: str,
    module: str,
    folder: Path,
    *,
    model: str = "tiny",
    max_step_tokens: int = 1 << 20,
    **options: Any,
) -> Iterator[ModelFreeNode]:
    """Run a node inside the block.

    Args:
        options: Of the connector.
    """
    transfer = transfer_of(connector, module, folder, **options)
    config = engine_config(transfer.pop("kv_connector"), model=model, **transfer)
    with ModelFreeNode(config, SHAPE, max_step_tokens=max_step_tokens) as node:
        yield node


def prompt(*parts: tuple[int, int]) -> Sequence[int]:
    """Return a prompt of runs of token ids, each `(first, number)`."""
    return [token for first, number in parts for token in range(first, first + number)]


def answer(node: ModelFreeNode, request: Request, **more: Any) -> int:
    """Run a request to its end, and until the store has released its blocks; return how many tokens were
    loaded.
    """
    node.add(request, **more)
    node.step_until(lambda: not node.is_busy)
    assert sorted(node.pool.free_blocks) == list(range(1, SHAPE.num_blocks))
    return node.num_loaded_tokens.get(request.request_id, 0)


def cut_short(folder: Path) -> None:
    """Cut a byte off each file of a store."""
    for path in folder.iterdir():
        path.write_bytes(path.read_bytes()[:-1])


def flip_bits(folder: Path) -> None:
    """Change bytes in each file of a store."""
    for path in folder.iterdir():
        path.write_bytes(path.read_bytes()[:-8] + bytes(8))
