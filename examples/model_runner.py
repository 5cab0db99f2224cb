"""An engine of one's own: two nodes hand over a prompt's cache.

Run `python examples/model_runner.py`; see docs/embedding.md.

`ModelRunner` is the worker's side: a tiny model, its cache in the uniform layout, and steps with the
connector's hooks around them. `Node` adds the scheduler's side, for one request at a time.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

import kvferry.connector as kv
import kvferry.runner_mixin as rm

HEADS, KV_HEADS, HEAD_SIZE, VOCABULARY, MAX_LEN = 4, 2, 16, 97, 128
NUM_BLOCKS, BLOCK_SIZE, CPU = 64, 4, torch.device("cpu")
LAYERS = tuple(f"model.layers.{index}.attn" for index in range(3))


@dataclass
class Request:  # a `kv.ConnectorRequest`, with its blocks
    request_id: str
    prompt_token_ids: list[int]
    kv_transfer_params: dict[str, Any] | None = None
    answer: list[int] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    num_loaded_tokens: int = 0
    num_computed_tokens: int = 0
    finish_reason: str | None = None
    cache_salt = lora_id = prompt_embeds = None
    mm_features = ()
    num_prompt_tokens = property(lambda self: len(self.prompt_token_ids))
    all_token_ids = property(lambda self: self.prompt_token_ids + self.answer)


class Scheduled(NamedTuple):  # a `kv.ScheduledRequest`
    request_id: str
    num_computed_tokens: int
    num_scheduled_tokens: int
    block_ids: tuple[tuple[int, ...], ...]


@dataclass
class Step:  # a `kv.SchedulerOutput`, with the tokens to compute
    scheduled_requests: Sequence[Scheduled] = ()
    token_ids: Sequence[int] = ()
    finished_req_ids: set[str] = field(default_factory=set)
    preempted_req_ids: set[str] = field(default_factory=set)
    kv_connector_metadata: kv.KVConnectorMetadata | None = None
    total_num_scheduled_tokens = property(lambda self: len(self.token_ids))


class ModelRunner(rm.KVConnectorModelRunnerMixin):
    def __init__(self, config: kv.EngineConfig, pool: kv.KVCacheConfig) -> None:
        draw = torch.Generator().manual_seed(1)  # all nodes need the same weights
        self.embedding = torch.randn(VOCABULARY + MAX_LEN, HEADS * HEAD_SIZE, generator=draw)
        columns = (HEADS + 2 * KV_HEADS) * HEAD_SIZE
        self.weights = torch.randn(len(LAYERS), HEADS * HEAD_SIZE, columns, generator=draw) / 8
        self.config, attention = config, rm.init_attn_backend(pool, config, CPU)
        params = rm.AttentionParams(HEADS, KV_HEADS, HEAD_SIZE, scale=HEAD_SIZE**-0.5)
        backends, self.builders = attention.attn_backends, attention.metadata_builders
        self.layers = {name: rm.AttentionLayer(name, params, backends[name]) for name in LAYERS}
        self.worker = kv.KVConnectorFactory.create_connector(config, kv.KVConnectorRole.WORKER, pool)
        # Installed while it is used: the slot is one per process, and two nodes share this one.
        with rm.kv_transfer_group(self.worker):
            groups, sizes = attention.attn_groups, attention.kernel_block_sizes
            assert self.use_uniform_kv_cache(groups, "auto"), "the connector prefers another layout"
            views, cache, backend = self.allocate_uniform_kv_caches(pool, groups, "auto", CPU, sizes)
            self.worker.register_cross_layers_kv_cache(cache, backend)
        rm.bind_kv_cache(views, self.layers, [])

    def execute(self, step: Step) -> tuple[int, kv.KVConnectorOutput | None]:
        with rm.kv_transfer_group(self.worker):
            if not step.scheduled_requests:
                return -1, self.kv_connector_no_forward(step, self.config).kv_connector_output
            (item,) = step.scheduled_requests
            batch = rm.StepBatch.from_lens([item.num_scheduled_tokens], [item.num_computed_tokens], CPU)
            table = torch.tensor(item.block_ids, dtype=torch.int32)
            slots = rm.compute_slot_mapping(table, batch, BLOCK_SIZE)
            metadata = rm.build_attn_metadata(self.builders, batch, [table], [slots])
            context = rm.set_forward_context(rm.ForwardContext(self.layers, metadata))
            with context, self.maybe_get_kv_connector_output(step) as report:
                token = self.forward(torch.tensor(step.token_ids), item.num_computed_tokens)
            return token, report  # it is filled in when the `with` ends

    def forward(self, tokens: torch.Tensor, first: int) -> int:
        x = self.embedding[tokens] + self.embedding[VOCABULARY + first :][: len(tokens)]
        for layer, weight in zip(self.layers.values(), self.weights, strict=True):
            heads = (x @ weight).view(len(tokens), -1, HEAD_SIZE).split([HEADS, KV_HEADS, KV_HEADS], dim=1)
            x = torch.nn.functional.layer_norm(x + layer.forward(*heads).flatten(1), x.shape[1:])
        return int((x[-1] @ self.embedding[:VOCABULARY].T).argmax())


class Node:
    def __init__(self, connector: str = "shm") -> None:
        layers = tuple(kv.AttentionLayerConfig(name, KV_HEADS, HEAD_SIZE) for name in LAYERS)
        model = kv.ModelConfig("tiny", "float32", MAX_LEN, layers, num_kv_heads=KV_HEADS)
        transfer = kv.KVTransferConfig(connector, "kv_both")
        config = kv.EngineConfig(model, kv.CacheConfig(BLOCK_SIZE), kv_transfer=transfer)
        spec = kv.FullAttentionSpec(BLOCK_SIZE, KV_HEADS, HEAD_SIZE, torch.float32)
        tensors = tuple(kv.KVCacheTensor(NUM_BLOCKS * spec.page_size_bytes, (name,)) for name in LAYERS)
        pool = kv.KVCacheConfig(NUM_BLOCKS, tensors, (kv.KVCacheGroupSpec(LAYERS, spec),))
        self.runner = ModelRunner(config, pool)
        self.scheduler = kv.KVConnectorFactory.create_connector(config, kv.KVConnectorRole.SCHEDULER, pool)
        address = self.runner.worker.get_handshake_metadata()  # by rank; there is one
        self.scheduler.set_handshake_metadata({0: address} if address else {})
        self.free, self.held = list(range(1, NUM_BLOCKS)), dict[str, list[int]]()  # block 0 is the null block
        self.finished: set[str] = set()

    def step(self, plan: Step) -> tuple[int, kv.KVConnectorOutput]:
        plan.finished_req_ids, self.finished = self.finished, set()
        plan.kv_connector_metadata = self.scheduler.build_connector_meta(plan)
        token, report = self.runner.execute(plan)
        report = report or kv.KVConnectorOutput()
        self.scheduler.update_connector_output(report)
        for request_id in report.finished_sending:
            self.free += self.held.pop(request_id)
        return token, report

    def grow(self, request: Request) -> None:
        while len(request.block_ids) * BLOCK_SIZE < len(request.all_token_ids):
            request.block_ids.append(self.free.pop())

    def run(self, request: Request, num_tokens: int, other: "Node") -> dict[str, Any] | None:
        self.scheduler.on_new_request(request)
        num_loaded = self.scheduler.get_num_new_matched_tokens(request, 0)[0] or 0
        self.grow(request)
        self.scheduler.update_state_after_alloc(request, [request.block_ids], num_loaded)
        if num_loaded:
            self.wait_for_load(request, num_loaded, other)
        while len(request.answer) < num_tokens:
            self.grow(request)
            first, table = request.num_computed_tokens, (tuple(request.block_ids),)
            tokens = request.all_token_ids[first:]
            item = Scheduled(request.request_id, first, len(tokens), table)
            request.answer.append(self.step(Step([item], tokens))[0])
            request.num_computed_tokens += len(tokens)
        request.finish_reason = "length"
        must_keep, params = self.scheduler.request_finished(request, [request.block_ids])
        self.finished.add(request.request_id)
        self.held[request.request_id] = request.block_ids
        if not must_keep:  # otherwise when a report names the request in `finished_sending`
            self.free += self.held.pop(request.request_id)
        return params

    def wait_for_load(self, request: Request, num_tokens: int, other: "Node") -> None:
        failed, is_over = False, False
        while not is_over:  # for as long as the connector's own deadlines allow
            other.step(Step())  # a node in a process of its own steps by itself
            report = self.step(Step())[1]
            failed |= bool(report.invalid_block_ids)
            is_over = request.request_id in report.finished_recving
        request.num_loaded_tokens = 0 if failed else num_tokens
        # The prompt's last token is computed again, because its logits give the first token of the answer.
        request.num_computed_tokens = min(request.num_loaded_tokens, request.num_prompt_tokens - 1)
        self.scheduler.update_state_after_alloc(request, [request.block_ids], 0)

    def close(self) -> None:
        self.runner.worker.shutdown()
        self.scheduler.shutdown()


if __name__ == "__main__":
    prefill, decode, prompt = Node(), Node(), list(range(18))
    offer = prefill.run(Request("p", prompt, {"do_remote_decode": True}), 1, decode)
    paired, alone = Request("d", prompt, offer), Request("a", prompt)
    decode.run(paired, 12, prefill)
    prefill.run(alone, 12, decode)
    is_same = paired.answer == alone.answer
    print(
        f"{paired.num_loaded_tokens} of {len(prompt)} tokens were loaded; the same answer as alone: {is_same}"
    )
    prefill.close()
    decode.close()
