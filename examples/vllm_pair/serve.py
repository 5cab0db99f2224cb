"""Run `vllm serve` under the demo's launcher: report when it is ready, and end when the launcher ends.

python serve.py --launcher-fd N MODEL --port PORT ...        passes all other arguments to `vllm serve`
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request

POLL_S = 0.25
STOP_S = 15.0

#: Settings that CPU nodes need to share a machine. The user's environment overrides them.
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def main() -> int:
    """Run vLLM until it ends, or until the launcher or a signal ends it. Returns its exit status."""
    # Allow no abbreviations, because one of our option may be an option of vLLM's.
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--launcher-fd", type=int, required=True)
    options, arguments = parser.parse_known_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    port = int(arguments[arguments.index("--port") + 1])
    # Start `vllm serve` by its module, because vllm-cpu's command looks for a distribution named vllm.
    vllm = subprocess.Popen(
        [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", *arguments],
        env=ENVIRONMENT | os.environ,
    )
    with socket.socket(fileno=options.launcher_fd) as launcher:
        try:
            launcher.send(json.dumps({"listening": port}).encode() + b"\n")
            return _watch(vllm, launcher, f"http://127.0.0.1:{port}/health")
        finally:
            _stop(vllm)


def _watch(vllm: subprocess.Popen[bytes], launcher: socket.socket, health: str) -> int:
    is_ready = False
    with selectors.DefaultSelector() as selector:
        selector.register(launcher, selectors.EVENT_READ)
        while (status := vllm.poll()) is None:
            if selector.select(POLL_S):
                return 0  # the launcher has ended
            if not is_ready and _answers(health):
                is_ready = True
                launcher.send(json.dumps({"ready": True}).encode() + b"\n")
    return status


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=POLL_S) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, TimeoutError, ConnectionError):
        return False


def _stop(vllm: subprocess.Popen[bytes]) -> None:
    vllm.terminate()
    try:
        vllm.wait(STOP_S)
    except subprocess.TimeoutExpired:
        vllm.kill()
        vllm.wait()


if __name__ == "__main__":
    sys.exit(main())
