"""The worker half of a handoff: the pool in the transport's memory, and the thread that serves it."""

from __future__ import annotations

import hashlib
import resource
import secrets
import sys
import time
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from kvferry import __version__

from ...transports.base import Arena, Endpoint, Transport
from ...transports.errors import ConfigurationError, KVTransferError, KVTransferStateError
from ...transports.regions import Pool
from ...transports.registry import create_transport
from ..base import WorkerHalf
from ..handoff.consumer import ConsumerProtocol
from ..handoff.events import Identity, LoadEnded, LocalBlocks
from ..handoff.messages import MAX_EPOCH
from ..handoff.node import NodeProtocol
from ..handoff.producer import ProducerProtocol
from ..output import KVConnectorOutput
from ..planning.compatibility import digest
from ..spans import active_tracer
from ..stats import KVConnectorStats
from .computed import AT_ONCE, Mark, mark_computed
from .loop import HandoffDriver
from .options import ConnectorOptions
from .orders import HandoffMetadata, WorkerAddress
from .outcomes import Outcomes
from .registration import NO_FIELDS, Registration, describe_caches, layout_name
from .trace import HandoffTrace

if TYPE_CHECKING:
    import torch

    from ..config import EngineConfig
    from ..kv_cache_specs import KVCacheConfig

#: How much longer than one read, which has a deadline of its own, the handoff thread may take to end.
_CLOSE_GRACE_S = 5.0
#: What waits for the end of all handoffs waits this long: longer than a step takes, whose orders come first.
_BEGIN_TIMEOUT_S = 30.0

#: Descriptors that are reserved per connection in progress, out of the process's limit.
_DESCRIPTORS_PER_CONNECTION = 32


def new_epoch() -> int:
    """Draw a random number for one start of a node. It is unguessable, so no other start has it."""
    return 1 + secrets.randbelow(MAX_EPOCH)


def _next_epoch(epoch: int) -> int:
    """Derive the number of a node's next start, so that its ranks agree on it without asking each other."""
    return 1 + int.from_bytes(hashlib.sha256(f"after {epoch}".encode()).digest()) % MAX_EPOCH


def _affordable_connections() -> int:
    """How many connections may be in progress at once under the process's limit of open files.

    A connection takes a handful of descriptors; UCX takes the most, because it opens several per worker. The
    rest of the limit is for everything else that the process opens.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if limit == resource.RLIM_INFINITY else max(1, limit // _DESCRIPTORS_PER_CONNECTION)


def start_handoffs(
    config: EngineConfig,
    registration: Registration,
    transport: Transport,
    options: ConnectorOptions,
    before: HandoffDriver | None = None,
) -> HandoffDriver:
    """Listen, and start the handoff thread of one process whose caches are registered.

    Args:
        transport: Not yet listening. It belongs to the driver from now on.
        before: What this process did its handoffs with until now; it is closed. This is another start of the
            same node, at the same address if the transport can have it again. The ends go where they went.

    Raises:
        ConfigurationError: the address is malformed, taken, or not ours to bind. The transport is as it was.
    """
    if config.kv_transfer is None:
        raise KVTransferStateError("a connector needs EngineConfig.kv_transfer")
    parallel = config.parallel
    identity = Identity(
        engine_id=config.kv_transfer.engine_id,
        epoch=_next_epoch(before.identity.epoch) if before else parallel.epoch or new_epoch(),
        digest=digest(registration.fields),
        fields=registration.fields,
        layout=registration.layout,
        release=__version__,
    )
    max_connecting = min(options.handoff.max_connecting, _affordable_connections())
    handoff = replace(options.handoff, max_connecting=max_connecting)
    endpoint = transport.register(registration.pool)
    place = _listen_again(endpoint, before, options) if before else endpoint.listen(options.address)
    address = WorkerAddress(place, identity.epoch, parallel.rank)
    if before:
        outcomes = before.outcomes
    else:
        outcomes = Outcomes(transport.scheme, layout_name(registration.layout), is_first=parallel.rank == 0)
    protocol = NodeProtocol(
        ProducerProtocol(identity, handoff, transport.guards.num_guards),
        ConsumerProtocol(identity, handoff, parallel.rank, parallel.world_size),
    )
    keep = outcomes.keep_span if options.trace else None
    trace = HandoffTrace(keep, parallel.rank) if keep is not None or active_tracer() is not None else None
    required = options.require_transport
    driver = HandoffDriver(transport, endpoint, protocol, outcomes, identity, address, trace, required)
    driver.start()
    return driver


def _listen_again(endpoint: Endpoint, before: HandoffDriver, options: ConnectorOptions) -> str:
    """Listen where peers know this node; if that cannot be had again, where the options say."""
    try:
        return endpoint.listen(before.address.address)
    except ConfigurationError:
        return endpoint.listen(options.address)


class HandoffWorker(WorkerHalf):
    """Allocates and registers the pool, then hands over.

    Args:
        transport: Fresh. It belongs to this object from now on.
    """

    def __init__(
        self,
        config: EngineConfig,
        kv_cache_config: KVCacheConfig,
        transport: Transport,
        options: ConnectorOptions,
    ) -> None:
        self._config = config
        self._kv_cache_config = kv_cache_config
        self._transport = transport
        self._options = options
        self._arenas: list[Arena] = []
        self._memory: list[torch.Tensor] = []  # peers read it until the transport is closed
        self._driver: HandoffDriver | None = None  # from the registration on
        self._describe: Callable[[], Registration]  # the caches, where they are now
        self._weights: str | None = None  # as they are described to peers; None: as at the start
        self._is_asleep = False
        self._mark: Callable[[], Mark] = lambda: (
            AT_ONCE
        )  # marks what was launched until now; see `mark_computed`
        self._report = KVConnectorOutput()

    @property
    def failure(self) -> str:
        return self._driver.failure if self._driver is not None else ""

    @property
    def warning(self) -> str:
        # What kept a handoff from working within the last minute.
        return self._driver.warning if self._driver is not None else ""

    @property
    def fields(self) -> Mapping[str, str | int]:
        """What this node describes of its model and its cache to peers; see `Registration.fields`."""
        return self._handoffs().identity.fields

    # -- memory --------------------------------------------------------------------------------------

    def allocate_kv_memory(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        """Allocate memory that peers can read without a staging copy: on the CPU, an arena of the transport.

        Raises:
            ConfigurationError: `device` is neither the CPU nor a CUDA device, or the memory cannot be had.
        """
        import torch

        if device.type == "cuda":
            # Memory of PyTorch's own: the transport asks CUDA's driver for all that it needs to know about
            # it.
            return torch.zeros(num_bytes, dtype=torch.int8, device=device)
        if device.type != "cpu":
            raise ConfigurationError(
                f"a cache can be in main memory or on CUDA devices, not on {device}",
                key="device",
                value=str(device),
            )
        arena = self._transport.allocate(num_bytes)
        self._arenas.append(arena)
        return torch.frombuffer(arena.buffer, dtype=torch.int8)

    def register_kv_caches(
        self,
        kv_caches: Mapping[str, torch.Tensor],
        host_fields: Mapping[str, str] = NO_FIELDS,
        *,
        draft_fields: Mapping[str, str] = NO_FIELDS,
        is_packed: bool = False,
    ) -> None:
        """Learn where each layer's cache is, start to listen, and start the handoff thread.

        Args:
            host_fields, draft_fields, is_packed: What only the engine knows; see `describe_caches`.

        Raises:
            KVTransferStateError: caches are registered already. Those stay.
            ConfigurationError: a cache cannot be served, or the address cannot be bound. Nothing was started.
            BackendUnavailableError: something that is needed to serve a GPU's memory is not installed.
                Nothing was started.
        """
        if self._driver is not None:
            raise KVTransferStateError("the KV caches are registered already")

        def describe() -> Registration:
            arenas = [arena.segment for arena in self._arenas]
            return describe_caches(
                self._config,
                self._kv_cache_config,
                kv_caches,
                arenas,
                host_fields,
                draft_fields=draft_fields,
                is_packed=is_packed,
            )

        registration = describe()
        self._describe = describe
        self._memory.extend(kv_caches.values())
        self._mark = partial(mark_computed, self._memory[0].device)
        self._driver = start_handoffs(self._config, registration, self._transport, self._options)

    def register_cross_layers_kv_cache(
        self, kv_cache: torch.Tensor, attn_backend: type[Any] | None = None
    ) -> None:
        """Register the caches of all layers; see `register_kv_caches`.

        Row `i` of `kv_cache` is the cache of the layers that share tensor `i` of the configuration.
        """
        tensors = self._kv_cache_config.kv_cache_tensors
        if len(kv_cache) != len(tensors):
            raise ConfigurationError(
                f"the cross-layer cache has {len(kv_cache)} rows, but the configuration has {len(tensors)} tensors"
            )
        rows = zip(tensors, kv_cache, strict=True)
        self.register_kv_caches({name: row for tensor, row in rows for name in tensor.shared_by})

    def sleep(self, why: str) -> None:
        """End every handoff and let go of the caches' memory. Idempotent.

        After this nothing here touches that memory, and no peer accepts what it reads there, so the engine
        may free it. The node still answers at its address, as one that is asleep: each load that a peer asks
        for fails at once, with an error that says so.

        Args:
            why: For the log and for the errors of what ends.

        Raises:
            TransferTimeoutError: the handoff thread is busy, or a read could not be stopped in time: it still
                writes into the caches. They must stay; call this again.
            UnexpectedError: peers may go on reading what was offered; restart the node.
        """
        if self._driver is None or self._is_asleep:
            return
        # First, because a close alone does not carry out what was ordered before it.
        self._driver.begin_anew(self._driver.identity, why, _BEGIN_TIMEOUT_S)
        fields, layout = self._driver.identity.fields, self._driver.layout
        transport = self._replaced_transport()
        # A transport serves some memory, and this is no cache's.
        nothing = Pool([transport.allocate(resource.getpagesize()).segment])
        asleep = {**fields, "weights": f"none: {why}"}
        self._driver = start_handoffs(
            self._config, Registration(nothing, layout, asleep), transport, self._options, self._driver
        )
        self._weights, self._is_asleep = str(fields["weights"]), True

    def wake_up(self) -> None:
        """Serve the caches again, which are where they were before `sleep`. Idempotent.

        This is another start of the node: no offer and no name of a rendezvous from before is honoured.

        Raises:
            KVTransferError: as for `register_kv_caches`. The node is still asleep; call this again.
        """
        if not self._is_asleep:
            return
        transport = self._replaced_transport()
        found = self._describe()
        fields = {**found.fields, "weights": self._weights or ""}
        self._driver = start_handoffs(
            self._config, replace(found, fields=fields), transport, self._options, self._driver
        )
        self._is_asleep = False

    def _replaced_transport(self) -> Transport:
        """Close the handoffs with their transport, and make another one: a transport has one pool."""
        self._handoffs().close(self._options.handoff.read_timeout_s + _CLOSE_GRACE_S)
        self._transport.close()  # if the last attempt to start again failed
        # What it allocated is foreign memory for the next one. The caches are views of it and keep it.
        self._arenas.clear()
        self._transport = create_transport(self._transport.scheme, self._options.transport_options)
        return self._transport

    def get_handshake_metadata(self) -> WorkerAddress:
        return self._handoffs().address

    # -- one step ------------------------------------------------------------------------------------

    def handle_preemptions(self, preempted_req_ids: set[str]) -> None:
        """End the open offers of requests that lose their blocks, before the blocks can be overwritten."""
        if self._driver is not None:
            self._driver.retract(preempted_req_ids)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self.submit(cast(HandoffMetadata, self.connector_metadata))

    def submit(self, orders: HandoffMetadata, *, is_computed: bool = False) -> None:
        """Have orders carried out; return at once.

        On a GPU they wait until all has run that this thread launched before. Only then are the offered
        blocks written, and the blocks that are loaded into no longer in use.

        Args:
            is_computed: Do not wait. Only for orders without loads, whose offered blocks are certainly
                written.
        """
        driver = self._handoffs()
        if not orders.is_empty():
            driver.submit(orders, AT_ONCE if is_computed else self._mark())

    def begin_anew(self, weights: str | None, why: str) -> None:
        """End every handoff, and describe other weights to peers from now on.

        Args:
            weights: What the field `weights` is from now on. None: what it is already; then a step need not
                wait for the end.
            why: For the log and for the errors of what ends.

        Raises:
            TransferTimeoutError: the handoff thread is busy. It will do this before it does anything that is
                ordered later.
            UnexpectedError: peers may go on reading what was offered; restart the node.
        """
        driver = self._handoffs()
        identity = driver.identity
        if self._is_asleep:  # there is nothing to end
            self._weights = self._weights if weights is None else weights
            return
        if weights is not None:
            fields = {**identity.fields, "weights": weights}
            identity = replace(identity, fields=fields, digest=digest(fields))
        driver.begin_anew(identity, why, None if weights is None else _BEGIN_TIMEOUT_S)

    def fail_load(self, request_id: str, blocks: LocalBlocks, error: KVTransferError) -> None:
        """Report as failed a load that could not even be ordered. It is reported once, like any load."""
        self._handoffs().outcomes.load_ended(LoadEnded(request_id, "failed", error, blocks), time.monotonic())

    def wait_finished(self, timeout_s: float) -> None:
        """Return as soon as `get_finished` has something to return, or after `timeout_s`; at once if no
        handoff is under way.
        """
        self._handoffs().outcomes.wait(timeout_s)

    def get_finished(self, finished_req_ids: AbstractSet[str] = frozenset()) -> tuple[set[str], set[str]]:
        # One report for all three calls. If each of them asked the outcomes itself, a load that fails between
        # two calls would be reported without its blocks, and the engine would use what is in them.
        self._report = self._handoffs().outcomes.take_report()
        return self._report.finished_sending, self._report.finished_recving

    def get_block_ids_with_load_errors(self) -> set[int]:
        block_ids, self._report.invalid_block_ids = self._report.invalid_block_ids, set()
        return block_ids

    def take_load_errors(self) -> dict[str, str]:
        errors, self._report.load_errors = self._report.load_errors, {}
        return errors

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        return self._driver.outcomes.take_stats() if self._driver is not None else None

    def shutdown(self) -> None:
        """End every handoff and free everything. Idempotent.

        Raises:
            TransferTimeoutError: a read could not be stopped in time; it still writes into the pool.
        """
        if self._driver is not None:
            self._driver.close(self._options.handoff.read_timeout_s + _CLOSE_GRACE_S)
        else:
            self._transport.close()
        # Only after the transport is closed: until then peers may read this memory.
        self._memory.clear()

    def _handoffs(self) -> HandoffDriver:
        if self._driver is None:
            raise KVTransferStateError("the KV caches are not registered: call register_kv_caches first")
        return self._driver
