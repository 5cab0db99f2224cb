"""The worker half of a `MultiConnector`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
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
        # What children reported and was not passed on yet: another child raised in the same call.
        self._sent: set[str] = set()
        self._received: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._load_errors: dict[str, str] = {}

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
        self._call_all(lambda _, child: child.handle_preemptions(preempted_req_ids))

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        metadata = cast(MultiMetadata, connector_metadata)
        self._owed.expect(metadata)
        self._call_all(lambda name, child: child.bind_connector_metadata(metadata.children[name]))

    def clear_connector_metadata(self) -> None:
        super().clear_connector_metadata()
        self._call_all(lambda _, child: child.clear_connector_metadata())

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        def start(_: str, child: WorkerHalf) -> None:
            if child.has_connector_metadata():  # otherwise binding it raised
                child.start_load_kv(forward_context, **kwargs)

        self._call_all(start)

    def wait_for_layer_load(self, layer_name: str) -> None:
        self._call_all(lambda _, child: child.wait_for_layer_load(layer_name))

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        self._call_all(lambda _, child: child.save_kv_layer(layer_name, kv_layer, attn_metadata, **kwargs))

    def wait_for_save(self) -> None:
        self._call_all(lambda _, child: child.wait_for_save())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        def take(name: str, child: WorkerHalf) -> None:
            sent, received = child.get_finished(finished_req_ids)
            self._sent |= self._owed.finish_sending(name, sent or ())
            self._received |= self._owed.finish_recving(name, received or ())

        self._call_all(take)
        sent, self._sent = self._sent, set()
        received, self._received = self._received, set()
        return sent, received

    def get_block_ids_with_load_errors(self) -> set[int]:
        self._call_all(lambda _, child: self._failed_blocks.update(child.get_block_ids_with_load_errors()))
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_load_errors(self) -> dict[str, str]:
        def take(_: str, child: WorkerHalf) -> None:
            self._load_errors = {**child.take_load_errors(), **self._load_errors}  # the first reason stays

        self._call_all(take)
        errors, self._load_errors = self._load_errors, {}
        return errors

    def _call_all(self, call: Callable[[str, WorkerHalf], None]) -> None:
        """Call every child by name, also if one raises; pass the first exception on at the end."""
        errors = []
        for name, child in self.children.items():
            try:
                call(name, child)
            except Exception as error:  # noqa: BLE001 - another author's code may raise anything
                errors.append(error)
        if errors:
            raise errors[0]

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
