"""WHAT: which blocks of which request cross, for whom, until when; is the peer compatible."""

from __future__ import annotations

if __name__ != "kvferry.connector":  # the same file under a second name would be a second set of classes
    raise ImportError("import kvferry.connector, not connector: `pip install -e .` first")
