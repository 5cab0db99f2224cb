"""Start vLLM servers with kvferry as their connector."""

from __future__ import annotations

import contextlib
import json
import random
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvferry.reference.demo.launcher import LaunchedProcess, Launcher, LaunchError

#: vLLM's KV transfer configuration for kvferry, without the connector's own options.
KVFERRY: Mapping[str, Any] = {
    "kv_connector": "KvferryConnector",
    "kv_connector_module_path": "kvferry.connector.vllm",
    "kv_role": "kv_both",
}
#: Below the ports that Linux gives to outgoing connections.
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
        str(port or _free_port()),
        *arguments,
        *config,
    )


def _free_port() -> int:
    # vLLM cannot choose a port and report it, and it binds late. So choose one from a range that the kernel does not use
    # for other sockets meanwhile.
    for port in random.sample(PORTS, len(PORTS)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise LaunchError(f"none of the ports from {PORTS[0]} to {PORTS[-1]} is free")
