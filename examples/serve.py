"""Serve a model as one node: `python examples/serve.py --help`."""

from __future__ import annotations

import os
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from node.main import main

if __name__ == "__main__":
    sys.exit(main())
