"""WHEN: the seam to a model runner: the lifecycle of one step, cache allocation and binding."""

from __future__ import annotations

if __name__ != "kvferry.runner_mixin":  # the same file under a second name would be a second set of classes
    raise ImportError("import kvferry.runner_mixin, not runner_mixin: `pip install -e .` first")
