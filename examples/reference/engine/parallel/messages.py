"""What the scheduler's process and its workers say to each other. Plain and frozen.

scheduler → worker: `Start`, then any number of `Step`, then `Stop`
worker → scheduler: `Ready`, then one `StepDone` for each `Step`; or `Failed`, and then nothing more; at any time
                    after `Ready`, when it changed while there was nothing to do, a `TransferHealth`
"""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.connector.base import KVConnectorHandshakeMetadata, KVConnectorMetadata
from kvferry.connector.config import EngineConfig
from kvferry.runner_mixin.outputs import ModelRunnerOutput

from ..settings import Layout
from ..types import GenerationRequest


@dataclass(frozen=True)
class Start:
    """Load your part of the model.

    Attributes:
        config: With this worker's rank, its part of each layer, and the number of blocks settled.
        folder: The model's.
        num_threads: Threads of PyTorch.
    """

    config: EngineConfig
    folder: str
    layout: Layout
    num_threads: int


@dataclass(frozen=True)
class Ready:
    """The part is loaded, the pool is registered.

    Attributes:
        handshake_metadata: The handshake metadata of the connector's worker half; None without a connector.
    """

    handshake_metadata: KVConnectorHandshakeMetadata | None


@dataclass(frozen=True)
class StepItem:
    """What a step computes of one request; see `ScheduledRequest`.

    Attributes:
        source: With the first item of the request, its prompt being all tokens so far; else None.
        num_known_tokens: Tokens of the request that the worker knows, those of `source` among them.
        new_token_ids: Those that follow.
    """

    request_id: str
    source: GenerationRequest | None
    num_known_tokens: int
    new_token_ids: tuple[int, ...]
    num_computed_tokens: int
    num_new_tokens: int
    block_ids: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Step:
    """Run one step; see `StepPlan`."""

    items: tuple[StepItem, ...]
    finished_req_ids: frozenset[str]
    preempted_req_ids: frozenset[str]
    kv_connector_metadata: KVConnectorMetadata | None


@dataclass(frozen=True)
class StepDone:
    """What came of a step on this rank. The tokens are the same on all ranks only where they are greedy."""

    output: ModelRunnerOutput


@dataclass(frozen=True)
class Failed:
    """The worker ends now.

    Attributes:
        key: The setting to blame if the worker refused to start; otherwise empty.
        is_refusal: True if the worker refused its settings; False if something broke.
    """

    text: str
    key: str
    is_refusal: bool


@dataclass(frozen=True)
class Stop:
    """End well: shut the connector down."""
