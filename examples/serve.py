"""Serve a model as one node: `python examples/serve.py --help`."""

from __future__ import annotations

import os
import sys

# Several nodes may share a machine's cores, so an OpenMP thread that waits must not spin. Set this before PyTorch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from kvferry.reference.node.main import main

if __name__ == "__main__":
    sys.exit(main())
