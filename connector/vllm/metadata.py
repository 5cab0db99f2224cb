"""What vLLM carries between the two halves, in addition to kvferry's own messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from ..handoff.events import LocalBlocks
from ..p2p.orders import HandoffMetadata, WorkerAddress


@dataclass(frozen=True)
class RefusedLoad:
    """A load that cannot even be ordered; it is reported to vLLM as a load that failed.

    Attributes:
        blocks: What vLLM allocated for it, per group.
        reason: Why, in words for the operator.
    """

    blocks: LocalBlocks
    reason: str


@dataclass(frozen=True)
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """One step's orders.

    Attributes:
        refused: Loads to report as failed, by request.
        preempted: Requests whose open offers must end before the step overwrites their blocks.
        is_idle: The step computes nothing.
        begins_anew: Every handoff that was ordered before ends first.
    """

    orders: HandoffMetadata = field(default_factory=HandoffMetadata)
    refused: Mapping[str, RefusedLoad] = field(default_factory=dict)
    preempted: frozenset[str] = frozenset()
    is_idle: bool = False
    begins_anew: bool = False


@dataclass(frozen=True)
class WorkerHandshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """Where one rank can be reached, and what it describes of its model and its cache to peers.

    Attributes:
        fields: See `Registration.fields`.
    """

    address: WorkerAddress
    fields: Mapping[str, str | int] = field(default_factory=dict)


@dataclass(frozen=True)
class LoadErrors(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Why loads have failed, by request. vLLM itself carries only which ones did."""

    reasons: Mapping[str, str]

    def aggregate(self, other: LoadErrors) -> LoadErrors:
        """Join the reports of two ranks. If a load failed on both, the first one's reason stays."""
        return LoadErrors({**other.reasons, **self.reasons})
