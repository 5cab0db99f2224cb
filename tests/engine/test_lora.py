"""LoRA adapters: each request is computed, cached and handed over with its own adapter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvferry.reference.engine.errors import InvalidRequestError
from kvferry.reference.engine.settings import EngineSettings
from kvferry.reference.engine.weights import load_model
from kvferry.reference.node.cli import parse_arguments
from kvferry.transports.errors import ConfigurationError
from tests.support.engines import served_engine
from tests.support.tiny_models import ALPHA, RANK, generate_greedily, write_adapter

PROMPT = list(range(40, 83))
#: Layer → (inputs, outputs) in the tiny llama.
TARGETS = {
    "model.layers.0.self_attn.q_proj": (64, 64),
    "model.layers.1.self_attn.v_proj": (64, 32),
    "model.layers.2.mlp.down_proj": (96, 64),
}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    root = tmp_path_factory.mktemp("adapters")
    return {
        name: str(write_adapter(root / name, TARGETS, seed)) for seed, name in enumerate(("polite", "terse"))
    }


@pytest.fixture(scope="module")
def merged(tiny_model: Callable[[str], Path], adapters: Mapping[str, str]) -> Callable[..., list[int]]:
    """`(adapter, prompt, num_tokens)` → the answer of transformers with the adapter merged into the weights."""

    def answer(name: str, prompt: Sequence[int], num_tokens: int) -> list[int]:
        model = load_model(tiny_model("llama"), torch.float32, torch.device("cpu"), "eager")
        if name:
            weights = load_file(Path(adapters[name]) / "adapter_model.safetensors")
            for target in TARGETS:
                down, up = (weights[f"base_model.model.{target}.lora_{part}.weight"] for part in "AB")
                model.get_submodule(target).weight += ALPHA / RANK * up @ down
        return generate_greedily(model, prompt, num_tokens)

    return answer


def test_requests_in_one_step_use_their_own_adapters(make_node: Any, adapters: Any, merged: Any) -> None:
    node = make_node(lora_modules=adapters)
    for name in ("", "polite", "terse"):
        node.add(f"by {name}", PROMPT, max_tokens=12, lora_name=name)
    node.run()
    answers = {name: node.tokens(f"by {name}") for name in ("", "polite", "terse")}
    assert answers == {name: merged(name, PROMPT, 12) for name in answers}
    assert len({tuple(answer) for answer in answers.values()}) == 3


def test_an_adapters_cached_blocks_are_used_only_with_it(make_node: Any, adapters: Any) -> None:
    node = make_node(lora_modules=adapters)
    for name, num_cached in (("polite", 0), ("terse", 0), ("", 0), ("polite", 40), ("", 40)):
        node.add("a", PROMPT, max_tokens=2, lora_name=name)
        node.run()
        assert node.last("a").metrics.num_cached_tokens == num_cached, name


def test_a_prompt_with_an_adapter_is_handed_over(
    make_node: Any, adapters: Any, merged: Any, drive: Any
) -> None:
    prefill, decode = (
        make_node(connector="shm", role=role, lora_modules=adapters)
        for role in ("kv_producer", "kv_consumer")
    )
    prefill.add("a", PROMPT, max_tokens=1, lora_name="terse", kv_transfer_params={"do_remote_decode": True})
    drive(prefill, until=lambda: prefill.is_over("a"))
    params = prefill.last("a").kv_transfer_params
    decode.add("a", PROMPT, max_tokens=12, lora_name="terse", kv_transfer_params=params)
    drive(prefill, decode, until=lambda: not prefill.core.has_work and not decode.core.has_work)
    assert decode.tokens("a") == merged("terse", PROMPT, 12)
    assert decode.last("a").metrics.num_loaded_tokens == len(PROMPT)


def test_nodes_with_different_adapters_hand_nothing_over(
    make_node: Any, adapters: Any, merged: Any, drive: Any
) -> None:
    """Both nodes have an adapter called `polite`, but with different weights, so their caches differ."""
    swapped = {"polite": adapters["terse"], "terse": adapters["polite"]}
    prefill = make_node(connector="shm", role="kv_producer", lora_modules=adapters)
    decode = make_node(connector="shm", role="kv_consumer", lora_modules=swapped)
    prefill.add("a", PROMPT, max_tokens=1, lora_name="polite", kv_transfer_params={"do_remote_decode": True})
    drive(prefill, until=lambda: prefill.is_over("a"))
    params = prefill.last("a").kv_transfer_params
    decode.add("a", PROMPT, max_tokens=6, lora_name="polite", kv_transfer_params=params)
    drive(prefill, decode, until=lambda: decode.is_over("a"))
    assert decode.tokens("a") == merged("terse", PROMPT, 6)
    assert decode.last("a").metrics.num_loaded_tokens == 0


async def test_a_client_names_an_adapter_as_its_model(
    tiny_model: Callable[[str], Path], adapters: Any, merged: Any
) -> None:
    """A client selects an adapter by its name, as in vLLM. The node lists it together with its base model."""
    settings = EngineSettings(
        str(tiny_model("llama")), num_blocks=60, max_model_len=128, lora_modules=adapters
    )
    listed, answers = await _ask(settings, ("llama", "polite", "rude"))
    assert [(model["id"], model.get("parent")) for model in listed] == [
        ("llama", None),
        ("polite", "llama"),
        ("terse", "llama"),
    ]
    for name, lora_name in (("llama", ""), ("polite", "polite")):
        assert answers[name]["model"] == name
        assert answers[name]["choices"][0]["token_ids"] == merged(lora_name, PROMPT, 6)
    assert answers["rude"]["error"]["code"] == "model_not_found"


async def _ask(settings: EngineSettings, models: Sequence[str]) -> tuple[list[Any], dict[str, Any]]:
    """Return the models that a node with these settings lists, and its answer for each of `models`."""
    body = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    async with served_engine(settings) as (_, _, client):
        listed = await (await client.get("/v1/models")).json()
        answers = {
            model: await (await client.post("/v1/completions", json={**body, "model": model})).json()
            for model in models
        }
    return listed["data"], answers


@pytest.mark.parametrize(("text", "is_good"), [("polite=/a=b", True), ("polite", False), ("=/a", False)])
def test_the_command_line_takes_names_and_folders(
    text: str, is_good: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    if is_good:
        options = parse_arguments(["--lora-modules", text, "terse=/c"])
        assert options.settings.lora_modules == {"polite": "/a=b", "terse": "/c"}
    else:
        with pytest.raises(SystemExit):
            parse_arguments(["--lora-modules", text])
        assert "is not NAME=PATH" in capsys.readouterr().err


def test_an_unknown_adapter_is_refused(make_node: Any) -> None:
    with pytest.raises(InvalidRequestError, match="no adapter 'polite'") as caught:
        make_node().add("a", PROMPT, lora_name="polite")
    assert caught.value.param == "model"


def _drop_config(folder: Path) -> None:
    (folder / "adapter_config.json").unlink()


def _break_config(folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"')


def _truncate_weights(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:100])


def _rename_layer(folder: Path) -> None:
    _edit(folder, lambda key: key.replace("layers.0.self_attn.q_proj", "layers.9.self_attn.q_proj"))


def _aim_at_the_output(folder: Path) -> None:
    _edit(folder, lambda key: key.replace("model.layers.0.self_attn.q_proj", "lm_head"))


def _drop_half(folder: Path) -> None:
    _edit(folder, lambda key: "" if key.endswith("q_proj.lora_B.weight") else key)


def _swap_layers(folder: Path) -> None:
    _edit(folder, lambda key: key.replace("0.self_attn.q_proj", "0.mlp.down_proj"))


def _edit(folder: Path, rename: Callable[[str], str]) -> None:
    path = folder / "adapter_model.safetensors"
    weights = {rename(key): tensor for key, tensor in load_file(path).items()}
    weights.pop("", None)
    save_file(weights, path)


@pytest.mark.parametrize(
    ("config", "damage", "message"),
    [
        ({}, _drop_config, "adapter_config.json cannot be read"),
        ({}, _break_config, "does not describe an adapter"),
        ({"peft_type": "IA3"}, None, "plain LoRA only, not IA3"),
        ({"use_dora": True, "bias": "all"}, None, "plain LoRA only, not use_dora, bias"),
        ({"r": 0}, None, "plain LoRA only"),
        ({}, _truncate_weights, "adapter_model.safetensors cannot be read"),
        ({}, _rename_layer, "no layer model.layers.9.self_attn.q_proj"),
        ({}, _aim_at_the_output, "lm_head is not a linear layer inside the model"),
        ({}, _drop_half, "nothing else: base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"),
        ({}, _swap_layers, "the weights of model.layers.0.mlp.down_proj do not have the shape"),
    ],
)
def test_the_error_for_a_broken_adapter_names_it_and_the_reason(
    config: Mapping[str, Any],
    damage: Callable[[Path], None] | None,
    message: str,
    make_node: Any,
    tmp_path: Path,
) -> None:
    folder = write_adapter(tmp_path / "bad", TARGETS, seed=0, **config)
    if damage is not None:
        damage(folder)
    with pytest.raises(ConfigurationError, match=message) as caught:
        make_node(lora_modules={"bad": str(folder)})
    assert caught.value.key == "lora_modules"
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize(
    "settings",
    [
        {"lora_modules": {"": "x"}},
        {"lora_modules": {"m": "x"}, "served_model_name": "m"},
        {"lora_modules": {"m": "x"}, "tensor_parallel_size": 2},
    ],
)
def test_settings_that_cannot_work_are_refused(settings: Mapping[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="lora_modules"):
        EngineSettings(**settings)
