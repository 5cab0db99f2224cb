"""A node's life once it has its port: load the model, serve, drain, stop. `docs/design.md` describes it from outside."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import socket
import threading
import time
from typing import Any

from ..engine.engine import Engine
from ..engine.errors import EngineDeadError
from ..web.launcher_link import Link
from ..web.serving import (
    SHUTDOWN_DEADLINE_S,
    BrokenError,
    StartupError,
    StopRequest,
    leave_now,
    say,
    serving,
)
from .app import NodeServer
from .cli import NodeOptions

logger = logging.getLogger(__name__)

#: Between two looks whether there is still something to finish.
_LOOK_INTERVAL_S = 0.02
#: Seconds for which `/health` shows the reason after the engine ended, so that a router can ask once more.
_SHOW_DEATH_S = 1.0
#: Seconds for the last clients to read their errors after the engine ended.
_TELL_DEATH_S = 5.0


async def serve(options: NodeOptions, listener: socket.socket, link: Link) -> None:
    """Serve until a signal arrives or the launcher ends.

    Raises:
        StartupError: the engine refused its settings; nothing was started.
        BrokenError: the engine ended by itself. Every client got the reason.
    """
    loop = asyncio.get_running_loop()
    stop, died = StopRequest(link), asyncio.Event()
    engine = Engine(options.settings, on_death=lambda: _set_from_thread(loop, died))
    server = NodeServer(engine)
    async with serving(server.application(), listener, options.limits):
        await _start(engine, stop)
        server.engine_is_ready()
        host, port = listener.getsockname()[:2]
        say(f"{options.role} node ready on http://{host}:{port}")
        link.report(ready=True)
        await _first_of(stop.drain, died)
        # The listener stays open to the end: a router that asks for health, or sends a request, gets an answer.
        if not died.is_set():
            server.drain()
            await _drain(server, engine, stop, died, options.drain_timeout_s)
        why = f"the engine ended: {engine.stats().error}"
        if died.is_set():
            link.report(failed=why)
            await _tell_death(server, stop)
        # The engine is closed while HTTP is still served: it ends what is left as aborted, and that has to be answered.
        await _close(engine)
    if died.is_set():
        raise BrokenError(why)


def _set_from_thread(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has ended, and nothing waits any more
        loop.call_soon_threadsafe(event.set)


async def _first_of(*events: asyncio.Event, timeout_s: float | None = None) -> None:
    """Wait until one of the events is set, at most `timeout_s`."""
    waiting = [asyncio.create_task(event.wait()) for event in events]
    await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    for task in waiting:
        task.cancel()


async def _start(engine: Engine, stop: StopRequest) -> None:
    """Start the engine, off the event loop so that `/health` can answer meanwhile."""
    started: concurrent.futures.Future[None] = concurrent.futures.Future()

    def start() -> None:
        try:
            engine.start()
        except Exception as error:  # noqa: BLE001 - the future passes it on
            started.set_exception(error)
        else:
            started.set_result(None)

    threading.Thread(target=start, name="engine-start", daemon=True).start()
    stopped, ready = asyncio.create_task(stop.drain.wait()), asyncio.wrap_future(started)
    either: set[asyncio.Future[Any]] = {ready, stopped}
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if not ready.done():
        leave_now(0)  # loading a model cannot be interrupted, and nothing depends on this process yet
    try:
        ready.result()
    except (ValueError, ImportError, EngineDeadError) as error:
        # A setting that cannot work, a backend that is not there, or a worker process that was killed.
        raise StartupError(str(error)) from error


async def _drain(
    server: NodeServer, engine: Engine, stop: StopRequest, died: asyncio.Event, timeout_s: float
) -> None:
    """Wait until every answer is written and every offer is delivered; until the deadline, or a reason not to wait.

    The two are waited for together. A prefill that is still being answered makes an offer at its end, and the decode
    node that loads an offer answers its own client meanwhile, so neither can be finished before the other.
    """
    deadline = time.monotonic() + timeout_s
    if not stop.now.is_set():
        logger.info("draining for up to %g s; a second signal ends the node at once", timeout_s)
    while server.num_answering or not engine.stats().is_idle:
        left_s = deadline - time.monotonic()
        if stop.now.is_set() or died.is_set() or left_s <= 0:
            break
        await _first_of(stop.now, died, timeout_s=min(_LOOK_INTERVAL_S, left_s))
    stats = engine.stats()
    if server.num_answering or not stats.is_idle:
        logger.warning(
            "stopping before all is done: %d answers and %d offers end as aborted",
            server.num_answering,
            stats.num_offered,
        )


async def _tell_death(server: NodeServer, stop: StopRequest) -> None:
    """Let the answers that were begun end with the reason, and `/health` show it."""
    began = time.monotonic()
    await _first_of(stop.now, timeout_s=_SHOW_DEATH_S)
    while server.num_answering and time.monotonic() < began + _TELL_DEATH_S and not stop.now.is_set():
        await _first_of(stop.now, timeout_s=_LOOK_INTERVAL_S)


async def _close(engine: Engine) -> None:
    """Close the engine; what still runs ends as aborted. Bounded."""
    try:
        await asyncio.wait_for(asyncio.to_thread(engine.close), SHUTDOWN_DEADLINE_S)
    except TimeoutError:
        logger.error("the engine did not close within %g s", SHUTDOWN_DEADLINE_S)
        leave_now(1)
