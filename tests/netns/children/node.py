"""A node without a model that runs in a network namespace and takes orders over a pipe.

Usage: node.py FD CONNECTOR OPTIONS    the pipe's descriptor; a connector; `kv_connector_extra_config` as JSON
"""

from __future__ import annotations

import hashlib
import json
import sys
from multiprocessing.connection import Connection
from typing import Any

import torch

from kvferry.connector.testing import CacheShape, ModelFreeNode, Request, engine_config
from kvferry.connector.testing.harness import begin_load

#: 32 usable blocks of 1 MiB.
SHAPE = CacheShape(num_layers=4, num_blocks=33, block_size=16, num_kv_heads=32, head_size=64)


class Program:
    """A node's requests by id, and a method for each order."""

    def __init__(self, node: ModelFreeNode) -> None:
        self._node = node
        self._loads: dict[str, list[int]] = {}

    def prefill(self, request_id: str, num_tokens: int) -> tuple[dict[str, Any] | None, str]:
        """Offer a prompt. Returns the params for the consumer and a digest of the blocks."""
        blocks, params = self._node.prefill(request_id, num_tokens, seed=hash(request_id) % 1000)
        return params, self._digest(blocks)

    def load(self, request_id: str, num_tokens: int, params: dict[str, Any]) -> None:
        """Order the load of an offer."""
        request = Request(request_id, num_tokens, params)
        self._loads[request_id] = begin_load(self._node, request)

    def result(self, request_id: str) -> tuple[int, str, str]:
        """Return how often the load was reported, why it failed, and a digest of the blocks."""
        node, blocks = self._node, self._loads[request_id]
        return node.num_reports(request_id, "recving"), node.load_error(request_id), self._digest(blocks)

    def finish(self, request_id: str) -> None:
        """End a request whose load was reported."""
        del self._loads[request_id]
        self._node.finish(request_id, "stop")

    def num_free(self) -> int:
        """Return the number of free blocks."""
        return len(set(self._node.pool.free_blocks))

    def routes(self) -> list[tuple[str, str]]:
        """Return the transport of each transfer into this node, and why it was chosen."""
        return [(record.transport, record.reason) for record in self._node.stats.transfers]

    def _digest(self, blocks: list[int]) -> str:
        return hashlib.sha256(self._node.contents(blocks).numpy().tobytes()).hexdigest()


def main() -> None:
    torch.set_num_threads(1)
    pipe = Connection(int(sys.argv[1]))
    connector, options = sys.argv[2], json.loads(sys.argv[3])
    config = engine_config(connector, block_size=SHAPE.block_size, kv_connector_extra_config=options)
    with pipe, ModelFreeNode(config, SHAPE) as node:
        program = Program(node)
        pipe.send(None)
        while True:
            node.step()
            if not pipe.poll(0.002):
                continue
            try:
                name, *arguments = pipe.recv()
            except EOFError:
                return
            pipe.send(getattr(program, name)(*arguments))


if __name__ == "__main__":
    main()
