"""LoRA adapters: low-rank changes to a model's linear layers. Each request chooses one adapter or none.

An adapter is a folder in PEFT's format, with `adapter_config.json` and `adapter_model.safetensors`.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers.modeling_utils import PreTrainedModel

from ...transports.errors import ConfigurationError
from .step import StepPlan

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_DOWN, _UP = ".lora_A.weight", ".lora_B.weight"
#: Features of PEFT that this engine lacks. An adapter that uses one is refused: without it, its answers would be wrong.
_NOT_SUPPORTED = (
    "use_dora",
    "modules_to_save",
    "rank_pattern",
    "alpha_pattern",
    "layer_replication",
    "lora_bias",
)

#: For each request of the current step that has an adapter: where its tokens begin and end, and the adapter's name.
_runs: ContextVar[tuple[tuple[int, int, str], ...]] = ContextVar("kvferry_adapter_runs", default=())


@contextmanager
def set_step_adapters(plan: StepPlan) -> Iterator[None]:
    """Apply each request's adapter to its tokens of a step, in this thread, inside the block."""
    runs, start = [], 0
    for item in plan.scheduled_requests:
        end = start + item.num_scheduled_tokens
        if item.request.lora_id is not None:
            runs.append((start, end, item.request.lora_id))
        start = end
    token = _runs.set(tuple(runs))
    try:
        yield
    finally:
        _runs.reset(token)


def adapters_identity(folders: Mapping[str, str]) -> str:
    """Hash the names of the adapters and every byte of their two files; `"none"` without adapters.

    Raises:
        ConfigurationError: a file of an adapter cannot be read.
    """
    if not folders:
        return "none"
    digest = hashlib.sha256()
    for name, folder in sorted(folders.items()):
        digest.update(name.encode() + b"\0")
        for part in (_CONFIG, _WEIGHTS):
            digest.update(hashlib.sha256(_read(Path(folder) / part)).digest())
    return digest.hexdigest()[:16]


def install_adapters(model: PreTrainedModel, folders: Mapping[str, str]) -> None:
    """Make a model's linear layers apply the adapters, to the tokens of requests that chose one.

    Args:
        folders: Name → folder.

    Raises:
        ConfigurationError: a folder is not a LoRA adapter, uses a feature that this engine lacks, or does not fit the
            model. The message names the folder.
    """
    layers: dict[str, _AdaptedLinear] = {}
    for name, folder in folders.items():
        for module_name, change in _load(Path(folder), model).items():
            if module_name not in layers:
                linear = model.get_submodule(module_name)
                assert isinstance(linear, torch.nn.Linear)
                layers[module_name] = _AdaptedLinear(linear.weight, linear.bias)
                linear.forward = layers[module_name].forward  # type: ignore[method-assign]
            layers[module_name].changes[name] = change


@dataclass(frozen=True)
class _Change:
    """One adapter's change to one layer. It has the effect of adding `up @ down` to the weight.

    Attributes:
        down: `(rank, in_features)`.
        up: `(out_features, rank)`, multiplied by the adapter's scale.
    """

    down: torch.Tensor
    up: torch.Tensor


@dataclass
class _AdaptedLinear:
    """A linear layer that also applies the adapters of the current step.

    Attributes:
        changes: Name of the adapter → its change to this layer.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    changes: dict[str, _Change] = field(default_factory=dict)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Compute `(…, num_tokens, in_features)` → `(…, num_tokens, out_features)`."""
        result = torch.nn.functional.linear(input, self.weight, self.bias)
        for start, end, name in _runs.get():
            if change := self.changes.get(name):
                result[..., start:end, :] += input[..., start:end, :] @ change.down.T @ change.up.T
        return result


def _load(folder: Path, model: PreTrainedModel) -> dict[str, _Change]:
    """Read the changes of one adapter, by name of the model's layer."""
    config = _config(folder)
    scale = config["lora_alpha"] / (math.sqrt(config["r"]) if config.get("use_rslora") else config["r"])
    try:
        weights = load_file(folder / _WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise _refusal(folder, f"{_WEIGHTS} cannot be read: {error}") from error
    names = {key.removeprefix(_PREFIX).removesuffix(_DOWN) for key in weights if key.endswith(_DOWN)}
    expected = {f"{_PREFIX}{name}{part}" for name in names for part in (_DOWN, _UP)}
    if not names or expected != weights.keys():
        odd = min(expected ^ weights.keys(), default="no weights")
        raise _refusal(folder, f"{_WEIGHTS} must have pairs of {_DOWN} and {_UP}, and nothing else: {odd}")
    changes = {}
    for name in sorted(names):
        linear = _target(folder, model, name)
        down, up = (weights[f"{_PREFIX}{name}{part}"].to(linear.weight) for part in (_DOWN, _UP))
        if (up.shape[0], down.shape[1], up.shape[1]) != (*linear.weight.shape, down.shape[0]):
            raise _refusal(folder, f"the weights of {name} do not have the shape of the model's layer")
        changes[name] = _Change(down, up * scale)
    return changes


def _config(folder: Path) -> Mapping[str, Any]:
    try:
        config = json.loads(_read(folder / _CONFIG))
        is_lora = config["peft_type"] == "LORA" and config["r"] > 0 and config["lora_alpha"] > 0
    except (ValueError, TypeError, KeyError) as error:
        raise _refusal(folder, f"{_CONFIG} does not describe an adapter: {error!r}") from error
    wants = [name for name in _NOT_SUPPORTED if config.get(name)]
    if config.get("bias", "none") != "none":
        wants.append("bias")
    if not is_lora or wants:
        raise _refusal(
            folder, f"this engine runs plain LoRA only, not {', '.join(wants) or config['peft_type']}"
        )
    checked: Mapping[str, Any] = config
    return checked


def _target(folder: Path, model: PreTrainedModel, name: str) -> torch.nn.Linear:
    """Return the layer that an adapter changes.

    The output layer is refused: it gets only some tokens of a step, so `_runs` does not apply to it.
    """
    try:
        layer = model.get_submodule(name)
    except AttributeError:
        raise _refusal(folder, f"this model has no layer {name}") from None
    if not isinstance(layer, torch.nn.Linear) or layer is model.get_output_embeddings():  # type: ignore[no-untyped-call]
        raise _refusal(folder, f"{name} is not a linear layer inside the model")
    return layer


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise _refusal(path.parent, f"{path.name} cannot be read: {error.strerror}") from error


def _refusal(folder: Path, why: str) -> ConfigurationError:
    return ConfigurationError(f"LoRA adapter {str(folder)!r}: {why}", key="lora_modules", value=str(folder))
