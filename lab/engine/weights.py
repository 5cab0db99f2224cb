"""Load models from folders with clear errors, and identify a model so that two nodes can compare theirs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.configuration_utils import PretrainedConfig
from transformers.modeling_utils import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.utils import GENERATION_CONFIG_NAME

from ...connector.config import ModelIdentity
from ...connector.identity.model import (
    chat_template_digest,
    configuration_digest,
    find_weight_files,
    read_configuration,
    tokenizer_digest,
    weights_digest,
)
from ...transports.errors import ConfigurationError
from .default_model import default_model_folder
from .progress import quiet_loading
from .settings import DEFAULT_MODEL

_WEIGHT_PATTERNS = ("*.safetensors", "pytorch_model*.bin")


@dataclass(frozen=True)
class ModelDescription:
    """A model without its weights.

    Attributes:
        identity: The digests that a peer compares.
        eos_token_ids: Tokens that end an answer.
    """

    folder: Path
    config: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase
    identity: ModelIdentity
    eos_token_ids: frozenset[int]

    @property
    def text_config(self) -> PretrainedConfig:
        """The configuration of the decoder."""
        config: PretrainedConfig = self.config.get_text_config(decoder=True)
        return config


def model_folder(model: str) -> Path:
    """Return the folder that `model` names: the default model's, or a local one.

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
    """Read a model's folder, but keep only a digest of the weights.

    Raises:
        ConfigurationError: the folder's files do not describe a decoder-only language model, or one cannot be
            read; `key` is `"model"`.
    """
    config = _load_config(folder)
    tokenizer, eos_token_ids = _load_tokenizer(folder), _eos_token_ids(folder, config)
    return ModelDescription(folder, config, tokenizer, model_identity(folder), eos_token_ids)


def load_model(
    folder: Path, dtype: torch.dtype, device: torch.device, attn_implementation: str
) -> PreTrainedModel:
    """Load the model of a folder. This never downloads anything.

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
    except Exception as error:
        # A broken file can make the loader raise anything. Report all of it as a broken folder.
        raise _broken(folder, f"its weights cannot be loaded: {_one_line(error)}") from error
    model, info = loaded
    absent = sorted({*info["missing_keys"], *(str(key) for key in info["mismatched_keys"])})
    if absent:
        # transformers fills missing weights with random numbers, which an engine must not serve.
        raise _broken(folder, f"{len(absent)} weights are missing or have another shape, e.g. {absent[0]}")
    placed: PreTrainedModel = model.eval().requires_grad_(False).to(device)
    return placed


def model_identity(folder: Path) -> ModelIdentity:
    """Hash a folder's model, including every byte of its weights.

    The result depends neither on where the files lie nor on the version of the library that wrote the
    configuration.

    Raises:
        ConfigurationError: a file cannot be read; `key` is `"model"`.
    """
    return ModelIdentity(
        weights=weights_digest(_weight_files(folder)),
        configuration=configuration_digest(read_configuration(folder)),
        tokenizer=tokenizer_digest(folder),
        chat_template=chat_template_digest(folder),
    )


def _weight_files(folder: Path) -> list[Path]:
    return find_weight_files(folder, _WEIGHT_PATTERNS)


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
