"""Start vLLM servers with kvferry as their connector."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvferry.reference.demo.foreign import free_port
from kvferry.reference.demo.launcher import LaunchedProcess, Launcher

#: vLLM's KV transfer configuration for kvferry, without the connector's own options.
KVFERRY: Mapping[str, Any] = {
    "kv_connector": "KvferryConnector",
    "kv_connector_module_path": "kvferry.connector.vllm",
    "kv_role": "kv_both",
}


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
        transfer: Its KV transfer configuration. None: no connector.
        port: The port to listen on. 0 chooses a free one.

    Raises:
        LaunchError: No port is free.
    """
    config = () if transfer is None else ("--kv-transfer-config", json.dumps(transfer))
    return launcher.start(
        name,
        str(Path(__file__).with_name("serve.py")),
        model,
        "--served-model-name",
        "model",
        "--port",
        str(port or free_port()),
        *arguments,
        *config,
    )
