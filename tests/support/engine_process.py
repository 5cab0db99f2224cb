"""An engine that takes orders, as tests see it."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from reference.demo.launcher import Spawn

#: An engine takes half a minute to start on two idle cores.
START_S = 240.0
#: Ranks of one engine wait for each other by spinning: on cores that others use too, a token can take seconds.
ANSWER_S = 180.0

Answer = dict[str, Any]


class Node:
    """One engine in a process group of its own.

    Args:
        host: Which engine.
        script: Its program.
        settings: vLLM's engine arguments.
        log: File for what it prints.
        spawn: Starts its process.
    """

    def __init__(self, host: str, script: Path, settings: dict[str, Any], log: Path, spawn: Spawn) -> None:
        self.host = host
        self._log = log
        self._arrived = threading.Condition()
        self._answers: list[Answer] = []
        self._num_orders = 0
        self._link, theirs = socket.socketpair()
        with log.open("wb") as output, theirs:
            self._process = spawn(str(script), [json.dumps(settings)], output.fileno(), theirs.fileno())
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def wait_until_ready(self) -> Node:
        self._take(lambda answer: "ready" in answer, START_S)
        return self

    @property
    def log(self) -> str:
        return self._log.read_text()

    # -- orders --------------------------------------------------------------------------------------

    def order(self, do: str, **arguments: Any) -> Answer:
        """Have the engine do something, and wait until it did."""
        self._num_orders += 1
        number = self._num_orders
        self._link.sendall(json.dumps({"id": number, "do": do, **arguments}).encode() + b"\n")
        return self._take(lambda answer: answer.get("id") == number, ANSWER_S)

    def start(
        self, request: str, prompt: list[int], max_tokens: int = 1, params: Any = None, **more: Any
    ) -> None:
        self.order("add", request=request, prompt=prompt, max_tokens=max_tokens, params=params, **more)

    def wait_for_first_token(self, request: str) -> None:
        self._take(lambda answer: answer.get("first") == request, ANSWER_S)

    def result(self, request: str, timeout_s: float = ANSWER_S) -> Answer:
        return self._take(lambda answer: answer.get("finished") == request, timeout_s)

    def has_finished(self, request: str) -> bool:
        """Whether its result can be taken."""
        with self._arrived:
            return any(answer.get("finished") == request for answer in self._answers)

    def ask(
        self, request: str, prompt: list[int], max_tokens: int = 1, params: Any = None, **more: Any
    ) -> Answer:
        self.start(request, prompt, max_tokens, params, **more)
        return self.result(request)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that have these labels."""
        samples = self.order("metric", name=name)["samples"]
        return float(sum(value for has, value in samples if labels.items() <= has.items()))

    def wait_for_status(self, is_so: Callable[[Answer], bool]) -> Answer:
        deadline = time.monotonic() + ANSWER_S
        while not is_so(status := self.order("status")):
            assert time.monotonic() < deadline, f"still {status}"
        return status

    # -- the process ---------------------------------------------------------------------------------

    def signal(self, number: signal.Signals) -> None:
        """To the engine and every process of it."""
        os.killpg(self._process.pid, number)

    def kill(self) -> None:
        """End it at once, whatever it is doing."""
        self.signal(signal.SIGKILL)
        self._reap()

    def stop(self) -> int:
        """End it as an operator would, and return its exit status."""
        self._link.shutdown(socket.SHUT_WR)
        try:
            return self._process.wait(ANSWER_S)
        finally:
            self.close()

    def close(self) -> None:
        """Leave nothing behind, whatever state it is in. Idempotent."""
        try:
            self.signal(signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._reap()

    def _reap(self) -> None:
        self._process.wait(ANSWER_S)
        self._reader.join(ANSWER_S)
        self._link.close()

    # -- answers -------------------------------------------------------------------------------------

    def _read(self) -> None:
        with self._link.makefile() as lines, suppress(ConnectionResetError):  # killed before it had read all
            for line in lines:
                self._put(json.loads(line))
        self._put({"ended": True})

    def _put(self, answer: Answer) -> None:
        with self._arrived:
            self._answers.append(answer)
            self._arrived.notify_all()

    def _take(self, is_wanted: Callable[[Answer], bool], timeout_s: float) -> Answer:
        def found() -> bool:
            return any(is_wanted(answer) or "ended" in answer for answer in self._answers)

        with self._arrived:
            assert self._arrived.wait_for(found, timeout_s), (
                f"no answer; its log ends with\n{self.log[-4000:]}"
            )
            wanted = next((answer for answer in self._answers if is_wanted(answer)), None)
            assert wanted is not None, f"the engine is gone; its log ends with\n{self.log[-4000:]}"
            self._answers.remove(wanted)
            return wanted
