"""Prefill in one process and decode in another: `python examples/disagg_pair.py --help`.

`kvferry demo` is the same.
"""

from __future__ import annotations

import os
import sys

from kvferry.lab.demo.run import main

if __name__ == "__main__":
    # The nodes are processes of their own. They find the connectors of this folder as this program does.
    folders = (os.environ.get("PYTHONPATH"), os.path.dirname(os.path.abspath(__file__)))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    sys.exit(main(program="disagg_pair.py"))
