"""The connector that an author starts from, given to a real node as its docstring says."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from reference.demo.launcher import Launcher
from tests.support.client import Client, wait_until
from tests.support.layer_store import MARK


@pytest.mark.slow
def test_a_prompt_of_one_node_is_loaded_by_the_next(
    launcher: Launcher, tiny_single: Client, tiny_single_arguments: Sequence[str], tmp_path: Path
) -> None:
    options = (
        *("--role", "both", "--connector", "FileConnector", "--connector-module", "custom_connector"),
        *("--connector-option", f"folder={tmp_path}", "--layout", "per-layer"),
    )
    nodes = [
        launcher.start("both", "serve.py", "--port", "0", *tiny_single_arguments, *options) for _ in "123"
    ]
    launcher.wait_ready(nodes, 110)
    first, second, third = map(Client, nodes)
    prompt = "A ferry that keeps a book. " * 5
    expected = tiny_single.complete(prompt, max_tokens=6).token_ids
    assert first.complete(prompt, max_tokens=6).token_ids == expected
    wait_until(first.is_whole)
    (kept,) = tmp_path.iterdir()
    assert second.complete(prompt, max_tokens=6).token_ids == expected
    save_file({name: torch.zeros_like(pages) for name, pages in load_file(kept).items()}, kept)
    assert third.complete(prompt, max_tokens=6).token_ids != expected  # so it is the file that is loaded
    for client in (second, third):
        wait_until(client.is_whole)


@pytest.mark.slow
def test_the_client_learns_what_the_connector_raised_and_the_node_goes_on(
    launcher: Launcher, tiny_single: Client, tiny_single_arguments: Sequence[str]
) -> None:
    options = (
        *("--role", "both", "--connector", "LayerStoreConnector", "--layout", "per-layer"),
        *("--connector-module", "tests.support.layer_store", "--connector-option"),
    )
    hooks = ("get_num_new_matched_tokens", "start_load_kv")
    nodes = [
        launcher.start(hook, "serve.py", "--port", "0", *tiny_single_arguments, *options, f"raise_in={hook}")
        for hook in hooks
    ]
    launcher.wait_ready(nodes, 110)
    prompt = [*range(1, 30)]
    expected = tiny_single.complete(prompt, max_tokens=6).token_ids
    for hook, client in zip(hooks, map(Client, nodes), strict=True):
        reply = client.complete([MARK, *prompt], max_tokens=6)
        assert reply.status == 500
        assert f"{hook} of the connector LayerStoreConnector failed: Boom: on purpose" in reply.error
        with client.streaming([MARK, *prompt], max_tokens=6) as events:
            assert "Boom: on purpose" in str(list(events)[-1]["error"]["message"])
        assert client.complete(prompt, max_tokens=6).token_ids == expected
        wait_until(client.is_whole)
        assert client.get("/health")[0] == 200
