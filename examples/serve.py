"""Serve a model as one node: `python examples/serve.py --help`. `kvferry serve` is the same."""

from __future__ import annotations

import sys

from kvferry.lab.node.main import main

if __name__ == "__main__":
    sys.exit(main(program="serve.py"))
