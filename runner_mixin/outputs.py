"""The output of one step of a model runner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..connector.output import KVConnectorOutput


@dataclass(frozen=True)
class ModelRunnerOutput:
    """One step's result of one rank.

    Attributes:
        req_ids: The requests that ran.
        sampled_token_ids: For each of them, its new tokens; empty until its whole prompt is computed.
        logprobs: For each request that asked for it, (token id, log probability) of its newest token, and
            then of the likeliest tokens in its place, the likeliest first.
        kv_connector_output: The connector's report, or None if it has nothing to report.
    """

    req_ids: tuple[str, ...] = ()
    sampled_token_ids: tuple[tuple[int, ...], ...] = ()
    kv_connector_output: KVConnectorOutput | None = None
    logprobs: Mapping[str, tuple[tuple[int, float], ...]] = field(default_factory=dict)


#: Shared by every step that has nothing to report. Frozen; use `dataclasses.replace` to make a changed copy.
EMPTY_MODEL_RUNNER_OUTPUT = ModelRunnerOutput()
