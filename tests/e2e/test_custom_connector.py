"""The stores that an author starts from, given to a real pair as their docstrings say."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvferry.lab.servers import Launcher
from tests.support.client import Client, wait_until

from .conftest import START_TIMEOUT_S

NUM_LAYERS = 3  # of the tiny model
PROMPT = "A ferry that keeps a book. " * 5
ASKED = {"max_tokens": 6, "logprobs": 0}


def forge_file(path: Path) -> None:
    """Make a file hold other pages than it should, in a form that its store accepts."""
    save_file({name: torch.zeros_like(pages) for name, pages in load_file(path).items()}, path)


def forge_block(path: Path) -> None:
    path.write_bytes(_checked(bytes(path.stat().st_size - 4)))


def forge_layers(path: Path) -> None:
    path.write_bytes(_checked(bytes(path.stat().st_size // NUM_LAYERS - 4)) * NUM_LAYERS)


def _checked(data: bytes) -> bytes:
    return data + zlib.crc32(data).to_bytes(4, "little")


@pytest.mark.full
@pytest.mark.parametrize(
    ("connector", "module", "forge"),
    [
        pytest.param("FileConnector", "custom_connector", forge_file, id="file"),
        pytest.param("BlockStoreConnector", "block_store", forge_block, id="block"),
        pytest.param("LayerStoreConnector", "layer_store", forge_layers, id="layer"),
    ],
)
def test_a_pair_hands_over_through_a_store(
    connector: str,
    module: str,
    forge: Callable[[Path], None],
    launcher: Launcher,
    tiny_single: Client,
    tiny_single_arguments: Sequence[str],
    tmp_path: Path,
) -> None:
    options = (
        *("--connector", connector, "--connector-module", module, "--connector-option", f"folder={tmp_path}"),
        "--no-prefix-caching",  # so that each request asks the store
    )
    nodes = [
        launcher.start_node(role, role, *tiny_single_arguments, *options) for role in ("prefill", "decode")
    ]
    launcher.wait_listening(nodes, START_TIMEOUT_S)
    process = launcher.start_router("router", nodes[:1], nodes[1:])
    launcher.wait_ready([*nodes, process], START_TIMEOUT_S)
    prefill, decode, router = Client(nodes[0]), Client(nodes[1]), Client(process)

    expected = tiny_single.complete(PROMPT, **ASKED).answer
    reply = router.complete(PROMPT, **ASKED)
    assert reply.answer == expected
    assert reply.headers["X-KV-Transfer"] == "loaded"
    assert (reply.transfer["transport"], reply.transfer["num_blocks"]) == ("file", len(PROMPT) // 16)
    assert reply.body["metrics"]["num_loaded_tokens"] == len(PROMPT) // 16 * 16
    assert reply.transfer["num_bytes"] > 0
    labels = f'{{mechanism="{reply.transfer["mechanism"]}",transport="file"}}'
    assert f"kvferry_load_seconds_count{labels} 1.0" in decode.get("/metrics")[1].decode()
    assert router.metric("kvferry_router_without_handoff_total") == 0
    assert "kvferry_load_seconds_count{" not in prefill.get("/metrics")[1].decode()
    for client in (prefill, decode):
        wait_until(client.is_whole)

    for path in tmp_path.iterdir():
        forge(path)
    assert router.complete(PROMPT, **ASKED).token_ids != expected  # so it is the file that is loaded
    for client in (prefill, decode):
        wait_until(client.is_whole)
