"""The worker half, called by vLLM's model runner."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ..errors import ConnectorError
from ..handoff.events import LocalBlocks
from ..p2p.orders import OpenOrder
from ..p2p.worker import HandoffWorker
from .config import host_fields, kv_cache_config, require_whole_caches, state_fields
from .memory import PoolPlacement
from .metadata import LoadErrors, StepMetadata, WorkerHandshake
from .stats import KvferryStats

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

#: vLLM repeats steps without tokens every millisecond while a request waits for a load, and while blocks are
#: offered. Each of them takes 0.4 ms of a core, which the copying may need. A request that arrives meanwhile
#: waits this long at most.
_IDLE_STEP_S = 0.002


@dataclass(frozen=True)
class Finished:
    """What ended since the last call.

    Attributes:
        failed: Those of `received` whose load failed.
    """

    sent: set[str]
    received: set[str]
    failed: set[str]


class WorkerSide:
    """Translates between vLLM's model runner and a `HandoffWorker`."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, half: HandoffWorker) -> None:
        import torch

        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._half = half
        self._carried_out: StepMetadata | None = None
        self._started: StepMetadata | None = None  # the step whose loads were started last
        self._load_errors: dict[str, str] = {}  # by request; of loads that vLLM knows to have failed
        self._may_wait = False  # the last step computed and reported nothing
        # vLLM makes an offer when a request has ended. By then its last token is on the host, so the pass
        # that wrote its blocks is over, on all ranks, since they exchange results in each layer. An
        # asynchronous scheduler has already launched the next pass, and no peer should wait for that one. But
        # a drafting model writes after sampling.
        self._offers_are_computed = getattr(vllm_config, "speculative_config", None) is None
        self._draft_caches: list[tuple[int, torch.Tensor]] = []  # group, and the layer's pages by block id
        self._placement = PoolPlacement(partial(half.allocate_kv_memory, device=torch.device("cpu")))

    # -- memory --------------------------------------------------------------------------------------

    def get_mem_pool_context(self) -> AbstractContextManager[None] | None:
        """Return a context in which vLLM allocates its cache in the transport's memory.

        None if the cache is not in main memory, or is not a single buffer.
        """
        sizes = {tensor.size for tensor in self._kv_cache_config.kv_cache_tensors}
        if self._vllm_config.device_config.device_type != "cpu" or len(sizes) != 1:
            return None
        return self._placement.answering(sizes.pop())

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Start to serve the caches.

        Raises:
            ConfigurationError: a cache cannot be served; vLLM does not start.
        """
        require_whole_caches(self._kv_cache_config, kv_caches, self._vllm_config)
        pool = kv_cache_config(self._kv_cache_config, self._vllm_config)
        groups = {
            name: index for index, group in enumerate(pool.kv_cache_groups) for name in group.layer_names
        }
        served = {name: cache for name, cache in kv_caches.items() if name in groups}
        drafts = [name for name in served if name in pool.draft_layers]
        fields = host_fields(
            self._vllm_config, [name for name in served if name not in pool.draft_layers]
        ) | state_fields(self._kv_cache_config)
        self._half.register_kv_caches(
            served,
            fields,
            draft_fields=host_fields(self._vllm_config, drafts),
            # CPU attention packs keys. The strides of a GPU's views say where each token is.
            is_packed=bool(fields["packing"]),
        )
        self._draft_caches = [
            (groups[name], served[name].view(pool.num_blocks, -1, *served[name].shape[1:])) for name in drafts
        ]
        logger.info(
            "kvferry serves %d layers at %s; the cache is in %s",
            len(served),
            self._half.get_handshake_metadata().address,
            self._place_of(served),
        )
        if left_out := sorted(kv_caches.keys() - served.keys()):
            logger.info(
                "kvferry leaves out layers that are not to be transferred, or that no answer depends on: %s",
                ", ".join(left_out),
            )
        if drafts:
            logger.info(
                "kvferry serves layers of a draft model to nodes that have the same one: %s",
                ", ".join(drafts),
            )

    def _place_of(self, kv_caches: Mapping[str, torch.Tensor]) -> str:
        if self._vllm_config.device_config.device_type != "cpu":
            return "a GPU's memory, which peers map"
        if all(map(self._placement.holds, kv_caches.values())):
            return "the transport's own memory"
        return "vLLM's memory, which peers cannot map: reads are slower"

    def sleep(self) -> None:
        """Let go of the caches, whose memory vLLM is about to free; see `HandoffWorker.sleep`."""
        self._half.sleep("the node is asleep, and its cache and weights may be gone; wake it up")

    def wake_up(self) -> None:
        """Serve the caches again, which vLLM has put back to where they were."""
        self._half.wake_up()

    def get_handshake_metadata(self) -> WorkerHandshake:
        return WorkerHandshake(self._half.get_handshake_metadata(), self._half.fields)

    # -- one step ------------------------------------------------------------------------------------

    def begin_anew(self, weights: str | None, why: str) -> None:
        """End every handoff, and describe these weights to peers; None: the same as before."""
        self._half.begin_anew(weights, why)

    def carry_out(self, metadata: StepMetadata) -> None:
        """Have all of a step's orders but its loads carried out; do nothing if called again for the same
        step.

        Peers wait for these orders, so the orders must not wait for the step's forward pass, nor for an
        encoder's. Nothing of the step has run yet: what the orders offer was computed by earlier steps.
        """
        if metadata is not self._carried_out:
            self._carried_out = metadata
            if metadata.begins_anew:
                self.begin_anew(None, "the cache of the node was reset")
            # First, and with a wait for the end: the step that begins now writes into these blocks.
            if metadata.preempted:
                self._half.handle_preemptions(set(metadata.preempted))
            orders = metadata.orders.without_loads()
            # What an open offer gains was computed by the step before this one, which a GPU may still work
            # on.
            is_early = any(
                isinstance(order.offer, OpenOrder) or order.extension is not None for order in orders.requests
            )
            self._half.submit(orders, is_computed=self._offers_are_computed and not is_early)

    def start_loads(self, metadata: StepMetadata) -> None:
        """Have the whole step carried out; do nothing if called again for the same step.

        Call it after the model runner has zeroed and copied the step's blocks.

        If a load started earlier, the runner would overwrite what it brought.
        """
        self.carry_out(metadata)
        if metadata is self._started:
            return
        self._started = metadata
        orders = metadata.orders.loads()
        self._clear_draft_pages(order.load for order in orders.requests if order.load is not None)
        self._half.submit(orders)
        for request_id, load in metadata.refused.items():
            self._half.fail_load(request_id, load.blocks, ConnectorError(load.reason))

    def _clear_draft_pages(self, loads: Iterable[LocalBlocks]) -> None:
        """Zero what the draft model keeps in the blocks of loads: a producer without that model leaves it as
        it was.

        vLLM takes a loaded block as complete in all layers, and puts it into the prefix cache. Without this
        the draft model would read what another request left there, or bytes that are no numbers. Which tokens
        are accepted does not depend on it.
        """
        for blocks in loads if self._draft_caches else ():
            for group, cache in self._draft_caches:
                cache[[block for block in blocks[group].block_ids if block]] = 0

    def take_finished(self) -> Finished:
        """Take what ended; failed loads are named by request only, so their blocks are discarded here."""
        sent, received = self.get_finished()
        self._half.get_block_ids_with_load_errors()
        errors = self._half.take_load_errors()
        self._load_errors.update(errors)
        return Finished(sent, received, failed=set(errors))

    def get_finished(self) -> tuple[set[str], set[str]]:
        """Take what ended; `take_failed_blocks` then names the failed blocks of the same loads."""
        is_idle = self._carried_out is not None and self._carried_out.is_idle
        # vLLM begins a step before it takes in the result of the last one. If that is a token or a handoff's
        # end, do not delay it. On a GPU never: there the thread that launches the next step's kernels must
        # not sleep, and the handoff thread has cores of its own.
        if is_idle and self._may_wait and self._vllm_config.device_config.device_type == "cpu":
            self._half.wait_finished(_IDLE_STEP_S)
        sent, received = self._half.get_finished()
        self._may_wait = is_idle and not sent and not received
        return sent, received

    def take_load_errors(self) -> LoadErrors | None:
        """Take why loads have failed since the last call; None if none has."""
        # Before 0.30 vLLM takes failed blocks, and nothing has taken the errors.
        errors, self._load_errors = self._load_errors | self._half.take_load_errors(), {}
        return LoadErrors(errors) if errors else None

    def take_failed_blocks(self) -> set[int]:
        return self._half.get_block_ids_with_load_errors()

    def get_kv_connector_stats(self) -> KvferryStats | None:
        stats = self._half.get_kv_connector_stats()
        return None if stats is None else KvferryStats(data=stats.to_dict())

    def shutdown(self) -> None:
        self._half.shutdown()
