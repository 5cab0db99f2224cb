"""An engine as a child process. It receives orders and sends answers as JSON lines over an inherited socket.

Each order, `{"id": 1, "do": "add", ...}`, is answered by one line with its `id`. A request adds the line
`{"first": ...}` with its first token, and `{"finished": ..., "tokens": ..., "reason": ..., "params": ...,
"top_logits": ...}` when it has ended. `"num_top_logits": n` in an order to add a request asks for the n
largest logits of its first token, as `[token id, logit]`, the largest first. All may be shifted by the same
amount, as log-probabilities are.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import socket
import threading
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TextIO

from kvferry.router.http.launcher_link import LAUNCHER_VARIABLE


class Host(Protocol):
    """An engine. Each public method is an order: it takes keyword arguments and returns a JSON object."""

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""

    def step(self) -> Iterable[dict[str, Any]]:
        """Run one step. Returns the lines to send about requests."""

    def close(self) -> None:
        """Shut the engine down."""


def obey(make_host: Callable[[dict[str, Any]], Host]) -> None:
    """Run a host with the settings on the command line: carry out orders, and step while there is work.

        KVFERRY_LAUNCHER_FD=DESCRIPTOR python PROGRAM SETTINGS

    Returns when the other end of the socket is shut down for writing.
    """
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("settings", type=json.loads)
    arguments = parser.parse_args()
    host = make_host(arguments.settings)
    orders: queue.Queue[dict[str, Any] | None] = queue.Queue()
    with socket.socket(fileno=int(os.environ.pop(LAUNCHER_VARIABLE))) as link:
        with link.makefile("r") as incoming, link.makefile("w") as answers:
            threading.Thread(target=_read, args=(incoming, orders), daemon=True).start()
            _say(answers, {"ready": True})
            _work(host, orders, answers)


def _work(host: Host, orders: queue.Queue[dict[str, Any] | None], answers: TextIO) -> None:
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


def _read(incoming: TextIO, orders: queue.Queue[dict[str, Any] | None]) -> None:
    with contextlib.suppress(ConnectionResetError):  # the process at the other end died
        for line in incoming:
            orders.put(json.loads(line))
    orders.put(None)


def _say(answers: TextIO, answer: dict[str, Any]) -> None:
    print(json.dumps(answer), file=answers, flush=True)
