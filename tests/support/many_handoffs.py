"""Many handoffs in a rendezvous through a router: how long each took, and whether a deadline had to end one
of them.
"""

from __future__ import annotations

import itertools
import os
import random
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.support.vllm_servers import Server

#: How many requests each test sends. `make soak-ranks` sends 2,000.
NUM_HANDOFFS = int(os.environ.get("KVFERRY_HANDOFFS", "100"))
#: Tensor-parallel ranks of the prefill and of the decode node.
SHAPES = {"two ranks and one": (2, 1), "one rank and two": (1, 2), "four ranks and two": (4, 2)}
#: With chunks of 128 tokens a prompt is computed in three to five steps.
CHUNK_TOKENS = 128
NUM_CLIENTS = 2
#: Longest time of a request beyond four times the median, which is what computing takes at most on a busy
#: machine. A wait that a deadline of the protocol ends takes longer.
LONGEST_WAIT_S = 5.0
ENDED_BY_A_DEADLINE = (
    "kvferry_load_failures_total",
    "kvferry_rendezvous_failures_total",
    "kvferry_unmet_claims_total",
    "kvferry_offers_expired_total",
    "kvferry_offers_aborted_total",
)


def hand_over_many(router: Server, prefill: Server, decode: Server) -> None:
    """Send `NUM_HANDOFFS` requests to a router.

    Fail if one took too long, or was not loaded as it should be.
    """
    router.complete([7] * 2 * CHUNK_TOKENS, 4)  # the answer says where the prefill node is
    nodes = (prefill, decode)
    before = _ended_by_a_deadline(nodes)
    num_met = router.metric("kvferry_router_rendezvous_total")
    seconds = sorted(_ask_many(router))
    median = statistics.median(seconds)
    print(
        f"{len(seconds)} handoffs: median {median:.2f} s, "
        f"99% {seconds[len(seconds) * 99 // 100]:.2f} s, longest {seconds[-1]:.2f} s"
    )
    # These do not depend on how busy the machine is.
    assert _ended_by_a_deadline(nodes) == before
    assert router.metric("kvferry_router_rendezvous_total") - num_met == NUM_HANDOFFS
    assert seconds[-1] < 4 * median + LONGEST_WAIT_S


def _ended_by_a_deadline(nodes: tuple[Server, ...]) -> list[dict[str, float]]:
    return [{name: node.metric(name) for name in ENDED_BY_A_DEADLINE} for node in nodes]


def _ask_many(router: Server) -> list[float]:
    numbers = itertools.count()
    lock = threading.Lock()
    seconds: list[float] = []

    def ask(client: int) -> None:
        drawn = random.Random(client)
        while next(numbers) < NUM_HANDOFFS:
            prompt = drawn.choices(range(1, 250), k=drawn.randrange(300, 600))
            began = time.monotonic()
            reply = router.complete(prompt, 4)
            assert reply.status == 200, reply
            with lock:
                seconds.append(time.monotonic() - began)

    with ThreadPoolExecutor(NUM_CLIENTS) as threads:
        asking: list[Any] = [threads.submit(ask, client) for client in range(NUM_CLIENTS)]
        for each in asking:
            each.result()
    return seconds
