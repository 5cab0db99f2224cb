"""Two nodes hand over only if they compute the same cache. A difference that is allowed is logged once."""

from __future__ import annotations

import json
import logging
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny_models import scale_tensor, write_tiny_model

SAME_MODEL: dict[str, Any] = {"options": {"kv_load_failure_policy": "fail"}}


def _prompt(seed: int) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(256) for _ in range(40)]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model of 5 MB, so large that a sample of its bytes would miss a small tensor in the middle."""
    return write_tiny_model(tmp_path / "model", intermediate_size=2048)


@pytest.fixture
def copy(tmp_path: Path, model: Path) -> Path:
    return Path(shutil.copytree(model, tmp_path / "copy"))


@pytest.fixture
def hand_over(make_node: Any, drive: Any, model: Path, copy: Path) -> Callable[[int], Any]:
    """Hand prompts over from a node with the model to a node with the copy.

    Returns the last output of each.
    """
    nodes: list[Any] = []

    def ask(seed: int) -> Any:
        if not nodes:
            nodes.append(make_node(connector="inproc", role="kv_producer", model=str(model)))
            nodes.append(make_node(connector="inproc", role="kv_consumer", model=str(copy), **SAME_MODEL))
        prefill, decode = nodes
        name = f"r{seed}"
        prefill.add(name, _prompt(seed), max_tokens=1, kv_transfer_params={"do_remote_decode": True})
        drive(prefill, until=lambda: prefill.is_over(name))
        params = prefill.last(name).kv_transfer_params
        decode.add(name, _prompt(seed), max_tokens=4, kv_transfer_params=params)
        drive(prefill, decode, until=lambda: decode.is_over(name))
        return decode.last(name)

    return ask


def test_one_scaled_tensor_is_refused_at_the_handshake(copy: Path, hand_over: Any) -> None:
    scale_tensor(copy, "model.layers.1.self_attn.v_proj.weight", 1.5)
    output = hand_over(1)
    assert output.finish_reason == "error"
    assert "incompatible peer: weights differs" in output.error


def test_another_configuration_is_refused_at_the_handshake(copy: Path, hand_over: Any) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    assert "incompatible peer: configuration differs" in hand_over(1).error


def test_another_chat_template_is_warned_about_once_and_refuses_nothing(
    copy: Path, hand_over: Any, caplog: pytest.LogCaptureFixture
) -> None:
    (copy / "chat_template.jinja").write_text("{{ messages }} on Monday")
    with caplog.at_level(logging.WARNING, "kvferry"):
        outputs = [hand_over(seed) for seed in (1, 2)]
    assert [output.finish_reason for output in outputs] == ["length"] * 2
    assert [output.metrics.num_loaded_tokens for output in outputs] == [40] * 2
    (warning,) = [record for record in caplog.records if "differs" in record.message]
    assert "chat_template differs" in warning.message
    assert warning.levelno == logging.WARNING
