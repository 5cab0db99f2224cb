"""Connectors for nodes of vLLM: one beside kvferry's in its MultiConnector, and one of an older vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorTransferResults,
)

from kvferry.connector.vllm import KvferryConnector


@dataclass
class _Orders(KVConnectorMetadata):
    """One step's orders: requests to save, and requests to load."""

    saves: set[str] = field(default_factory=set)
    loads: set[str] = field(default_factory=set)


class Planted(KVConnectorBase_V1):
    """Saves late, or fails to load, as the request's `kv_transfer_params` say; it does nothing for other
    requests.

    `"planted_save": true` keeps the blocks of a finished request for some steps; `"planted_load": true`
    promises the whole prompt, and the load fails.
    """

    STEPS_OF_A_SAVE = 5

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._orders = _Orders()
        self._promised: set[str] = set()
        self._saving: dict[str, int] = {}
        self._loading: set[str] = set()

    # -- scheduler half ------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if not _asks(request, "planted_load") or request.request_id in self._promised:
            return 0, False
        return request.num_prompt_tokens - num_computed_tokens, True

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self._promised.add(request.request_id)
            self._orders.loads.add(request.request_id)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        orders, self._orders = self._orders, _Orders()
        return orders

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        if not _asks(request, "planted_save"):
            return False, None
        self._orders.saves.add(request.request_id)
        return True, {"planted_name": request.request_id}

    # -- worker half ---------------------------------------------------------------------------------

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        orders = self._get_connector_metadata()
        assert isinstance(orders, _Orders)
        self._saving |= dict.fromkeys(orders.saves, self.STEPS_OF_A_SAVE)
        self._loading |= orders.loads

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        self._saving = {request: steps - 1 for request, steps in self._saving.items()}
        saved = {request for request, steps in self._saving.items() if not steps}
        for request in saved:
            del self._saving[request]
        failed, self._loading = self._loading, set()
        return KVConnectorTransferResults(
            finished_sending=saved, finished_recving=failed, failed_recving=failed
        )

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Return at once."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Return at once."""

    def wait_for_save(self) -> None:
        """Return at once."""


def _asks(request: Any, key: str) -> bool:
    params = request.kv_transfer_params
    return isinstance(params, Mapping) and params.get(key) is True


class WithoutHook(KvferryConnector):
    """As in vLLM before 0.31, which allocates the cache in memory that peers cannot map."""

    def get_mem_pool_context(self) -> None:
        return None
