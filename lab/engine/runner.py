"""`ModelRunner`: one step of the model, with the connector's worker half around it."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice

import torch
from transformers.modeling_utils import PreTrainedModel

from ...connector.config import EngineConfig
from ...connector.errors import WorkerHookError
from ...connector.kv_cache_specs import KVCacheConfig
from ...runner_mixin import state
from ...runner_mixin.attention.building import build_attn_metadata
from ...runner_mixin.forward_context import ForwardContext, set_forward_context
from ...runner_mixin.kv_caches import init_attn_backend, init_kv_cache
from ...runner_mixin.layouts import init_kv_cache_for_connector
from ...runner_mixin.mixin import KVConnectorModelRunnerMixin
from ...runner_mixin.outputs import ModelRunnerOutput
from ...transports.errors import ConfigurationError
from .attention import PagedLayer
from .batch import InputBatch, StepInputs
from .errors import StepFailedError, reason_of
from .sampling import logprobs_of, same_numbers_after_failure, sample
from .settings import Layout
from .step import StepPlan
from .types import Logprobs


@dataclass(frozen=True)
class _Forwarded:
    """What a forward pass gives: one token per request that has one, and what was asked for beside it.

    Attributes:
        logprobs: One per token; empty for a request that did not ask.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)


class ModelRunner(KVConnectorModelRunnerMixin):
    """Run the model over the pool.

    Lifecycle: construct → `initialize_kv_cache` once → `execute` for every step.

    Args:
        model: A model that was loaded with the paged attention as its attention implementation.
        device: The device of model and pool.
    """

    def __init__(self, config: EngineConfig, model: PreTrainedModel, device: torch.device) -> None:
        self.config = config
        self.device = device
        self.kv_caches: list[torch.Tensor] = []
        self._model = model

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig, layout: Layout) -> None:
        """Allocate the pool, in the connector's memory if there is a connector, bind it, and register it with
        the connector.

        Args:
            layout: `"uniform"` is the layout that the connector prefers; `"per-layer"` has one buffer per
                layer.
        """
        attention = init_attn_backend(kv_cache_config, self.config, self.device)
        layers = {
            layer.name: PagedLayer(layer, attention.attn_backends[layer.name])
            for layer in self.config.model.layers
        }
        if layout == "uniform":
            cache_dtype = self.config.cache.cache_dtype
            init_kv_cache_for_connector(
                self.kv_caches, layers, kv_cache_config, attention, cache_dtype, self.device
            )
        else:
            kv_caches = init_kv_cache(self.kv_caches, layers, kv_cache_config, attention, self.device)
            if state.has_kv_transfer_group():
                state.get_kv_transfer_group().register_kv_caches(kv_caches)
        block_sizes = [group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups]
        limits = self.config.scheduler
        self._batch = InputBatch(
            limits.max_num_seqs, self.config.model.max_model_len, block_sizes, self.device
        )
        self._layers = layers
        self._metadata_builders = attention.metadata_builders

    def warm_up(self) -> None:
        """Run the model once over a few tokens.

        This finds unsupported models, and makes the first request faster.

        The tokens are written into the null block, which is never read.

        Raises:
            ConfigurationError: the model does something that this engine does not support.
        """
        num_tokens = min(4, self.config.cache.block_size)
        try:
            inputs = self._batch.make_dummy_inputs(num_tokens)
            with set_forward_context(self._context(inputs)):
                self._forward(inputs)
        except (TypeError, KeyError, AttributeError, RuntimeError) as error:
            name = self._model.config.model_type
            raise ConfigurationError(
                f"this engine cannot run {name} models: {type(error).__name__}: {error}",
                key="model",
                value=name,
            ) from error
        unused = [name for name, layer in self._layers.items() if layer.num_calls == 0]
        if unused:
            raise ConfigurationError(
                f"{unused[0]} of this model does not use the attention interface of transformers: "
                "its cache cannot be paged",
                key="model",
                value=self._model.config.model_type,
            )

    def execute(self, plan: StepPlan) -> ModelRunnerOutput:
        """Run one step.

        Raises:
            StepFailedError: the inputs, the forward pass or the sampler raised. The connector's worker half
                did its part nevertheless, because it gets its orders only once; its report is in the error.
                What the worker half itself raises is in the report as well: see
                `KVConnectorOutput.hook_errors`.
        """
        self._batch.forget(plan)
        if not plan.scheduled_requests:
            try:
                return self.kv_connector_no_forward(plan, self.config)
            except WorkerHookError as raised:
                return ModelRunnerOutput(kv_connector_output=raised.output)
        failure: Exception | None = None
        try:
            inputs = self._batch.make_inputs(plan)
            context = self._context(inputs)
        except Exception as error:  # noqa: BLE001 - raised again below, after the connector did its part
            failure, context = error, ForwardContext(self._layers)
        try:
            with (
                set_forward_context(context),
                self.maybe_get_kv_connector_output(plan) as report,
            ):
                if failure is not None:
                    raise failure
                try:
                    with same_numbers_after_failure(inputs.samplers):
                        forwarded = self._forward(inputs)
                except Exception as error:
                    failure = error
                    raise
        except WorkerHookError:
            pass  # the report says it, and the other ranks have computed the step as well
        except Exception as error:
            if error is not failure:
                raise
            raise StepFailedError(reason_of(error), report) from error
        tokens = iter(forwarded.tokens)
        yielding = [item.request_id for item in plan.scheduled_requests if item.yields_token]
        return ModelRunnerOutput(
            req_ids=tuple(item.request_id for item in plan.scheduled_requests),
            sampled_token_ids=tuple(
                tuple(islice(tokens, item.yields_token)) for item in plan.scheduled_requests
            ),
            kv_connector_output=report,
            logprobs={name: some for name, some in zip(yielding, forwarded.logprobs, strict=True) if some},
        )

    def _context(self, inputs: StepInputs) -> ForwardContext:
        metadata = build_attn_metadata(
            self._metadata_builders, inputs.batch, inputs.block_tables, inputs.slot_mappings
        )
        return ForwardContext(self._layers, metadata)

    @torch.inference_mode()
    def _forward(self, inputs: StepInputs) -> _Forwarded:
        """Run the model on the step's tokens, and choose the next token of each request that has one."""
        result = self._model(
            input_ids=inputs.input_ids,
            position_ids=inputs.position_ids,
            use_cache=False,
            logits_to_keep=inputs.logits_indices,
        )
        if not inputs.samplers:
            return _Forwarded()
        logits = result.logits[0]
        tokens = sample(logits, inputs.samplers)
        return _Forwarded(tokens, _logprobs_of_samples(logits, tokens, inputs))


def _logprobs_of_samples(logits: torch.Tensor, tokens: list[int], inputs: StepInputs) -> list[Logprobs]:
    asked = [sampler.params.num_logprobs for sampler in inputs.samplers]
    rows = [row for row, count in enumerate(asked) if count is not None]
    found = iter(logprobs_of(logits[rows], [tokens[row] for row in rows], [asked[row] or 0 for row in rows]))
    return [() if count is None else next(found) for count in asked]
