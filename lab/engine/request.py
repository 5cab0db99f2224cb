"""The scheduler's state of one request."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...connector.stats import TransferRecord
from ...runner_mixin.kv_cache.block_hash import BlockHash, MultiModalFeature
from .types import FinishReason, GenerationRequest, Logprobs

BlockHasher = Callable[["Request"], list[BlockHash]]


class RequestStatus(enum.Enum):
    """The state of a request. It holds blocks while it is loading, ready or running.

    `WAITING`: for its first blocks, or for new ones after a preemption. `LOADING`: another node's KV cache is
    being read. `READY`: the load has ended, and the request waits for a step.
    """

    WAITING = "waiting"
    LOADING = "loading"
    READY = "ready"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass
class RequestFigures:
    """The times measured for one request."""

    arrival_s: float
    first_blocks_s: float | None = None
    first_token_s: float | None = None
    num_cached_tokens: int = 0
    num_loaded_tokens: int = 0
    num_preemptions: int = 0
    transfer: TransferRecord | None = None

    @property
    def ttft_s(self) -> float:
        """Seconds from arrival to the first token; 0 until there is one."""
        return 0.0 if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def queue_s(self) -> float:
        """Seconds from arrival until it got its first blocks; 0 while it waits for them."""
        return 0.0 if self.first_blocks_s is None else self.first_blocks_s - self.arrival_s

    def note_failed_load(self, request_id: str, why: str) -> None:
        """Note that the load failed, also if the connector reported no figures of it."""
        self.num_loaded_tokens = 0
        self.transfer = self.transfer or TransferRecord(request_id, transport="", error=why)


class Request:
    """A request as scheduler, connector, block manager and runner see it.

    Attributes:
        source: The request as the client sent it.
        all_token_ids: The prompt and the generated tokens.
        block_hashes: Hashes of the full blocks of these tokens.
        num_computed_tokens: The number of tokens whose keys and values are in the request's blocks.
        may_load: Whether the engine may still ask the connector for a load. A request loads at most once.
    """

    def __init__(
        self, request_id: str, source: GenerationRequest, hasher: BlockHasher, arrival_s: float
    ) -> None:
        self.request_id = request_id
        self.source = source
        self.all_token_ids = [*source.prompt_token_ids, *source.known_token_ids]
        self.block_hashes: list[BlockHash] = []
        self.num_computed_tokens = 0
        self.status = RequestStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.logprobs: Logprobs = ()
        self.may_load = True
        self.figures = RequestFigures(arrival_s)
        self._hasher = hasher
        self.block_hashes += hasher(self)

    def __repr__(self) -> str:
        return f"<Request {self.request_id} {self.status.value} {self.num_computed_tokens}/{self.num_tokens}>"

    @property
    def cache_salt(self) -> str | None:
        return self.source.cache_salt or None

    @property
    def lora_id(self) -> None:
        return None  # the engine has no adapters

    @property
    def mm_features(self) -> Sequence[MultiModalFeature]:
        return ()  # prompts are tokens only

    @property
    def prompt_embeds(self) -> None:
        return None

    @property
    def prompt_token_ids(self) -> Sequence[int]:
        return self.source.prompt_token_ids

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.source.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """The number of tokens that the next steps have to compute; 1 in the decode phase."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def kv_transfer_params(self) -> Mapping[str, Any] | None:
        return self.source.kv_transfer_params

    def append_token(self, token_id: int) -> None:
        """Add a generated token."""
        self.all_token_ids.append(token_id)
        self.block_hashes += self._hasher(self)
