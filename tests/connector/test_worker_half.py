"""The worker half: what it registers, what it refuses, and that nothing waits for a thread that has died."""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations, product

import pytest
import torch

from kvferry.connector import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from kvferry.connector.config import ParallelConfig
from kvferry.connector.handoff.events import GroupBlocks
from kvferry.connector.kv_cache_specs import FullAttentionSpec
from kvferry.connector.p2p.loop import HandoffDriver
from kvferry.connector.p2p.options import ConnectorOptions
from kvferry.connector.p2p.orders import Announcement, HandoffMetadata, OfferOrder, RequestOrders
from kvferry.connector.p2p.params import parse_transfer_params
from kvferry.connector.p2p.registration import Registration, describe_caches, layout_name
from kvferry.connector.p2p.worker import HandoffWorker
from kvferry.connector.planning.compatibility import DESCRIPTION_VERSION
from kvferry.connector.planning.slots import Shard, SlotArray
from kvferry.connector.testing import CacheShape, ModelFreeNode, Request, engine_config
from kvferry.transports.base import Endpoint, Event
from kvferry.transports.errors import ConfigurationError, KVTransferStateError
from kvferry.transports.inproc import InProcTransport
from kvferry.transports.regions import Pool, Segment
from kvferry.transports.testing.wrapping import WrappedEndpoint
from tests.support.client import wait_until
from tests.support.handoff_orders import ordered
from tests.support.patience import DEADLINE_S

SHAPE = CacheShape()
CPU = torch.device("cpu")


def cache_config(num_layers: int = 2, num_blocks: int = 8) -> KVCacheConfig:
    return replace(SHAPE, num_layers=num_layers, num_blocks=num_blocks).kv_cache_config()


def names(config: KVCacheConfig) -> tuple[str, ...]:
    return config.kv_cache_groups[0].layer_names


class FaultyEndpoint(WrappedEndpoint):
    """Counts its wakes. Works until `break_down`, then raises an exception that no endpoint should raise."""

    num_failures_left = 0.0
    num_wakes = 0

    @property
    def is_broken(self) -> bool:
        return self.num_failures_left > 0

    def wait_events(self, timeout_s: float) -> list[Event]:
        if self.is_broken:
            self.num_failures_left -= 1
            raise ZeroDivisionError("a bug")
        return super().wait_events(timeout_s)

    def wake(self) -> None:
        self.num_wakes += 1
        super().wake()

    def break_down(self, for_calls: float = math.inf) -> None:
        self.num_failures_left = for_calls
        self.wake()


class FaultyTransport(InProcTransport):
    """A transport whose endpoint is a `FaultyEndpoint`."""

    endpoint: FaultyEndpoint

    def _open(self, pool: Pool) -> Endpoint:
        self.endpoint = FaultyEndpoint(super()._open(pool))
        return self.endpoint


@pytest.fixture
def transport() -> FaultyTransport:
    return FaultyTransport()


@pytest.fixture
def worker(transport: FaultyTransport) -> Iterator[HandoffWorker]:
    """A worker half with registered caches."""
    config = SHAPE.kv_cache_config()
    made = HandoffWorker(engine_config("inproc"), config, transport, ConnectorOptions())
    memory = made.allocate_kv_memory(sum(t.size for t in config.kv_cache_tensors), CPU).view(SHAPE.dtype)
    made.register_cross_layers_kv_cache(
        memory.view(SHAPE.num_blocks, SHAPE.num_layers, *SHAPE.logical_page).transpose(0, 1)
    )
    yield made
    made.shutdown()


class TestLife:
    def test_memory_is_zeroed_and_in_the_transports_arena(self) -> None:
        worker = HandoffWorker(engine_config("inproc"), cache_config(), InProcTransport(), ConnectorOptions())
        memory = worker.allocate_kv_memory(4096, CPU)
        assert (memory.shape, memory.dtype, memory.is_contiguous()) == ((4096,), torch.int8, True)
        assert not memory.any()
        worker.shutdown()

    def test_memory_of_another_device_is_refused(self) -> None:
        worker = HandoffWorker(engine_config("inproc"), cache_config(), InProcTransport(), ConnectorOptions())
        with pytest.raises(ConfigurationError, match="not on meta"):
            worker.allocate_kv_memory(4096, torch.device("meta"))
        with pytest.raises(ConfigurationError, match="is on meta; only main memory"):
            worker.register_kv_caches({n: torch.empty(8, 64, device="meta") for n in names(cache_config())})
        worker.shutdown()

    def test_nothing_works_before_the_caches_are_registered(self) -> None:
        worker = HandoffWorker(engine_config("inproc"), cache_config(), InProcTransport(), ConnectorOptions())
        for call in (worker.get_handshake_metadata, worker.get_finished):
            with pytest.raises(KVTransferStateError, match="call register_kv_caches first"):
                call()
        assert worker.get_kv_connector_stats() is None
        worker.shutdown()
        worker.shutdown()

    def test_caches_are_registered_once(self, worker: HandoffWorker) -> None:
        address = worker.get_handshake_metadata()
        with pytest.raises(KVTransferStateError, match="already"):
            worker.register_kv_caches({n: torch.zeros(32, 64) for n in names(SHAPE.kv_cache_config())})
        assert worker.get_handshake_metadata() == address

    def test_each_start_has_another_epoch(self) -> None:
        epochs = set()
        for _ in range(3):
            with ModelFreeNode(engine_config("inproc", engine_id="same"), SHAPE) as node:
                epochs.add(node.worker.get_handshake_metadata().epoch)  # type: ignore[union-attr]
        assert len(epochs) == 3

    def test_an_address_can_be_chosen_and_only_one_node_can_use_it(self) -> None:
        config = engine_config("inproc", kv_connector_extra_config={"address": "inproc://chosen"})
        with ModelFreeNode(config, SHAPE) as node:
            assert node.worker.get_handshake_metadata().address == "inproc://chosen"  # type: ignore[union-attr]
            with pytest.raises(ConfigurationError, match="in use"):
                ModelFreeNode(config, SHAPE)

    def test_calls_to_the_wrong_half_are_refused(self) -> None:
        with ModelFreeNode(engine_config("inproc"), SHAPE) as node:
            with pytest.raises(KVTransferStateError, match="scheduler half was called on a worker half"):
                node.worker.on_new_request(Request("r", 4))
            with pytest.raises(KVTransferStateError, match="worker half was called on a scheduler half"):
                node.scheduler.get_finished(set())

    def test_shutdown_ends_all_handoffs_and_is_idempotent(self, worker: HandoffWorker) -> None:
        worker.submit(ordered("p", offer=OfferOrder(1, ((1, 2),), 8, "of p")))
        worker.shutdown()
        worker.shutdown()
        assert worker.get_finished() == ({"p"}, set())
        assert worker.get_finished() == (set(), set())

    def test_orders_after_shutdown_end_at_once(self, worker: HandoffWorker) -> None:
        worker.shutdown()
        worker.submit(
            HandoffMetadata(
                (
                    RequestOrders("p", offer=OfferOrder(1, ((1, 2),), 8, "of p")),
                    RequestOrders("d", load=(GroupBlocks(0, (3, 4)),)),
                )
            )
        )
        assert worker.get_finished() == ({"p"}, {"d"})
        assert worker.get_block_ids_with_load_errors() == {3, 4}
        assert worker.get_block_ids_with_load_errors() == set()
        assert "has ended" in worker.take_load_errors()["d"]
        assert worker.take_load_errors() == {}


class TestWaking:
    def test_an_announcement_does_not_disturb_the_step_that_begins(
        self, worker: HandoffWorker, transport: FaultyTransport
    ) -> None:
        worker.submit(ordered("p", traceparent="00-1-1-01", announcement=Announcement(1)))
        assert transport.endpoint.num_wakes == 0
        worker.submit(ordered("p", offer=OfferOrder(1, ((1, 2),), 8, "of p")))
        assert transport.endpoint.num_wakes == 1


class TestThreadThatDies:
    def test_everything_in_flight_is_reported_failed(
        self, worker: HandoffWorker, transport: FaultyTransport, caplog: pytest.LogCaptureFixture
    ) -> None:
        with ModelFreeNode(engine_config("inproc"), SHAPE) as other:
            offer = parse_transfer_params(other.prefill("theirs", 8)[1]).load_from
            assert offer is not None
            worker.submit(
                HandoffMetadata(
                    (
                        RequestOrders("ours", offer=OfferOrder(1, ((1, 2),), 8, "of p")),
                        # This load waits, because the other node does not step.
                        RequestOrders("d", claim=offer, load=(GroupBlocks(0, (3, 4)),)),
                    )
                )
            )
            transport.endpoint.break_down()
            wait_until(lambda: worker.failure != "")
            worker.shutdown()
            assert worker.get_finished() == ({"ours"}, {"d"})
            assert worker.get_block_ids_with_load_errors() == {3, 4}
            assert "handoff thread died: cannot wait for events: ZeroDivisionError('a bug')" in worker.failure
            assert worker.failure in worker.take_load_errors()["d"]
            assert "the handoff thread dies" in caplog.text
            # One for the transport and one for the end of the thread, not one per attempt.
            assert caplog.text.count("Traceback") <= 2
            stats = worker.get_kv_connector_stats()
            assert stats is not None
            assert stats.counters["handoff_thread_deaths_total"] == 1

    def test_orders_after_the_threads_death_end_at_once(
        self, worker: HandoffWorker, transport: FaultyTransport
    ) -> None:
        transport.endpoint.break_down()
        wait_until(lambda: worker.failure != "")
        worker.submit(ordered("d", load=(GroupBlocks(0, (3, 4)),)))
        wait_until(lambda: "d" in worker.get_finished()[1])
        assert worker.take_load_errors()["d"] != ""

    def test_a_shortage_that_passes_is_survived(
        self, worker: HandoffWorker, transport: FaultyTransport
    ) -> None:
        transport.endpoint.break_down(for_calls=5)
        wait_until(lambda: not transport.endpoint.is_broken)
        assert worker.failure == ""

    def test_no_peer_can_read_any_more(self, worker: HandoffWorker, transport: FaultyTransport) -> None:
        def is_any_guard_set() -> bool:
            return any(ctypes.string_at(transport.guards.address, 8 * transport.guards.num_guards))

        worker.submit(ordered("p", offer=OfferOrder(1, ((1, 2),), 8, "of p")))
        deadline = time.monotonic() + DEADLINE_S
        while not is_any_guard_set():
            assert time.monotonic() < deadline
            worker.get_finished()
        transport.endpoint.break_down()
        wait_until(lambda: worker.failure != "")
        worker.shutdown()
        assert not is_any_guard_set()

    def test_blocks_that_peers_may_still_read_are_not_given_back(
        self, worker: HandoffWorker, transport: FaultyTransport, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(HandoffDriver, "_clear_guards", lambda driver: False)
        worker.submit(ordered("p", offer=OfferOrder(1, ((1, 2),), 8, "of p")))
        transport.endpoint.break_down()
        wait_until(lambda: worker.failure != "")
        assert worker.get_finished() == (set(), set())


class TestRegistration:
    def test_layers_of_one_arena_are_one_segment(self) -> None:
        config = cache_config()
        memory = torch.zeros(2 * config.kv_cache_tensors[0].size, dtype=torch.int8)
        arena = Segment(memory.data_ptr(), memory.numel())
        cache = memory.view(torch.float32).view(8, 2, *SHAPE.logical_page).transpose(0, 1)
        caches = dict(zip(names(config), cache, strict=True))
        registration = describe_caches(engine_config("inproc"), config, caches, [arena])
        assert registration.pool.segments == (arena,)
        assert [layer.base_offset for layer in registration.layout.layers] == [0, SHAPE.spec.page_size_bytes]
        assert layout_name(registration.layout) == "uniform"

    def test_memory_that_the_engine_allocated_is_one_segment_per_storage(self) -> None:
        config = cache_config()
        caches = {name: torch.zeros(8, *SHAPE.logical_page) for name in names(config)}
        registration = describe_caches(engine_config("inproc"), config, caches, [])
        assert [s.address for s in registration.pool.segments] == [c.data_ptr() for c in caches.values()]
        assert layout_name(registration.layout) == "per-layer"

    def test_the_offset_of_a_view_within_its_storage_counts(self) -> None:
        config = cache_config(num_layers=1)
        storage = torch.zeros(1024 + 8 * SHAPE.spec.page_size_bytes // 4)
        cache = storage[1024:].view(8, *SHAPE.logical_page)
        layout = describe_caches(engine_config("inproc"), config, {names(config)[0]: cache}, []).layout
        assert layout.layers[0].base_offset == 4096

    def test_kernel_blocks_make_up_blocks(self) -> None:
        config = cache_config(num_layers=1)
        cache = torch.zeros(16, 2, 2, 2, 8)  # two kernel blocks of two slots make a block of four
        layout = describe_caches(engine_config("inproc"), config, {names(config)[0]: cache}, []).layout
        (layer,) = layout.layers
        assert (layer.page_bytes, layer.page_format) == (SHAPE.spec.page_size_bytes, "float32[2,2,2,2,8]")

    def test_layers_that_share_a_cache_share_its_bytes(self) -> None:
        config = cache_config()
        cache = torch.zeros(8, *SHAPE.logical_page)
        caches = dict.fromkeys((*names(config), "runner-only"), cache)
        registration = describe_caches(engine_config("inproc"), config, caches, [])
        assert len(registration.pool.segments) == 1
        assert {layer.base_offset for layer in registration.layout.layers} == {0}
        assert registration.fields["num_layers"] == 2

    def test_groups_may_share_a_tensor(self) -> None:
        size = 8 * SHAPE.spec.page_size_bytes
        groups = tuple(KVCacheGroupSpec((name,), SHAPE.spec) for name in ("a", "b"))
        config = KVCacheConfig(8, (KVCacheTensor(size, ("a", "b")),), groups)
        cache = torch.zeros(8, *SHAPE.logical_page)
        layout = describe_caches(engine_config("inproc"), config, {"a": cache, "b": cache}, []).layout
        assert [layer.group_index for layer in layout.layers] == [0, 1]
        assert layout_name(layout) == "uniform"

    def test_the_fields_list_what_must_be_equal(self) -> None:
        config = cache_config()
        caches = {name: torch.zeros(8, *SHAPE.logical_page) for name in names(config)}
        fields = describe_caches(engine_config("inproc", model="m"), config, caches, []).fields
        assert fields == {
            "protocol": DESCRIPTION_VERSION,
            "model": "m",
            "configuration": "",
            "weights": "",
            "adapters": "",
            "dtype": "float32",
            "cache_dtype": "float32",
            "num_groups": 1,
            "num_layers": 2,
            "num_kv_heads": "2",
            "head_size": "8",
            "byte_order": "little",
            "tokenizer": "",
            "chat_template": "",
        }

    def test_a_draft_models_layers_are_no_part_of_the_fields(self) -> None:
        """Their names say which draft model they belong to, and only nodes with the same one pair them."""
        config = cache_config()
        target, draft = names(config)
        caches = {name: torch.zeros(8, *SHAPE.logical_page) for name in (target, draft)}
        engine = engine_config("inproc", model="m")

        def described(config: KVCacheConfig, packing: str = "vec") -> Registration:
            fields = {"packing": packing}
            return describe_caches(engine, config, caches, [], draft_fields=fields)

        drafting = described(replace(config, draft_layers=frozenset({draft})))
        assert drafting.fields == {**described(config).fields, "num_layers": 1}
        first, second = drafting.layout.layers
        assert (first.name, first.is_draft, second.is_draft) == (target, False, True)
        other = described(replace(config, draft_layers=frozenset({draft})), "amx").layout.layers[1].name
        assert second.name.startswith("draft:")
        assert second.name.endswith(f":{draft}")
        assert other != second.name

    def test_the_number_of_heads_is_that_of_the_model_not_of_the_rank(self) -> None:
        config = cache_config()
        caches = {name: torch.zeros(8, *SHAPE.logical_page) for name in names(config)}
        engine = replace(engine_config("inproc"), parallel=ParallelConfig(4, 3))
        registration = describe_caches(engine, config, caches, [])
        assert registration.fields["num_kv_heads"] == "8"
        assert {layer.shard for layer in registration.layout.layers} == {Shard(6, 2, 8)}

    @pytest.mark.parametrize("order", list(permutations((1, 2, 3))))
    @pytest.mark.parametrize("kernel_block_size", [4, 2])
    def test_slots_describe_where_each_vector_is(
        self, order: tuple[int, ...], kernel_block_size: int
    ) -> None:
        config = cache_config(num_layers=1)
        shape = (32 // kernel_block_size, 2, kernel_block_size, 2, 8)
        physical = torch.arange(1024.0).reshape([shape[axis] for axis in (0, *order, 4)])
        cache = physical.permute(0, *(1 + order.index(axis) for axis in (1, 2, 3)), 4)
        assert cache.shape == shape
        (layer,) = describe_caches(
            engine_config("inproc"), config, {names(config)[0]: cache}, []
        ).layout.layers
        assert layer.slots is not None
        for slot, part, head in product(range(32), range(2), range(2)):
            kernel_block, within = divmod(slot, kernel_block_size)
            place = (
                layer.base_offset
                + kernel_block * layer.slots.kernel_block_stride
                + within * layer.slots.slot_stride
                + part * layer.slots.part_stride
                + head * layer.slots.head_stride
            )
            assert physical.view(-1)[place // 4] == cache[kernel_block, part, within, head, 0]

    def test_a_latent_vector_is_one_part_without_heads_on_every_rank(self) -> None:
        spec = FullAttentionSpec(4, 1, 8, torch.float32, use_mla=True)
        config = KVCacheConfig(8, (), (KVCacheGroupSpec(("a",), spec),))
        engine = replace(engine_config("inproc"), parallel=ParallelConfig(2, 1))
        (layer,) = describe_caches(engine, config, {"a": torch.zeros(8, 4, 8)}, []).layout.layers
        assert layer.shard == Shard(0, 1, 1)
        assert layer.slots == SlotArray("float32", 1, 32, 4, 128, 32, 0, 0)

    @pytest.mark.parametrize("shape", [(8, 2, 2, 4, 8), (8, 4, 2, 16), (8, 128)])
    def test_pages_of_an_unknown_shape_are_opaque(self, shape: tuple[int, ...]) -> None:
        config = cache_config(num_layers=1)
        caches = {names(config)[0]: torch.zeros(shape)}
        (layer,) = describe_caches(engine_config("inproc"), config, caches, []).layout.layers
        assert layer.slots is None

    def test_pages_that_the_engine_packs_its_own_way_are_opaque(self) -> None:
        config = cache_config(num_layers=1)
        caches = {names(config)[0]: torch.zeros(8, *SHAPE.logical_page)}
        registration = describe_caches(
            engine_config("inproc"), config, caches, [], {"packing": "amx"}, is_packed=True
        )
        assert registration.layout.layers[0].slots is None
        assert registration.fields["packing"] == "amx"

    @pytest.mark.parametrize(
        ("num_kernel_blocks", "message"), [(7, "7 kernel blocks for 8 blocks"), (12, "12 kernel blocks")]
    )
    def test_a_cache_of_another_size_is_refused(self, num_kernel_blocks: int, message: str) -> None:
        config = cache_config(num_layers=1)
        cache = torch.zeros(num_kernel_blocks, *SHAPE.logical_page)
        with pytest.raises(ConfigurationError, match=message):
            describe_caches(engine_config("inproc"), config, {names(config)[0]: cache}, [])

    def test_a_cache_that_is_in_no_group_is_refused(self) -> None:
        with pytest.raises(ConfigurationError, match=r"registered: \['odd'\]"):
            describe_caches(engine_config("inproc"), cache_config(), {"odd": torch.zeros(8, 4)}, [])

    def test_a_uniform_cache_of_other_layers_is_refused(self) -> None:
        worker = HandoffWorker(engine_config("inproc"), cache_config(), InProcTransport(), ConnectorOptions())
        with pytest.raises(ConfigurationError, match="has 3 rows, but the configuration has 2 tensors"):
            worker.register_cross_layers_kv_cache(torch.zeros(3, 8, *SHAPE.logical_page))
        worker.shutdown()
