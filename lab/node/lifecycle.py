"""Run a node that has its port: load the model, serve, drain, stop.

`docs/design.md` describes what others see of this.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import socket
import threading
import time
from typing import Any

from ...router.http.admin import serving_admin
from ...router.http.launcher_link import Link
from ...router.http.serving import (
    SHUTDOWN_DEADLINE_S,
    BrokenError,
    StartupError,
    StopRequest,
    leave_now,
    say,
    serving,
    url_of,
)
from ..engine.engine import Engine
from ..engine.errors import EngineDeadError
from .app import NodeServer
from .cli import NodeOptions

logger = logging.getLogger(__name__)

#: Seconds between two checks whether a drain is complete.
_LOOK_INTERVAL_S = 0.02
#: Seconds for which `/health` shows the reason after the engine ended, so that routers can ask once more.
_SHOW_DEATH_S = 1.0
#: Most seconds that clients have to read their errors after the engine ended.
_REPORT_DEATH_S = 5.0


async def serve(options: NodeOptions, listener: socket.socket, link: Link) -> None:
    """Serve until a signal arrives or the launcher ends.

    Raises:
        StartupError: the engine refused its settings.
        BrokenError: the engine ended by itself. Clients in flight received the reason.
    """
    loop = asyncio.get_running_loop()
    stop, died = StopRequest(link), asyncio.Event()
    engine = Engine(options.settings, on_death=lambda: _set_from_thread(loop, died))
    server = NodeServer(engine)
    admin = server.admin_application(stop.begin_drain, options.admin.port if options.admin else None)
    async with (
        serving_admin(admin, options.admin),
        serving(server.application(), listener, options.limits, options.access),
    ):
        if options.admin is not None:
            say(f"{options.role} node's admin endpoints on {options.admin.url}")
        await _start(engine, stop)
        server.engine_is_ready()
        say(f"{options.role} node ready on {url_of(listener, options.access)}")
        link.report(ready=True)
        await _first_of(stop.drain, died)
        # Keep the listener open until the end, so that health checks and new requests of routers still get an
        # answer.
        if not died.is_set():
            server.announce_drain()
            await _first_of(stop.now, died, timeout_s=options.drain_delay_s)
            server.drain()
            await _drain(server, engine, stop, died, options.drain_timeout_s)
        why = f"the engine ended: {engine.stats().error}"
        if died.is_set():
            link.report(failed=why)
            await _report_death(server, stop)
        # Close the engine while HTTP is still served: this aborts the remaining requests, and their clients
        # need answers.
        await _close(engine)
    if died.is_set():
        raise BrokenError(why)


def _set_from_thread(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed, so nothing waits for the event
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
        # A setting that cannot work, a backend that is not installed, or a worker process that was killed.
        raise StartupError(str(error)) from error


async def _drain(
    server: NodeServer, engine: Engine, stop: StopRequest, died: asyncio.Event, timeout_s: float
) -> None:
    """Wait until every answer is written and every offer is delivered.

    The wait ends early at the deadline, at a second signal, or if the engine ends.

    Wait for both at once. Offers cannot be waited for first, because a prefill that is still being answered
    makes one when it ends. Answers need not be waited for first, because decode nodes load offers meanwhile.
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
            "stopping before the drain is complete: aborting %d answers and %d offers",
            server.num_answering,
            stats.num_offered,
        )


async def _report_death(server: NodeServer, stop: StopRequest) -> None:
    """Keep serving for a short time, so that `/health` and the answers in flight report why the
    engine ended.
    """
    began = time.monotonic()
    await _first_of(stop.now, timeout_s=_SHOW_DEATH_S)
    while server.num_answering and time.monotonic() < began + _REPORT_DEATH_S and not stop.now.is_set():
        await _first_of(stop.now, timeout_s=_LOOK_INTERVAL_S)


async def _close(engine: Engine) -> None:
    """Close the engine, which aborts its requests. If it does not close in time, end the process."""
    try:
        await asyncio.wait_for(asyncio.to_thread(engine.close), SHUTDOWN_DEADLINE_S)
    except TimeoutError:
        logger.error("the engine did not close within %g s", SHUTDOWN_DEADLINE_S)
        leave_now(1)
