"""Different models get different identities."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from kvferry.lab.engine.weights import model_identity
from tests.support.tiny_models import scale_tensor, write_tiny_model


@pytest.fixture
def copy(tmp_path: Path, tiny_model: Callable[[str], Path]) -> Path:
    return Path(shutil.copytree(tiny_model("llama"), tmp_path / "copy"))


def _parts(folder: Path) -> dict[str, str]:
    return asdict(model_identity(folder))


def _differing(one: dict[str, str], other: dict[str, str]) -> set[str]:
    return {part for part, digest in one.items() if other[part] != digest}


def test_identity_depends_on_contents_not_on_the_path(copy: Path, tmp_path: Path) -> None:
    parts = _parts(copy)
    assert _parts(Path(shutil.copytree(copy, tmp_path / "elsewhere"))) == parts
    assert _differing(_parts(write_tiny_model(tmp_path / "other", seed=1)), parts) == {"weights"}
    assert _differing(_parts(write_tiny_model(tmp_path / "config", rms_norm_eps=1e-3)), parts) == {
        "configuration"
    }


def test_one_scaled_tensor_makes_other_weights(tmp_path: Path) -> None:
    """The tensor is small and in the middle of a large file."""
    folder = write_tiny_model(tmp_path / "large", intermediate_size=2048)
    parts = _parts(folder)
    scale_tensor(folder, "model.layers.1.self_attn.v_proj.weight", 1.5)
    assert _differing(_parts(folder), parts) == {"weights"}


def test_tokenizer_and_chat_template_are_separate_parts(copy: Path) -> None:
    parts = _parts(copy)
    (copy / "chat_template.jinja").write_text("{{ messages }} on Monday")
    assert _differing(_parts(copy), parts) == {"chat_template"}
    tokenizer = json.loads((copy / "tokenizer.json").read_text())
    tokenizer["pre_tokenizer"]["add_prefix_space"] = True
    (copy / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert _differing(_parts(copy), parts) == {"chat_template", "tokenizer"}
