"""The worker half of a `MultiConnector`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, cast

from ..base import KVConnectorMetadata, WorkerHalf
from ..stats import KVConnectorStats
from .accounting import MultiHandshakeMetadata, MultiMetadata, OwedReports

if TYPE_CHECKING:
    import torch


class MultiWorker(WorkerHalf):
    """Pass each call on to every child, and report each end of a transfer once.

    Args:
        children: By name, in order of preference. They belong to this object from now on.
    """

    def __init__(self, children: Mapping[str, WorkerHalf]) -> None:
        self.children = children
        self._owed = OwedReports()

    # -- memory --------------------------------------------------------------------------------------

    @property
    def prefer_cross_layer_blocks(self) -> bool:
        return all(child.prefer_cross_layer_blocks for child in self.children.values())

    @property
    def allocates_memory(self) -> bool:
        return any(child.allocates_memory for child in self.children.values())

    def allocate_kv_memory(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        for child in self.children.values():
            if child.allocates_memory:
                return child.allocate_kv_memory(num_bytes, device)
        return super().allocate_kv_memory(num_bytes, device)

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        for child in self.children.values():
            child.register_kv_caches(kv_caches)

    def register_cross_layers_kv_cache(self, kv_cache: torch.Tensor, attn_backend: type[Any]) -> None:
        for child in self.children.values():
            child.register_cross_layers_kv_cache(kv_cache, attn_backend)

    def get_handshake_metadata(self) -> MultiHandshakeMetadata:
        of_children = {name: child.get_handshake_metadata() for name, child in self.children.items()}
        return MultiHandshakeMetadata({name: metadata for name, metadata in of_children.items() if metadata})

    # -- one step ------------------------------------------------------------------------------------

    def handle_preemptions(self, preempted_req_ids: set[str]) -> None:
        for child in self.children.values():
            child.handle_preemptions(preempted_req_ids)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        metadata = cast(MultiMetadata, connector_metadata)
        self._owed.expect(metadata)
        for name, child in self.children.items():
            child.bind_connector_metadata(metadata.children[name])

    def clear_connector_metadata(self) -> None:
        super().clear_connector_metadata()
        for child in self.children.values():
            child.clear_connector_metadata()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for child in self.children.values():
            child.start_load_kv(forward_context, **kwargs)

    def wait_for_layer_load(self, layer_name: str) -> None:
        for child in self.children.values():
            child.wait_for_layer_load(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        for child in self.children.values():
            child.save_kv_layer(layer_name, kv_layer, attn_metadata, **kwargs)

    def wait_for_save(self) -> None:
        for child in self.children.values():
            child.wait_for_save()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        sending: set[str] = set()
        recving: set[str] = set()
        for name, child in self.children.items():
            sent, received = child.get_finished(finished_req_ids)
            sending |= self._owed.finish_sending(name, sent or ())
            recving |= self._owed.finish_recving(name, received or ())
        return sending, recving

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed = [child.get_block_ids_with_load_errors() for child in self.children.values()]
        return set().union(*failed)

    def take_load_errors(self) -> dict[str, str]:
        errors: dict[str, str] = {}
        for child in self.children.values():
            for request_id, reason in child.take_load_errors().items():
                errors.setdefault(request_id, reason)
        return errors

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        figures = [child.get_kv_connector_stats() for child in self.children.values()]
        total = KVConnectorStats()
        for stats in figures:
            total = total.aggregate(stats) if isinstance(stats, KVConnectorStats) else total
        return None if total.is_empty() else total

    # -- health and end ------------------------------------------------------------------------------

    @property
    def failure(self) -> str:
        return _join((name, child.failure) for name, child in self.children.items())

    @property
    def warning(self) -> str:
        return _join((name, child.warning) for name, child in self.children.items())

    def shutdown(self) -> None:
        with ExitStack() as stack:  # shuts every child down even if one raises
            for child in self.children.values():
                stack.callback(child.shutdown)


def _join(texts: Iterable[tuple[str, str]]) -> str:
    return "; ".join(f"{name}: {text}" for name, text in texts if text)
