"""Serve a model as one node: `python examples/serve.py --help`."""

from __future__ import annotations

import os
import sys

# Several nodes share the cores of a machine: a thread that waits for another one must not spin on a core.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from reference.node.main import main

if __name__ == "__main__":
    sys.exit(main())
