"""The router: takes clients' requests, has one node compute the prompt, and passes on another node's answer.

It is what `kvferry router` runs, in front of reference nodes or of vLLM's servers. It needs the extra
`kvferry[router]`.
"""

from __future__ import annotations

if __name__ != "kvferry.router":  # the same file under a second name would be a second set of classes
    raise ImportError("import kvferry.router, not router: `pip install -e .` first")
