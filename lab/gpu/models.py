"""The models of the steps, with random weights, and how large everything is on each kind of device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ..engine.progress import quiet_loading
from ..prove.models import byte_tokenizer

_COMMON: Final = {
    "vocab_size": 257,
    "bos_token_id": None,
    "eos_token_id": 256,
    "pad_token_id": None,
    "tie_word_embeddings": False,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_size": 256,
    "intermediate_size": 512,
    "max_position_embeddings": 32768,
    # So large that each token of a prompt changes the answer.
    "initializer_range": 0.15,
}
#: A latent as large as that of the large models in DeepSeek-V2's form, for which kernels are made.
_LATENT: Final = {
    "model_type": "deepseek_v2",
    # With larger weights the attention is so sharp that two kernels for latents differ visibly.
    "initializer_range": 0.06,
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "first_k_dense_replace": 4,  # no experts
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "n_group": 1,
    "topk_group": 1,
}
_WINDOWS: Final = {
    "model_type": "gemma3_text",
    "sliding_window": 256,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "query_pre_attn_scalar": 64,
    "hidden_activation": "gelu_pytorch_tanh",
}
_STATES: Final = {
    "model_type": "granitemoehybrid",
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "mamba_n_heads": 8,
    "mamba_d_head": 64,
    "mamba_d_state": 64,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "num_local_experts": 0,
    "shared_intermediate_size": 512,
}
#: A Llama whose cache has 32 KiB per token in bfloat16, like that of Llama 3.2 1B.
_LARGE: Final = {
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "initializer_range": 0.05,
}


#: With prefix caching vLLM keeps a state per block, and its kernels for CPUs cannot.
_WITH_STATES: Final = "--no-enable-prefix-caching"
#: Kind of model → what it has beside the common part. `llama` depends on the device.
_KINDS: Final[Mapping[str, Mapping[str, Any]]] = {"mla": _LATENT, "windows": _WINDOWS, "hybrid": _STATES}


@dataclass(frozen=True)
class Scale:
    """How much a device is given to do: by default a GPU.

    Attributes:
        llama: What the Llama's configuration has beside the common part.
        lengths: Of prompts, in tokens.
        rounds: Prompts per length.
        answer_tokens: Tokens per answer.
        rates: Requests per second of `vllm bench serve`.
        load: Requests per rate, and average tokens of their prompts and answers.
        arguments: Of every `vllm serve`.
        own_arguments: Of those of a kind of model, in addition.
        environment: Variables of every `vllm serve`.
        start_s: Seconds that servers may take to start.
    """

    dtype: str = "bfloat16"
    llama: Mapping[str, Any] = field(default_factory=lambda: _LARGE)
    lengths: tuple[int, ...] = (128, 1024, 4096, 16000)
    rounds: int = 5
    answer_tokens: int = 32
    rates: tuple[float, float] = (4.0, 16.0)
    load: tuple[int, int, int] = (100, 1000, 128)
    block_size: int = 16
    # With a cache of their own size, servers that start together do not count each other's memory.
    arguments: str = (
        "--max-model-len 16384 --max-num-batched-tokens 2048 --gpu-memory-utilization 0.2 "
        f"--kv-cache-memory-bytes {3 << 30}"
    )
    own_arguments: Mapping[str, str] = field(default_factory=lambda: {"hybrid": _WITH_STATES})
    environment: Mapping[str, str] = field(default_factory=dict)
    start_s: float = 150.0

    def settings(self, model: str) -> Mapping[str, Any]:
        """Return the configuration of a kind of model."""
        return {**_COMMON, **(_KINDS.get(model) or {"model_type": "llama", **self.llama})}

    def serve_arguments(self, model: str) -> list[str]:
        """Return arguments of `vllm serve` for a kind of model."""
        common = f"--dtype {self.dtype} --block-size {self.block_size} --enforce-eager --disable-uvicorn-access-log"
        return f"{common} {self.arguments} {self.own_arguments.get(model, '')}".split()


#: So small that it shows only whether the steps work.
ON_CPU: Final = Scale(
    dtype="float32",
    llama={},
    lengths=(128, 1024),
    rounds=2,
    answer_tokens=8,
    rates=(1.0, 2.0),
    load=(10, 200, 16),
    block_size=32,
    arguments="--max-model-len 2048 --max-num-batched-tokens 256 --distributed-executor-backend uni",
    # The engine computes in its server's process: two would spin while they wait for each other.
    environment={"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
    start_s=300.0,
)


def write_random_model(folder: Path, settings: Mapping[str, Any], seed: int = 0) -> Path:
    """Write a model of any architecture with random weights in float32, and the tokenizer of bytes.

    Args:
        settings: Its configuration, with `model_type`.
        seed: Seed of the weights. The same seed writes the same model.
    """
    config = AutoConfig.for_model(**settings)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    model.generation_config.eos_token_id = settings["eos_token_id"]
    with quiet_loading():
        model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder
