"""What a model runner returns from one step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..connector.output import KVConnectorOutput


@dataclass(frozen=True)
class ModelRunnerOutput:
    """One step's result of one rank.

    Attributes:
        req_ids: The requests that ran.
        sampled_token_ids: For each of them the new tokens; empty while its prompt is not computed.
        top_logits: Of those that asked for it, the largest logits behind their newest token as (token id, logit), the
            largest first.
        kv_connector_output: What the connector reported, or None when it had nothing to say.
    """

    req_ids: tuple[str, ...] = ()
    sampled_token_ids: tuple[tuple[int, ...], ...] = ()
    kv_connector_output: KVConnectorOutput | None = None
    top_logits: Mapping[str, tuple[tuple[int, float], ...]] = field(default_factory=dict)


#: Shared by every step with nothing to say. Frozen; to add to it, `dataclasses.replace` it.
EMPTY_MODEL_RUNNER_OUTPUT = ModelRunnerOutput()
