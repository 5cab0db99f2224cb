"""Tiny models with random weights, in the folder format of Hugging Face."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from kvferry.lab.gpu.models import write_random_model
from tests.support.answers import Answer

_COMMON = {
    "vocab_size": 257,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 256,
    "pad_token_id": None,
    "tie_word_embeddings": False,
    # Wide enough that the greedy token does not depend on the last bit of a sum.
    "initializer_range": 0.3,
}

#: Family → what its configuration has beside the common part.
FAMILIES: dict[str, Mapping[str, Any]] = {
    "llama": {"model_type": "llama"},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3"},
    "mistral": {"model_type": "mistral", "sliding_window": 24},
    "gemma2": {
        "model_type": "gemma2",
        "sliding_window": 24,
        "num_hidden_layers": 4,
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 20.0,
        "final_logit_softcapping": 30.0,
        "hidden_activation": "gelu_pytorch_tanh",
    },
    "gemma3": {
        "model_type": "gemma3_text",
        "sliding_window": 24,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "query_pre_attn_scalar": 16,
        "hidden_activation": "gelu_pytorch_tanh",
    },
    "gemma3n": {
        "model_type": "gemma3n_text",
        "sliding_window": 24,
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 257,
        "laurel_rank": 8,
        "altup_num_inputs": 2,
    },
    "gemma4": {
        "model_type": "gemma4_text",
        "sliding_window": 24,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "global_head_dim": 32,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 257,
    },
    "llama4": {
        "model_type": "llama4_text",
        "num_hidden_layers": 4,
        "attention_chunk_size": 24,
        "layer_types": ["chunked_attention", "full_attention"] * 2,
        "no_rope_layers": [1, 0, 1, 0],
        "intermediate_size_mlp": 96,
        "num_local_experts": 2,
        "interleave_moe_layer_step": 2,
    },
}

#: Families with recurrent layers, which vLLM has and the reference engine does not.
RECURRENT_FAMILIES: dict[str, Mapping[str, Any]] = {
    "granitemoehybrid": {
        "model_type": "granitemoehybrid",
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
        "mamba_expand": 1,
        "mamba_n_groups": 1,
        "mamba_chunk_size": 8,
        "num_local_experts": 0,
        "shared_intermediate_size": 64,
    },
    "falcon_h1": {
        "model_type": "falcon_h1",
        "num_hidden_layers": 2,
        "mamba_d_ssm": 64,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
        "mamba_chunk_size": 8,
    },
    "mamba2": {
        "model_type": "mamba2",
        "num_hidden_layers": 2,
        "num_heads": 4,
        "head_dim": 32,
        "n_groups": 1,
        "state_size": 8,
        "chunk_size": 8,
    },
    "qwen3_next": {
        "model_type": "qwen3_next",
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 16,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    },
}


def write_tiny_model(folder: Path, family: str = "llama", *, seed: int = 0, **overrides: Any) -> Path:
    """Write a model with random weights, and a tokenizer with one token per byte and an end token.

    Args:
        seed: Seed of the weights. The same seed writes the same model.
        overrides: Fields of the configuration to change.
    """
    settings = {**_COMMON, **(FAMILIES | RECURRENT_FAMILIES)[family], **overrides}
    return write_random_model(folder, settings, seed)


#: Rank and scale of the adapters that `write_adapter` writes.
RANK, ALPHA = 4, 8


def write_adapter(folder: Path, targets: Mapping[str, tuple[int, int]], seed: int, **config: Any) -> Path:
    """Write a LoRA adapter with random weights in PEFT's format.

    Args:
        targets: Layer → its numbers of inputs and outputs.
        config: Fields of the configuration to change.
    """
    folder.mkdir(exist_ok=True)
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none", **config}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    noise = torch.Generator().manual_seed(seed)
    weights = {}
    for name, (inputs, outputs) in targets.items():
        weights[f"base_model.model.{name}.lora_A.weight"] = torch.randn(RANK, inputs, generator=noise) * 0.2
        weights[f"base_model.model.{name}.lora_B.weight"] = torch.randn(outputs, RANK, generator=noise) * 0.2
    save_file(weights, folder / "adapter_model.safetensors")
    return folder


def tiny_models_in(root: Path) -> Callable[[str], Path]:
    """Return a function from a family to the folder of its tiny model below `root`, which it writes once."""

    def folder(family: str) -> Path:
        path = root / family
        return path if path.exists() else write_tiny_model(path, family)

    return folder


def scale_tensor(folder: Path, name: str, factor: float) -> None:
    """Multiply one tensor of a model's file in place. The file keeps its size."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors[name] = tensors[name] * factor
    save_file(tensors, path, metadata={"format": "pt"})


def generate_greedily(model: Any, prompt: Sequence[int], num_tokens: int) -> Answer:
    """Return `num_tokens` tokens from transformers' own `generate`, past any end token."""
    ids = torch.tensor([list(prompt)], device=model.device)
    whole = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        output_logits=True,
        return_dict_in_generate=True,
    )
    tokens = whole.sequences[0, -num_tokens:].tolist()
    scores = [logits[0].float().log_softmax(dim=-1) for logits in whole.logits]
    return Answer(tokens, (float(of[token]) for of, token in zip(scores, tokens, strict=True)))
