"""Route requests over nodes: `python examples/router.py --help`. `kvferry router` is the same."""

from __future__ import annotations

import sys

from kvferry.router.main import main

if __name__ == "__main__":
    sys.exit(main(program="router.py"))
