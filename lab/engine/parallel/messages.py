"""The messages between the scheduler's process and its workers: plain, frozen dataclasses.

scheduler → worker: `Start`, then any number of `Step`, then `Stop`
worker → scheduler: `Ready`, then one `StepDone` per `Step`. `Failed` may take the place of either, and is the
last
                    message. After `Ready`, an idle worker also sends a `TransferHealth` each time its health
                    changes.
"""

from __future__ import annotations

from dataclasses import dataclass

from ....connector.base import KVConnectorHandshakeMetadata, KVConnectorMetadata
from ....connector.config import EngineConfig
from ....runner_mixin.outputs import ModelRunnerOutput
from ..settings import Layout
from ..types import GenerationRequest


@dataclass(frozen=True)
class Start:
    """The order to load this worker's part of the model.

    Attributes:
        config: The configuration, with this worker's rank and part of each layer, and with a fixed number of
            blocks.
        folder: The model's folder.
        num_threads: Number of PyTorch's threads.
    """

    config: EngineConfig
    folder: str
    layout: Layout
    num_threads: int


@dataclass(frozen=True)
class Ready:
    """The worker's part of the model is loaded, and its pool is registered.

    Attributes:
        handshake_metadata: The handshake metadata of the connector's worker half; None without a connector.
    """

    handshake_metadata: KVConnectorHandshakeMetadata | None


@dataclass(frozen=True)
class StepItem:
    """The part of one request that a step computes; see `ScheduledRequest`.

    Attributes:
        source: Sent with the first item of a request, with all its tokens so far as the prompt. None in later
            items.
        num_known_tokens: Tokens of the request that the worker knows, including those of `source`.
        new_token_ids: The tokens after these.
    """

    request_id: str
    source: GenerationRequest | None
    num_known_tokens: int
    new_token_ids: tuple[int, ...]
    num_computed_tokens: int
    num_scheduled_tokens: int
    block_ids: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Step:
    """The order to run one step; see `StepPlan`."""

    items: tuple[StepItem, ...]
    finished_req_ids: frozenset[str]
    preempted_req_ids: frozenset[str]
    kv_connector_metadata: KVConnectorMetadata | None


@dataclass(frozen=True)
class StepDone:
    """The result of a step on this rank. Ranks agree on the tokens only if sampling is greedy."""

    output: ModelRunnerOutput


@dataclass(frozen=True)
class Failed:
    """The worker failed and exits.

    Attributes:
        text: Why.
        key: The setting at fault if the worker refused to start; otherwise empty.
        is_refusal: True if the worker refused its settings; False if something broke.
    """

    text: str
    key: str
    is_refusal: bool


@dataclass(frozen=True)
class Stop:
    """The order to shut the connector down and exit."""
