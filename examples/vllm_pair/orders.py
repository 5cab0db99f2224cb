"""An engine as a child process: orders come as JSON lines on standard input, answers go to a pipe.

Every order, `{"id": 1, "do": "add", ...}`, gets one line with its `id`. A request gets one more, `{"first": ...}`, with its
first token, and one, `{"finished": ..., "tokens": ..., "reason": ..., "params": ...}`, when it has ended.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from collections.abc import Iterable
from typing import Any, Protocol

__all__ = ["Host", "obey"]


class Host(Protocol):
    """An engine. Its public methods are the orders: keyword arguments in, a JSON object out."""

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""

    def step(self) -> Iterable[dict[str, Any]]:
        """Run one step; returns what is to be said of requests."""

    def close(self) -> None:
        """End, as an operator would have it."""


def obey(host: Host, descriptor: int) -> None:
    """Step while there is anything to do, and obey, until standard input ends."""
    orders: queue.Queue[dict[str, Any] | None] = queue.Queue()
    threading.Thread(target=_read, args=(orders,), daemon=True).start()
    with os.fdopen(descriptor, "w", buffering=1) as answers:
        _say(answers, {"ready": True})
        while True:
            try:
                order = orders.get(block=not host.has_work)
            except queue.Empty:
                for event in host.step():
                    _say(answers, event)
                continue
            if order is None:
                host.close()
                return
            number, do = order.pop("id"), order.pop("do")
            _say(answers, {"id": number, **getattr(host, do)(**order)})


def _read(orders: queue.Queue[dict[str, Any] | None]) -> None:
    for line in sys.stdin:
        orders.put(json.loads(line))
    orders.put(None)


def _say(answers: Any, answer: dict[str, Any]) -> None:
    print(json.dumps(answer), file=answers)
