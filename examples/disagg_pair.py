"""Prefill a prompt in one process and decode it in another: `python examples/disagg_pair.py --help`."""

from __future__ import annotations

import sys

from kvferry.reference.demo.run import main

if __name__ == "__main__":
    sys.exit(main())
