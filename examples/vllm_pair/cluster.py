"""What is started: nodes of vLLM, and something in front of them."""

from __future__ import annotations

import contextlib
import json
import random
import socket
from collections.abc import Mapping
from typing import Any

from reference.demo.launcher import LaunchedProcess, Launcher, LaunchError

#: How vLLM is told of kvferry; options of the connector are added.
KVFERRY: Mapping[str, Any] = {
    "kv_connector": "KvferryConnector",
    "kv_connector_module_path": "kvferry.connector.vllm",
    "kv_role": "kv_both",
}
#: Below those that Linux gives to outgoing connections.
PORTS = range(20000, 32000)


def start_vllm(
    launcher: Launcher,
    name: str,
    model: str,
    arguments: tuple[str, ...],
    transfer: Mapping[str, Any] | None,
    port: int = 0,
) -> LaunchedProcess:
    """Start `vllm serve`. Returns at once.

    Args:
        transfer: Its KV transfer configuration; None for a node by itself.
        port: Where it listens; 0 for a port that is free.

    Raises:
        LaunchError: no port is free.
    """
    config = () if transfer is None else ("--kv-transfer-config", json.dumps(transfer))
    return launcher.start(
        name,
        "vllm_pair/serve.py",
        model,
        "--served-model-name",
        "model",
        "--port",
        str(port or _free_port()),
        *arguments,
        *config,
    )


def _free_port() -> int:
    # vLLM cannot be told to take one itself and say which, and it takes it late; so it is one that the kernel does not
    # give to others meanwhile.
    for port in random.sample(PORTS, len(PORTS)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise LaunchError(f"none of the ports from {PORTS[0]} to {PORTS[-1]} is free")
