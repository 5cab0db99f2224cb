"""What a connector reports after one step. `aggregator` joins the reports of several ranks into one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class KVConnectorOutput:
    """One step's report of one rank.

    Attributes:
        finished_sending: Requests whose held blocks may be freed now.
        finished_recving: Requests whose load ended, well or not.
        invalid_block_ids: Local blocks that were to be loaded and whose contents are undefined.
        load_errors: Request → why its load failed, in words for its client.
        kv_connector_stats: Figures since the last report.
        failure: Why this rank no longer transfers anything; see `KVConnectorBase.failure`.
        warning: What keeps some of its transfers from working; see `KVConnectorBase.warning`.
        hook_errors: Hook of the worker half that raised in this step → what it raised, in words for a client.
            Then the rest of the report may be incomplete; `docs/connector-contract.md` says what that means
            for the step's requests.
    """

    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    invalid_block_ids: set[int] = field(default_factory=set)
    load_errors: dict[str, str] = field(default_factory=dict)
    kv_connector_stats: Any = None
    failure: str = ""
    warning: str = ""
    hook_errors: dict[str, str] = field(default_factory=dict)

    def is_empty(self) -> bool:
        """Whether there is nothing to report."""
        return not (
            self.finished_sending
            or self.finished_recving
            or self.invalid_block_ids
            or self.load_errors
            or self.kv_connector_stats
            or self.failure
            or self.warning
            or self.hook_errors
        )
