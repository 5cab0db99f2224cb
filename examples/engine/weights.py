"""Models from folders: loading one with clear errors, and telling whether two nodes have the same one."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.configuration_utils import PretrainedConfig
from transformers.modeling_utils import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.utils import GENERATION_CONFIG_NAME

from kvferry.transports.errors import ConfigurationError

from .default_model import default_model_folder
from .progress import quiet_loading
from .settings import DEFAULT_MODEL

__all__ = ["ModelDescription", "describe_model", "load_model", "model_folder", "model_identity"]

_WEIGHT_PATTERNS = ("*.safetensors", "pytorch_model*.bin")
_SAMPLE_BYTES = 64 << 10
_NUM_SAMPLES = 16


@dataclass(frozen=True)
class ModelDescription:
    """What there is to know of a model without its weights.

    Attributes:
        identity: Equal on two nodes exactly if configuration and (a sample of) the weights are.
        eos_token_ids: Tokens that end an answer.
    """

    folder: Path
    config: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase
    identity: str
    eos_token_ids: frozenset[int]

    @property
    def text_config(self) -> PretrainedConfig:
        """The configuration of the decoder."""
        config: PretrainedConfig = self.config.get_text_config(decoder=True)
        return config


def model_folder(model: str) -> Path:
    """The folder that `model` names: the default model's, or a local one.

    Raises:
        ConfigurationError: there is no such folder, or it holds no model; the message says what is missing.
    """
    if model == DEFAULT_MODEL:
        return default_model_folder()
    folder = Path(model).expanduser()
    if not folder.is_dir():
        raise _broken(folder, f"it is neither a folder nor {DEFAULT_MODEL!r}; models are never downloaded")
    if not (folder / "config.json").is_file():
        raise _broken(folder, "it has no config.json")
    if not _weight_files(folder):
        raise _broken(folder, f"it has no weights ({' or '.join(_WEIGHT_PATTERNS)})")
    return folder


def describe_model(folder: Path) -> ModelDescription:
    """Read everything of a folder but the weights.

    Raises:
        ConfigurationError: the folder's files do not describe a decoder-only language model; `key` is `"model"`.
    """
    config = _load_config(folder)
    return ModelDescription(
        folder, config, _load_tokenizer(folder), model_identity(folder), _eos_token_ids(folder, config)
    )


def load_model(
    folder: Path, dtype: torch.dtype, device: torch.device, attn_implementation: str
) -> PreTrainedModel:
    """Load the model of a folder; nothing is fetched from elsewhere.

    Raises:
        ConfigurationError: the folder's files do not make a decoder-only language model; `key` is `"model"`.
    """
    config = _load_config(folder)
    try:
        with quiet_loading():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                attn_implementation=attn_implementation,
                local_files_only=True,
                output_loading_info=True,
            )
    except Exception as error:  # whatever a broken file makes of the loader, the user broke the folder
        raise _broken(folder, f"its weights cannot be loaded: {_one_line(error)}") from error
    model, info = loaded
    absent = sorted({*info["missing_keys"], *(str(key) for key in info["mismatched_keys"])})
    if absent:
        # transformers fills such weights with random numbers; an engine must not serve those.
        raise _broken(folder, f"{len(absent)} weights are missing or have another shape, e.g. {absent[0]}")
    placed: PreTrainedModel = model.eval().requires_grad_(False).to(device)
    return placed


def model_identity(folder: Path) -> str:
    """A short text that differs when configuration or weights do: a hash over the first and samples of the second.

    Where the files lie and which version of a library wrote them makes no difference.
    """
    config = json.loads((folder / "config.json").read_text())
    for volatile in ("_name_or_path", "transformers_version", "torch_dtype", "dtype"):
        config.pop(volatile, None)
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for path in _weight_files(folder):
        _update_with_sample(digest, path)
    return f"{config.get('model_type', 'model')}-{digest.hexdigest()[:16]}"


def _update_with_sample(digest: Any, path: Path) -> None:
    size = path.stat().st_size
    digest.update(f"{path.name}:{size}".encode())
    stride = max(_SAMPLE_BYTES, (size - _SAMPLE_BYTES) // (_NUM_SAMPLES - 1))
    with path.open("rb") as file:
        for start in range(0, size, stride):
            file.seek(start)
            digest.update(file.read(_SAMPLE_BYTES))


def _weight_files(folder: Path) -> list[Path]:
    for pattern in _WEIGHT_PATTERNS:
        if found := sorted(folder.glob(pattern)):
            return found
    return []


def _load_config(folder: Path) -> PretrainedConfig:
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise _broken(folder, f"its config.json cannot be read: {_one_line(error)}") from error
    if config.is_encoder_decoder:
        raise _broken(folder, f"{config.model_type} is not a decoder-only model")
    return config


def _load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise _broken(folder, f"its tokenizer cannot be loaded: {_one_line(error)}") from error
    return tokenizer


def _eos_token_ids(folder: Path, config: PretrainedConfig) -> frozenset[int]:
    if (folder / GENERATION_CONFIG_NAME).is_file():
        generation = GenerationConfig.from_pretrained(folder, local_files_only=True)
    else:
        generation = GenerationConfig.from_model_config(config)
    eos = generation.eos_token_id
    if eos is None:
        return frozenset()
    return frozenset(eos if isinstance(eos, list) else [eos])


def _broken(folder: Path, why: str) -> ConfigurationError:
    return ConfigurationError(f"model {str(folder)!r}: {why}", key="model", value=str(folder))


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
