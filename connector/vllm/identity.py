"""Digests of vLLM's model, from the files that vLLM loaded."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...transports.errors import ConfigurationError
from ..config import ModelIdentity
from ..identity.digest_cache import DigestCache
from ..identity.model import (
    WEIGHT_PATTERNS,
    chat_template_digest,
    configuration_digest,
    find_weight_files,
    read_configuration,
    tokenizer_digest,
    weights_digest,
)

logger = logging.getLogger(__name__)

#: What the keys and values that a draft model computes for a prompt depend on, of vLLM's
#: `speculative_config`.
_DRAFT_SETTINGS = ("method", "parallel_drafting", "use_heterogeneous_vocab")

_COMMIT = re.compile(r"[0-9a-f]{40}")
_CONSOLIDATED = "consolidated*.safetensors"
#: `load_format` → the files that vLLM reads, where they are not the usual ones.
_PATTERNS_OF_FORMAT: Mapping[str, tuple[str, ...]] = {
    "auto": (_CONSOLIDATED, *WEIGHT_PATTERNS),
    "mistral": (_CONSOLIDATED,),
    "pt": ("*.pt",),
    "npcache": ("*.bin",),
    "gguf": ("*.gguf",),
}


def model_identity(
    vllm_config: Any, cache: DigestCache | None = None, *, has_draft: bool = False, by_name: bool = False
) -> ModelIdentity:
    """Hash the model's files where vLLM has them: a local folder or file, or a snapshot of the Hugging Face
    cache.

    Nothing is fetched. Without files, a repository and a commit stand for the weights, because a commit never
    changes. A draft model has a digest of its own, because peers may have another one or none.

    Args:
        cache: Where digests of files are kept; by default the user's.
        has_draft: Whether there is a draft model with a cache of its own.
        by_name: Without files and without a commit, the model's name stands for the weights, and a warning
            says so.

    Raises:
        ConfigurationError: a file cannot be read, or nothing but a name tells which weights they are; vLLM
            does not start.
    """
    model, load = vllm_config.model_config, getattr(vllm_config, "load_config", None)
    tokenizer = _tokenizer_folder(model, load)
    weights = _weights(model, load, cache, by_name=by_name)
    return ModelIdentity(
        weights=weights,
        configuration=_configuration(model, load),
        draft=_draft(vllm_config, weights, cache, by_name=by_name) if has_draft else "",
        tokenizer=tokenizer_digest(tokenizer) if tokenizer is not None else "",
        chat_template=chat_template_digest(tokenizer) if tokenizer is not None else "",
    )


def _draft(vllm_config: Any, weights: str, cache: DigestCache | None, *, by_name: bool) -> str:
    """Hash what a draft model's cache depends on, apart from the target model.

    Args:
        weights: Those of the target model, whose file can hold the draft model as well.
    """
    settings, load = vllm_config.speculative_config, vllm_config.load_config
    draft = settings.draft_model_config
    content = {
        "weights": weights
        if draft.model == vllm_config.model_config.model
        else _weights(draft, load, cache, by_name=by_name),
        "configuration": _configuration(draft, load),
        **{key: getattr(settings, key, None) for key in _DRAFT_SETTINGS},
    }
    return configuration_digest(content)


def weights_of_files(vllm_config: Any) -> str:
    """Hash the weight files that vLLM loaded last, as `model_identity` does at the start, where a name was
    enough or not needed.
    """
    return _weights(vllm_config.model_config, getattr(vllm_config, "load_config", None), None, by_name=True)


def model_name(model: Any) -> str:
    """Return the model's name as the user gave it to vLLM, with the revision if there is one."""
    name, revision = getattr(model, "model_weights", "") or model.model, getattr(model, "revision", None)
    return f"{name}@{revision}" if revision else str(name)


def _weights(model: Any, load: Any, cache: DigestCache | None, *, by_name: bool) -> str:
    load_format = str(getattr(load, "load_format", "auto"))
    if load_format == "dummy":
        return f"dummy with seed {getattr(model, 'seed', None)}"
    place = _local_place(model.model, getattr(model, "revision", None), load)
    if place is None:
        files = []
    elif place.is_file():
        files = [place]
    else:
        files = find_weight_files(place, _PATTERNS_OF_FORMAT.get(load_format, WEIGHT_PATTERNS))
    if files:
        return weights_digest(files, cache)
    name = model_name(model)
    # In an object store's place a revision means nothing, and a branch or a tag may name other weights
    # tomorrow.
    if not getattr(model, "model_weights", "") and _COMMIT.fullmatch(getattr(model, "revision", None) or ""):
        return name
    if not by_name:
        raise ConfigurationError(
            f"cannot tell whether peers have the weights of {name!r}: vLLM loaded no file that is on this machine "
            f"(load_format={load_format!r}). Give --revision with a commit, or, if all nodes surely load the same weights, "
            'set "weights_by_name": true in kv_connector_extra_config',
            key="weights_by_name",
            value=False,
        )
    logger.warning(
        "the weights of %r are not compared with those of peers, as weights_by_name asks for: their name is compared instead",
        name,
    )
    return f"not compared: {name}"


def _configuration(model: Any, load: Any) -> str:
    """Hash the configuration file and the options that change it; without the file, vLLM's configuration
    object.
    """
    name = getattr(model, "hf_config_path", None) or model.model
    place = _local_place(name, getattr(model, "revision", None), load)
    overrides = getattr(model, "hf_overrides", None) or {}
    content: dict[str, Any] = {
        "quantization": getattr(model, "quantization", None),
        "disable_sliding_window": bool(getattr(model, "disable_sliding_window", False)),
    }
    # vLLM names an image by its bytes and the request's settings, but embeds it by the server's as well.
    multimodal = getattr(model, "multimodal_config", None)
    if processing := getattr(multimodal, "mm_processor_kwargs", None):
        content["mm_processor_kwargs"] = dict(processing)
    if (is_long := _uses_long_factors(model)) is not None:
        content["long_rope"] = is_long
    # The file is better than vLLM's object, which contains the defaults of one version of transformers. But
    # if a function changes the object, only the object can be compared.
    if place is not None and (place / "config.json").is_file() and isinstance(overrides, Mapping):
        content |= {"file": read_configuration(place), "overrides": dict(overrides)}
    elif (config := getattr(model, "hf_config", None)) is not None:
        content["object"] = config.to_dict()
    else:
        content["name"] = model_name(model)
    return configuration_digest(content)


def _uses_long_factors(model: Any) -> bool | None:
    """Whether a model with two sets of rotary factors computes with the one for long prompts; None if it has
    one set.

    vLLM chooses the set by `max_model_len`, for prompts of any length. So nodes with other limits can compute
    other keys.
    """
    config = getattr(model, "hf_text_config", None)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    if not isinstance(rope, Mapping) or rope.get("rope_type", rope.get("type")) != "longrope":
        return None
    name = "original_max_position_embeddings"
    original: Any = rope.get(name) or getattr(config, name, 0)
    return bool(model.max_model_len > original)


def _tokenizer_folder(model: Any, load: Any) -> Path | None:
    if getattr(model, "skip_tokenizer_init", False):
        return None
    name, revision = getattr(model, "tokenizer", None), getattr(model, "tokenizer_revision", None)
    place = _local_place(name, revision, load) if name else None
    return place if place is not None and place.is_dir() else None


def _local_place(name: str, revision: str | None, load: Any) -> Path | None:
    """Find the folder or file of a model on this machine; None if there is none."""
    place = Path(name).expanduser()
    if place.exists():
        return place
    try:
        from huggingface_hub import snapshot_download

        folder = snapshot_download(
            name, revision=revision, cache_dir=getattr(load, "download_dir", None), local_files_only=True
        )
    except (ImportError, OSError, ValueError):  # not a repository's name, or not in the local cache
        return None
    return Path(folder)
