"""The command `kvferry`, for people who operate nodes: `docs/operations.md`.

Each command is a module with `add`, which declares its options, and `run`, which returns the exit status. The
modules import what is heavy (NumPy, transports) only in `run`, so that `kvferry --help` and `kvferry version`
answer at once.
"""

from __future__ import annotations

if __name__ != "kvferry.cli":  # the same file under a second name would be a second set of classes
    raise ImportError("import kvferry.cli, not cli: `pip install -e .` first")
