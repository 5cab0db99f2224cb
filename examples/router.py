"""Route requests over prefill and decode nodes: `python examples/router.py --help`."""

from __future__ import annotations

import sys

from kvferry.reference.router.main import main

if __name__ == "__main__":
    sys.exit(main())
