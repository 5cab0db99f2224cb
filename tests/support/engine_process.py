"""A test's side of an engine process that takes orders; see `vllm_program.py`."""

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

from kvferry.lab.servers import run_program

#: Seconds for a start, which takes half a minute on two idle cores.
START_S = 240.0
#: Seconds for an answer. The ranks of an engine busy-poll for each other, so on shared cores a token can take
#: seconds.
ANSWER_S = 180.0

Answer = dict[str, Any]


class Node:
    """One engine in a process group of its own.

    Args:
        script: The engine's program.
        settings: vLLM's engine arguments.
        log: File for the process's output.
    """

    def __init__(self, script: Path, settings: dict[str, Any], log: Path) -> None:
        self._log = log
        self._arrived = threading.Condition()
        self._answers: list[Answer] = []
        self._num_orders = 0
        self._link, theirs = socket.socketpair()
        with log.open("wb") as output, theirs:
            arguments = [json.dumps(settings)]
            self._process = run_program(str(script), arguments, output.fileno(), theirs.fileno())
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
        """Send an order, and wait until the engine has carried it out."""
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
        """Whether `result` would return at once."""
        with self._arrived:
            return any(answer.get("finished") == request for answer in self._answers)

    def ask(
        self, request: str, prompt: list[int], max_tokens: int = 1, params: Any = None, **more: Any
    ) -> Answer:
        self.start(request, prompt, max_tokens, params, **more)
        return self.result(request)

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of a metric's samples with these labels."""
        samples = self.order("metric", name=name)["samples"]
        return float(sum(value for has, value in samples if labels.items() <= has.items()))

    def wait_for_status(self, is_so: Callable[[Answer], bool]) -> Answer:
        deadline = time.monotonic() + ANSWER_S
        while not is_so(status := self.order("status")):
            assert time.monotonic() < deadline, f"still {status}"
        return status

    # -- the process ---------------------------------------------------------------------------------

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all processes of the engine."""
        os.killpg(self._process.pid, number)

    def kill(self) -> None:
        """Kill the engine."""
        self.signal(signal.SIGKILL)
        self._reap()

    def stop(self) -> int:
        """Ask the engine to end, and return its exit status."""
        self._link.shutdown(socket.SHUT_WR)
        try:
            return self._process.wait(ANSWER_S)
        finally:
            self.close()

    def close(self) -> None:
        """Kill the engine if it runs, and release everything. Idempotent."""
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
        with (
            self._link.makefile() as lines,
            suppress(ConnectionResetError),
        ):  # the engine was killed before it had read everything
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
                f"no answer in time; the engine's log ends with\n{self.log[-4000:]}"
            )
            wanted = next((answer for answer in self._answers if is_wanted(answer)), None)
            assert wanted is not None, f"the engine has ended; its log ends with\n{self.log[-4000:]}"
            self._answers.remove(wanted)
            return wanted
