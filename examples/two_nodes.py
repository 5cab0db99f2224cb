"""Two processes hand over a prompt's cache, without a model: `python examples/two_nodes.py [shm | tcp]`.

The pools are in the uniform layout, in which each block is one run of bytes with all layers. The prefill
process writes a prompt of 18 tokens, and its connector names the offer in `params`: what a server would put
into its answer as `kv_transfer_params`. The decode process reads the blocks from the other pool, and compares
them.
"""

import json
import multiprocessing
import sys
from multiprocessing.connection import Connection

from kvferry.connector.testing import CacheShape, ModelFreeNode, Request, engine_config

NUM_TOKENS = 18
SHAPE = CacheShape(num_layers=3, num_blocks=32, block_size=4)


def prefill(connector: str, decode: Connection) -> None:
    with ModelFreeNode(engine_config(connector), SHAPE) as node:
        blocks, params = node.prefill("request 1", NUM_TOKENS)
        decode.send_bytes(json.dumps(params).encode())
        decode.send_bytes(node.contents(blocks).numpy().tobytes())
        # The blocks stay until the decode node has read them, or until their lease ends.
        node.step_until(lambda: not node.held)


def main(connector: str = "shm") -> None:
    ours, theirs = multiprocessing.Pipe()
    spawn = multiprocessing.get_context("spawn")
    process = spawn.Process(target=prefill, args=(connector, theirs))
    process.start()
    theirs.close()  # so that `recv_bytes` ends if the process does
    with ModelFreeNode(engine_config(connector), SHAPE) as node:
        params, sent = json.loads(ours.recv_bytes()), ours.recv_bytes()
        node.add(Request("request 2", NUM_TOKENS, params), computes=False)
        node.step()
        node.step_until(lambda: not node.is_waiting("request 2"))
        blocks = node.blocks_of("request 2")
        is_same = node.contents(blocks).numpy().tobytes() == sent
        print(f"{len(blocks)} blocks came over {connector}, and are as they were sent: {is_same}")
    process.join()


if __name__ == "__main__":
    main(*sys.argv[1:])
