"""Prefill a prompt in one vLLM server and decode it in another: `python examples/vllm_pair --help`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from vllm_pair.run import main

if __name__ == "__main__":
    sys.exit(main())
