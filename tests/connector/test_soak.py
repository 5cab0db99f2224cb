"""Several nodes, many requests, clients that leave at any moment: no byte is wrong, and nothing leaks."""

from __future__ import annotations

import random
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from kvferry.connector.testing import CacheShape, ModelFreeNode, Request, engine_config

SHAPE = CacheShape(num_blocks=48)
OPTIONS = {"lease_s": 0.4}


@dataclass
class Waiting:
    """A request at a consumer, from its arrival to its end."""

    node: ModelFreeNode
    request: Request
    expected: torch.Tensor
    has_begun: bool = False


class Soak:
    """Random requests over two producers and two consumers. Freed blocks are overwritten at once."""

    def __init__(self, connector: str, seed: int, stack: ExitStack) -> None:
        self.random = random.Random(seed)
        self.nodes = [
            stack.enter_context(
                ModelFreeNode(engine_config(connector, kv_connector_extra_config=OPTIONS), shape)
            )
            for shape in (SHAPE, CacheShape(num_blocks=48, layout="per-layer"), SHAPE, SHAPE)
        ]
        self.waiting: list[Waiting] = []
        self.num_loaded = self.num_failed = self.num_requests = 0

    def run(self, num_turns: int, num_loads: int) -> None:
        """Take at least `num_turns` turns, and more until `num_loads` loads succeed: leases expire on a busy
        machine.
        """
        for turn in range(10 * num_turns):
            if turn >= num_turns and self.num_loaded >= num_loads:
                break
            action = self.random.choice(
                [self.arrive, self.arrive, self.start, self.start, self.abort, self.step]
            )
            action()
            self.step()
        for waiting in self.waiting.copy():
            self.end(waiting, "abort")
        for node in self.nodes:
            node.step_until(lambda node=node: not node.is_busy, *self.nodes)  # type: ignore[misc]
            node.step()

    def arrive(self) -> None:
        producer, consumer = self.random.sample(self.nodes, 2)
        num_tokens = self.random.randint(2, 30)
        if len(producer.pool.free_blocks) < 10:
            return
        self.num_requests += 1
        offered, params = producer.prefill(f"p{self.num_requests}", num_tokens, seed=self.num_requests)
        request = Request(f"d{self.num_requests}", num_tokens, params)
        consumer.add(request, is_queued=True, computes=False)
        self.waiting.append(Waiting(consumer, request, producer.contents(offered)))

    def start(self) -> None:
        queued = [waiting for waiting in self.waiting if not waiting.has_begun]
        if queued and len((waiting := self.random.choice(queued)).node.pool.free_blocks) >= 10:
            waiting.has_begun = True
            waiting.node.start(waiting.request.request_id)

    def abort(self) -> None:
        if self.waiting and self.random.random() < 0.3:
            self.end(self.random.choice(self.waiting), "abort")

    def step(self) -> None:
        for node in self.random.sample(self.nodes, len(self.nodes)):
            before = set(node.pool.free_blocks)
            output = node.step()
            node.pool.fill(sorted(set(node.pool.free_blocks) - before), seed=0)  # as another request would
            for waiting in [w for w in self.waiting if w.request.request_id in output.finished_recving]:
                self.check(waiting, output.load_errors)

    def check(self, waiting: Waiting, errors: dict[str, Any]) -> None:
        if waiting.request.request_id in errors:
            self.num_failed += 1
        else:
            blocks = waiting.node.blocks_of(waiting.request.request_id)
            assert torch.equal(waiting.node.contents(blocks), waiting.expected)
            self.num_loaded += 1
        self.end(waiting, "stop")

    def end(self, waiting: Waiting, reason: str) -> None:
        self.waiting.remove(waiting)
        waiting.node.finish(waiting.request.request_id, reason)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("connector", ["inproc", "shm"])
def test_no_byte_is_wrong_and_nothing_leaks(connector: str, seed: int) -> None:
    with ExitStack() as stack:
        soak = Soak(connector, seed, stack)
        soak.run(num_turns=300, num_loads=30)
        assert soak.num_loaded >= 30
        for node in soak.nodes:
            assert sorted(node.pool.free_blocks) == list(range(1, SHAPE.num_blocks))
            for output in node.outputs:
                for request_id in output.finished_recving:
                    assert node.num_reports(request_id, "recving") == 1
                for request_id in output.finished_sending:
                    assert node.num_reports(request_id, "sending") == 1
