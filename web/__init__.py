"""What the router and the reference node share as HTTP servers: access, limits, errors, logs, traces, start
and end.

It needs the extra `kvferry[router]`.
"""

from __future__ import annotations

if __name__ != "kvferry.web":  # the same file under a second name would be a second set of classes
    raise ImportError("import kvferry.web, not web: `pip install -e .` first")
