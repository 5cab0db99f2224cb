"""A connector that writes down each call, and raises where a test wants it.

It keeps blocks of prompts in this process.

It finds all that it needs in what the contract promises: which tokens a step computes, and which blocks they
are in. It raises `Boom` in the hook that the option `raise_in` names, for requests whose prompts begin with
`MARK`, and for steps that concern such a request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch

import kvferry.connector as kv

#: The first token of the prompts for which a hook raises.
MARK = 250

Tables = tuple[tuple[int, ...], ...]
#: A block's key: the tokens of the prompt up to its end. A page: the contents of one layer's block.
Key = tuple[int, ...]
Pages = dict[str, torch.Tensor]


class Boom(Exception):
    """An error of no documented type."""


@dataclass(frozen=True)
class Call:
    """A call of a hook about one request: the request's state and the arguments at that moment."""

    hook: str
    request_id: str
    num_computed_tokens: int
    block_ids: Tables = ()
    num_tokens: int = 0
    finish_reason: str | None = None


@dataclass(frozen=True)
class Scheduled:
    """What a step computed of one request."""

    request_id: str
    num_computed_tokens: int
    num_scheduled_tokens: int
    block_ids: Tables


@dataclass
class Orders(kv.KVConnectorMetadata):
    """One step's work: keys and blocks to load, by request, and to save."""

    sync_loads: list[tuple[Key, int]] = field(default_factory=list)
    async_loads: dict[str, list[tuple[Key, int]]] = field(default_factory=dict)
    saves: list[tuple[Key, int]] = field(default_factory=list)
    is_marked: bool = False


class RecordingScheduler(kv.SchedulerHalf):
    """Loads what another request saved before.

    Attributes:
        calls: Calls about requests, and the steps: tuples of `Scheduled`.
        num_not_yet: How many more times the answer is "not yet".
        refusal: Raised by `update_state_after_alloc` for marked requests instead of `Boom`.
    """

    def __init__(self, options: Mapping[str, Any], store: dict[Key, Pages], block_size: int) -> None:
        self.raise_in = options.get("raise_in", "")
        self.load: Literal["", "sync", "async"] = options.get("load", "")
        self.calls: list[Call | tuple[Scheduled, ...]] = []
        self.num_not_yet = 0
        self.refusal: Exception = Boom("on purpose")
        self._store = store
        self._block_size = block_size
        self._prompts: dict[str, Key] = {}
        self._num_local: dict[str, int] = {}
        self._orders = Orders()
        self._saved: list[Key] = []  # in the latest step

    def _note(self, hook: str, request: kv.ConnectorRequest, tables: Any = (), num_tokens: int = 0) -> None:
        block_ids = tuple(map(tuple, tables))
        reason = request.finish_reason
        self.calls.append(
            Call(hook, request.request_id, request.num_computed_tokens, block_ids, num_tokens, reason)
        )
        if hook == self.raise_in and request.prompt_token_ids[0] == MARK:
            raise self.refusal if hook == "update_state_after_alloc" else Boom("on purpose")

    def calls_of(self, name: str) -> list[Call]:
        """The calls about the request that a client called `name`."""
        calls = (call for call in self.calls if isinstance(call, Call))
        return [call for call in calls if call.request_id.rpartition("-")[0] == name]

    def steps_of(self, name: str) -> list[Scheduled]:
        """What each step computed of the request that a client called `name`."""
        items = (item for call in self.calls if isinstance(call, tuple) for item in call)
        return [item for item in items if item.request_id.rpartition("-")[0] == name]

    def on_new_request(self, request: kv.ConnectorRequest) -> None:
        self._prompts[request.request_id] = tuple(request.prompt_token_ids)
        self._note("on_new_request", request)

    def get_num_new_matched_tokens(
        self, request: kv.ConnectorRequest, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        self._note("get_num_new_matched_tokens", request, num_tokens=num_computed_tokens)
        if self.num_not_yet:
            self.num_not_yet -= 1
            return None, False
        self._num_local[request.request_id] = num_computed_tokens
        prompt, end = self._prompts[request.request_id], num_computed_tokens
        is_async = self.load == "async"
        last = len(prompt) - (not is_async)  # a synchronous load leaves the last token to compute
        while end + self._block_size <= last and prompt[: end + self._block_size] in self._store:
            end += self._block_size
        return (end - num_computed_tokens if self.load else 0), is_async

    def update_state_after_alloc(
        self, request: kv.ConnectorRequest, block_ids: Sequence[Sequence[int]], num_external_tokens: int
    ) -> None:
        if num_external_tokens:
            first = self._num_local[request.request_id]
            wanted = self._blocks(request.request_id, block_ids[0], first, first + num_external_tokens)
            if self.load == "async":
                self._orders.async_loads[request.request_id] = wanted
            else:
                self._orders.sync_loads += wanted
        self._note("update_state_after_alloc", request, block_ids, num_external_tokens)

    def _blocks(self, request_id: str, table: Sequence[int], start: int, end: int) -> list[tuple[Key, int]]:
        """Keys and ids of the prompt's blocks that tokens `[start, end)` make full."""
        prompt, size = self._prompts[request_id], self._block_size
        indices = range(start // size, min(end, len(prompt)) // size)
        return [(prompt[: (index + 1) * size], table[index]) for index in indices]

    def request_progressed(self, request: kv.ConnectorRequest, block_ids: Sequence[Sequence[int]]) -> None:
        self._note("request_progressed", request, block_ids)

    def build_connector_meta(self, scheduler_output: kv.SchedulerOutput) -> Orders:
        items = scheduler_output.scheduled_requests
        orders = self._orders
        involved = {item.request_id for item in items} | orders.async_loads.keys()
        orders.is_marked = any(self._prompts[request_id][0] == MARK for request_id in involved)
        if orders.is_marked and self.raise_in == "build_connector_meta":
            raise Boom("on purpose")
        self.calls.append(
            tuple(
                Scheduled(
                    item.request_id,
                    item.num_computed_tokens,
                    item.num_scheduled_tokens,
                    tuple(map(tuple, item.block_ids)),
                )
                for item in items
            )
        )
        for item in items:
            start = item.num_computed_tokens
            end = start + item.num_scheduled_tokens
            orders.saves += self._blocks(item.request_id, item.block_ids[0], start, end)
        self._saved = [key for key, _ in orders.saves]
        self._orders = Orders()
        return orders

    def update_connector_output(self, connector_output: kv.KVConnectorOutput) -> None:
        if connector_output.hook_errors:  # what this step saved may have been computed from anything
            for key in self._saved:
                self._store.pop(key, None)
        if self.raise_in == "update_connector_output":
            raise Boom("on purpose")

    def take_events(self) -> Sequence[Any]:
        if self.raise_in == "take_events":
            raise Boom("on purpose")
        return ()

    def request_finished(
        self, request: kv.ConnectorRequest, block_ids: Sequence[Sequence[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._note("request_finished", request, block_ids)
        return False, None


class RecordingWorker(kv.WorkerHalf):
    """Copies between the caches and the store.

    Attributes:
        calls: The hooks of all steps, with the layer where there is one.
        done: Requests whose asynchronous loads have ended and are still to be reported.
        holds_reports: Report no end of a load for now.
    """

    def __init__(self, options: Mapping[str, Any], store: dict[Key, Pages], rank: int) -> None:
        self.raise_in = options.get("raise_in", "") if rank == options.get("raise_rank", 0) else ""
        self.calls: list[str] = []
        self.done: set[str] = set()
        self.holds_reports = False
        self.caches: dict[str, torch.Tensor] = {}
        self._store = store

    def _note(self, hook: str, layer_name: str = "", *, is_concerned: bool | None = None) -> None:
        self.calls.append(f"{hook} {layer_name}".strip())
        if is_concerned is None:
            is_concerned = self.has_connector_metadata() and self._orders.is_marked
        if hook == self.raise_in and is_concerned:
            raise Boom("on purpose")

    @property
    def _orders(self) -> Orders:
        return cast(Orders, self.connector_metadata)

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        self.caches = dict(kv_caches)

    def handle_preemptions(self, preempted_req_ids: set[str]) -> None:
        self._note("handle_preemptions", is_concerned=True)

    def bind_connector_metadata(self, connector_metadata: kv.KVConnectorMetadata) -> None:
        self._note("bind_connector_metadata", is_concerned=cast(Orders, connector_metadata).is_marked)
        super().bind_connector_metadata(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._note("start_load_kv")
        for request_id, blocks in self._orders.async_loads.items():
            for layer_name in self.caches:
                self._load(layer_name, blocks)
            self.done.add(request_id)

    def _load(self, layer_name: str, blocks: list[tuple[Key, int]]) -> None:
        for key, block in blocks:
            self.caches[layer_name][block] = self._store[key][layer_name]

    def wait_for_layer_load(self, layer_name: str) -> None:
        self._note("wait_for_layer_load", layer_name)
        self._load(layer_name, self._orders.sync_loads)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        self._note("save_kv_layer", layer_name)
        assert kv_layer.data_ptr() == self.caches[layer_name].data_ptr()
        for key, block in self._orders.saves:
            self._store.setdefault(key, {})[layer_name] = kv_layer[block].clone()

    def wait_for_save(self) -> None:
        self._note("wait_for_save")

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        self._note("get_finished")
        if self.holds_reports:
            return None, None
        done, self.done = self.done, set()
        return None, done

    def get_block_ids_with_load_errors(self) -> set[int]:
        self._note("get_block_ids_with_load_errors")
        return set()

    def take_load_errors(self) -> dict[str, str]:
        self._note("take_load_errors")
        return {}

    def get_kv_connector_stats(self) -> Any:
        self._note("get_kv_connector_stats", is_concerned=True)

    def clear_connector_metadata(self) -> None:
        is_concerned = self.has_connector_metadata() and self._orders.is_marked
        super().clear_connector_metadata()
        self._note("clear_connector_metadata", is_concerned=is_concerned)

    @property
    def failure(self) -> str:
        self._note("failure", is_concerned=True)
        return ""

    @property
    def warning(self) -> str:
        self._note("warning", is_concerned=True)
        return ""


class RecordingConnector(kv.KVConnectorBase):
    """Both halves share one store per rank, as long as they are in one process.

    Only a model of one group can load.
    """

    store: dict[Key, Pages] = {}  # noqa: RUF012 - shared by all nodes of a process; tests clear it

    def make_scheduler_half(self) -> RecordingScheduler:
        group = self.kv_cache_config.kv_cache_groups[0]
        return RecordingScheduler(self._options, self.store, group.kv_cache_spec.block_size)

    def make_worker_half(self) -> RecordingWorker:
        return RecordingWorker(self._options, self.store, self.config.parallel.rank)

    @property
    def _options(self) -> Mapping[str, Any]:
        return self.kv_transfer_config.kv_connector_extra_config
