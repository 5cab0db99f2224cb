"""Folders without a usable model are refused with the reason, and different models get different
identities.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from kvferry.lab.engine.default_model import default_model_folder
from kvferry.lab.engine.settings import DEFAULT_MODEL, EngineSettings
from kvferry.lab.engine.weights import describe_model, load_model, model_folder, model_identity
from kvferry.transports.errors import ConfigurationError
from tests.support.tiny_models import scale_tensor, write_tiny_model

CPU = torch.device("cpu")


@pytest.fixture
def copy(tmp_path: Path, tiny_model: Callable[[str], Path]) -> Path:
    return Path(shutil.copytree(tiny_model("llama"), tmp_path / "copy"))


def _load(folder: Path) -> None:
    path = model_folder(str(folder))
    describe_model(path)
    load_model(path, torch.float32, CPU, "eager")


def test_a_good_folder_loads(copy: Path) -> None:
    _load(copy)
    model = describe_model(copy)
    assert model.eos_token_ids == {256}
    assert model.tokenizer.decode(model.tokenizer.encode("héllo")) == "héllo"


def test_a_missing_folder_is_named() -> None:
    with pytest.raises(ConfigurationError, match="/no/such/folder.*never downloaded") as error:
        model_folder("/no/such/folder")
    assert error.value.key == "model"


@pytest.mark.parametrize(
    ("missing", "message"),
    [("config.json", "no config.json"), ("model.safetensors", "no weights")],
)
def test_a_missing_file_is_named(copy: Path, missing: str, message: str) -> None:
    (copy / missing).unlink()
    with pytest.raises(ConfigurationError, match=message):
        _load(copy)


def test_a_broken_config_is_reported(copy: Path) -> None:
    (copy / "config.json").write_text("{")
    with pytest.raises(ConfigurationError, match=r"config\.json cannot be read"):
        _load(copy)


def test_truncated_weights_are_reported(copy: Path) -> None:
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ConfigurationError, match="weights cannot be loaded"):
        _load(copy)


def test_weights_that_lack_a_layer_are_reported(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 4}))
    with pytest.raises(ConfigurationError, match="weights are missing"):
        _load(copy)


def test_a_missing_tokenizer_is_reported(copy: Path) -> None:
    for path in copy.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(ConfigurationError, match="tokenizer cannot be loaded"):
        _load(copy)


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


def test_weights_that_cannot_be_read_are_reported(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    (copy / "model.safetensors").mkdir()
    with pytest.raises(ConfigurationError, match="cannot hash the weight file") as error:
        describe_model(copy)
    assert error.value.key == "model"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model", ""),
        ("dtype", "float8"),
        ("layout", "diagonal"),
        ("block_size", 0),
        ("num_blocks", 1),
        ("memory_utilization", 0.0),
        ("max_num_batched_tokens", 4),
        ("max_num_seqs", 0),
        ("num_threads", -1),
    ],
)
def test_settings_outside_their_range_are_named(key: str, value: object) -> None:
    with pytest.raises(ConfigurationError) as error:
        EngineSettings(**{key: value})  # type: ignore[arg-type]
    assert error.value.key == key


def test_a_cache_folder_that_cannot_be_written_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVFERRY_CACHE", str(tmp_path / "file"))
    with pytest.raises(ConfigurationError, match="set KVFERRY_CACHE"):
        default_model_folder()


@pytest.mark.slow
def test_the_default_model_is_converted_once_and_leaves_nothing_half_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVFERRY_CACHE", str(tmp_path))
    half_done = tmp_path / f".{DEFAULT_MODEL}-0.1.2-1-dead"
    half_done.mkdir()
    folder = model_folder(DEFAULT_MODEL)
    assert {path.name for path in folder.iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json"}
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert model_folder(DEFAULT_MODEL) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    assert [path for path in tmp_path.iterdir() if path.name.startswith(".")] == []
