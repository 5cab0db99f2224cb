"""What goes into the engine and what comes out of it. Plain frozen data, no tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from .errors import InvalidRequestError

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True)
class SamplingParams:
    """How the answer is chosen.

    Attributes:
        max_tokens: Longest answer; it also ends where the model's `max_model_len` does.
        temperature: 0 is greedy.
        top_p: Sample from the smallest set of tokens whose probability reaches this, 0 < top_p <= 1.
        seed: Same seed, same answer, whatever else runs; None draws one.
        stop: The answer ends before the first of these texts.
        ignore_eos: Go on past the model's end-of-sequence tokens.
        num_top_logits: How many of the largest logits for the first token to tell, 0 to 20.

    Raises:
        InvalidRequestError: a value is outside its range; `param` names it.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    num_top_logits: int = 0

    def __post_init__(self) -> None:
        _require(self.max_tokens >= 1, "max_tokens", self.max_tokens, "at least 1")
        _require(0.0 <= self.temperature <= 100.0, "temperature", self.temperature, "between 0 and 100")
        _require(0.0 < self.top_p <= 1.0, "top_p", self.top_p, "above 0 and at most 1")
        _require(0 <= self.num_top_logits <= 20, "return_top_logits", self.num_top_logits, "between 0 and 20")
        _require(all(self.stop), "stop", self.stop, "texts that are not empty")
        _require(self.seed is None or abs(self.seed) < 1 << 63, "seed", self.seed, "64 bits")


@dataclass(frozen=True)
class PromptItem:
    """Vectors in the place of some of a prompt's tokens, as an encoder of images or sounds makes them.

    Attributes:
        offset: Position of its first token in the prompt.
        length: Its tokens in the prompt; what ids they have changes nothing but for those without a vector.
        vectors: `(num_vectors, hidden_size)` float32, little-endian.
        is_embed: For each of its tokens, whether there is a vector; empty: for all.
    """

    offset: int
    length: int
    vectors: bytes
    is_embed: tuple[bool, ...] = ()


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt to be continued.

    Attributes:
        request_id: Unique among the requests that are alive on the node.
        kv_transfer_params: What a router or a prefill node said about this request's KV cache.
        cache_salt: The prefix cache serves it only what requests with the same salt left there; empty: no salt.
        lora_name: The adapter that it runs with; empty: none.
        items: By rising offset, without overlap.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    kv_transfer_params: Mapping[str, Any] | None = None
    cache_salt: str = ""
    lora_name: str = ""
    items: tuple[PromptItem, ...] = ()


@dataclass(frozen=True)
class TransferRecord:
    """How a request's KV cache came to this node.

    Attributes:
        connector: Class of the connector.
        transport: Scheme of the transport, e.g. `"shm"`.
        mechanism: What really moved the bytes, e.g. `"mapped"`.
        layout: `"uniform"` or `"per-layer"`.
        num_blocks: Blocks moved, over all groups; those that were cached here are not among them.
        num_regions: Runs of bytes in which they came.
        num_regions_per_layer: Runs that the same blocks would have taken with a buffer for each layer.
        num_bytes: Bytes moved.
        seconds: From the start of the read to the last byte.
        exposed_seconds: The part of it that nothing hid: after the whole prompt was computed and the load was ordered.
        error: Why the load failed, empty when it did not. The figures are then of what was tried.
        reason: Why this transport; empty where there was no choice.
    """

    connector: str
    transport: str
    mechanism: str
    layout: str
    num_blocks: int
    num_regions: int
    num_regions_per_layer: int
    num_bytes: int
    seconds: float
    exposed_seconds: float
    error: str = ""
    reason: str = ""


@dataclass(frozen=True)
class TransferHealth:
    """How the connector is, in words for operators.

    Attributes:
        error: Why it transfers nothing any more, empty while it does.
        warning: What keeps some transfers from working, else empty.
    """

    error: str = ""
    warning: str = ""


@dataclass(frozen=True)
class RequestMetrics:
    """Figures of one request, complete in its last output.

    Attributes:
        num_prompt_tokens: Length of the prompt.
        num_output_tokens: Tokens generated so far.
        num_cached_tokens: Prompt tokens found in this node's own prefix cache.
        num_loaded_tokens: Prompt tokens whose KV cache another node computed.
        num_preemptions: Times the request lost its blocks and was recomputed.
        ttft_s: From arrival to the first token; 0 until there is one.
        transfer: How the KV cache came here, None when nothing was loaded.
    """

    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    num_loaded_tokens: int
    num_preemptions: int
    ttft_s: float
    transfer: TransferRecord | None


@dataclass(frozen=True)
class NextToken:
    """What the model found likely after a prompt, for a request that asked for it.

    Attributes:
        top_logits: (token id, logit), the largest first.
    """

    prompt_token_ids: tuple[int, ...]
    top_logits: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class RequestOutput:
    """A piece of the answer. The last one, and only it, has a `finish_reason`.

    Attributes:
        new_token_ids: Tokens since the previous output.
        text_delta: Text since the previous output; a stop text and what follows it never appear.
        error: Why the request ended with `finish_reason` `"error"`, else empty.
        kv_transfer_params: In the last output of a prefill: what the decode node needs. Already in one before the first
            token, if the request asked for that and its prompt takes several steps.
        next_token: From the first token on, if the request has `num_top_logits`.
    """

    request_id: str
    new_token_ids: tuple[int, ...]
    text_delta: str
    finish_reason: FinishReason | None
    error: str
    kv_transfer_params: Mapping[str, Any] | None
    metrics: RequestMetrics
    next_token: NextToken | None = None


@dataclass(frozen=True)
class EngineTotals:
    """What an engine did since it started.

    Attributes:
        num_preemptions: Times a request lost its blocks, over finished requests.
        num_prompt_tokens: Prompt tokens of finished requests.
        num_cached_tokens: Those of them that were found in this node's own prefix cache.
        num_output_tokens: Tokens generated.
        num_transfers: Loads that ended well.
        num_failed_transfers: Loads that did not.
        num_unreachable_peers: Loads that were refused because the other node runs another transport.
        transferred_bytes: Bytes that the loads brought.
        transfer_seconds: Time that they took.
        exposed_transfer_seconds: The part of it that nothing hid; see `TransferRecord`.
        num_finished: Requests over, by finish reason.
    """

    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_transfers: int = 0
    num_failed_transfers: int = 0
    num_unreachable_peers: int = 0
    transferred_bytes: int = 0
    transfer_seconds: float = 0.0
    exposed_transfer_seconds: float = 0.0
    num_finished: Mapping[FinishReason, int] = field(default_factory=dict)


@dataclass(frozen=True)
class EngineStats:
    """An engine at one moment.

    Attributes:
        healthy: The step loop runs.
        error: Why it does not, else empty.
        transfer_error: Why the node hands nothing over any more although the step loop runs, else empty.
        transfer_warning: What keeps some handoffs from working, else empty.
        num_waiting: Requests that have no blocks yet, or lost them.
        num_loading: Requests that wait for another node's KV cache.
        num_running: Requests that are being computed.
        num_offered: Finished requests whose blocks are kept for another node.
        num_blocks: Blocks that requests can have (the pool without its null block).
        num_free_blocks: Of these, how many nobody holds; cached ones are free until they are hit.
        prefix_cache_hit_rate: Share of the tokens of recent requests that were cached here, 0 to 1.
    """

    healthy: bool
    error: str = ""
    transfer_error: str = ""
    transfer_warning: str = ""
    num_waiting: int = 0
    num_loading: int = 0
    num_running: int = 0
    num_offered: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    prefix_cache_hit_rate: float = 0.0
    totals: EngineTotals = field(default_factory=EngineTotals)

    @property
    def is_idle(self) -> bool:
        """Whether no request is alive, and no other node needs blocks of this one."""
        return not (self.num_waiting or self.num_loading or self.num_running or self.num_offered)


def _require(holds: bool, param: str, value: object, allowed: str) -> None:
    if not holds:
        raise InvalidRequestError(f"{param}={value!r}: it must be {allowed}", param=param)
