"""A node's life once it has its port: load the model, serve, stop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import socket
import threading
from typing import Any

from engine.engine import Engine
from engine.errors import EngineDeadError
from web.launcher_link import Link
from web.serving import SHUTDOWN_DEADLINE_S, StartupError, leave_now, serving, stop_event

from .app import NodeServer
from .cli import NodeOptions

__all__ = ["serve"]

logger = logging.getLogger(__name__)


async def serve(options: NodeOptions, listener: socket.socket, link: Link) -> None:
    """Serve until a signal, or the launcher's end, says to stop.

    Raises:
        StartupError: the engine cannot start as asked; nothing is left over.
    """
    stop = stop_event(link)
    engine = Engine(options.settings)
    server = NodeServer(engine)
    async with serving(server.application(), listener):
        await _start(engine, stop)
        server.engine_is_ready()
        host, port = listener.getsockname()[:2]
        print(f"{options.role} node ready on http://{host}:{port}", flush=True)
        link.report(ready=True)
        await stop.wait()
        logger.info("stopping")
        await _close(engine)


async def _start(engine: Engine, stop: asyncio.Event) -> None:
    """Start the engine, off the event loop so that `/health` can answer meanwhile."""
    started: concurrent.futures.Future[None] = concurrent.futures.Future()

    def start() -> None:
        try:
            engine.start()
        except Exception as error:  # noqa: BLE001 - it goes to whoever waits for the future
            started.set_exception(error)
        else:
            started.set_result(None)

    threading.Thread(target=start, name="engine-start", daemon=True).start()
    stopped, ready = asyncio.create_task(stop.wait()), asyncio.wrap_future(started)
    either: set[asyncio.Future[Any]] = {ready, stopped}
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if not ready.done():
        leave_now(0)  # a model that loads cannot be interrupted, and nobody depends on this process yet
    try:
        ready.result()
    except (ValueError, ImportError, EngineDeadError) as error:
        # A setting that cannot work, a backend that is not there, or a worker process that was killed.
        raise StartupError(str(error)) from error


async def _close(engine: Engine) -> None:
    """Close the engine; what still runs ends as aborted. Bounded."""
    try:
        await asyncio.wait_for(asyncio.to_thread(engine.close), SHUTDOWN_DEADLINE_S)
    except TimeoutError:
        logger.error("the engine did not close within %g s", SHUTDOWN_DEADLINE_S)
        leave_now(1)
