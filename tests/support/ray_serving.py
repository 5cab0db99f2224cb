"""Ray Serve on this machine: a prefill and a decode deployment with kvferry, and a deployment of one engine
without it.

Ray takes the machine for two: each of its raylets counts as one. Decode replicas run on the second one only.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
from ray import serve
from ray.cluster_utils import Cluster
from ray_serve_pair import DEMO_CPUS, ask, deploy_alone, deploy_pair, make_parser

from kvferry.connector.ray import register
from kvferry.lab.client import call, totals_of
from kvferry.lab.engine.default_model import default_model_folder
from kvferry.lab.servers import free_port

#: A resource that only the second raylet has.
DECODE = "decode_machine"

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "VLLM_NO_USAGE_STATS": "1",
    # By default all that Ray starts is of a lower priority than the rest of the machine.
    "RAY_worker_niceness": "0",
}


WORDS = [
    "A",
    "ferry",
    "takes",
    "what",
    "others",
    "have",
    "packed;",
    "it",
    "does",
    "not",
    "open",
    "the",
    "boxes,",
    "and",
    "the",
    "river",
    "is",
    "wide",
    "today.",
]
SOON_S = 90.0


@dataclass(frozen=True)
class App:
    """An application of Ray Serve with OpenAI's API."""

    url: str

    def ask(self, prompt: str, **fields: Any) -> str:
        """Return the answer's text.

        Raises:
            urllib.error.HTTPError: The application has refused the request.
        """
        return ask(self.url, prompt, 8, **fields)


class Serving:
    """Both applications, and the cluster in which they run. `start` starts them.

    Attributes:
        pair: The pair of deployments.
        alone: One engine.
    """

    def __init__(self, cluster: Cluster, port: int) -> None:
        self.pair, self.alone = App(f"http://127.0.0.1:{port}/pair"), App(f"http://127.0.0.1:{port}/alone")
        self._options = make_parser().parse_args(["--model", str(default_model_folder()), "--device", "cpu"])
        self._cluster = cluster
        self._decode_raylet = self._add_raylet()

    def start(self) -> None:
        deploy_alone(self._options)
        self.deploy(num_decodes=1)

    def deploy(self, *, num_decodes: int, max_num_batched_tokens: int = 256) -> None:
        """Deploy the pair, perhaps again and in another way, and wait until it is so."""
        self._options.max_num_batched_tokens = max_num_batched_tokens
        deploy_pair(self._options, 1, num_decodes, decode_resource=DECODE)

    def lose_decode_raylet(self) -> None:
        """Kill the raylet of the decode replicas with all that runs there, and add another one."""
        self._cluster.remove_node(self._decode_raylet, allow_graceful=False)
        self._decode_raylet = self._add_raylet()

    def _add_raylet(self) -> Any:
        return self._cluster.add_node(num_cpus=DEMO_CPUS, resources={DECODE: 4})

    def metric(self, name: str) -> float:
        """Return the sum of a metric of all replicas; 0 if there is none."""
        found = 0.0
        for node in ray.nodes():
            if not node["Alive"]:
                continue
            url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}"
            found += totals_of(call("GET", url, "/metrics").decode()).get(f"ray_{name}", 0.0)
        return found

    def load_seconds(self) -> tuple[float, float]:
        """Return the seconds of all loads, and those of which that an answer waited for."""
        return self.metric("kvferry_load_seconds_sum"), self.metric("kvferry_load_exposed_seconds_sum")


@contextmanager
def serving_here() -> Iterator[Serving]:
    """Start Ray and both applications, and stop them afterwards."""
    port = free_port()
    cluster = Cluster(initialize_head=True, connect=True, head_node_args={"num_cpus": DEMO_CPUS})
    try:
        register()
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serving = Serving(cluster, port)
        serving.start()
        yield serving
    finally:
        serve.shutdown()
        ray.shutdown()
        cluster.shutdown()


def prompts(seed: int, num_words: int = 80) -> Iterator[str]:
    """Yield prompts without an end."""
    dice = random.Random(seed)
    while True:
        yield " ".join(dice.choice(WORDS) for _ in range(num_words))


def wait_until(condition: Callable[[], bool], seconds: float = SOON_S) -> None:
    """Wait until something is so.

    Raises:
        AssertionError: It is not, after that time.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.5)
