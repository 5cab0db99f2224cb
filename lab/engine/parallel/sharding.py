"""Tensor parallelism: choose the part of each weight that a rank keeps, by the plan that transformers has for
the model.

The linear layers before an attention or an MLP are cut by outputs, in whole heads, so they need no
communication. The layer after it is cut by inputs, and its results are summed over the ranks. All other
weights are the same on every rank.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed
from transformers.configuration_utils import PretrainedConfig
from transformers.modeling_utils import PreTrainedModel

from ....connector.config import AttentionLayerConfig
from ....transports.errors import ConfigurationError

_BY_OUTPUTS, _BY_INPUTS = "colwise", "rowwise"
#: Prefix of the plan's styles for weights that every rank keeps whole.
_WHOLE = "replicated"


def require_divisible(config: PretrainedConfig, num_ranks: int) -> None:
    """Check that a model can be spread over `num_ranks` ranks.

    Raises:
        ConfigurationError: the heads or the MLP cannot be divided evenly (the message lists the sizes that
            fit), or the engine cannot cut this kind of model.
    """
    _plan_of(config)
    if _fits(config, num_ranks):
        return
    fitting = [str(size) for size in range(2, config.num_attention_heads + 1) if _fits(config, size)]
    raise ConfigurationError(
        f"tensor_parallel_size={num_ranks} does not fit this model ({config.num_attention_heads} attention heads, "
        f"{_num_kv_heads(config)} key/value heads, MLP width {config.intermediate_size}); "
        f"sizes that fit: {', '.join(['1', *fitting])}",
        key="tensor_parallel_size",
        value=num_ranks,
    )


def layers_of_rank(
    layers: Sequence[AttentionLayerConfig], num_ranks: int
) -> tuple[AttentionLayerConfig, ...]:
    """Return the layers of one rank: each with an equal share of the key/value heads, at least one."""
    return tuple(replace(layer, num_kv_heads=max(1, layer.num_kv_heads // num_ranks)) for layer in layers)


def shard(model: PreTrainedModel, rank: int, num_ranks: int) -> None:
    """Cut a model down to the part of one rank, in place. Its forward pass then needs all ranks.

    If there are more ranks than key/value heads, neighbouring ranks keep the same head.
    """
    config = model.config.get_text_config(decoder=True)
    plan = _plan_of(config)
    for name, module in list(model.named_modules()):
        style = next((style for pattern, style in plan.items() if fnmatch.fnmatch(name, f"*.{pattern}")), "")
        if not isinstance(module, torch.nn.Linear):
            continue
        if style == _BY_OUTPUTS:
            num_units = _num_kv_heads(config) if name.endswith(("k_proj", "v_proj")) else num_ranks
            _keep_outputs(module, _share(module.out_features, num_units, rank, num_ranks))
        elif style == _BY_INPUTS:
            share = _share(module.in_features, num_ranks, rank, num_ranks)
            model.set_submodule(name, _SummedLinear(module.weight[:, share].clone(), module.bias))


def _plan_of(config: PretrainedConfig) -> Mapping[str, str]:
    plan: Mapping[str, str] = config.base_model_tp_plan or {}
    whole = [name for name, style in plan.items() if style.startswith(_WHOLE)]
    unknown = [name for name in plan.keys() - set(whole) if plan[name] not in (_BY_OUTPUTS, _BY_INPUTS)]
    if unknown or not plan:
        why = (
            f"the plan's style {plan[min(unknown)]!r} of {min(unknown)!r} is not supported"
            if unknown
            else "transformers has no tensor-parallel plan for them"
        )
        raise ConfigurationError(
            f"this engine cannot spread {config.model_type} models over several processes: {why}",
            key="tensor_parallel_size",
            value=config.model_type,
        )
    return plan


def _fits(config: PretrainedConfig, num_ranks: int) -> bool:
    num_kv_heads, widths = _num_kv_heads(config), config.intermediate_size
    widths = widths if isinstance(widths, list) else [widths]
    return (
        config.num_attention_heads % num_ranks == 0
        and (num_kv_heads % num_ranks == 0 or num_ranks % num_kv_heads == 0)
        and all(width % num_ranks == 0 for width in widths)
    )


def _num_kv_heads(config: PretrainedConfig) -> int:
    return getattr(config, "num_key_value_heads", None) or int(config.num_attention_heads)


def _share(width: int, num_units: int, rank: int, num_ranks: int) -> slice:
    """Return the rank's part of `width` elements, which are `num_units` equal units: whole units, at least
    one.

    If there are fewer units than ranks, several ranks have the same unit.
    """
    first = rank * num_units // num_ranks
    count = max(1, num_units // num_ranks)
    unit = width // num_units
    return slice(first * unit, (first + count) * unit)


def _keep_outputs(linear: torch.nn.Linear, share: slice) -> None:
    linear.weight = torch.nn.Parameter(linear.weight[share].clone(), requires_grad=False)
    if linear.bias is not None:
        linear.bias = torch.nn.Parameter(linear.bias[share].clone(), requires_grad=False)
    linear.out_features = share.stop - share.start


class _SummedLinear(torch.nn.Module):
    """A linear layer whose inputs are divided among the ranks. Its output is the sum over the ranks.

    Args:
        weight: `(num_outputs, num_inputs of this rank)`.
        bias: `(num_outputs,)`, added after the sum, so that it counts once.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self._bias = bias

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Compute `(…, num_inputs of this rank)` → `(…, num_outputs)`, the same on all ranks."""
        outputs = torch.nn.functional.linear(inputs, self.weight)
        torch.distributed.all_reduce(outputs)
        return outputs if self._bias is None else outputs + self._bias
