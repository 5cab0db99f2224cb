"""A reference engine, its HTTP node, and the demo: a whole host for kvferry, in plain Python.

It is what `kvferry serve` and `kvferry demo` run. It needs the extra `kvferry[reference]`.
"""

from __future__ import annotations

if __name__ != "kvferry.reference":  # the same file under a second name would be a second set of classes
    raise ImportError("import kvferry.reference, not reference: `pip install -e .` first")
