"""Start `vllm serve` with kvferry as its connector, and ask what it has loaded."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import aiohttp

from .client import Answer, OnText, ask
from .launcher import LaunchedProcess, Launcher, free_port

#: vLLM's KV transfer configuration for kvferry, without the connector's own options.
KVFERRY: Mapping[str, Any] = {
    "kv_connector": "KvferryConnector",
    "kv_connector_module_path": "kvferry.connector.vllm",
    "kv_role": "kv_both",
}
#: For models in float32 that run beside others on a CPU.
ARGUMENTS = ("--dtype", "float32", "--block-size", "32", "--max-model-len", "2048", "--enforce-eager")
#: Settings that nodes on CPUs need to share a machine. The user's environment overrides them.
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",  # with more, threads on shared cores spin while they wait for each other
    "TORCHDYNAMO_DISABLE": "1",  # otherwise the first request for log probabilities waits for a compilation
    "VLLM_USE_AOT_COMPILE": "0",  # it fails without TorchDynamo
}
#: A sample of a node's page of metrics: name, labels, value.
_LOAD_METRIC = re.compile(
    r"^(kvferry_load_\w+|vllm:external_prefix_cache_hits_total)\{(.*)\} (\S+)$", re.MULTILINE
)


def start_vllm(
    launcher: Launcher,
    name: str,
    model: str,
    arguments: Sequence[str] = ARGUMENTS,
    transfer: Mapping[str, Any] | None = KVFERRY,
    *,
    port: int = 0,
    host: str = "127.0.0.1",
    environment: Mapping[str, str] | None = None,
    cpus: Collection[int] = (),
    prefix: Sequence[str] = (),
) -> LaunchedProcess:
    """Start `vllm serve` in this interpreter's environment. It serves its model as `model`. Returns at once.

    Args:
        model: The model's folder or name.
        arguments: Further arguments of `vllm serve`.
        transfer: Its KV transfer configuration. None: no connector.
        port: The port to listen on. 0 chooses a free one.
        host: The address to listen on.
        environment: Variables for it, beside those of this process and `ENVIRONMENT`.
        cpus: The processors that it may use. Empty: all.
        prefix: A command that runs the one that follows it, such as `ip netns exec NAME`.

    Raises:
        LaunchError: no port is free.
    """
    port = port or free_port()
    # Start it by its module, because vllm-cpu's command looks for a distribution named vllm.
    command = [*prefix, sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    command += ["--served-model-name", "model", "--host", host, "--port", str(port), *arguments]
    if transfer is not None:
        command += ["--kv-transfer-config", json.dumps(transfer)]
    defaults = {name: value for name, value in ENVIRONMENT.items() if name not in os.environ}
    return launcher.start_server(
        name,
        command,
        port,
        "/health",
        host=host,
        environment={**defaults, **(environment or {})},
        cpus=cpus,
    )


async def ask_pair(
    session: aiohttp.ClientSession,
    url: str,
    prompt: str,
    max_tokens: int,
    on_text: OnText,
    cache_salt: str = "",
    *,
    decode: LaunchedProcess,
) -> Answer:
    """Ask a pair as `ask` does, and give the answer the figures of its load, which vLLM does not send with it.

    They are what the request has added to the metrics of `decode`. So no other request may be in flight.
    """
    before = await _load_metrics(session, decode.url)
    answer = await ask(session, url, prompt, max_tokens, on_text, cache_salt)
    after = await _load_metrics(session, decode.url)
    answer.metrics = _figures({key: value - before.get(key, 0.0) for key, value in after.items()})
    return answer


async def _load_metrics(session: aiohttp.ClientSession, url: str) -> dict[tuple[str, str], float]:
    """Read a node's metrics of loads: name and labels → value."""
    async with session.get(f"{url}/metrics") as response:
        text = await response.text()
    return {(name, labels): float(value) for name, labels, value in _LOAD_METRIC.findall(text)}


def _figures(added: Mapping[tuple[str, str], float]) -> Mapping[str, Any]:
    """Return the figures of a load in the form of a reference node's; empty if there was none."""

    def total(name: str) -> float:
        return sum(value for (own, _), value in added.items() if own == name)

    if total("kvferry_load_failures_total"):
        return {"transfer": {"error": "see the log of the decode node"}}
    through = [
        labels for (name, labels), value in added.items() if name == "kvferry_load_seconds_count" and value
    ]
    if not through:
        return {}
    labels = dict(re.findall(r'(\w+)="([^"]*)"', through[0]))
    return {
        "num_loaded_tokens": int(total("vllm:external_prefix_cache_hits_total")),
        "transfer": {
            "transport": labels["transport"],
            "mechanism": labels["mechanism"],
            "seconds": total("kvferry_load_seconds_sum"),
            "exposed_seconds": total("kvferry_load_exposed_seconds_sum"),
            "num_bytes": int(total("kvferry_load_bytes_sum")),
            "num_blocks": int(total("kvferry_load_blocks_sum")),
            "num_regions": int(total("kvferry_load_regions_sum")),
        },
    }
