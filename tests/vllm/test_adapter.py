"""How the adapter translates vLLM's configuration, requests and calls, without an engine."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
import vllm
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.utils import check_stop
from vllm.v1.kv_cache_interface import FullAttentionSpec as VllmAttentionSpec
from vllm.v1.kv_cache_interface import MambaSpec as VllmMambaSpec
from vllm.v1.request import RequestStatus

from kvferry.connector.config import EngineConfig, KVTransferConfig, ModelConfig
from kvferry.connector.handoff.events import GroupBlocks
from kvferry.connector.kv_cache_specs import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    UniformTypeKVCacheSpecs,
)
from kvferry.connector.p2p.options import ConnectorOptions
from kvferry.connector.p2p.orders import HandoffMetadata, OfferOrder, RequestOrders, WorkerAddress
from kvferry.connector.p2p.scheduler import HandoffScheduler
from kvferry.connector.p2p.worker import HandoffWorker
from kvferry.connector.stats import TransferRecord
from kvferry.connector.vllm import KvferryConnector, config
from kvferry.connector.vllm.adapter import _scheduler_side
from kvferry.connector.vllm.config import (
    answer_fields,
    can_continue_answers,
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
from kvferry.connector.vllm.metadata import StepMetadata, WorkerHandshake
from kvferry.connector.vllm.scheduler import SchedulerSide, client_request_id
from kvferry.connector.vllm.sharing import SharedOffers
from kvferry.connector.vllm.windows import WindowBlocks
from kvferry.connector.vllm.worker import WorkerSide
from kvferry.transports.errors import ConfigurationError
from kvferry.transports.registry import create_transport
from tests.support.handoff_orders import ordered, orders_of

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


def test_an_unknown_option_is_reported_with_the_nearest_name_while_vllm_reads_its_configuration():
    for options, nearest in (
        ({"leas_s": 1}, "lease_s"),
        ({"transport_option": {}}, "transport_options"),
        ({"transport": "zeromk"}, "zeromq"),
        ({"transport": "zeromq", "transport_options": {"prot": 1}}, "port"),
    ):
        with pytest.raises(ConfigurationError, match=f"did you mean '{nearest}'"):
            KvferryConnector.requires_piecewise_for_cudagraph(options)
    assert not KvferryConnector.requires_piecewise_for_cudagraph({"lease_s": 20})


@pytest.mark.parametrize(("total", "heads_by_layer"), [(8, (4, 2)), (None, (4,))])
def test_ranks_are_distinguished_if_the_models_number_of_heads_is_unknown(total, heads_by_layer):
    specs = [FullAttentionSpec(16, num_heads, 8, torch.float32) for num_heads in heads_by_layer]
    groups = tuple(KVCacheGroupSpec((f"layer {i}",), spec) for i, spec in enumerate(specs))
    vllm_config = _vllm_config()
    vllm_config.parallel_config.tensor_parallel_size = 2
    if total is not None:
        vllm_config.model_config.get_total_num_kv_heads = lambda: total
    assert engine_config(vllm_config, KVCacheConfig(8, (), groups)).model.num_kv_heads == 0


class TestRefusedSettings:
    """A setting of vLLM that handoffs do not support ends the start with an error that names it."""

    @pytest.mark.parametrize(
        ("part", "key", "value"),
        [
            ("parallel_config", "prefill_context_parallel_size", 2),
            ("parallel_config", "decode_context_parallel_size", 2),
            ("cache_config", "calculate_kv_scales", True),
        ],
    )
    def test_settings(self, part, key, value):
        parts = {name: SimpleNamespace() for name in ("parallel_config", "model_config", "cache_config")}
        setattr(parts[part], key, value)
        with pytest.raises(ConfigurationError, match=key) as caught:
            engine_config(SimpleNamespace(**parts, kv_transfer_config=None), KVCacheConfig(8, (), ()))
        assert caught.value.key == key

    def test_sleep_with_a_vllm_that_does_not_tell_connectors_of_it(self, monkeypatch):
        parts = SimpleNamespace(
            parallel_config=SimpleNamespace(),
            model_config=SimpleNamespace(enable_sleep_mode=True),
            cache_config=SimpleNamespace(),
        )
        monkeypatch.setattr(config, "_tells_of_sleep", lambda: False)
        with pytest.raises(ConfigurationError, match=f"{vllm.__version__}.*use vLLM 0.33 or later") as caught:
            config._refuse_unsupported(parts)
        assert caught.value.key == "enable_sleep_mode"
        monkeypatch.setattr(config, "_tells_of_sleep", lambda: True)
        config._refuse_unsupported(parts)

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
        offering, loading = _request("r", {"do_remote_decode": True}), _request("s", LOAD)
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


LOAD = {
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


def _side(has_prefix_cache=True, role="kv_both", spec=ATTENTION, fields=None, epoch=5, **more):
    """A scheduler side. With `fields`, which say what its node is, it has an address."""
    config = KVCacheConfig(8, (), (KVCacheGroupSpec(("layer",), spec),))
    half = HandoffScheduler(KVTransferConfig("KvferryConnector", role), config)
    side = SchedulerSide(half, SharedOffers(has_prefix_cache), WindowBlocks({0: spec}), **more)
    if fields is not None:
        side.set_handshake_metadata({0: WorkerHandshake(WorkerAddress("shm:x", epoch, 0), fields)})
    return side


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
        side, request = _side(fields={}), _request("r", self.WISH)
        side.on_new_request(request)
        first = side.build_connector_meta(self.step(new=[("r", [4])]))
        # A prefix hit may be of blocks that the same step computes, so nothing is offered with it.
        assert not orders_of(first.orders, "offer")
        return side, request

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
        side, request = _side(fields={}), _request("r", {"do_remote_decode": True})
        side._can_meet = False
        side.on_new_request(request)
        request.num_computed_tokens, request.get_finished_reason = 40, lambda: "length"
        _, params = side.request_finished(request, ([4, 5, 6],))
        assert "rendezvous_supported" not in params


class TestContinuing:
    """Which nodes may share one answer: those that are known to give the same one."""

    FIELDS: ClassVar = {"weights": "w", "tokenizer": "t"}

    @staticmethod
    def asked(side, params, lora_request=None):
        request = _request("r", params)
        request.lora_request, request.num_computed_tokens = lora_request, 40
        request.get_finished_reason = lambda: "length"
        side.on_new_request(request)
        return side.request_finished(request, ([4, 5, 6],))[1]

    def test_each_field_decides_and_an_unknown_tokenizer_is_that_of_one_start(self):
        known = _side(fields=self.FIELDS).identity
        assert known == _side(fields=dict(self.FIELDS), epoch=6).identity
        for changed in ({"weights": "x"}, {"tokenizer": "u"}, {"dtype": "half"}):
            assert _side(fields={**self.FIELDS, **changed}).identity != known
        assert _side(fields=self.FIELDS, answer_fields={"sampling": "{}"}).identity != known
        unknown = {**self.FIELDS, "tokenizer": ""}
        assert _side(fields=unknown).identity != _side(fields=unknown, epoch=6).identity
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
        side = _side(fields=self.FIELDS, can_continue=can)
        assert ("remote_identity" in self.asked(side, {"describe": True})) is can

    @pytest.mark.parametrize("fields", [{}, {"weights": "other", "tokenizer": "t"}, FIELDS])
    def test_it_continues_only_after_a_token_of_its_own_model(self, fields):
        side, request = _side(fields=fields), _request("r", {})
        request.kv_transfer_params = {"continues": {"model": _side(fields=self.FIELDS).identity}}
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


class TestContent:
    """What two requests must have in common to use each other's blocks."""

    IMAGE = SimpleNamespace(identifier="image", mm_position=SimpleNamespace(offset=8, length=4))

    def test_an_unidentified_image_is_not_offered(self):
        """Without a prefix cache vLLM does not distinguish images."""
        side, request = _side(has_prefix_cache=False), _request("r", {"do_remote_decode": True})
        request.mm_features = [self.IMAGE]
        side.on_new_request(request)
        assert side.get_num_new_matched_tokens(request, 0) == (0, False)
        assert side.build_connector_meta().orders.is_empty()

    def test_an_unidentified_image_is_not_loaded(self):
        side, request = _side(has_prefix_cache=False), _request("r", LOAD)
        request.mm_features = [self.IMAGE]
        side.on_new_request(request)
        assert side.get_num_new_matched_tokens(request, 0) == (40, True)
        side.update_state_after_alloc(request, BLOCKS, 40)
        step = side.build_connector_meta()
        assert step.orders == HandoffMetadata(counts={"offered_requests_total/refused": 1})
        assert "--enable-prefix-caching" in step.refused["r"].reason


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("adapter", "org/one"), ("adapter", "org/two")),
        # A space does not move from the name to the repository.
        (("polite", "small org/adapter"), ("polite small", "org/adapter")),
    ],
)
def test_an_adapter_from_the_hub_is_identified_by_its_name_and_its_repository(one, other):
    identities = {
        adapter_identity(SimpleNamespace(lora_name=name, lora_path=path, lora_int_id=1))
        for name, path in (one, other)
    }
    assert len(identities) == 2


@pytest.mark.parametrize("params", ["nonsense", 7, ["traceparent"], None])
def test_malformed_params_do_not_matter_where_vllm_traces(params):
    """Also the account that another request asks for has none of them."""
    side, request = _side(), _request("cmpl-known-0-1f", params)
    request.trace_headers = {"traceparent": "00-" + "1" * 32 + "-" + "2" * 16 + "-01"}
    side.on_new_request(request)
    request.get_finished_reason = lambda: "abort"
    side.request_finished(request, ([],))
    for wanted, names in (("known", ["queue", "node"]), ("other", [])):
        question = _request("cmpl-why-0-1f", {"explain": wanted})
        side.on_new_request(question)
        side.update_state_after_alloc(question, BLOCKS, 0)
        question.get_finished_reason, question.num_output_tokens = lambda: "length", 1
        _, told = side.request_finished(question, ([9],))
        assert [span["name"] for span in told["spans"]["spans"]] == names


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


def test_without_a_prefix_cache_no_request_waits_for_another_ones_load():
    side, requests = _side(has_prefix_cache=False), [_request(f"{number}_r", LOAD) for number in range(3)]
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
