"""Ray Serve on this machine: a prefill and a decode deployment with kvferry, and a deployment of one engine without it."""

from __future__ import annotations

import argparse
import os
import re
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
from ray import serve
from ray.cluster_utils import Cluster
from ray_serve_pair import DEMO_CPUS, ask, deploy_alone, deploy_pair, make_parser

from kvferry.connector.ray import register
from kvferry.reference.demo.launcher import free_port
from kvferry.reference.engine.default_model import default_model_folder

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "VLLM_NO_USAGE_STATS": "1",
    # By default all that Ray starts is of a lower priority than the rest of the machine.
    "RAY_worker_niceness": "0",
}


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


@dataclass(frozen=True)
class Serving:
    """Both applications.

    Attributes:
        pair: The pair of deployments.
        alone: One engine.
    """

    options: argparse.Namespace
    cluster: Cluster
    pair: App
    alone: App

    def scale(self, *, num_prefills: int, num_decodes: int) -> None:
        """Deploy the pair again, with other numbers of replicas, and wait until it is so."""
        deploy_pair(self.options, num_prefills, num_decodes)

    def metric(self, name: str) -> float:
        """Return the sum of a metric of all replicas; 0 if there is none."""
        found = 0.0
        for node in ray.nodes():
            if not node["Alive"]:
                continue
            url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
            with urllib.request.urlopen(url, timeout=10) as response:
                text = response.read().decode()
            found += sum(map(float, re.findall(rf"^ray_{name}{{.*}} (\S+)$", text, re.MULTILINE)))
        return found

    def load_seconds(self) -> tuple[float, float]:
        """Return the seconds of all loads, and those of which that an answer waited for."""
        return self.metric("kvferry_load_seconds_sum"), self.metric("kvferry_load_exposed_seconds_sum")


@contextmanager
def serving_here() -> Iterator[Serving]:
    """Start Ray and both applications, and stop them afterwards."""
    port = free_port()
    options = make_parser().parse_args(["--model", str(default_model_folder()), "--device", "cpu"])
    cluster = Cluster(initialize_head=True, connect=True, head_node_args={"num_cpus": DEMO_CPUS})
    try:
        register()
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        deploy_alone(options)
        deploy_pair(options, 1, 1)
        url = f"http://127.0.0.1:{port}"
        yield Serving(options, cluster, App(f"{url}/pair"), App(f"{url}/alone"))
    finally:
        serve.shutdown()
        ray.shutdown()
        cluster.shutdown()
