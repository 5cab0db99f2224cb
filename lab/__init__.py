"""What starts, asks, loads, measures, breaks and plans nodes of kvferry, and the reference engine to do it
with.

`engine` is an engine in plain Python and `node` its HTTP node: `kvferry serve`. `demo`, `prove` and `plan`
are the commands of these names. `bench` compares kvferry with other programs. What each needs beyond kvferry
is in the extra `kvferry[lab]`.
"""

from __future__ import annotations

if __name__ != "kvferry.lab":  # the same file under a second name would be a second set of classes
    raise ImportError("import kvferry.lab, not lab: `pip install -e .` first")
