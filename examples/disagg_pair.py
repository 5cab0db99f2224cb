"""A prompt, prefilled by one process and answered by another: `python examples/disagg_pair.py --help`."""

from __future__ import annotations

import sys

from reference.demo.run import main

if __name__ == "__main__":
    sys.exit(main())
