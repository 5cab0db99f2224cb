"""The reference engine with model and pool on a GPU, alone and with connectors that can read GPU memory."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvferry.connector.config import KVTransferConfig
from kvferry.transports.errors import BackendUnavailableError

DEMO = Path(__file__).parents[2] / "examples" / "disagg_pair.py"
#: Several steps of prefill. The last block is not full.
PROMPT = [random.Random(5).randrange(256) for _ in range(77)]


@pytest.mark.parametrize(
    "family",
    [
        pytest.param("llama", id="llama, full attention"),
        pytest.param("gemma3", id="gemma3, windows and full"),
        pytest.param("gemma4", id="gemma4, layers of different sizes"),
    ],
)
def test_answers_are_those_of_transformers(family: str, make_node: Any, reference: Any) -> None:
    tokens = make_node(family).answer(PROMPT, max_tokens=24)
    assert tokens == reference(family, PROMPT, 24)


def test_a_cached_prefix_changes_nothing(make_node: Any) -> None:
    node = make_node("llama")
    first = node.answer(PROMPT, max_tokens=12)
    again = node.answer(PROMPT, max_tokens=12)
    assert again == first
    assert node.metrics.num_cached_tokens == 64


@pytest.mark.parametrize("layout", ["uniform", "per-layer"])
def test_a_custom_connectors_load_is_complete_before_the_step_computes(
    layout: str, make_node: Any, reference: Any, tmp_path: Path
) -> None:
    """The connector copies in `start_load_kv`, on the stream that the forward pass uses afterwards."""
    transfer = KVTransferConfig(
        "FileConnector",
        "kv_both",
        kv_connector_module_path="custom_connector",
        kv_connector_extra_config={"folder": str(tmp_path)},
    )
    prefill, decode = (make_node("llama", kv_transfer=transfer, layout=layout) for _ in range(2))
    expected = reference("llama", PROMPT, 24)
    assert prefill.answer(PROMPT, max_tokens=1) == expected[:1]
    tokens = decode.answer(PROMPT, max_tokens=24)
    assert tokens == expected
    assert decode.metrics.num_loaded_tokens == 64


@pytest.mark.parametrize("connector", ["shm", "tcp", "zeromq", "ucx", "nixl", "auto"])
@pytest.mark.parametrize("layout", ["uniform", "per-layer"])
def test_a_node_serves_its_pool(layout: str, connector: str, make_node: Any, reference: Any) -> None:
    try:
        node = make_node("llama", kv_transfer=KVTransferConfig(connector, "kv_both"), layout=layout)
    except BackendUnavailableError as error:
        pytest.skip(str(error))
    assert node.answer(PROMPT, max_tokens=8) == reference("llama", PROMPT, 8)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["uniform", "per-layer"])
def test_the_demo_hands_over_from_gpu_memory_to_gpu_memory(layout: str, tiny_model: Any) -> None:
    options = ["--device", "cuda", "--serve-args", f"--dtype float32 --num-blocks 60 --layout {layout}"]
    # The demo's own longer prompt does not fit into the tiny model, whose tokens are bytes.
    options += ["--prompt", "The ferry carries a cache. " * 6]
    done = subprocess.run(
        [sys.executable, DEMO, "--model", tiny_model("llama"), *options],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "mechanism cuda_ipc" in done.stdout + done.stderr
