"""Reads that go in slices: what the reader and the owner of the memory do about each slice, once for all
wires.

The reader *fetches* a read slice by slice, a window at a time. The owner of the memory sends the bytes of
each slice and its *verdict*: whether the guard held after the last byte had left its pool. A read succeeds if
all of its slices are in the pool and the owner has vouched for all of them.

`Reader` and `Server` are state machines without sockets or clocks. A transport derives both: it says how a
fetch and an answer travel, and reports what arrives and what has left. `docs/design.md` has the states.
"""

from .reader import Reader, Slice, SliceState, Transfer, Verdict
from .server import Answer, Server

__all__ = ["Answer", "Reader", "Server", "Slice", "SliceState", "Transfer", "Verdict"]
