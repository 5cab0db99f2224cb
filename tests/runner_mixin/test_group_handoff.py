"""Groups of several kinds, from their specs to attention over blocks that another node handed over.

Two nodes without a model share this process. Each has attention layers, recurrent state, block tables, and
both halves of the shared-memory connector.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest
import torch

from kvferry.connector.base import KVConnectorRole
from kvferry.connector.config import AttentionLayerConfig, CacheConfig
from kvferry.connector.factory import KVConnectorFactory
from kvferry.connector.kv_cache_specs import MambaSpec
from kvferry.connector.output import KVConnectorOutput
from kvferry.connector.stats import TransferRecord
from kvferry.connector.testing import Request, Step, engine_config
from kvferry.runner_mixin import (
    AttentionLayer,
    AttentionParams,
    ForwardContext,
    KVConnectorModelRunnerMixin,
    StepBatch,
    build_attn_metadata,
    compute_slot_mapping,
    get_kv_cache_spec,
    init_attn_backend,
    init_kv_cache_for_connector,
    kv_transfer_group,
    mamba_state_views,
    register_attention_backend,
    set_forward_context,
)
from kvferry.runner_mixin.attention import selection
from kvferry.runner_mixin.attention.torch_backend import TorchAttentionBackend
from kvferry.runner_mixin.kv_cache import KVCacheManager, get_kv_cache_config
from tests.support.patience import DEADLINE_S

CPU = torch.device("cpu")
BLOCK, WINDOW, HEADS, HEAD_SIZE = 4, 6, 2, 8
PAGE_BYTES = 2 * BLOCK * HEADS * HEAD_SIZE * 4
PROMPT = 18
#: Two layers with full attention, two with a window, and one that reads the first one's cache.
LAYERS = (
    *(AttentionLayerConfig(f"layers.{i}", HEADS, HEAD_SIZE, WINDOW if i % 2 else None) for i in range(4)),
    AttentionLayerConfig("layers.4", HEADS, HEAD_SIZE, kv_sharing_target="layers.0"),
)
#: The page is padded to the size of the attention layers' page.
STATE = MambaSpec(
    BLOCK,
    shapes=((3, 5), (7,)),
    dtypes=(torch.float32, torch.bfloat16),
    page_size_padded=PAGE_BYTES,
)
STATE_LAYERS = ("layers.5", "layers.6")
NUM_BLOCKS_PER_TABLE = -(-PROMPT // BLOCK)
NUM_IN_WINDOW = NUM_BLOCKS_PER_TABLE - (PROMPT - WINDOW) // BLOCK


class SmallBlocks(TorchAttentionBackend):
    """Supports only blocks of 2 tokens. In memory, heads come before tokens."""

    @staticmethod
    def get_supported_kernel_block_sizes() -> tuple[int, ...]:
        return (2,)

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        return (1, 0, 2, 4, 3, 5) if include_num_layers_dimension else (0, 1, 3, 2, 4)


@dataclass
class TokenRequest(Request):
    """The part of a request that the connector and the block manager use."""

    num_tokens: int = PROMPT
    block_hashes: list[bytes] = field(default_factory=list)


class Node(KVConnectorModelRunnerMixin):
    """A runner and a scheduler that handle one request."""

    def __init__(self, backend: str = "TORCH", *, cross_layer_blocks: bool = True) -> None:
        options = {"cross_layer_blocks": cross_layer_blocks}
        config = engine_config("shm", kv_connector_extra_config=options)
        self.config = replace(
            config,
            model=replace(config.model, layers=LAYERS),
            cache=CacheConfig(block_size=BLOCK, num_blocks_override=32, attention_backend=backend),
        )
        specs = get_kv_cache_spec(self.config, torch.float32) | dict.fromkeys(STATE_LAYERS, STATE)
        self.pool = get_kv_cache_config(self.config, specs, available_memory=0)
        self.manager = KVCacheManager(self.pool, self.config.model.max_model_len)
        create = KVConnectorFactory.create_connector
        self.worker = create(self.config, KVConnectorRole.WORKER, self.pool)
        self.layout = self._bind()
        self.scheduler = create(self.config, KVConnectorRole.SCHEDULER, self.pool)
        address = self.worker.get_handshake_metadata()
        assert address is not None
        self.scheduler.set_handshake_metadata({0: address})
        self.done = KVConnectorOutput()
        self.transfers: list[TransferRecord] = []

    def _bind(self) -> str:
        attention = init_attn_backend(self.pool, self.config, CPU)
        self.builders = attention.metadata_builders
        self.layers = {
            layer.name: AttentionLayer(
                layer.name,
                AttentionParams(4, HEADS, HEAD_SIZE, 0.3, layer.sliding_window),
                attention.attn_backends[layer.name],
                writes_cache=not layer.kv_sharing_target,
            )
            for layer in LAYERS
        }
        self.state_layers = {name: SimpleNamespace(kv_cache=[]) for name in STATE_LAYERS}
        with kv_transfer_group(self.worker):
            return init_kv_cache_for_connector(
                [], self.layers | self.state_layers, self.pool, attention, "auto", CPU
            )

    def close(self) -> None:
        self.worker.shutdown()
        self.scheduler.shutdown()
        del self.worker, self.layers, self.state_layers

    def table(self, group: int, request_id: str = "a") -> list[int]:
        return self.manager.get_block_ids(request_id)[group]

    def group_of(self, layer_name: str) -> int:
        return next(i for i, group in enumerate(self.pool.kv_cache_groups) if layer_name in group.layer_names)

    # -- computing -----------------------------------------------------------------------------------

    def compute(self, request: TokenRequest, num_new_tokens: int) -> torch.Tensor:
        """Run attention for the next tokens in every layer.

        Returns `(num_layers, num_tokens, 4, HEAD_SIZE)`.
        """
        first, end = request.num_computed_tokens, request.num_computed_tokens + num_new_tokens
        tables = [torch.tensor([table], dtype=torch.int32) for table in self.manager.get_block_ids("a")]
        batch = StepBatch.from_lens([num_new_tokens], [first], CPU)
        attention_tables = {builder.group.kv_cache_group_id for builder in self.builders}
        slots = [
            compute_slot_mapping(table, batch, BLOCK) if group in attention_tables else torch.empty(0)
            for group, table in enumerate(tables)
        ]
        metadata = build_attn_metadata(self.builders, batch, tables, slots)
        with set_forward_context(ForwardContext(self.layers, metadata)):
            outs = [
                layer.forward(*(part[first:end] for part in _tokens(index)))
                for index, layer in enumerate(self.layers.values())
            ]
        request.num_computed_tokens = end
        return torch.stack(outs)

    def write_state(self, seed: int) -> None:
        """Fill the recurrent layers' pages of the request, padding included."""
        (block,) = self.table(self.group_of(STATE_LAYERS[0]))
        for index, layer in enumerate(self.state_layers.values()):
            noise = torch.Generator().manual_seed(seed + index)
            page = torch.randint(-128, 128, (PAGE_BYTES,), dtype=torch.int8, generator=noise)
            layer.kv_cache[0][block] = page

    def state(self) -> list[torch.Tensor]:
        (block,) = self.table(self.group_of(STATE_LAYERS[0]))
        return [layer.kv_cache[0][block].clone() for layer in self.state_layers.values()]

    # -- handing over --------------------------------------------------------------------------------

    def prefill(self) -> tuple[torch.Tensor, dict[str, object]]:
        request = TokenRequest("a", PROMPT, {"do_remote_decode": True})
        self.scheduler.on_new_request(request)
        assert self.manager.allocate_slots(request, PROMPT)
        self.scheduler.update_state_after_alloc(request, self.manager.get_block_ids("a"), 0)
        self.step()  # announces the request to the workers before any of it is computed
        out = self.compute(request, PROMPT)
        self.write_state(seed=1)
        request.finish_reason = "length"
        must_keep, params = self.scheduler.request_finished(request, self.manager.get_block_ids("a"))
        assert must_keep
        assert params is not None
        return out, params

    def load(self, params: dict[str, object], producer: Node) -> TokenRequest:
        """Load the offer, which ends before the request's last token because of the state.

        Then go back one token.
        """
        request = TokenRequest("a", PROMPT + 1, params)
        self.scheduler.on_new_request(request)
        assert self.scheduler.get_num_new_matched_tokens(request, 0) == (PROMPT, True)
        assert self.manager.allocate_slots(request, 0, num_external_tokens=PROMPT)
        self.scheduler.update_state_after_alloc(request, self.manager.get_block_ids("a"), PROMPT)
        deadline = time.monotonic() + DEADLINE_S
        while not self.done.finished_recving:
            assert time.monotonic() < deadline, (self.done, producer.done)
            self.step()
            producer.step()
        request.num_computed_tokens = PROMPT - 1
        return request

    def step(self) -> None:
        with kv_transfer_group(self.worker):
            step = Step(self.scheduler.build_connector_meta(Step()))
            report = self.kv_connector_no_forward(step, self.config).kv_connector_output
        if report is not None:
            self.scheduler.update_connector_output(report)
            self.done.finished_recving |= report.finished_recving
            self.done.finished_sending |= report.finished_sending
            self.done.load_errors |= report.load_errors
            if report.kv_connector_stats is not None:
                self.transfers += report.kv_connector_stats.transfers


def _tokens(layer: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries, keys and values of a layer for every position, `(position, heads, HEAD_SIZE)`."""
    noise = torch.Generator().manual_seed(layer)
    return tuple(torch.randn(PROMPT + 8, heads, HEAD_SIZE, generator=noise) for heads in (4, HEADS, HEADS))


@pytest.fixture
def make_node(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Node]]:
    monkeypatch.setattr(selection, "_BACKENDS", dict(selection._BACKENDS))
    register_attention_backend("SMALL", f"{__name__}:SmallBlocks")
    with ExitStack() as stack:

        def make(*args: str, **options: bool) -> Node:
            node = Node(*args, **options)
            stack.callback(node.close)
            return node

        yield make


layouts = pytest.mark.parametrize("cross_layer_blocks", [True, False], ids=["hybrid-uniform", "per-layer"])


@layouts
@pytest.mark.parametrize("backend", ["TORCH", "SMALL"])
def test_the_next_tokens_attend_to_the_loaded_blocks(
    backend: str, cross_layer_blocks: bool, make_node: Callable[..., Node]
) -> None:
    """Full, windowed and sharing layers are right, with kernel blocks of the manager's size and of half that
    size.
    """
    producer, consumer = (make_node(backend, cross_layer_blocks=cross_layer_blocks) for _ in range(2))
    assert consumer.layout == ("hybrid-uniform" if cross_layer_blocks else "per-layer")
    assert consumer.layers["layers.0"].kv_cache[0].shape[2] == (2 if backend == "SMALL" else BLOCK)
    expected, params = producer.prefill()
    request = consumer.load(params, producer)
    assert consumer.done.load_errors == {}
    torch.testing.assert_close(consumer.compute(request, 1)[:, 0], expected[:, -1])
    alone = make_node()
    whole = TokenRequest("a", PROMPT + 5, num_tokens=PROMPT + 5)
    assert alone.manager.allocate_slots(whole, PROMPT + 5)
    expected = alone.compute(whole, PROMPT + 5)
    request.num_tokens = PROMPT + 5
    assert consumer.manager.allocate_slots(request, 5)
    torch.testing.assert_close(consumer.compute(request, 5), expected[:, PROMPT:])


@layouts
def test_a_recurrent_state_is_copied_as_it_is(
    cross_layer_blocks: bool, make_node: Callable[..., Node]
) -> None:
    producer, consumer = (make_node(cross_layer_blocks=cross_layer_blocks) for _ in range(2))
    _, params = producer.prefill()
    expected = producer.state()
    consumer.load(params, producer)
    for mine, theirs in zip(consumer.state(), expected, strict=True):
        assert mine.equal(theirs)
    (block,) = consumer.table(consumer.group_of(STATE_LAYERS[0]))
    views = mamba_state_views(consumer.state_layers["layers.5"].kv_cache[0], STATE)
    assert [(tuple(view.shape[1:]), view.dtype) for view in views] == [
        ((3, 5), torch.float32),
        ((7,), torch.bfloat16),
    ]
    num_bytes = [view[block].numel() * view.element_size() for view in views]
    assert torch.equal(views[0][block].reshape(-1).view(torch.int8), expected[0][: num_bytes[0]])


def test_each_kind_transfers_what_it_needs_and_a_shared_cache_once(make_node: Callable[..., Node]) -> None:
    num_states = 1
    num_blocks = NUM_BLOCKS_PER_TABLE + NUM_IN_WINDOW + num_states
    num_regions = {}
    for cross_layer_blocks in (True, False):
        producer, consumer = (make_node(cross_layer_blocks=cross_layer_blocks) for _ in range(2))
        assert consumer.layers["layers.4"].kv_cache[0] is consumer.layers["layers.0"].kv_cache[0]
        _, params = producer.prefill()
        consumer.load(params, producer)
        (transfer,) = consumer.transfers
        assert transfer.num_blocks == num_blocks
        assert transfer.num_bytes == num_blocks * 2 * PAGE_BYTES, (
            "there are two layers of each kind, and none for layers.4"
        )
        num_regions[transfer.layout] = transfer.num_regions
    assert num_regions["per-layer"] == 2 * num_regions["uniform"], (
        "both layers of a group are one run of bytes"
    )


@pytest.mark.parametrize(("theirs", "ours"), [("TORCH", "SMALL"), ("SMALL", "TORCH")])
def test_nodes_with_other_kernel_blocks_and_layouts_hand_over(
    theirs: str, ours: str, make_node: Callable[..., Node]
) -> None:
    """Their page orders differ. Each token gets into its place, and a state is copied as it is."""
    producer, consumer = make_node(theirs, cross_layer_blocks=False), make_node(ours)
    expected, params = producer.prefill()
    state = producer.state()
    request = consumer.load(params, producer)
    assert consumer.done.load_errors == {}
    for mine, its in zip(consumer.state(), state, strict=True):
        assert mine.equal(its)
    torch.testing.assert_close(consumer.compute(request, 1)[:, 0], expected[:, -1])
