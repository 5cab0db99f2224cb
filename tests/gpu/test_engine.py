"""The reference engine with model and pool on a GPU, alone and over a connector that can read it."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvferry.connector.config import KVTransferConfig
from kvferry.transports.errors import ConfigurationError

DEMO = Path(__file__).parents[2] / "examples" / "disagg_pair.py"
#: Several steps of prefill; its last block is not full.
PROMPT = [random.Random(5).randrange(256) for _ in range(77)]


@pytest.mark.parametrize(
    "family",
    [
        pytest.param("llama", id="llama, full attention"),
        pytest.param("gemma3", id="gemma3, windows and full"),
        pytest.param("gemma4", id="gemma4, layers of unlike sizes"),
        pytest.param("bamba", id="bamba, recurrent and full"),
    ],
)
def test_answers_are_those_of_transformers(family: str, make_node: Any, reference: Any) -> None:
    tokens, _ = make_node(family).answer(PROMPT, 24)
    assert tokens == reference(family, PROMPT, 24)


def test_a_cached_prefix_changes_nothing(make_node: Any) -> None:
    node = make_node("llama")
    first, _ = node.answer(PROMPT, 12)
    again, metrics = node.answer(PROMPT, 12)
    assert again == first
    assert metrics.num_cached_tokens == 64


@pytest.mark.parametrize("layout", ["uniform", "per-layer"])
def test_what_a_connector_of_ones_own_loads_is_there_before_the_step_computes(
    layout: str, make_node: Any, reference: Any, tmp_path: Path
) -> None:
    """It copies in `start_load_kv`, on the stream that the forward pass then uses."""
    transfer = KVTransferConfig(
        "FileConnector",
        "kv_both",
        kv_connector_module_path="custom_connector",
        kv_connector_extra_config={"folder": str(tmp_path)},
    )
    prefill, decode = (make_node("llama", kv_transfer=transfer, layout=layout) for _ in range(2))
    expected = reference("llama", PROMPT, 24)
    assert prefill.answer(PROMPT, 1)[0] == expected[:1]
    tokens, metrics = decode.answer(PROMPT, 24)
    assert tokens == expected
    assert metrics.num_loaded_tokens == 64


@pytest.mark.parametrize("connector", ["shm", "zeromq"])
def test_connectors_that_serve_main_memory_say_so(connector: str, make_node: Any) -> None:
    with pytest.raises(ConfigurationError, match="serves main memory, not cuda") as caught:
        make_node("llama", kv_transfer=KVTransferConfig(connector, "kv_both"))
    assert caught.value.key == "device"


@pytest.mark.slow
def test_so_does_the_demo_at_once(tiny_model: Any) -> None:
    command = [sys.executable, DEMO, "--device", "cuda", "--model", tiny_model("llama"), "--num-blocks", "60"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode != 0
    assert "serves main memory, not cuda" in done.stderr + done.stdout
