"""Start nodes quickly by forking them from a process that has already imported PyTorch and transformers.

Most of a node's start is those imports. A zygote is a process that has imported them, and none of our code.
To run a program it forks, and the child runs it as a launcher's `run_program` would.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
#: As in `kvferry.router.http.launcher_link`, which a zygote must not have imported.
LAUNCHER_VARIABLE = "KVFERRY_LAUNCHER_FD"
#: Seconds that the zygote may take for its imports on a busy machine.
ANSWER_TIMEOUT_S = 100.0
MAX_ORDER_BYTES = 64 << 10
MODULES = (
    *("aiohttp.web", "msgpack", "numpy", "prometheus_client", "safetensors.torch", "torch", "xxhash", "zmq"),
    *("transformers.models.auto.modeling_auto", "transformers.models.auto.tokenization_auto"),
    *("transformers.generation", "transformers.models.llama.modeling_llama", "transformers.masking_utils"),
)


class Zygote:
    """Forks processes for a `Launcher`: `Launcher(zygote.spawn)`.

    For one thread. Closing it does not end the processes that it forked.
    """

    def __init__(self) -> None:
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._orders.settimeout(ANSWER_TIMEOUT_S)
            # Threads do not survive a fork, so no import may start one.
            environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "OPENBLAS_NUM_THREADS": "1"}
            command = [sys.executable, __file__, str(theirs.fileno())]
            self._process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(),)
            )

    def spawn(self, program: str, arguments: Sequence[str], log: int, link: int) -> Forked:
        """See `servers.Spawn`."""
        order = {"program": program, "arguments": list(arguments), "cwd": os.getcwd()}
        socket.send_fds(self._orders, [json.dumps(order).encode()], [log, link])
        return Forked(self._answer(), self._reap)

    def _reap(self, pid: int) -> int:
        self._orders.send(json.dumps({"reap": pid}).encode())
        return self._answer()

    def _answer(self) -> int:
        return int(self._orders.recv(MAX_ORDER_BYTES))

    def close(self) -> None:
        """End the zygote. The processes that it forked live on until their launcher ends them."""
        self._orders.close()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Forked:
    """A process that a zygote forked, with the part of `subprocess.Popen` that a launcher needs."""

    def __init__(self, pid: int, reap: Callable[[int], int]) -> None:
        self.pid = pid
        self._reap = reap
        self._statuses: list[int] = []
        self._end = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """Return the exit status. None while the process runs."""
        return self._statuses[0] if self._statuses or self._has_ended(0.0) else None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit status.

        Raises:
            subprocess.TimeoutExpired: The process still runs.
        """
        if not self._statuses and not self._has_ended(timeout):
            assert timeout is not None
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        return self._statuses[0]

    def _has_ended(self, timeout_s: float | None) -> bool:
        if not select.select([self._end], [], [], timeout_s)[0]:
            return False
        self._statuses.append(self._reap(self.pid))
        os.close(self._end)
        return True


# -- the zygote's own process -----------------------------------------------------------------------------


def main(descriptor: int) -> None:
    """Carry out orders until their socket closes. In a forked child, run the program."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the launcher, which ends us
    for name in MODULES:
        importlib.import_module(name)
    gc.freeze()
    with socket.socket(fileno=descriptor) as orders:
        order = _fork_for_orders(orders)
    if order:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _run(order["program"], order["arguments"])


def _run(program: str, arguments: list[str]) -> None:
    """Run a command of kvferry, or a script: of `examples/` if its path is relative."""
    if program.endswith(".py"):
        sys.argv = [str(EXAMPLES / program), *arguments]
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        sys.argv = ["kvferry", program, *arguments]
        runpy.run_module("kvferry", run_name="__main__", alter_sys=True)


def _fork_for_orders(orders: socket.socket) -> dict[str, Any]:
    """Fork for each order. Returns the order in a child, and an empty one when the socket has closed."""
    while True:
        data, descriptors, _, _ = socket.recv_fds(orders, MAX_ORDER_BYTES, 2)
        if not data:
            return {}
        order: dict[str, Any] = json.loads(data)
        if "reap" in order:
            _, status = os.waitpid(order["reap"], 0)
            orders.send(str(os.waitstatus_to_exitcode(status)).encode())
            continue
        pid = os.fork()
        if pid == 0:
            _become(descriptors, order)
            return order
        os.setpgid(pid, pid)  # parent and child both do this, so that it is done before either continues
        for inherited in descriptors:
            os.close(inherited)
        orders.send(str(pid).encode())


def _become(descriptors: Sequence[int], order: dict[str, Any]) -> None:
    """Set up the child as `subprocess.Popen` would have."""
    log, link = descriptors
    os.setpgid(0, 0)
    for standard in (1, 2):
        os.dup2(log, standard)
    os.close(log)
    os.chdir(order["cwd"])
    os.environ[LAUNCHER_VARIABLE] = str(link)


if __name__ == "__main__":
    sys.path[0] = str(EXAMPLES)  # the scripts import from their own folder
    sys.path.append(str(EXAMPLES.parent))  # and a test may bring a connector of its own
    main(int(sys.argv[1]))
