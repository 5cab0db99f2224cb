"""How the adapter translates vLLM's configuration, requests and calls, without an engine."""

from __future__ import annotations

import itertools
import json
import time
from functools import partial
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from vllm.sampling_params import SamplingParams
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.utils import check_stop
from vllm.v1.kv_cache_interface import FullAttentionSpec as VllmAttentionSpec
from vllm.v1.kv_cache_interface import MambaSpec as VllmMambaSpec
from vllm.v1.request import RequestStatus

from kvferry.connector.config import EngineConfig, KVTransferConfig, ModelConfig
from kvferry.connector.handoff.events import GroupBlocks
from kvferry.connector.identity.content import content_digest
from kvferry.connector.kv_cache_specs import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from kvferry.connector.p2p.options import ConnectorOptions
from kvferry.connector.p2p.orders import HandoffMetadata, OfferOrder, RequestOrders, WorkerAddress
from kvferry.connector.p2p.params import STOPPED_TO_MOVE
from kvferry.connector.p2p.scheduler import HandoffScheduler
from kvferry.connector.p2p.worker import HandoffWorker
from kvferry.connector.stats import COUNTERS, METRICS, KVConnectorStats, TransferRecord
from kvferry.connector.vllm import KvferryConnector
from kvferry.connector.vllm.adapter import _scheduler_side
from kvferry.connector.vllm.config import (
    answer_fields,
    can_continue_answers,
    connector_options,
    draft_layers,
    engine_config,
    host_fields,
    kv_cache_config,
    require_whole_caches,
    served_groups,
    state_fields,
)
from kvferry.connector.vllm.lora import adapter_identity
from kvferry.connector.vllm.memory import PoolPlacement
from kvferry.connector.vllm.metadata import LoadErrors, StepMetadata, WorkerHandshake
from kvferry.connector.vllm.scheduler import SchedulerSide, VllmRequest, client_request_id
from kvferry.connector.vllm.sharing import SharedOffers
from kvferry.connector.vllm.stats import KvferryStats
from kvferry.connector.vllm.windows import WindowBlocks
from kvferry.connector.vllm.worker import WorkerSide
from kvferry.lab.engine.types import EngineStats
from kvferry.lab.node.metrics import NodeMetrics
from kvferry.transports.errors import ConfigurationError
from kvferry.transports.registry import create_transport
from tests.support.handoff_orders import ordered, orders_of
from tests.support.metrics_page import declared

RECORD = TransferRecord("r", "shm", "mapped", "per-layer", 2, 8, 8, 4096, 0.5)


def test_it_is_a_connector_of_vllm():
    from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1, supports_hma

    assert issubclass(KvferryConnector, KVConnectorBase_V1)
    assert not KvferryConnector.__abstractmethods__
    # An older vLLM cannot be told about failed loads of several groups. For a connector that does not support
    # several groups it makes a single one.
    assert supports_hma(KvferryConnector) == hasattr(KVConnectorBase_V1, "get_transfer_results")


def test_vllm_counts_the_tokens_that_it_loads_as_those_of_a_peer():
    source = pytest.importorskip("vllm.v1.metrics.cache_hit_source").CacheHitSource
    assert KvferryConnector._cache_hit_source is source.P2P


def test_vllm_finds_it_by_name_alone():
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    assert KVConnectorFactory.get_connector_class_by_name("KvferryConnector") is KvferryConnector


class TestOptions:
    def test_defaults(self):
        assert connector_options({}).transport == "shm"

    def test_everything_a_user_may_write(self):
        options = connector_options(
            {"transport": "zeromq", "transport_options": {"port": 1}, "lease_s": 10, "address": "a"}
        )
        assert options.transport == "zeromq"
        assert options.transport_options == {"port": 1}
        assert options.handoff.lease_s == 10

    @pytest.mark.parametrize("mapping", [{"transport": 1}, {"transport": {}}, {"lease": 1}, {"lease_s": "1"}])
    def test_refused(self, mapping):
        with pytest.raises(ConfigurationError) as caught:
            connector_options(mapping)
        assert caught.value.key == next(iter(mapping))

    def test_an_unknown_option_is_reported_with_the_nearest_name_while_vllm_reads_its_configuration(self):
        for options, nearest in (
            ({"leas_s": 1}, "lease_s"),
            ({"transport_option": {}}, "transport_options"),
            ({"transport": "zeromk"}, "zeromq"),
            ({"transport": "zeromq", "transport_options": {"prot": 1}}, "port"),
        ):
            with pytest.raises(ConfigurationError, match=f"did you mean '{nearest}'"):
                KvferryConnector.requires_piecewise_for_cudagraph(options)
        assert not KvferryConnector.requires_piecewise_for_cudagraph({"lease_s": 20})


class TestHeads:
    """The number of KV heads of the whole model, which does not follow from a rank's own caches."""

    @staticmethod
    def _heads(total, num_ranks, *heads_by_layer):
        specs = [FullAttentionSpec(16, num_heads, 8, torch.float32) for num_heads in heads_by_layer]
        groups = tuple(KVCacheGroupSpec((f"layer {i}",), spec) for i, spec in enumerate(specs))
        model = SimpleNamespace(model="m", dtype=torch.float32, max_model_len=64)
        if total is not None:
            model.get_total_num_kv_heads = lambda: total
        vllm_config = SimpleNamespace(
            parallel_config=SimpleNamespace(tensor_parallel_size=num_ranks),
            model_config=model,
            cache_config=SimpleNamespace(block_size=16),
            scheduler_config=SimpleNamespace(max_num_batched_tokens=2048, max_num_seqs=8),
            kv_transfer_config=KVTransferConfig("KvferryConnector", "kv_both"),
        )
        return engine_config(vllm_config, KVCacheConfig(8, (), groups)).model.num_kv_heads

    @pytest.mark.parametrize(("total", "num_ranks", "own"), [(8, 1, 8), (8, 4, 2), (2, 4, 1)])
    def test_ranks_split_or_share_them(self, total, num_ranks, own):
        assert self._heads(total, num_ranks, own, own) == total

    def test_ranks_are_distinguished_if_the_number_is_unknown(self):
        assert self._heads(8, 2, 4, 2) == 0
        assert self._heads(None, 2, 4) == 0


class TestRefusedSettings:
    """A setting of vLLM that handoffs do not support ends the start with an error that names it."""

    @pytest.mark.parametrize(
        ("part", "key", "value"),
        [
            ("parallel_config", "prefill_context_parallel_size", 2),
            ("parallel_config", "decode_context_parallel_size", 2),
            ("model_config", "enable_sleep_mode", True),
            ("cache_config", "calculate_kv_scales", True),
        ],
    )
    def test_settings(self, part, key, value):
        parts = {name: SimpleNamespace() for name in ("parallel_config", "model_config", "cache_config")}
        setattr(parts[part], key, value)
        with pytest.raises(ConfigurationError, match=key) as caught:
            engine_config(SimpleNamespace(**parts, kv_transfer_config=None), KVCacheConfig(8, (), ()))
        assert caught.value.key == key

    def test_a_kind_of_cache_whose_blocks_do_not_hold_tokens(self):
        class CircularBufferSpec(SimpleNamespace):
            """One block per request, as in vLLM for keys that are not compressed yet."""

        spec = CircularBufferSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32)
        group = SimpleNamespace(layer_names=["layer"], kv_cache_spec=spec)
        with pytest.raises(ConfigurationError, match="CircularBufferSpec"):
            kv_cache_config(SimpleNamespace(num_blocks=8, kv_cache_groups=[group]))

    @pytest.mark.parametrize(
        ("kv_caches", "num_bytes"), [({}, 0), ({"layer": torch.zeros(8, 100, dtype=torch.int8)}, 800)]
    )
    def test_a_cache_that_vllm_registers_only_partly(self, kv_caches, num_bytes):
        group = SimpleNamespace(
            layer_names=["layer"], kv_cache_spec=SimpleNamespace(real_page_size_bytes=128)
        )
        config = SimpleNamespace(num_blocks=8, kv_cache_groups=[group])
        with pytest.raises(ConfigurationError, match=f"keeps 1024 bytes, .* registers {num_bytes}"):
            require_whole_caches(config, kv_caches)


class TestGroupsThatAreNotTransferred:
    """vLLM marks a group whose contents can be made from those of another group.

    It is left out; nothing is refused.
    """

    @pytest.fixture
    def config(self):
        class HotSpec(SimpleNamespace):
            """A kind of cache that kvferry does not know."""

        spec = FullAttentionSpec(16, 1, 8, torch.float32)
        marks = {"hot": HotSpec(block_size=16), "copy": spec}
        groups = [
            SimpleNamespace(layer_names=[name], kv_cache_spec=kind, enable_kv_transfer=False)
            for name, kind in marks.items()
        ]
        whole = SimpleNamespace(layer_names=["layer"], kv_cache_spec=spec)
        return SimpleNamespace(num_blocks=8, kv_cache_groups=[groups[0], whole, groups[1]])

    def test_the_other_groups_are_served(self, config):
        assert [group.layer_names for group in kv_cache_config(config).kv_cache_groups] == [("layer",)]
        config.kv_cache_groups[1].kv_cache_spec = SimpleNamespace(real_page_size_bytes=128)
        require_whole_caches(config, {"layer": torch.zeros(8, 128, dtype=torch.int8)})

    def test_only_block_tables_of_the_other_groups_are_offered_and_loaded(self, config):
        side = _side(served_groups=tuple(served_groups(config)))
        offering, loading = _request("r", {"do_remote_decode": True}), _request("s", TestSharedOffers.PARAMS)
        for request in (offering, loading):
            side.on_new_request(request)
        blocks = SimpleNamespace(get_block_ids=lambda: ([7], [1, 2, 3], [8]))
        side.update_state_after_alloc(loading, blocks, 40)
        offering.get_finished_reason, offering.num_computed_tokens = lambda: "length", 40
        side.set_handshake_metadata({0: WorkerHandshake(WorkerAddress("shm://@a", 1, 0))})
        _, params = side.request_finished(offering, ([9], [4, 5, 6], [9]))
        assert params["remote_block_ids"] == [[4, 5, 6]]
        (load,) = orders_of(side.build_connector_meta().orders, "load")["s"]
        assert load.block_ids == (1, 2, 3)

    def test_a_pool_of_their_own_is_refused(self, config):
        config.kv_cache_groups[1].host_resident = True
        with pytest.raises(ConfigurationError, match="pool of their own"):
            kv_cache_config(config)


class TestDraftLayers:
    """A draft model's layers, which vLLM puts into the same groups as the target model's, or into others."""

    VLLM = SimpleNamespace(
        speculative_config=SimpleNamespace(draft_model_config=object()),
        model_config=SimpleNamespace(get_total_num_hidden_layers=lambda: 2),
    )
    TARGET: ClassVar = ["model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn"]

    @pytest.mark.parametrize(
        "name",
        [
            "model.layers.2.self_attn.attn",
            "draft_model.model.layers.0.self_attn.attn",
            "mtp.layers.0.self_attn.attn",
        ],
    )
    def test_they_are_known_by_their_names(self, name):
        assert draft_layers(self.VLLM, [*self.TARGET, name]) == [name]
        assert draft_layers(SimpleNamespace(speculative_config=None), [*self.TARGET, name]) == []

    def test_an_unknown_kind_of_cache_is_left_out(self):
        class RingSpec(SimpleNamespace):
            """A kind of cache that kvferry does not know."""

        spec, ring = FullAttentionSpec(16, 1, 8, torch.float32), RingSpec(block_size=16)
        names = ["draft_model.model.layers.0"], self.TARGET
        groups = [
            SimpleNamespace(layer_names=names, kv_cache_spec=kind)
            for names, kind in zip(names, (ring, spec), strict=True)
        ]
        config = SimpleNamespace(num_blocks=8, kv_cache_groups=groups)
        assert list(served_groups(config, self.VLLM)) == [1]
        assert [group.layer_names for group in kv_cache_config(config, self.VLLM).kv_cache_groups] == [
            tuple(self.TARGET)
        ]
        with pytest.raises(ConfigurationError, match="RingSpec"):
            kv_cache_config(config)

    def test_a_group_of_a_draft_model_does_not_count_as_loaded(self):
        """Its blocks are zeroed by vLLM, where vLLM zeroes blocks, before they are loaded."""
        spec = FullAttentionSpec(16, 1, 8, torch.float32)
        layers = [
            [self.TARGET[0], "draft_model.model.layers.0"],
            ["draft_model.model.layers.1"],
            [self.TARGET[1]],
        ]
        groups = [SimpleNamespace(layer_names=names, kv_cache_spec=spec) for names in layers]
        connector = object.__new__(KvferryConnector)
        connector._vllm_config = self.VLLM
        connector._kv_cache_config = SimpleNamespace(num_blocks=8, kv_cache_groups=groups)
        assert connector.get_loaded_kv_cache_group_ids(None) == (0, 2)

    def test_their_pages_are_zeroed_before_a_load(self):
        """A peer without the draft model does not fill them, and they may hold what another request left
        there.
        """
        cache = torch.ones(16, 4)
        half = SimpleNamespace(allocate_kv_memory=torch.zeros, submit=lambda *args, **kwargs: None)
        side = WorkerSide(SimpleNamespace(), None, half)
        side._draft_caches = [(1, cache.unflatten(0, (8, 2)))]
        loads = (GroupBlocks(0, (1, 2)), GroupBlocks(0, (0, 5, 6)))
        side.start_loads(StepMetadata(ordered("d", load=loads)))
        assert sorted(set((cache.sum(dim=1) == 0).nonzero().flatten().tolist())) == [10, 11, 12, 13]


class TestStates:
    """Recurrent states, of which each request has one."""

    @staticmethod
    def _config(**settings):
        spec = VllmMambaSpec(
            block_size=512, shapes=((3, 8), (2, 4, 8)), dtypes=(torch.float32, torch.bfloat16), **settings
        )
        group = SimpleNamespace(layer_names=["layer"], kv_cache_spec=spec)
        return SimpleNamespace(num_blocks=8, kv_cache_groups=[group])

    def test_the_group_is_one_of_whole_states(self):
        (group,) = kv_cache_config(self._config(page_size_padded=256)).kv_cache_groups
        assert isinstance(group.kv_cache_spec, MambaSpec)
        assert group.kv_cache_spec.block_size == 512
        assert (group.kv_cache_spec.state_size_bytes, group.kv_cache_spec.page_size_bytes) == (224, 256)

    def test_peers_compare_the_order_of_its_axes(self):
        """They may differ between machines, although the number of bytes does not."""
        assert state_fields(self._config()) == {"states": "float32[3, 8] bfloat16[2, 4, 8]"}
        spec = SimpleNamespace(block_size=16)
        attention = SimpleNamespace(layer_names=["layer"], kv_cache_spec=spec)
        assert state_fields(SimpleNamespace(kv_cache_groups=[attention])) == {}

    def test_a_vllm_version_that_registers_the_parts_of_a_state_is_refused(self):
        with pytest.raises(ConfigurationError, match="registers 0"):
            require_whole_caches(self._config(), {"layer": [torch.zeros(8, 3, 8), torch.zeros(8, 2, 4, 8)]})

    @pytest.mark.parametrize(
        ("role", "max_tokens", "prompt_logprobs", "num_left"),
        [
            ("kv_both", 1, None, 39),
            ("kv_both", 2, None, 40),
            ("kv_both", 1, 1, 40),
            ("kv_consumer", 1, None, 40),
        ],
    )
    def test_the_last_token_is_left_out_only_of_a_prompt_that_can_be_offered(
        self, role, max_tokens, prompt_logprobs, num_left
    ):
        """The decode node computes it.

        A request that wants more than the offer gets its right answer instead.
        """
        state = MambaSpec(512, ((3, 8),), (torch.float32,))
        side = _side(role=role, spec=state)
        request = _request("r", {"do_remote_decode": True})
        request.max_tokens = max_tokens
        request.sampling_params = SimpleNamespace(prompt_logprobs=prompt_logprobs)
        shared, request._all_token_ids = request.prompt_token_ids, list(request.prompt_token_ids)
        side.on_new_request(request)
        assert len(request.prompt_token_ids) == len(request._all_token_ids) == num_left
        assert request.num_prompt_tokens == num_left
        assert len(shared) == 40

    def test_states_of_unlike_layers_in_one_group_are_states_too(self):
        states = {f"layer {size}": MambaSpec(512, ((size, 8),), (torch.float32,)) for size in (2, 3)}
        config = KVCacheConfig(
            8, (), (KVCacheGroupSpec(tuple(states), UniformTypeKVCacheSpecs(512, states)),)
        )
        assert HandoffScheduler(KVTransferConfig("KvferryConnector", "kv_producer"), config).offers_state
        assert not HandoffScheduler(KVTransferConfig("KvferryConnector", "kv_consumer"), config).offers_state

    def test_a_request_that_is_refused_keeps_its_prompt(self):
        side = _side(spec=MambaSpec(512, ((3, 8),), (torch.float32,)))
        for _ in range(2):  # the second one has an id that is in use
            request = _request("r", {"do_remote_decode": True})
            request.max_tokens, request.sampling_params = 1, SimpleNamespace(prompt_logprobs=None)
            request._all_token_ids = list(request.prompt_token_ids)
            side.on_new_request(request)
        assert request.num_prompt_tokens == len(request.prompt_token_ids) == 40


class TestPacking:
    """The order in which CPU attention stores keys.

    Older versions of vLLM have it elsewhere, or not at all.
    """

    @staticmethod
    def _packing(**layer):
        layer = SimpleNamespace(
            get_attn_backend=lambda: SimpleNamespace(get_name=lambda: "CPU_ATTN"), **layer
        )
        vllm_config = SimpleNamespace(
            compilation_config=SimpleNamespace(static_forward_context={"layer": layer}),
            cache_config=SimpleNamespace(cache_dtype="auto"),
        )
        return host_fields(vllm_config, ["layer"])["packing"]

    def test_it_is_found(self):
        assert self._packing(isa="amx") == self._packing(impl=SimpleNamespace(isa="amx")) == "amx"

    def test_an_unknown_order_is_refused(self):
        with pytest.raises(ConfigurationError, match="order"):
            self._packing(impl=None)


class TestPoolPlacement:
    @pytest.fixture
    def pool(self):
        return torch.zeros(4096, dtype=torch.int8)

    @pytest.fixture
    def placement(self, pool):
        return PoolPlacement(lambda num_bytes: pool)

    def test_only_the_caches_allocation_is_replaced(self, placement, pool):
        ordinary = torch.zeros
        with placement.answering(4096):
            others = [
                torch.zeros(4096),
                torch.zeros(4095, dtype=torch.int8),
                torch.zeros(2, 2048, dtype=torch.int8),
                torch.zeros(4096, dtype=torch.int8, device="meta"),
            ]
            cache = torch.zeros(4096, dtype=torch.int8, device=torch.device("cpu"))
            again = torch.zeros(4096, dtype=torch.int8)
        assert placement.holds(cache[64:].view(torch.float32))
        assert not any(placement.holds(other) for other in (*others[:3], again))
        assert torch.zeros is ordinary

    def test_if_the_transport_has_no_memory_vllm_allocates_its_own(self, caplog):
        def nothing_left(num_bytes):
            raise ConfigurationError("no memory")

        placement = PoolPlacement(nothing_left)
        with placement.answering(64):
            cache = torch.zeros(64, dtype=torch.int8)
        assert cache.tolist() == [0] * 64
        assert not placement.holds(cache)
        assert "stays in vLLM's own memory: no memory" in caplog.text

    def test_torchs_function_is_restored_after_an_exception(self, placement):
        ordinary = torch.zeros
        with pytest.raises(RuntimeError), placement.answering(64):
            raise RuntimeError
        assert torch.zeros is ordinary


@pytest.mark.parametrize(("device_type", "is_wanted"), [("cpu", True), ("cuda", False)])
def test_only_main_memory_is_allocated_by_the_transport(device_type, is_wanted):
    """A cache on a GPU stays in the memory that vLLM allocates."""
    half = HandoffWorker(
        EngineConfig(ModelConfig("m", "float32", 64)),
        KVCacheConfig(8, (), ()),
        create_transport("shm", {}),
        ConnectorOptions(),
    )
    vllm_config = SimpleNamespace(device_config=SimpleNamespace(device_type=device_type))
    tensors = SimpleNamespace(kv_cache_tensors=[SimpleNamespace(size=4096)])
    side = WorkerSide(vllm_config, tensors, half)
    assert (side.get_mem_pool_context() is not None) == is_wanted
    side.shutdown()


SIZE = {"block_size": 16, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
ATTENTION, VLLM_ATTENTION = FullAttentionSpec(**SIZE), VllmAttentionSpec(**SIZE)


def _vllm_config():
    return SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        model_config=SimpleNamespace(
            model="m", dtype=torch.float32, max_model_len=64, get_diff_sampling_param=dict
        ),
        cache_config=SimpleNamespace(block_size=16, enable_prefix_caching=True),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=2048, max_num_seqs=8),
        kv_transfer_config=KVTransferConfig("KvferryConnector", "kv_both"),
    )


def _side(has_prefix_cache=True, role="kv_both", served_groups=(), spec=ATTENTION):
    config = KVCacheConfig(8, (), (KVCacheGroupSpec(("layer",), spec),))
    half = HandoffScheduler(KVTransferConfig("KvferryConnector", role), config)
    return SchedulerSide(half, SharedOffers(has_prefix_cache), WindowBlocks({0: spec}), served_groups)


def _request(request_id, params):
    return SimpleNamespace(
        request_id=request_id,
        prompt_token_ids=[7] * 40,
        all_token_ids=[7] * 40,
        num_prompt_tokens=40,
        num_output_tokens=0,
        num_computed_tokens=0,
        arrival_time=time.time(),
        kv_transfer_params=params,
        get_finished_reason=lambda: None,
        lora_request=None,
        cache_salt=None,
        mm_features=[],
        prompt_embeds=None,
    )


class TestEarlyOffers:
    """In a rendezvous the adapter offers what earlier steps have computed of a prompt."""

    WISH: ClassVar = {"do_remote_decode": True, "rendezvous": "0123456789abcdef" * 2}

    @staticmethod
    def step(new=(), cached=(), preempted=(), resumed=()):
        """One of vLLM's steps: new requests as (id, blocks), and others as (id, new blocks, tokens computed
        before).
        """
        return SimpleNamespace(
            scheduled_new_reqs=[SimpleNamespace(req_id=name, block_ids=([*blocks],)) for name, blocks in new],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[name for name, _, _ in cached],
                new_block_ids=[([*blocks],) if blocks else None for _, blocks, _ in cached],
                num_computed_tokens=[number for _, _, number in cached],
                resumed_req_ids=set(resumed),
            ),
            preempted_req_ids=set(preempted),
        )

    @pytest.fixture
    def begun(self):
        """A side with a request of 40 tokens, whose first step was scheduled."""
        side, request = _side(), _request("r", self.WISH)
        side.set_handshake_metadata({0: WorkerHandshake(WorkerAddress("shm:x", 5, 0))})
        side.on_new_request(request)
        first = side.build_connector_meta(self.step(new=[("r", [4])]))
        # A prefix hit may be of blocks that the same step computes, so nothing is offered with it.
        assert not orders_of(first.orders, "offer")
        return side, request

    def test_each_step_offers_what_the_steps_before_have_computed(self, begun):
        side, request = begun
        request.num_computed_tokens = 16
        opened = orders_of(side.build_connector_meta(self.step(cached=[("r", [5], 16)])).orders, "offer")["r"]
        assert (opened.num_ready, opened.num_tokens, opened.block_ids) == (16, 40, ((4,),))
        request.num_computed_tokens = 32
        extended = orders_of(
            side.build_connector_meta(self.step(cached=[("r", [6], 32)])).orders, "extension"
        )["r"]
        assert (extended.num_ready, extended.block_ids) == (32, ((4, 5),))
        # A step in which it has no share changes nothing.
        assert side.build_connector_meta(self.step()).orders.is_empty()

    @pytest.mark.parametrize(
        "loss",
        [
            {"preempted": ["r"]},
            {"resumed": ["r"]},  # preempted without being listed, and scheduled again
            {},  # preempted without being listed
        ],
        ids=["listed", "resumed", "unlisted"],
    )
    def test_an_offer_ends_before_the_step_that_overwrites_its_blocks(self, loss, begun):
        side, request = begun
        request.num_computed_tokens = 16
        side.build_connector_meta(self.step(cached=[("r", [5], 16)]))
        request.num_computed_tokens = 0
        step = side.build_connector_meta(self.step(**loss))
        assert step.preempted == {"r"}
        # It is not offered again: its consumer was denied.
        request.num_computed_tokens = 16
        again = side.build_connector_meta(self.step(cached=[("r", [8], 16)]))
        assert (again.orders.is_empty(), again.preempted) == (True, frozenset())

    @pytest.mark.parametrize(
        ("kind", "keeps_all"),
        [
            ("FullAttentionSpec", True),
            ("MLAAttentionSpec", True),
            ("SlidingWindowSpec", False),
            ("ChunkedLocalAttentionSpec", False),
        ],
    )
    def test_only_caches_that_keep_every_block_are_offered_early(self, kind, keeps_all):
        size = {"block_size": 16, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
        looks_back = {"sliding_window": 32, "attention_chunk_size": 32}
        spec = type(kind, (SimpleNamespace,), {})(**size, **looks_back)
        group = SimpleNamespace(layer_names=["layer"], kv_cache_spec=spec)
        (known,) = kv_cache_config(SimpleNamespace(num_blocks=8, kv_cache_groups=[group])).kv_cache_groups
        assert isinstance(known.kv_cache_spec, FullAttentionSpec) == keeps_all

    @pytest.mark.parametrize("is_zeroed", [False, True])
    def test_a_prompt_is_offered_at_its_end_where_vllm_zeroes_blocks(self, is_zeroed):
        """vLLM would zero the blocks of a preempted request while a consumer may still read them."""
        group = SimpleNamespace(layer_names=["layer"], kv_cache_spec=VLLM_ATTENTION)
        pool = SimpleNamespace(num_blocks=8, kv_cache_groups=[group], needs_kv_cache_zeroing=is_zeroed)
        side, request = _scheduler_side(_vllm_config(), pool), _request("r", self.WISH)
        side.set_handshake_metadata({0: WorkerHandshake(WorkerAddress("shm:x", 5, 0))})
        side.on_new_request(request)
        side.build_connector_meta(self.step(new=[("r", [4])]))
        request.num_computed_tokens = 16
        opened = orders_of(side.build_connector_meta(self.step(cached=[("r", [5, 6], 16)])).orders, "offer")
        assert bool(opened) != is_zeroed
        request.num_computed_tokens, request.get_finished_reason = 40, lambda: "length"
        side.request_finished(request, ([4, 5, 6],))
        orders = side.build_connector_meta(self.step()).orders
        (order,) = orders.requests
        assert (order.offer.block_ids if is_zeroed else order.completion) == ((4, 5, 6),)

    def test_an_engine_that_shares_its_address_does_not_say_that_it_can_be_met(self):
        side, request = _side(), _request("r", {"do_remote_decode": True})
        side._can_meet = False
        side.set_handshake_metadata({0: WorkerHandshake(WorkerAddress("shm:x", 5, 0))})
        side.on_new_request(request)
        request.num_computed_tokens, request.get_finished_reason = 40, lambda: "length"
        _, params = side.request_finished(request, ([4, 5, 6],))
        assert "rendezvous_supported" not in params


class TestContinuing:
    """Which nodes may share one answer: those that are known to give the same one."""

    FIELDS: ClassVar = {"weights": "w", "tokenizer": "t"}

    @staticmethod
    def node(fields, epoch=5, answer_fields=None, can_continue=True):
        config = KVCacheConfig(8, (), (KVCacheGroupSpec(("layer",), ATTENTION),))
        half = HandoffScheduler(KVTransferConfig("KvferryConnector", "kv_both"), config)
        side = SchedulerSide(
            half,
            SharedOffers(True),
            WindowBlocks({0: ATTENTION}),
            answer_fields=answer_fields or {},
            can_continue=can_continue,
        )
        side.set_handshake_metadata({0: WorkerHandshake(WorkerAddress("shm:x", epoch, 0), fields)})
        return side

    @staticmethod
    def asked(side, params, lora_request=None):
        request = _request("r", params)
        request.lora_request, request.num_computed_tokens = lora_request, 40
        request.get_finished_reason = lambda: "length"
        side.on_new_request(request)
        return side.request_finished(request, ([4, 5, 6],))[1]

    def test_each_field_decides_and_an_unknown_tokenizer_is_that_of_one_start(self):
        known = self.node(self.FIELDS).identity
        assert known == self.node(dict(self.FIELDS), epoch=6).identity
        for changed in ({"weights": "x"}, {"tokenizer": "u"}, {"dtype": "half"}):
            assert self.node({**self.FIELDS, **changed}).identity != known
        assert self.node(self.FIELDS, answer_fields={"sampling": "{}"}).identity != known
        unknown = {**self.FIELDS, "tokenizer": ""}
        assert self.node(unknown).identity != self.node(unknown, epoch=6).identity
        assert _side().identity == ""

    @pytest.mark.parametrize(
        ("sampling", "more", "limits"),
        [
            ({}, {}, (0, 0)),
            ({"max_tokens": 6}, {"generation_config": "auto"}, (6, 0)),
            ({"max_tokens": 6}, {"override_generation_config": {"max_new_tokens": 6}}, (6, 6)),
            ({"max_tokens": 6}, {"generation_config": "/a/folder"}, (6, 6)),
        ],
    )
    def test_the_servers_own_limits_are_described(self, sampling, more, limits):
        config = _vllm_config()
        vars(config.model_config).update(more, get_diff_sampling_param=lambda: sampling)
        fields = answer_fields(config)
        assert (fields["default_max_tokens"], fields["most_tokens"]) == limits

    def test_other_stop_tokens_of_a_generation_config_are_other_answers(self):
        config = _vllm_config()
        before = answer_fields(config)
        config.model_config.try_get_generation_config = lambda: {"eos_token_id": [1, 2]}
        assert answer_fields(config) != before

    @pytest.mark.parametrize(
        ("sampling", "processors", "can"),
        [
            ({"temperature": 0.5, "repetition_penalty": 1.1, "max_tokens": 6}, None, True),
            ({"presence_penalty": 0.5}, None, False),
            ({"frequency_penalty": -0.5}, None, False),
            ({"presence_penalty": 0.0}, [], True),
            ({}, ["a.Processor"], False),
        ],
    )
    def test_a_server_whose_settings_look_at_the_answer_continues_none(self, sampling, processors, can):
        config = _vllm_config()
        vars(config.model_config).update(
            logits_processors=processors, get_diff_sampling_param=lambda: sampling
        )
        assert can_continue_answers(config) is can
        side = self.node(self.FIELDS, can_continue=can)
        assert ("remote_identity" in self.asked(side, {"describe": True})) is can

    def test_a_question_is_answered_with_the_identity(self):
        side = self.node(self.FIELDS)
        told = self.asked(side, {"describe": True})
        assert told["identity_fields"] == self.FIELDS
        assert told["remote_identity"] == side.identity
        assert "remote_identity" not in self.asked(side, {"do_remote_decode": True})

    def test_a_node_that_does_not_know_its_identity_names_none(self):
        side = self.node({})
        assert "remote_identity" not in self.asked(side, {"describe": True})

    @pytest.mark.parametrize("fields", [{}, {"weights": "other", "tokenizer": "t"}, FIELDS])
    def test_it_continues_only_after_a_token_of_its_own_model(self, fields):
        side, request = self.node(fields), _request("r", {})
        request.kv_transfer_params = {"continues": {"model": self.node(self.FIELDS).identity}}
        request.max_tokens, request.stop_reason = 8, None
        request.sampling_params = sampling = SamplingParams(stop_token_ids=[1], min_tokens=3)
        sampling.update_from_generation_config({}, eos_token_id=2)
        side.on_new_request(request)
        if fields == self.FIELDS:
            assert (request.max_tokens, request.stop_reason) == (8, None)
        else:
            assert request.max_tokens == 1
            assert request.stop_reason.startswith("kvferry refused to continue: ")
            for token in (1, 2, 3):
                request.pooling_params, request.output_token_ids, request.num_tokens = None, [token], 2
                request.num_output_tokens = 1
                assert check_stop(request, max_model_len=100)
                assert request.status is RequestStatus.FINISHED_LENGTH_CAPPED  # no stop text gives this
            assert (sampling.stop_token_ids, sampling.eos_token_id, sampling.min_tokens) == ([1], 2, 3)
        side.request_finished(request, ([],))
        assert side.num_remembered_requests == 0


class TestMoving:
    """An answer stops for another node after the next token that vLLM has not begun to compute."""

    NAME = "5" * 32

    def stopped(self, *, num_ahead=0, max_tokens=20, reason="length"):
        """Return a request that was ordered to stop, and what became of it."""
        side = TestContinuing.node(TestContinuing.FIELDS)
        request = _request("r", {"continues": {"model": side.identity, "move_as": self.NAME}})
        request.max_tokens, request.num_output_tokens, request.stop_reason = max_tokens, 3, None
        request.num_output_placeholders = num_ahead
        side.on_new_request(request)
        order = _request("order", {"move": self.NAME})
        side.on_new_request(order)
        side.build_connector_meta()
        request.get_finished_reason = lambda: reason
        request.all_token_ids, request.num_computed_tokens = [7] * 44, 43
        ended = side.request_finished(request, ([4, 5, 6],))
        side.request_finished(order, ([],))
        assert side.num_remembered_requests == ended[0]
        return request, ended

    def test_it_ends_with_the_next_token_and_says_in_its_stop_reason_what_it_offers(self):
        request, (keeps, params) = self.stopped()
        assert (request.max_tokens, keeps) == (4, True)
        sign, _, offer = request.stop_reason.partition(": ")
        assert sign + ": " == STOPPED_TO_MOVE
        assert json.loads(offer)["remote_num_tokens"] == 43
        assert json.loads(offer)["remote_lease"] == params["remote_lease"]

    def test_tokens_that_are_being_computed_are_waited_for(self):
        assert self.stopped(num_ahead=1)[0].max_tokens == 5

    def test_one_that_ends_there_by_itself_is_not_stopped(self):
        for ended in (self.stopped(max_tokens=4), self.stopped(reason="stop")):
            assert (ended[0].stop_reason, ended[1]) == (None, (False, None))


class TestWindowBlocks:
    """The blocks that the prompt's last token sees are held, because vLLM frees them when the request
    ends.
    """

    SPEC = SlidingWindowSpec(16, 1, 8, torch.float32, sliding_window=20)

    @pytest.fixture
    def pool(self):
        return BlockPool(num_gpu_blocks=16, enable_caching=False, hash_block_size=16)

    @pytest.fixture
    def windows(self, pool):
        windows = WindowBlocks({0: ATTENTION, 2: self.SPEC})
        windows.bind(pool)
        windows.follow("r", 67)  # its last token sees 47 to 66
        return windows

    @staticmethod
    def step(windows, blocks, num_computed, num_scheduled, *, is_new=False, **lists):
        tables = tuple([block.block_id for block in table] for table in blocks)
        new = (
            [SimpleNamespace(req_id="r", block_ids=tables, num_computed_tokens=num_computed)]
            if is_new
            else []
        )
        names = [] if is_new or not num_scheduled else ["r"]
        cached = SimpleNamespace(
            req_ids=names,
            new_block_ids=[tables] * len(names),
            num_computed_tokens=[num_computed] * len(names),
            resumed_req_ids=lists.get("resumed", set()),
        )
        windows.note_step(
            SimpleNamespace(
                scheduled_new_reqs=new,
                scheduled_cached_reqs=cached,
                num_scheduled_tokens={"r": num_scheduled},
                preempted_req_ids=lists.get("preempted"),
            )
        )

    @pytest.fixture
    def blocks(self, pool, windows):
        """A request's blocks in three groups, after two steps that computed the whole prompt."""
        blocks = [pool.get_new_blocks(5) for _ in range(3)]
        self.step(windows, [table[:3] for table in blocks], 0, 48, is_new=True)
        self.step(windows, [table[3:] for table in blocks], 48, 19)
        return blocks

    def test_what_vllm_has_freed_is_in_the_table_and_is_not_used_again(self, pool, windows, blocks):
        table = blocks[2]
        pool.free_blocks(table[2:0:-1])  # as if the next token saw 48 to 67
        assert pool.get_num_free_blocks() == 1  # of two: block 2 holds token 47
        ids = [block.block_id for block in table]
        filled = windows.fill("r", ([1], [2], [0, 0, 0, *ids[3:]]))
        assert filled == [[1], [2], [0, 0, *ids[2:]]]
        windows.release("r")
        assert (pool.get_num_free_blocks(), windows.num_requests) == (2, 0)

    def test_a_request_that_loses_its_blocks_holds_its_next_ones(self, pool, windows, blocks):
        self.step(windows, (), 0, 0, preempted={"r"})
        for table in blocks:
            pool.free_blocks(reversed(table))
        assert pool.get_num_free_blocks() == 15
        again = [pool.get_new_blocks(5) for _ in range(3)]
        self.step(windows, again, 0, 67, resumed={"r"})
        pool.free_blocks(reversed(again[2]))
        ids = [block.block_id for block in again[2]]
        assert windows.fill("r", ([], [], [0] * 5))[2] == [0, 0, *ids[2:]]
        windows.release("r")

    def test_a_request_that_ends_without_blocks_holds_none(self, pool, windows, blocks):
        for table in blocks:
            pool.free_blocks(reversed(table))
        assert windows.fill("r", ([], [], [])) == [[], [], []]
        windows.release("r")
        assert pool.get_num_free_blocks() == 15

    def test_nothing_is_held_for_layers_that_keep_everything(self, pool):
        windows = WindowBlocks({0: ATTENTION, 1: MambaSpec(512, ((3, 8),), (torch.float32,))})
        windows.bind(pool)
        windows.follow("r", 67)
        assert windows.num_requests == 0


class TestContent:
    """What two requests must have in common to use each other's blocks."""

    IMAGE = SimpleNamespace(identifier="image", mm_position=SimpleNamespace(offset=8, length=4))

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("prompt_token_ids", [7] * 39 + [8]),
            ("lora_request", SimpleNamespace(lora_name="adapter", lora_path="org/adapter", lora_int_id=1)),
            ("cache_salt", "salt"),
            ("mm_features", [IMAGE]),
            ("prompt_embeds", torch.ones(40, 4)),
        ],
    )
    def test_every_part_of_the_content_counts(self, key, value):
        one, other = _request("r", None), _request("s", None)
        assert self.digest(one) == self.digest(other)
        setattr(other, key, value)
        assert self.digest(one) != self.digest(other)

    @staticmethod
    def digest(request):
        return content_digest(VllmRequest.of(request), 40)

    def test_an_unidentified_image_is_not_offered(self):
        """Without a prefix cache vLLM does not distinguish images."""
        side, request = _side(has_prefix_cache=False), _request("r", {"do_remote_decode": True})
        request.mm_features = [self.IMAGE]
        side.on_new_request(request)
        assert side.get_num_new_matched_tokens(request, 0) == (0, False)
        assert side.build_connector_meta().orders.is_empty()

    def test_an_unidentified_image_is_not_loaded(self):
        side, request = _side(has_prefix_cache=False), _request("r", TestSharedOffers.PARAMS)
        request.mm_features = [self.IMAGE]
        side.on_new_request(request)
        assert side.get_num_new_matched_tokens(request, 0) == (40, True)
        side.update_state_after_alloc(request, TestSharedOffers.BLOCKS, 40)
        step = side.build_connector_meta()
        assert step.orders == HandoffMetadata(counts={"offered_requests_total/refused": 1})
        assert "--enable-prefix-caching" in step.refused["r"].reason


class TestAdapters:
    """An adapter is the same on two nodes if it has the same name and the same files, whatever their path."""

    @staticmethod
    def _adapter(folder, weights):
        folder.mkdir()
        (folder / "adapter_config.json").write_text("{}")
        (folder / "adapter_model.safetensors").write_bytes(weights)
        return SimpleNamespace(lora_name="adapter", lora_path=str(folder), lora_int_id=1)

    def test_its_identity_depends_on_its_contents_not_on_its_path(self, tmp_path):
        one = self._adapter(tmp_path / "one", b"weights")
        moved = self._adapter(tmp_path / "moved", b"weights")
        (tmp_path / "moved" / "README.md").write_text("anything")
        other = self._adapter(tmp_path / "other", b"weightz")
        assert adapter_identity(one) == adapter_identity(moved) != adapter_identity(other)

    def test_other_files_at_the_same_path_are_another_adapter(self, tmp_path):
        adapter = self._adapter(tmp_path / "one", b"weights")
        before = adapter_identity(adapter)
        (tmp_path / "one" / "adapter_model.safetensors").write_bytes(b"more weights")
        assert adapter_identity(adapter) != before

    def test_an_adapter_whose_files_changed_after_it_was_loaded_equals_no_other(self, tmp_path):
        """vLLM may hold the old ones, so another node that loaded the new ones must not take its cache."""
        adapter = self._adapter(tmp_path / "one", b"weights")
        before = adapter_identity(adapter)
        (tmp_path / "one" / "adapter_model.safetensors").write_bytes(b"more weights")
        elsewhere = self._adapter(tmp_path / "elsewhere", b"more weights")
        assert adapter_identity(adapter) not in (
            before,
            adapter_identity(elsewhere),
            adapter_identity(adapter),
        )
        loaded_again = SimpleNamespace(**vars(adapter) | {"lora_int_id": 2})
        assert adapter_identity(loaded_again) == adapter_identity(elsewhere)

    def test_the_same_files_with_another_name_are_another_adapter(self, tmp_path):
        adapter = self._adapter(tmp_path / "one", b"weights")
        renamed = SimpleNamespace(lora_name="renamed", lora_path=adapter.lora_path, lora_int_id=1)
        assert adapter_identity(adapter) != adapter_identity(renamed)

    def test_an_adapter_from_the_hub_is_identified_by_the_name_of_its_repository(self):
        fetched = [
            SimpleNamespace(lora_name="adapter", lora_path=path, lora_int_id=1)
            for path in ("org/one", "org/two")
        ]
        assert adapter_identity(fetched[0]) != adapter_identity(fetched[1])

    def test_a_space_does_not_move_from_the_name_to_the_repository(self):
        one = SimpleNamespace(lora_name="polite", lora_path="small org/adapter", lora_int_id=1)
        another = SimpleNamespace(lora_name="polite small", lora_path="org/adapter", lora_int_id=1)
        assert adapter_identity(one) != adapter_identity(another)

    def test_none(self):
        assert adapter_identity(None) is None


class TestExplaining:
    """A request with `explain` is answered with what vLLM's scheduler did for another one."""

    @pytest.fixture
    def side(self):
        return _side()

    @staticmethod
    def explained(side, wanted):
        question = _request("cmpl-why-0-1f", {"explain": wanted})
        side.on_new_request(question)
        side.get_num_new_matched_tokens(question, 0)
        side.update_state_after_alloc(question, SimpleNamespace(get_block_ids=lambda: ([9],)), 0)
        question.get_finished_reason = lambda: "length"
        question.num_output_tokens = 1
        _, params = side.request_finished(question, ([9],))
        return params["spans"]["spans"]

    @pytest.mark.parametrize("error", ["", "the offer is gone"])
    def test_the_spans_of_a_request_follow_each_other(self, side, error):
        # Malformed params are a load that fails at once; any load passes the same calls.
        request = _request("cmpl-known-0-1f", "nonsense")
        side.on_new_request(request)
        side.get_num_new_matched_tokens(request, 16)
        blocks = SimpleNamespace(get_block_ids=lambda: ([1, 2, 3],))
        side.update_state_after_alloc(request, blocks, 24)
        side.build_connector_meta()
        output = SimpleNamespace(finished_sending=None, finished_recving={request.request_id})
        output.kv_connector_worker_meta = LoadErrors({request.request_id: error})
        side.update_connector_output(output)
        side.update_state_after_alloc(request, blocks, 0)
        side.build_connector_meta()
        request.num_output_tokens = 1
        side.build_connector_meta()
        request.num_output_tokens, request.get_finished_reason = 2, lambda: "length"
        side.request_finished(request, ([],))
        for wanted in ("known", "cmpl-known"):
            spans = self.explained(side, wanted)
            computed = "prefill" if error else "first_step"
            assert [span["name"] for span in spans] == ["queue", "load_wait", computed, "generate", "node"]
        assert [span["error"] for span in spans] == ["", error, "", "", ""]
        *phases, node = spans
        assert node["start"] == phases[0]["start"] == request.arrival_time
        assert all(before["end"] == after["start"] for before, after in itertools.pairwise(phases))
        figures = phases[-1]["attributes"]
        assert (figures["prompt_tokens"], figures["output_tokens"], figures["cached_tokens"]) == (40, 2, 16)
        assert figures["loaded_tokens"] == (0 if error else 24)
        assert side.num_remembered_requests == 0

    @pytest.mark.parametrize("params", ["nonsense", 7, ["traceparent"], None])
    def test_malformed_params_do_not_matter_where_vllm_traces(self, side, params):
        request = _request("cmpl-known-0-1f", params)
        request.trace_headers = {"traceparent": "00-" + "1" * 32 + "-" + "2" * 16 + "-01"}
        side.on_new_request(request)
        request.get_finished_reason = lambda: "abort"
        side.request_finished(request, ([],))
        assert [span["name"] for span in self.explained(side, "known")] == ["queue", "node"]

    def test_of_a_request_that_is_not_known_there_are_no_spans(self, side):
        assert list(self.explained(side, "other")) == []


class TestRefusedRequests:
    """An exception in a scheduler method would end the engine, so a refused request becomes a load that
    fails.
    """

    @pytest.fixture
    def side(self):
        return _side()

    @pytest.fixture
    def request_(self):
        return _request("r", "nonsense")

    def test_it_becomes_a_load_that_fails_at_once(self, side, request_):
        side.on_new_request(request_)
        assert request_.kv_transfer_params is None
        assert side.get_num_new_matched_tokens(request_, 16) == (24, True)
        blocks = SimpleNamespace(get_block_ids=lambda: ([1, 2, 3],))
        side.update_state_after_alloc(request_, blocks, 24)
        refused = side.build_connector_meta().refused
        assert "kv_transfer_params" in refused["r"].reason
        assert side.get_num_new_matched_tokens(request_, 0) == (0, False)
        errors = LoadErrors({"r": refused["r"].reason}).aggregate(
            LoadErrors({"r": "", "ended before": "why"})
        )
        side.update_connector_output(
            SimpleNamespace(finished_sending=None, finished_recving={"r"}, kv_connector_worker_meta=errors)
        )
        request_.get_finished_reason = lambda: "length"
        # The prompt was computed here, so the answer is right, and the client is told why.
        assert side.request_finished(request_, ([],)) == (False, {"load_error": refused["r"].reason})
        assert side.num_remembered_requests == 0

    def test_a_load_that_failed_lets_others_free_their_blocks_first(self, side, request_):
        """vLLM looks at no request behind one that finds too few free blocks."""
        side.on_new_request(request_)
        side.update_state_after_alloc(request_, SimpleNamespace(get_block_ids=lambda: ([1, 2, 3],)), 24)
        assert "r" in side.build_connector_meta().refused
        ended = SimpleNamespace(finished_sending=None, finished_recving={"r"}, failed_recving={"r", "gone"})
        side.update_connector_output(ended)
        assert side.get_num_new_matched_tokens(request_, 0) == (None, False)
        assert side.get_num_new_matched_tokens(request_, 0) == (0, False)
        assert side.request_finished(request_, ([],)) == (False, None)
        assert side.num_remembered_requests == 0

    def test_no_state_is_left_of_a_refused_request_that_was_aborted(self, side, request_):
        side.on_new_request(request_)
        request_.get_finished_reason = lambda: "abort"
        assert side.request_finished(request_, ([],)) == (False, None)
        assert side.num_remembered_requests == 0


@pytest.mark.parametrize(
    ("request_id", "client_id"),
    [
        ("chatcmpl-ours-12ab34cd", "ours"),
        ("cmpl-ours-0-12ab34cd", "ours"),
        ("ours-12ab34cd", "ours"),
        # A client may choose any text, also what vLLM itself adds.
        ("chatcmpl-chatcmpl-ours-0-12ab34cd", "chatcmpl-ours-0"),
        ("cmpl-cmpl-ours-0-3-12ab34cd", "cmpl-ours-0"),
        ("-12ab34cd", ""),
        ("chatcmpl--12ab34cd", ""),
    ],
)
@pytest.mark.parametrize("is_random", [True, False])
def test_a_clients_id_is_found_in_the_engines(request_id, client_id, is_random, monkeypatch):
    monkeypatch.setenv("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "0" if is_random else "1")
    assert client_request_id(request_id if is_random else request_id.rpartition("-")[0]) == client_id


def test_a_request_id_cannot_forge_a_line_of_the_log(caplog):
    _side(role="kv_consumer").on_new_request(
        _request("r\n12:00:00 all is well \x1b[2J", {"do_remote_decode": True})
    )
    (line,) = caplog.messages
    assert line.isprintable()


def test_a_consumer_that_is_asked_for_an_offer_logs_that_it_ignores_this(caplog):
    side, request = _side(role="kv_consumer"), _request("r", {"do_remote_decode": True})
    side.on_new_request(request)
    assert "ignoring 'do_remote_decode' of request 'r': this node's kv_role 'kv_consumer'" in caplog.text
    request.get_finished_reason = lambda: "stop"
    assert side.request_finished(request, ([1, 2, 3],)) == (False, None)


class TestSharedOffers:
    """If several requests have the same offer, the first one loads.

    For the others, vLLM is told to ask again later.
    """

    PARAMS: ClassVar = {
        "do_remote_prefill": True,
        "remote_engine_id": "e",
        "remote_epoch": "1",
        "remote_request_id": "r",
        "remote_lease": "1",
        "remote_addresses": ["shm://@a"],
        "remote_num_tokens": 40,
        "remote_block_ids": [[1, 2, 3]],
        "tp_size": 1,
    }
    BLOCKS = SimpleNamespace(get_block_ids=lambda: ([1, 2, 3],))

    @pytest.fixture
    def requests(self):
        return [_request(f"{number}_r", self.PARAMS) for number in range(3)]

    @staticmethod
    def _end(side, request, failed=False):
        ended, failures = {request.request_id}, {request.request_id} if failed else set()
        side.update_connector_output(
            SimpleNamespace(finished_sending=None, finished_recving=ended, failed_recving=failures)
        )

    def test_the_others_continue_when_the_first_has_its_blocks(self, requests):
        side = _side()
        first, second, third = requests
        for request in requests:
            side.on_new_request(request)
        assert [side.get_num_new_matched_tokens(request, 0)[0] for request in requests] == [40, None, None]
        side.update_state_after_alloc(first, self.BLOCKS, 40)
        side.request_finished(third, ([],))
        assert list(orders_of(side.build_connector_meta().orders, "load")) == ["0_r"]
        self._end(side, first)
        assert side.get_num_new_matched_tokens(second, 0) == (None, False)
        side.update_state_after_alloc(first, self.BLOCKS, 0)
        assert side.get_num_new_matched_tokens(second, 32) == (0, False)
        for request in (first, second):
            side.request_finished(request, ([],))
        assert side.num_remembered_requests == 0

    def test_the_others_fail_when_the_first_does(self, requests):
        side = _side()
        for request in requests:
            side.on_new_request(request)
        side.update_state_after_alloc(requests[0], self.BLOCKS, 40)
        self._end(side, requests[0], failed=True)
        for request in requests[1:]:
            assert side.get_num_new_matched_tokens(request, 0) == (40, True)
            side.update_state_after_alloc(request, self.BLOCKS, 40)
        assert set(side.build_connector_meta().refused) == {"1_r", "2_r"}
        for request in requests:
            side.request_finished(request, ([],))
        assert side.num_remembered_requests == 0

    def test_without_a_prefix_cache_no_request_waits(self, requests):
        side = _side(has_prefix_cache=False)
        for request in requests:
            side.on_new_request(request)
        assert [side.get_num_new_matched_tokens(request, 0)[0] for request in requests] == [40, 40, 40]


class TestOneStep:
    """Which of vLLM's calls submits which orders.

    All orders that peers wait for come before the forward pass.
    """

    NOW = RequestOrders("p", offer=OfferOrder(1, ((1,),), 16, "content"))
    LATER = RequestOrders("d", load=(GroupBlocks(0, (2,)),))
    ORDERS = HandoffMetadata((NOW, LATER))

    @pytest.fixture
    def submitted(self):
        return []

    @pytest.fixture
    def side(self, submitted):
        half = SimpleNamespace(
            allocate_kv_memory=torch.zeros,
            submit=lambda orders, is_computed=False: submitted.append((orders, is_computed)),
        )
        device = SimpleNamespace(device_type="cpu")
        return WorkerSide(SimpleNamespace(speculative_config=None, device_config=device), None, half)

    def test_loads_are_submitted_last_and_no_order_twice(self, side, submitted):
        step = StepMetadata(self.ORDERS)
        side.carry_out(step)
        first = HandoffMetadata((self.NOW,)), True
        assert submitted == [first]
        side.start_loads(step)
        assert submitted == [first, (HandoffMetadata((self.LATER,)), False)]

    def test_a_vllm_version_that_does_not_announce_its_steps(self, side, submitted):
        side.start_loads(StepMetadata(self.ORDERS))
        assert len(submitted) == 2

    def test_a_drafting_model_writes_after_the_last_token(self, submitted):
        half = SimpleNamespace(
            allocate_kv_memory=torch.zeros,
            submit=lambda orders, is_computed: submitted.append(is_computed),
        )
        WorkerSide(SimpleNamespace(speculative_config=object()), None, half).carry_out(
            StepMetadata(self.ORDERS)
        )
        assert submitted == [False]

    def test_a_step_that_computes_nothing_waits_for_a_handoff_to_end(self, side):
        """vLLM repeats such steps at once, and each of them takes processor time from what copies the
        cache.
        """
        waits = []
        side._half.wait_finished = waits.append

        def waits_in_a_step(num_tokens, received=()):
            before = len(waits)
            side._half.get_finished = lambda: (set(), set(received))
            output = SimpleNamespace(total_num_scheduled_tokens=num_tokens)
            side.carry_out(_side().build_connector_meta(output))
            assert side.get_finished() == (set(), set(received))
            return len(waits) > before

        assert not waits_in_a_step(1)
        # Only after this step does vLLM, which schedules a step ahead, take in the token of the last one.
        assert not waits_in_a_step(0)
        assert waits_in_a_step(0)
        assert waits_in_a_step(0, received={"d"})
        assert not waits_in_a_step(0)  # likewise the end of this load
        assert waits_in_a_step(0)
        assert 0 < waits[0] <= 0.005  # a request that arrives meanwhile waits as long

    def test_on_a_gpu_no_step_waits(self, side):
        """The thread of the step launches the kernels of the next one, and the handoff thread has cores of
        its own.
        """
        waits = []
        side._vllm_config.device_config.device_type = "cuda"
        side._half.wait_finished = waits.append
        side._half.get_finished = lambda: (set(), set())
        for _ in range(3):
            side.carry_out(_side().build_connector_meta(SimpleNamespace(total_num_scheduled_tokens=0)))
            side.get_finished()
        assert not waits

    def test_each_step_is_carried_out(self, side, submitted):
        for _ in range(2):
            step = StepMetadata(self.ORDERS)
            side.carry_out(step)
            side.start_loads(step)
        assert len(submitted) == 4


class TestStats:
    def test_they_add_up_in_vllms_container(self):
        figures = KVConnectorStats((RECORD,), {"load_failures_total": 1, "offers_delivered_total": 2})
        stats = KvferryStats(data=figures.to_dict())
        both = KvferryConnector.build_kv_connector_stats(stats.data).aggregate(stats)
        assert both.figures.counters == {"load_failures_total": 2, "offers_delivered_total": 4}
        assert both.reduce()["num_bytes"] == 8192
        assert both.reduce()["offers_delivered_total"] == 4

    def test_a_reference_node_exports_the_same_metrics(self):
        figures = KVConnectorStats((RECORD,), dict.fromkeys(COUNTERS, 1))
        registry = CollectorRegistry()
        kinds = {kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
        config, labels = SimpleNamespace(kv_transfer_config=None), ("model_name", "engine")
        metrics = KvferryConnector.build_prom_metrics(config, kinds, list(labels), {0: ["tiny", "0"]})
        metrics.observe(figures.to_dict(), 0)
        node = NodeMetrics(lambda: EngineStats(healthy=True))
        node.observe_handoffs(figures)
        on_node = declared(node.text().decode())
        handoffs = {
            name: metric for name, metric in on_node.items() if not name.startswith("kvferry_engine_")
        }
        assert declared(generate_latest(registry).decode(), without=labels) == handoffs
        assert len(handoffs) == len(METRICS) + 1  # and `BUILD_INFO`

    def test_empty(self):
        stats = KvferryConnector.build_kv_connector_stats()
        assert stats.is_empty()
        assert stats.aggregate(stats).is_empty()
