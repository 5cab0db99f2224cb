"""Several connectors on one node, in order: the first that can serve a load loads, all of them save."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, Self, cast

from ...transports._options import unknown_key
from ...transports.errors import ConfigurationError, KVTransferStateError
from ..base import KVConnectorBase, KVConnectorHandshakeMetadata, KVConnectorMetadata, KVConnectorRole
from ..config import KVTransferConfig
from ..errors import ConnectorError
from ..factory import KVConnectorFactory
from ..stats import KVConnectorStats
from .accounting import Ledger, MultiHandshakeMetadata, MultiMetadata, OwedReports
from .params import ChildRequest, join_params, split_params

if TYPE_CHECKING:
    import torch

    from ..base import ConnectorRequest, SchedulerOutput
    from ..config import EngineConfig
    from ..kv_cache_specs import KVCacheConfig
    from ..output import KVConnectorOutput

_OPTION = "connectors"


@dataclass(frozen=True)
class ChildOptions:
    """One entry of the option `connectors`. The names are those of `KVTransferConfig`.

    Attributes:
        name: What the child is called in `kv_transfer_params`, alike on both nodes; empty: its class's name.
    """

    kv_connector: str
    kv_connector_module_path: str = ""
    kv_connector_extra_config: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""

    @classmethod
    def from_mapping(cls, mapping: Any) -> Self:
        """Parse what a user wrote.

        Raises:
            ConfigurationError: it is no mapping, lacks `kv_connector`, or has an unknown key or an ill-typed value.
        """
        if not isinstance(mapping, Mapping):
            raise _error(f"each entry must be a mapping, not {mapping!r}", mapping)
        known = {setting.name for setting in fields(cls)}
        for key in mapping:
            if key not in known:
                what = f"option {_OPTION!r}: unknown key {key!r}"
                raise unknown_key(what, str(key), known, key=_OPTION, value=key)
        if not mapping.get("kv_connector"):
            raise _error("an entry lacks 'kv_connector'", mapping)
        for key, value in mapping.items():
            wanted = Mapping if key == "kv_connector_extra_config" else str
            if not isinstance(value, wanted):
                raise _error(f"{key} cannot be {value!r}", value)
        return cls(**mapping)


@dataclass
class _Request:
    """A request that has not finished.

    Attributes:
        params: What each child is told.
        loader: The child that could load when last asked; empty: none.
        is_async: Whether it does so asynchronously.
        is_offered_early: Whether a consumer was told how to begin while the prompt is computed.
    """

    params: Mapping[str, Mapping[str, Any] | None]
    loader: str = ""
    is_async: bool = False
    is_offered_early: bool = False


class MultiConnector(KVConnectorBase):
    """Puts several connectors, its children, in the place of one.

    Its one option is `connectors`, an ordered list; see `ChildOptions`. For each request the first child that can
    load does so, and every child may save or offer; the blocks are held until each child that held them said it needs
    them no more. The pool is allocated by the first child that has memory of its own, and the others serve it as they
    serve foreign memory; the uniform layout is used if all children prefer it. Figures that are no `KVConnectorStats`
    are left out.

    Raises:
        KVTransferStateError: `config.kv_transfer` is None.
        ConfigurationError: an option is unknown or wrong, two children have one name, or a child refuses its options.
    """

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        for child in _parse(options):
            KVConnectorFactory.check_options(
                KVTransferConfig(
                    kv_connector=child.kv_connector,
                    kv_role="kv_both",
                    kv_connector_module_path=child.kv_connector_module_path,
                    kv_connector_extra_config=child.kv_connector_extra_config,
                )
            )

    def __init__(self, config: EngineConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(config, role, kv_cache_config)
        self._children: dict[str, KVConnectorBase] = {}
        self._requests: dict[str, _Request] = {}
        self._ledger = Ledger()
        self._owed = OwedReports()
        with ExitStack() as stack:
            stack.callback(self.shutdown)
            for options in _parse(self.kv_transfer_config.kv_connector_extra_config):
                self._add_child(options)
            stack.pop_all()

    def _add_child(self, options: ChildOptions) -> None:
        transfer = replace(
            self.kv_transfer_config,
            kv_connector=options.kv_connector,
            kv_connector_module_path=options.kv_connector_module_path,
            kv_connector_extra_config=options.kv_connector_extra_config,
        )
        name = options.name or KVConnectorFactory.get_connector_class(transfer).__name__
        if name in self._children:
            raise _error(f"two children are called {name!r}; give one of them another 'name'", name)
        config = replace(self.config, kv_transfer=transfer)
        self._children[name] = KVConnectorFactory.create_connector(config, self.role, self.kv_cache_config)

    @property
    def children(self) -> Mapping[str, KVConnectorBase]:
        """The children by name, in their order."""
        return self._children

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        figures = [child.get_kv_connector_stats() for child in self._children.values()]
        total = KVConnectorStats()
        for stats in figures:
            total = total.aggregate(stats) if isinstance(stats, KVConnectorStats) else total
        return None if total.is_empty() else total

    @property
    def failure(self) -> str:
        return _join(self._children, "failure")

    @property
    def warning(self) -> str:
        return _join(self._children, "warning")

    def shutdown(self) -> None:
        with ExitStack() as stack:  # every child is shut down, also after one that raised
            for child in self._children.values():
                stack.callback(child.shutdown)

    # -- worker half: memory -------------------------------------------------------------------------

    @property
    def prefer_cross_layer_blocks(self) -> bool:
        return all(child.prefer_cross_layer_blocks for child in self._children.values())

    def allocate_kv_memory(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        for child in self._children.values():
            if type(child).allocate_kv_memory is not KVConnectorBase.allocate_kv_memory:
                return child.allocate_kv_memory(num_bytes, device)
        return super().allocate_kv_memory(num_bytes, device)

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        for child in self._children.values():
            child.register_kv_caches(kv_caches)

    def register_cross_layers_kv_cache(self, kv_cache: torch.Tensor, attn_backend: type[Any]) -> None:
        for child in self._children.values():
            child.register_cross_layers_kv_cache(kv_cache, attn_backend)

    def get_handshake_metadata(self) -> MultiHandshakeMetadata:
        said = {name: child.get_handshake_metadata() for name, child in self._children.items()}
        return MultiHandshakeMetadata({name: metadata for name, metadata in said.items() if metadata})

    # -- worker half: one step -----------------------------------------------------------------------

    def handle_preemptions(self, preempted_req_ids: set[str]) -> None:
        for child in self._children.values():
            child.handle_preemptions(preempted_req_ids)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        metadata = cast(MultiMetadata, connector_metadata)
        self._owed.expect(metadata)
        for name, child in self._children.items():
            child.bind_connector_metadata(metadata.children[name])

    def clear_connector_metadata(self) -> None:
        super().clear_connector_metadata()
        for child in self._children.values():
            child.clear_connector_metadata()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for child in self._children.values():
            child.start_load_kv(forward_context, **kwargs)

    def wait_for_layer_load(self, layer_name: str) -> None:
        for child in self._children.values():
            child.wait_for_layer_load(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        for child in self._children.values():
            child.save_kv_layer(layer_name, kv_layer, attn_metadata, **kwargs)

    def wait_for_save(self) -> None:
        for child in self._children.values():
            child.wait_for_save()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        sending: set[str] = set()
        recving: set[str] = set()
        for name, child in self._children.items():
            sent, received = child.get_finished(finished_req_ids)
            sending |= self._owed.finish_sending(name, sent or ())
            recving |= self._owed.finish_recving(name, received or ())
        return sending, recving

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed = [child.get_block_ids_with_load_errors() for child in self._children.values()]
        return set().union(*failed)

    def take_load_errors(self) -> dict[str, str]:
        errors: dict[str, str] = {}
        for child in self._children.values():
            for request_id, reason in child.take_load_errors().items():
                errors.setdefault(request_id, reason)
        return errors

    # -- scheduler half ------------------------------------------------------------------------------

    def set_handshake_metadata(self, metadata: Mapping[int, KVConnectorHandshakeMetadata]) -> None:
        by_rank = cast(Mapping[int, MultiHandshakeMetadata], metadata)
        for name, child in self._children.items():
            own = {rank: said.children[name] for rank, said in by_rank.items() if name in said.children}
            if own:
                child.set_handshake_metadata(own)

    def recognizes_params(self, kv_transfer_params: Mapping[str, Any]) -> bool:
        return any(child.recognizes_params(kv_transfer_params) for child in self._children.values())

    def on_new_request(self, request: ConnectorRequest) -> None:
        request_id = request.request_id
        if request_id in self._requests or request_id in self._ledger:
            raise ConnectorError(f"request id {request_id!r} is in use: its transfer is not over")
        known = _Request(split_params(request.kv_transfer_params, self._children))
        with ExitStack() as undo:
            for name, child in self._children.items():
                child.on_new_request(ChildRequest(request, known.params[name]))
                refused = _Refused(request, known.params[name])
                undo.callback(child.request_finished, refused, ())
            undo.pop_all()
        self._requests[request_id] = known

    def get_num_new_matched_tokens(
        self, request: ConnectorRequest, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        known = self._known(request)
        known.loader = ""
        for name, child in self._children.items():
            view = ChildRequest(request, known.params[name])
            num_tokens, is_async = child.get_num_new_matched_tokens(view, num_computed_tokens)
            if num_tokens is None:
                return None, False
            if num_tokens > 0:
                known.loader, known.is_async = name, is_async
                return num_tokens, is_async
        return 0, False

    def update_state_after_alloc(
        self, request: ConnectorRequest, block_ids: Sequence[Sequence[int]], num_external_tokens: int
    ) -> None:
        known = self._known(request)
        if num_external_tokens and not known.loader:
            raise KVTransferStateError(f"nobody said that {request.request_id!r} could be loaded")
        if num_external_tokens and known.is_async:
            self._ledger.load(request.request_id, known.loader)
        for name, child in self._children.items():
            num_tokens = num_external_tokens if name == known.loader else 0
            child.update_state_after_alloc(ChildRequest(request, known.params[name]), block_ids, num_tokens)
        known.loader = ""

    def request_progressed(
        self, request: ConnectorRequest, block_ids: Sequence[Sequence[int]]
    ) -> dict[str, Any] | None:
        known = self._known(request)
        answers = {
            name: child.request_progressed(ChildRequest(request, known.params[name]), block_ids)
            for name, child in self._children.items()
        }
        params = join_params({name: said for name, said in answers.items() if said is not None})
        if params is None or known.is_offered_early:
            return None  # a child that is later than the others is heard when the request has finished
        known.is_offered_early = True
        return params

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> MultiMetadata:
        of_children = {n: child.build_connector_meta(scheduler_output) for n, child in self._children.items()}
        return self._ledger.take_metadata(of_children)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        for name, child in self._children.items():
            child.update_connector_output(self._ledger.share_of(name, connector_output))
        self._ledger.settle(connector_output)

    def request_finished(
        self, request: ConnectorRequest, block_ids: Sequence[Sequence[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        known = self._known(request)
        del self._requests[request.request_id]
        answers: dict[str, Mapping[str, Any]] = {}
        holders = set()
        for name, child in self._children.items():
            view = ChildRequest(request, known.params[name])
            delay_free, params = child.request_finished(view, block_ids)
            if delay_free:
                holders.add(name)
            if params is not None:
                answers[name] = params
        if holders:
            self._ledger.hold(request.request_id, frozenset(holders))
        return bool(holders), join_params(answers)

    def take_events(self) -> Iterable[Any]:
        return list(chain.from_iterable(child.take_events() for child in self._children.values()))

    def _known(self, request: ConnectorRequest) -> _Request:
        if request.request_id not in self._requests:
            raise KVTransferStateError(f"request {request.request_id!r} was never announced, or has finished")
        return self._requests[request.request_id]


class _Refused(ChildRequest):
    """A request that one child took, as it is told that the node as a whole did not."""

    @property
    def finish_reason(self) -> str:
        return "abort"


def _join(children: Mapping[str, KVConnectorBase], what: Literal["failure", "warning"]) -> str:
    said = {name: getattr(child, what) for name, child in children.items()}
    return "; ".join(f"{name}: {text}" for name, text in said.items() if text)


def _parse(options: Mapping[str, Any]) -> list[ChildOptions]:
    for key in options:
        if key != _OPTION:
            what = f"unknown connector option {key!r}"
            raise unknown_key(what, str(key), (_OPTION,), key=key, value=options[key])
    entries = options.get(_OPTION)
    if not isinstance(entries, list | tuple) or not entries:
        raise _error(f"must be a list of at least one connector, not {entries!r}", entries)
    return [ChildOptions.from_mapping(entry) for entry in entries]


def _error(why: str, value: object) -> ConfigurationError:
    return ConfigurationError(f"option {_OPTION!r}: {why}", key=_OPTION, value=value)
