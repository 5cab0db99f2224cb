"""Settings of an engine, checked before anything starts."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, get_args

from ...connector.config import KVTransferConfig, PageOrder
from ...transports.errors import ConfigurationError

#: The model that comes from the package index rather than from a folder.
DEFAULT_MODEL = "smollm2-135m-instruct"
DTYPES = ("auto", "float32", "bfloat16", "float16")
Layout = Literal["uniform", "per-layer"]


@dataclass(frozen=True)
class EngineSettings:
    """Settings of one engine.

    Attributes:
        model: Folder of a Hugging Face model, or `DEFAULT_MODEL`.
        served_model_name: Its name for clients; empty for the last part of `model`.
        dtype: Type of weights and cache; `"auto"` is float32 on a CPU and bfloat16 on a GPU.
        device: `"cpu"`, `"cuda"` or `"cuda:N"`.
        layout: `"uniform"` keeps one block of all layers in one run of bytes where connector and model admit
            it; `"per-layer"` has one buffer per layer.
        page_order: `"NHD"` keeps each token's heads together in a page, `"HND"` each head's tokens.
        block_size: Tokens per block.
        num_blocks: Blocks of the pool, including the null block; 0 for as many as `memory_utilization`
            allows.
        memory_utilization: Share of the device's memory for the pool when `num_blocks` is 0.
        max_model_len: Longest sequence; 0 for the length that the model was trained for, or less if the pool
            is smaller.
        max_num_batched_tokens: Most tokens per step, which is also the size of a prefill chunk.
        max_num_seqs: Most requests per step.
        enable_prefix_caching: Keep and reuse blocks of finished requests.
        hash_seed: Seed of the block hashes; nodes with the same seed agree on them. Empty for a random seed.
        num_threads: Threads of PyTorch in each process; 0 lets PyTorch choose.
        tensor_parallel_size: Worker processes that share each layer; 1 to run the model in this process.
        kv_events_endpoint: `tcp://HOST:PORT` at which to publish what the prefix cache stores and removes;
            port 0 for a free one, empty to publish nothing.
        kv_transfer: The connector and its options; None on a node that transfers nothing.

    Raises:
        ConfigurationError: a value is outside its range; `key` names it.
    """

    model: str = DEFAULT_MODEL
    served_model_name: str = ""
    dtype: str = "auto"
    device: str = "cpu"
    layout: Layout = "uniform"
    page_order: PageOrder = "NHD"
    block_size: int = 16
    num_blocks: int = 0
    memory_utilization: float = 0.1
    max_model_len: int = 0
    max_num_batched_tokens: int = 512
    max_num_seqs: int = 16
    enable_prefix_caching: bool = True
    hash_seed: str = ""
    num_threads: int = 0
    tensor_parallel_size: int = 1
    kv_events_endpoint: str = ""
    kv_transfer: KVTransferConfig | None = None

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigurationError("model is empty", key="model", value=self.model)
        _require_choice("dtype", self.dtype, DTYPES)
        _require_choice("layout", self.layout, get_args(Layout))
        _require_choice("page_order", self.page_order, get_args(PageOrder))
        minima = {
            "block_size": 1,
            "num_blocks": 0,
            "max_model_len": 0,
            "max_num_batched_tokens": 1,
            "max_num_seqs": 1,
            "num_threads": 0,
            "tensor_parallel_size": 1,
        }
        for setting in fields(self):
            if setting.name in minima:
                _require_at_least(setting.name, getattr(self, setting.name), minima[setting.name])
        if self.tensor_parallel_size > 1 and self.device != "cpu":
            raise ConfigurationError(
                f"tensor_parallel_size={self.tensor_parallel_size} is for the CPU, not for device={self.device!r}",
                key="tensor_parallel_size",
                value=self.tensor_parallel_size,
            )
        if self.num_blocks == 1:
            raise ConfigurationError("num_blocks=1: it must be 0 or at least 2", key="num_blocks", value=1)
        if not 0.0 < self.memory_utilization <= 1.0:
            raise ConfigurationError(
                f"memory_utilization={self.memory_utilization}: it must be above 0 and at most 1",
                key="memory_utilization",
                value=self.memory_utilization,
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigurationError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is less than "
                f"max_num_seqs={self.max_num_seqs}: each request of a step needs a token",
                key="max_num_batched_tokens",
                value=self.max_num_batched_tokens,
            )


def _require_choice(key: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigurationError(f"{key}={value!r}; allowed: {', '.join(choices)}", key=key, value=value)


def _require_at_least(key: str, value: int, minimum: int) -> None:
    if value < minimum:
        raise ConfigurationError(f"{key}={value}: it must be at least {minimum}", key=key, value=value)
