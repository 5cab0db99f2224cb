"""Run `vllm serve` under the demo's launcher: report when it is ready, and end when the launcher ends.

python serve.py --launcher-fd N MODEL --port PORT ...        passes all other arguments to `vllm serve`
"""

from __future__ import annotations

import argparse
import sys

from kvferry.reference.demo.foreign import run_server

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
    port = int(arguments[arguments.index("--port") + 1])
    # Start `vllm serve` by its module, because vllm-cpu's command looks for a distribution named vllm.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", *arguments]
    return run_server(command, options.launcher_fd, port, "/health", ENVIRONMENT)


if __name__ == "__main__":
    sys.exit(main())
