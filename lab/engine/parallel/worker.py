"""The worker process: `python -m kvferry.lab.engine.parallel.worker LINK_FD RENDEZVOUS_FD`.

Only `WorkerGroup` starts it.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed

from ....connector.base import KVConnectorHandshakeMetadata
from ....connector.config import ParallelConfig
from ....connector.spans import send_spans
from ....router.http.log_lines import LineFormatter
from ....runner_mixin import state
from ..attention import IMPLEMENTATION
from ..executor import own_transfer_health, start_runner
from ..memory import plan_pool
from ..runner import ModelRunner
from ..types import TransferHealth
from ..weights import load_model
from .channel import Channel
from .messages import Failed, Ready, Start, Step, StepDone
from .sharding import shard
from .steps import StepMirror

logger = logging.getLogger(__name__)

#: Seconds that a collective operation waits for the other ranks. If it takes longer, one of them hangs or has
#: ended.
COLLECTIVE_TIMEOUT_S = 300.0

#: Seconds that the end of the process waits for a collector of spans.
EXPORT_S = 1.0
#: Seconds between two checks of the connector's health while there is nothing to compute.
HEALTH_INTERVAL_S = 0.5


class Inbox:
    """Reads messages in a thread of its own, so that the end of the scheduler's process is noticed even
    during a step.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._messages: queue.SimpleQueue[object] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="inbox", daemon=True).start()

    def take(self, timeout_s: float | None = None) -> object:
        """Wait for the next message.

        Raises:
            queue.Empty: none came in time.
        """
        return self._messages.get(timeout=timeout_s)

    def _read(self) -> None:
        try:
            while True:
                self._messages.put(self._channel.receive())
        except (EOFError, OSError, ValueError):
            # The scheduler's process has ended, so nothing needs this worker. Exit without unwinding: the
            # main thread may wait in a collective operation for ranks that have exited already.
            os._exit(1)


def main(arguments: Sequence[str]) -> int:
    """Serve one rank until the scheduler's process stops it; return the exit status."""
    link_fd, rendezvous_fd = map(int, arguments)
    # A terminal sends Ctrl-C to all its processes. Ignore it: the scheduler's process stops the workers,
    # after its answers, and a worker exits by itself if that process ends.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=link_fd))
    inbox = Inbox(channel)
    try:
        with ExitStack() as resources:
            runner = _start(inbox.take(), rendezvous_fd, resources)
            channel.send(Ready(_handshake_metadata()))
            _serve(runner, inbox, channel)
    except _RefusedError as refusal:
        channel.send(Failed(str(refusal), refusal.key, is_refusal=True))
        return 2
    except Exception as error:
        logger.exception("the worker failed and exits")
        channel.send(Failed(f"{type(error).__name__}: {error}", "", is_refusal=False))
        return 1
    return 0


class _RefusedError(Exception):
    """The worker cannot start with its settings."""

    def __init__(self, message: str, key: str) -> None:
        super().__init__(message)
        self.key = key


def _start(start: object, rendezvous_fd: int, resources: ExitStack) -> ModelRunner:
    assert isinstance(start, Start), start
    try:
        return _load(start, rendezvous_fd, resources)
    except (
        ValueError,
        ImportError,
    ) as error:  # a setting that cannot work, or a backend that is not installed
        raise _RefusedError(str(error), str(getattr(error, "key", ""))) from error


def _load(start: Start, rendezvous_fd: int, resources: ExitStack) -> ModelRunner:
    parallel = start.config.parallel
    _observe(f"worker {parallel.rank}")
    torch.set_num_threads(start.num_threads)
    dtype = getattr(torch, start.config.model.dtype)
    model = load_model(Path(start.folder), dtype, torch.device("cpu"), IMPLEMENTATION)
    _join_ranks(parallel, rendezvous_fd)
    shard(model, parallel.tensor_parallel_rank, parallel.tensor_parallel_size)
    config, pool = plan_pool(start.config, model.device, may_shorten=False)
    return start_runner(config, pool, model, start.layout, resources)


def _observe(name: str) -> None:
    """Log and trace as the scheduler's process does, whose settings are in the environment."""
    log_format = os.environ.get("KVFERRY_LOG_FORMAT")
    is_traced = any(key.startswith("OTEL_EXPORTER_OTLP") for key in os.environ)
    if log_format != "json" and not is_traced:
        handler = logging.StreamHandler()
        handler.setFormatter(LineFormatter(name))
        logging.basicConfig(handlers=[handler])
        return
    # Only now, because they import the HTTP server.
    from ....router.http.logs import set_up_logging
    from ....router.http.tracing import set_up_tracing

    set_up_logging("warning", name, "json" if log_format == "json" else "text")
    set_up_tracing("", name.replace(" ", "-"))


def _join_ranks(parallel: ParallelConfig, rendezvous_fd: int) -> None:
    """Connect with the other ranks over loopback."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # The file is anonymous memory without a name in any folder, so it disappears with its last process.
    store = torch.distributed.FileStore(  # type: ignore[attr-defined]
        f"/proc/self/fd/{rendezvous_fd}", parallel.world_size
    )
    timeout = datetime.timedelta(seconds=COLLECTIVE_TIMEOUT_S)
    torch.distributed.init_process_group(
        "gloo", store=store, rank=parallel.rank, world_size=parallel.world_size, timeout=timeout
    )


def _handshake_metadata() -> KVConnectorHandshakeMetadata | None:
    return state.get_kv_transfer_group().get_handshake_metadata() if state.has_kv_transfer_group() else None


def _serve(runner: ModelRunner, inbox: Inbox, channel: Channel) -> None:
    mirror, sent = StepMirror(), TransferHealth()
    while True:
        try:
            step = inbox.take(HEALTH_INTERVAL_S)
        except queue.Empty:
            health = own_transfer_health()
            if health != sent:  # an idle worker sends no step's output, which would carry a failure
                sent = health
                channel.send(sent)
            continue
        if not isinstance(step, Step):
            return
        channel.send(StepDone(runner.execute(mirror.plan(step))))


if __name__ == "__main__":
    status = main(sys.argv[1:])
    with contextlib.suppress(OSError, ValueError):  # a full disk
        sys.stderr.flush()
    send_spans(EXPORT_S)
    # Skip the libraries' exit handlers, because they wait for ranks that may have ended.
    os._exit(status)
