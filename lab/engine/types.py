"""The engine's inputs and outputs: plain data without tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ...connector.stats import PREFIX, Metric, TransferRecord
from .errors import InvalidRequestError

#: `"moved"`: the answer was stopped after a token, for another node to go on with it.
FinishReason = Literal["stop", "length", "abort", "error", "moved"]

#: (token id, log probability) of a token, and then of the likeliest tokens in its place, the likeliest first.
#: They are the model's own: before temperature and `top_p`.
Logprobs = tuple[tuple[int, float], ...]
#: The most tokens of `Logprobs` after the first one.
MAX_LOGPROBS = 20


@dataclass(frozen=True)
class SamplingParams:
    """Say how the answer is chosen.

    Attributes:
        max_tokens: Length limit of the answer. The model's `max_model_len` limits it as well.
        temperature: 0 is greedy.
        top_p: Sample from the smallest set of tokens whose probability reaches this, 0 < top_p <= 1.
        seed: The same seed gives the same answer, whatever else runs. None draws a random seed.
        stop: The answer ends before the first of these texts.
        ignore_eos: Continue past the model's end-of-sequence tokens.
        num_logprobs: Return the log probability of each token of the answer, and of this many of the
            likeliest, 0 to 20. None returns none.

    Raises:
        InvalidRequestError: a value is outside its range; `param` names it.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    num_logprobs: int | None = None

    def __post_init__(self) -> None:
        _require(self.max_tokens >= 1, "max_tokens", self.max_tokens, "at least 1")
        _require(0.0 <= self.temperature <= 100.0, "temperature", self.temperature, "between 0 and 100")
        _require(0.0 < self.top_p <= 1.0, "top_p", self.top_p, "above 0 and at most 1")
        number, allowed = self.num_logprobs, f"between 0 and {MAX_LOGPROBS}"
        _require(number is None or 0 <= number <= MAX_LOGPROBS, "logprobs", number, allowed)
        _require(all(self.stop), "stop", self.stop, "texts that are not empty")
        _require(self.seed is None or abs(self.seed) < 1 << 63, "seed", self.seed, "64 bits")


@dataclass(frozen=True)
class GenerationRequest:
    """Ask for the continuation of one prompt.

    Attributes:
        request_id: Unique among the live requests of the node.
        kv_transfer_params: What to transfer, as a router or a prefill node wrote it.
        cache_salt: The prefix cache shares blocks only between requests with the same salt; empty for no
            salt.
        known_token_ids: The beginning of the answer, which another node has chosen. This node continues after
            it.
        move_as: The name by which `Engine.move` finds the request; empty: it stays here.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    kv_transfer_params: Mapping[str, Any] | None = None
    cache_salt: str = ""
    known_token_ids: tuple[int, ...] = ()
    move_as: str = ""


@dataclass(frozen=True)
class TransferHealth:
    """Describe the state of the connector for operators.

    Attributes:
        error: Why it can no longer transfer anything; empty while it can.
        warning: What prevents some transfers; otherwise empty.
    """

    error: str = ""
    warning: str = ""


@dataclass(frozen=True)
class RequestMetrics:
    """Hold the figures of one request. They are complete in its last output.

    Attributes:
        num_prompt_tokens: Length of the prompt.
        num_output_tokens: Tokens generated so far.
        num_cached_tokens: Prompt tokens found in this node's own prefix cache.
        num_loaded_tokens: Prompt tokens whose KV cache the connector loaded.
        num_preemptions: Times the request lost its blocks and was recomputed.
        ttft_s: Time from arrival to the first token; 0 until there is one.
        transfer: How the KV cache came here; None if nothing was loaded, or the connector reported no figures
            of the load.
        queue_s: Time from arrival until the request got its first blocks; part of `ttft_s`.
    """

    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    num_loaded_tokens: int
    num_preemptions: int
    ttft_s: float
    transfer: TransferRecord | None
    queue_s: float = 0.0


@dataclass(frozen=True)
class RequestOutput:
    """Hold a piece of the answer. Only the last one has a `finish_reason`.

    Attributes:
        new_token_ids: Tokens since the previous output.
        text_delta: Text since the previous output. A stop text and what follows it never appear.
        error: Why the request ended with `finish_reason` `"error"`; otherwise empty.
        kv_transfer_params: In the last output of a prefill, what the decode node needs; in that of an answer
            that is moved, what the node needs that goes on with it.
        logprobs: One entry per new token if the request has `num_logprobs`; otherwise empty.
        is_known: The piece is the request's `known_token_ids`, which the client has already.
    """

    request_id: str
    new_token_ids: tuple[int, ...]
    text_delta: str
    finish_reason: FinishReason | None
    error: str
    kv_transfer_params: Mapping[str, Any] | None
    metrics: RequestMetrics
    logprobs: tuple[Logprobs, ...] = ()
    is_known: bool = False


def _exported(kind: Literal["counter", "gauge"], name: str, text: str, *labels: str) -> dict[str, Metric]:
    """Make a field a metric as well. A field of a metric with a label maps the label's values to numbers."""
    return {"metric": Metric(f"{PREFIX}engine_{name}", kind, text, labels)}


def _counter(name: str, text: str) -> Any:
    return field(default=0, metadata=_exported("counter", name, text))


def _gauge(name: str, text: str) -> Any:
    return field(default=0, metadata=_exported("gauge", name, text))


@dataclass
class EngineTotals:
    """Count what an engine did since it started. Every field is a counter on `/metrics`."""

    num_preemptions: int = _counter(
        "preemptions_total", "Times that a finished request lost its blocks and was computed again"
    )
    num_prompt_tokens: int = _counter("prompt_tokens_total", "Prompt tokens of finished requests")
    num_cached_tokens: int = _counter(
        "cached_tokens_total",
        "Prompt tokens of finished requests that were in the node's own prefix cache",
    )
    num_loaded_tokens: int = _counter(
        "loaded_tokens_total",
        "Tokens of finished requests that were loaded from another node: of prompts, and of moved answers",
    )
    num_output_tokens: int = _counter("output_tokens_total", "Tokens generated")
    num_finished: dict[FinishReason, int] = field(
        default_factory=dict,
        metadata=_exported("counter", "finished_requests_total", "Requests that have ended", "reason"),
    )


@dataclass(frozen=True)
class EngineStats:
    """Describe an engine at one moment.

    Fields that count something are also metrics, whose help texts explain them.

    Attributes:
        healthy: The step loop runs.
        error: Why the step loop does not run; empty while it does.
        transfer_error: Why the node can no longer hand anything over although its step loop runs; otherwise
            empty.
        transfer_warning: What prevents some handoffs; otherwise empty.
    """

    healthy: bool
    error: str = ""
    transfer_error: str = ""
    transfer_warning: str = ""
    num_waiting: int = _gauge("waiting_requests", "Requests that have no blocks yet or have lost them")
    num_loading: int = _gauge("loading_requests", "Requests that wait for another node's KV cache")
    num_running: int = _gauge("running_requests", "Requests that are being computed")
    num_offered: int = _gauge("offered_requests", "Finished requests whose blocks are kept for another node")
    num_blocks: int = _gauge("blocks", "Blocks that requests can use: the pool without its null block")
    num_free_blocks: int = _gauge(
        "free_blocks",
        "Blocks that no request holds, including cached ones until a request uses them",
    )
    prefix_cache_hit_rate: float = _gauge(
        "prefix_cache_hit_ratio",
        "Share of the tokens of recent requests that were in the node's own prefix cache, 0 to 1",
    )
    totals: EngineTotals = field(default_factory=EngineTotals)

    @property
    def is_idle(self) -> bool:
        """Say whether no request is alive and no other node needs blocks of this one."""
        return not (self.num_waiting or self.num_loading or self.num_running or self.num_offered)


def _require(holds: bool, param: str, value: object, allowed: str) -> None:
    if not holds:
        raise InvalidRequestError(f"{param}={value!r}: it must be {allowed}", param=param)
