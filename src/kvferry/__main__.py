"""`python -m kvferry`: the command `kvferry`."""

from __future__ import annotations

import sys

from kvferry.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
