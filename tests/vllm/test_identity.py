"""The identity of a vLLM model, computed from vLLM's configuration without an engine."""

from __future__ import annotations

import shutil
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.connector.identity.digest_cache import DigestCache
from kvferry.connector.vllm.identity import model_identity
from kvferry.transports.errors import ConfigurationError
from tests.support.tiny_models import scale_tensor, write_tiny_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("identity") / "model")


@pytest.fixture
def folder(tiny: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny, tmp_path / "model"))


def _config(model: object, load_format: str = "auto", draft: Any = None, **settings: object) -> Any:
    """Make the parts of vLLM's configuration that are used here."""
    parts: dict[str, object] = {"model": str(model), "tokenizer": str(model), "hf_overrides": {}, "seed": 0}
    return SimpleNamespace(
        model_config=SimpleNamespace(**{**parts, **settings}),
        load_config=SimpleNamespace(load_format=load_format, download_dir=None),
        speculative_config=None if draft is None else SimpleNamespace(draft_model_config=draft),
    )


def _parts(config: Any, *, has_draft: bool = False, by_name: bool = False) -> dict[str, str]:
    return asdict(model_identity(config, DigestCache(None), has_draft=has_draft, by_name=by_name))


def _differing(one: dict[str, str], other: dict[str, str]) -> set[str]:
    return {part for part, value in one.items() if other[part] != value}


def test_it_depends_on_the_contents_not_on_the_path(folder: Path, tiny: Path) -> None:
    parts = _parts(_config(folder))
    assert parts == _parts(_config(tiny))
    assert all(parts[part] for part in ("weights", "configuration", "tokenizer", "chat_template"))


@pytest.mark.parametrize(
    "settings",
    [
        {"quantization": "fp8"},
        {"hf_overrides": {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}},
        {"disable_sliding_window": True},
        {"multimodal_config": SimpleNamespace(mm_processor_kwargs={"do_rescale": False})},
    ],
)
def test_settings_that_change_the_cache_are_in_the_configuration(
    tiny: Path, settings: dict[str, object]
) -> None:
    assert _differing(_parts(_config(tiny, **settings)), _parts(_config(tiny))) == {"configuration"}


def test_a_limit_that_chooses_other_rotary_factors_is_in_the_configuration(tiny: Path) -> None:
    """Other limits make no difference: vLLM has one set of factors for each."""
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 128}
    long, plain = SimpleNamespace(rope_parameters=rope), SimpleNamespace(rope_parameters={})

    def parts(config: object, max_model_len: int) -> dict[str, str]:
        return _parts(_config(tiny, hf_text_config=config, max_model_len=max_model_len))

    assert _differing(parts(long, 128), parts(long, 129)) == {"configuration"}
    assert parts(long, 129) == parts(long, 256)
    assert parts(plain, 128) == parts(plain, 129) == _parts(_config(tiny))


def test_a_function_that_changes_the_configuration_counts_by_its_result(tiny: Path) -> None:
    made = [SimpleNamespace(to_dict=lambda theta=theta: {"rope_theta": theta}) for theta in (1.0, 1.0, 2.0)]
    one, same, other = (_parts(_config(tiny, hf_overrides=lambda c: c, hf_config=config)) for config in made)
    assert one == same
    assert _differing(one, other) == {"configuration"}


def test_dummy_weights_are_identified_by_their_seed(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "model.safetensors").unlink()
    first, second = (_parts(_config(folder, "dummy", seed=seed)) for seed in (0, 1))
    assert "dummy" in first["weights"]
    assert _differing(first, second) == {"weights"}
    assert caplog.records == []


def test_a_snapshot_of_the_hub_is_found_without_a_network(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = "a" * 40
    repository = tmp_path / "hub" / "models--some--model"
    shutil.copytree(tiny, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    config = _config("some/model")
    config.load_config.download_dir = str(tmp_path / "hub")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    assert _parts(config) == _parts(_config(tiny))


#: Models without files: what of them names their weights.
_ELSEWHERE = [
    {"model": "some/model", "revision": None},
    {"model": "some/model", "revision": "v1.0"},
    {"model": "s3://bucket/model"},
    # Of a model in an object store vLLM has the configuration on this machine.
    {"model": "CONFIGURATION", "model_weights": "s3://bucket/model", "revision": "a" * 40},
]


@pytest.fixture(params=_ELSEWHERE, ids=str)
def elsewhere(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    fields = dict(request.param)
    model = fields.pop("model").replace("CONFIGURATION", str(tmp_path))
    config = _config(model, "runai_streamer", **fields)
    config.load_config.download_dir = str(tmp_path)
    return config


def test_a_commit_names_weights_that_are_not_here(tmp_path: Path) -> None:
    config = _config("some/model", "runai_streamer", revision="a" * 40)
    config.load_config.download_dir = str(tmp_path)
    assert _parts(config)["weights"] == f"some/model@{'a' * 40}"


def test_a_name_alone_is_refused(elsewhere: Any) -> None:
    with pytest.raises(ConfigurationError, match="weights_by_name") as error:
        _parts(elsewhere)
    assert error.value.key == "weights_by_name"
    assert "--revision" in str(error.value)
    assert "runai_streamer" in str(error.value)


def test_a_name_is_compared_if_a_user_says_so_and_a_warning_repeats_it(
    elsewhere: Any, caplog: pytest.LogCaptureFixture
) -> None:
    parts = _parts(elsewhere, by_name=True)
    assert parts["weights"].startswith("not compared: ")
    assert (parts["tokenizer"], parts["chat_template"]) == ("", "")
    (record,) = [record for record in caplog.records if record.name.startswith("kvferry")]
    assert (record.levelname, "are not compared" in record.message) == ("WARNING", True)


@pytest.mark.parametrize(
    ("load_format", "read"),
    [("auto", "consolidated"), ("mistral", "consolidated"), ("safetensors", "both"), ("pt", "pt")],
)
def test_the_files_are_those_that_vllm_loads(folder: Path, load_format: str, read: str) -> None:
    shutil.copy(folder / "model.safetensors", folder / "consolidated.safetensors")
    (folder / "model.pt").write_bytes(b"pickled")
    parts = _parts(_config(folder, load_format))
    changed = {"consolidated": "consolidated.safetensors", "both": "model.safetensors", "pt": "model.pt"}
    with (folder / changed[read]).open("ab") as file:
        file.write(b"x")
    assert _differing(_parts(_config(folder, load_format)), parts) == {"weights"}


def test_a_model_can_be_a_single_file(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    parts = _parts(_config(path, hf_config=SimpleNamespace(to_dict=lambda: {"layers": 2})))
    path.write_bytes(b"GGUG")
    other = _parts(_config(path, hf_config=SimpleNamespace(to_dict=lambda: {"layers": 2})))
    assert _differing(parts, other) == {"weights"}


def test_a_draft_model_is_a_part_of_its_own(folder: Path, tiny: Path) -> None:
    """Peers must have the same target model; only those with the same draft model hand its layers over."""

    def drafted(draft: Path) -> dict[str, str]:
        return _parts(_config(tiny, draft=_config(draft).model_config), has_draft=True)

    alone, same = _parts(_config(tiny)), drafted(folder)
    assert _parts(_config(tiny, draft=_config(folder).model_config)) == alone
    assert _differing(same, alone) == {"draft"}
    assert drafted(tiny) == same
    scale_tensor(folder, "model.layers.1.mlp.up_proj.weight", 1.01)
    assert _differing(drafted(folder), same) == {"draft"}
