"""What is started: nodes of vLLM, and something in front of them."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from typing import Any

from demo.launcher import LaunchedProcess, Launcher

__all__ = ["KVFERRY", "start_vllm"]

#: How vLLM is told of kvferry; options of the connector are added.
KVFERRY: Mapping[str, Any] = {
    "kv_connector": "KvferryConnector",
    "kv_connector_module_path": "kvferry.connector.vllm",
    "kv_role": "kv_both",
}


def start_vllm(
    launcher: Launcher, name: str, model: str, arguments: tuple[str, ...], transfer: Mapping[str, Any] | None
) -> LaunchedProcess:
    """Start `vllm serve` on a free port. Returns at once.

    Args:
        transfer: Its KV transfer configuration; None for a node by itself.
    """
    config = () if transfer is None else ("--kv-transfer-config", json.dumps(transfer))
    return launcher.start(
        name,
        "vllm_pair/serve.py",
        model,
        "--served-model-name",
        "model",
        "--port",
        str(_free_port()),
        *arguments,
        *config,
    )


def _free_port() -> int:
    # vLLM cannot be told to take one itself and say which.
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
