"""What the options of `kvferry prove` choose: connectors, rows, and how params are changed."""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import pytest

from kvferry.cli.main import main
from kvferry.lab.engine.progress import quiet_loading
from kvferry.lab.prove.cli import configure
from kvferry.lab.prove.forging import KEPT, forged, malformed
from kvferry.lab.prove.lab import parse_environments
from kvferry.lab.prove.main import command, select
from kvferry.lab.prove.models import write_other_weights, write_tiny_model
from kvferry.lab.prove.presets import PRESETS, SIDES, connector_of, with_places
from kvferry.lab.prove.rows import AFTERWARDS, ROWS, STAGES
from kvferry.transports.errors import ConfigurationError

PARAMS = {
    "do_remote_prefill": True,
    "remote_block_ids": [[1, 2, 3]],
    "remote_engine_id": "abc",
    "remote_port": 5600,
    "expires": 1.5,
    "nothing": None,
}


def _options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    configure(parser)
    return parser.parse_args(words)


def _places(side: str) -> dict[str, str | int]:
    return {"side": side, "port": 5600, "folder": "/shared", "beside_port": 5700}


@pytest.mark.parametrize("change", [forged, malformed])
def test_one_value_of_the_params_is_changed_and_never_what_is_asked_for(change) -> None:  # type: ignore[no-untyped-def]
    seen = set()
    for seed in range(200):
        changed, what = change(PARAMS, random.Random(seed))
        assert changed != PARAMS
        differing = {key for key in PARAMS if changed.get(key, "removed") != PARAMS[key]}
        assert len(differing) == 1, what
        assert what.startswith(next(iter(differing)))
        assert not differing & KEPT
        seen |= differing
    assert seen == {"remote_block_ids", "remote_engine_id", "remote_port", "expires"}
    assert PARAMS["remote_block_ids"] == [[1, 2, 3]]


def test_a_forged_value_keeps_its_type() -> None:
    for seed in range(200):
        changed, _ = forged(PARAMS, random.Random(seed))
        for key, value in PARAMS.items():
            assert type(changed[key]) is type(value)


def test_the_placeholders_of_a_connector_are_filled() -> None:
    for name, preset in PRESETS.items():
        for side in SIDES:
            told = json.dumps(preset.transfer_of(_places(side), "fail"))
            assert "{" not in told.replace('{"', "").replace("{}", ""), name
            assert ('"kv_load_failure_policy": "fail"' in told) is not preset.encodes
    assert PRESETS["tcp"].transfer_of(_places("decode"), "fail")["kv_connector_extra_config"][
        "transport_options"
    ] == {"bind_host": "127.0.0.1", "port": 5600}
    assert PRESETS["nixl"].environment_of(_places("prefill"))["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "5600"
    (name, value) = "lmcache.mp.port", 5700
    assert (
        PRESETS["lmcache"].transfer_of(_places("decode"), "fail")["kv_connector_extra_config"][name] == value
    )


def test_a_connector_that_answers_no_params_says_what_both_sides_are_asked_with() -> None:
    preset, request = PRESETS["p2p"], {"request_id": "r"}
    assert with_places(preset.offer, request) == {"remote_decoder": {"kv_request_id": "r"}}
    assert with_places(preset.load, {**request, "prefill_port": 5600}) == {
        "remote_prefiller": {"kv_request_id": "r", "remote_host": "127.0.0.1", "remote_port": 5600}
    }


def test_an_encoder_apart_has_another_option_and_a_role_per_side() -> None:
    preset = PRESETS["encoder-shm"]
    roles = {side: preset.transfer_of(_places(side), "fail")["ec_role"] for side in SIDES}
    assert roles == {"prefill": "ec_producer", "decode": "ec_consumer", "stranger": "ec_producer"}
    assert (preset.option, PRESETS["shm"].option) == ("--ec-transfer-config", "--kv-transfer-config")
    assert connector_of("shm", '{"ec_connector": "Mine"}', None, None).encodes


def test_any_connector_can_be_given(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text('{"kv_connector": "Mine"}')
    for text in ('{"kv_connector": "Mine"}', f"@{file}"):
        found = connector_of("shm", text, 7.0, False)
        assert (found.name, found.lease_s, found.takes_params) == ("Mine", 7.0, False)


@pytest.mark.parametrize(
    ("preset", "transfer", "message"),
    [
        (
            "mine",
            "",
            "--preset must be one of shm, .* got 'mine'; give another connector with --transfer-config",
        ),
        ("shm", "{", "--transfer-config must be JSON"),
        ("shm", "@/no/such/file", "--transfer-config must be JSON, or @FILE"),
        ("shm", "[1]", "an object with kv_connector, .* or with ec_connector"),
    ],
)
def test_a_wrong_connector_is_refused_by_option_and_value(preset: str, transfer: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        connector_of(preset, transfer, None, None)


def test_rows_and_single_cells_can_be_chosen() -> None:
    assert select([]) == {name: row.stages for name, row in ROWS.items()}
    assert select(["kill-prefill/loading", "none"]) == {"kill-prefill": ("loading",), "none": ("asked",)}
    assert select([f"none/{AFTERWARDS}"]) == {"none": ()}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["no-such-row"], "--only: no row is called 'no-such-row'; there are none, "),
        (["none/loading"], "--only: the row 'none' has no stage 'loading'; it has asked, afterwards"),
    ],
)
def test_an_unknown_row_or_stage_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        select(words)


def test_every_stage_of_every_row_is_explained() -> None:
    for row in ROWS.values():
        assert set(row.columns) <= set(STAGES), row.name
        assert list(row.columns) == [stage for stage in STAGES if stage in row.columns], row.name


def test_the_command_that_repeats_a_cell_has_every_option_that_matters() -> None:
    options = _options(
        "--preset",
        "nixl",
        "--short",
        "--out",
        "x",
        "--deadline-s",
        "20",
        "--env",
        "prefill:A=1",
        "B=2",
        "--only",
        "none",
    )
    assert (
        command("kvferry prove", options)
        == "kvferry prove --preset nixl --deadline-s 20 --env prefill:A=1 B=2"
    )
    assert command("kvferry prove", _options()) == "kvferry prove"


def test_errors_reach_the_user_with_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--out", str(tmp_path / "out")]
    assert main(["prove", "--only", "nothing", *out]) == 2
    assert "--only: no row is called 'nothing'" in capsys.readouterr().err
    assert main(["prove", "--url", "decode=http://localhost:1", *out]) == 2
    assert "--url prefill=URL is missing" in capsys.readouterr().err
    assert main(["prove", "--url", "http://localhost:1", *out]) == 2
    assert "--url must be SIDE=URL" in capsys.readouterr().err
    urls = [f"{side}=http://localhost:1" for side in ("prefill", "decode", "alone")]
    assert main(["prove", "--preset", "p2p", "--url", *urls, *out]) == 2
    assert "p2p needs servers that the kit starts" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_variables_are_for_one_server_or_for_all() -> None:
    assert parse_environments(["A=1", "decode:B=x=y", "decode:A=2"]) == {
        "prefill": {"A": "1"},
        "decode": {"A": "2", "B": "x=y"},
        "alone": {"A": "1"},
    }
    for word in ("A", "decode:A", "other:A=1"):
        with pytest.raises(ConfigurationError, match="--env must be NAME=VALUE, or SIDE:NAME=VALUE"):
            parse_environments([word])


def test_other_weights_differ_in_one_tensor_of_the_same_size(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    model = write_tiny_model(tmp_path / "model")
    (model / "notes.txt").write_text("kept")
    other = write_other_weights(model, tmp_path / "other")
    ours, theirs = load_file(model / "model.safetensors"), load_file(other / "model.safetensors")
    assert [name for name in ours if (ours[name] != theirs[name]).any()] == [
        "model.layers.0.self_attn.v_proj.weight"
    ]
    assert sorted(each.name for each in other.iterdir()) == sorted(each.name for each in model.iterdir())
    assert (other / "notes.txt").read_text() == "kept"


def test_a_folder_of_results_can_be_moved_between_two_runs(tmp_path: Path) -> None:
    write_other_weights(write_tiny_model(tmp_path / "before" / "model"), tmp_path / "before" / "other")
    after = (tmp_path / "before").rename(tmp_path / "after")
    other = write_other_weights(after / "model", after / "other")
    assert json.loads((other / "config.json").read_text())["model_type"] == "llama"


def test_the_tiny_model_is_one_that_transformers_loads(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    with quiet_loading():
        model = AutoModelForCausalLM.from_pretrained(write_tiny_model(tmp_path / "model"))
    answers = [
        model.generate(torch.tensor([[first, 6, 7]]), max_new_tokens=4, do_sample=False, pad_token_id=0)[
            0, 3:
        ].tolist()
        for first in (5, 9)
    ]
    assert answers[0] != answers[1]


def test_a_model_without_local_weights_has_no_other_weights(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="it is no local folder"):
        write_other_weights(tmp_path / "nothing", tmp_path / "other")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigurationError, match="name other rows than other-weights"):
        write_other_weights(tmp_path / "empty", tmp_path / "other")
