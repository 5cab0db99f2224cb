"""The admin endpoints: on a listener of their own, on loopback unless told otherwise, and with a key unless
`--dev` lifts that.

A program declares the options, makes an application with its routes, and serves it next to the public one:

    add_admin_arguments(parser)
    admin = admin_of(options, access.tls)            # None: no --admin-port
    app = admin_application([web.post("/admin/drain", self._drain)])
    async with serving_admin(app, admin):
        ...
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass

from aiohttp import web

from ...transports.errors import ConfigurationError
from ...transports.network import is_loopback
from .access import ADMIN_KEY_VARIABLE, Access, ApiKeys, ServerTls
from .connections import ConnectionLimits
from .errors import error_middleware
from .serving import StartupError, bind, serving, url_of

#: Clients of admin endpoints are few.
LIMITS = ConnectionLimits(max_connections=32)


@dataclass(frozen=True)
class Admin:
    """Where and for whom the admin endpoints are served.

    Attributes:
        listener: The bound socket. `serving_admin` closes it.
    """

    listener: socket.socket
    access: Access

    @property
    def port(self) -> int:
        """The port, also if the system chose it."""
        port: int = self.listener.getsockname()[1]
        return port

    @property
    def url(self) -> str:
        """The base URL."""
        return url_of(self.listener, self.access)


def add_admin_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options for the admin endpoints."""
    group = parser.add_argument_group("admin endpoints")
    group.add_argument(
        "--admin-port",
        type=int,
        metavar="PORT",
        help="port of the admin endpoints (/admin/...), which need a key of their own; 0 takes a free one and prints it "
        "(default: no admin endpoints)",
    )
    group.add_argument(
        "--dev",
        action="store_true",
        help="for a first look on one machine: serve the admin endpoints without a key, on loopback only, at a free port unless "
        "--admin-port names one; every user of the machine can then read them and drain this server",
    )
    group.add_argument(
        "--admin-host",
        default="127.0.0.1",
        metavar="HOST",
        help="address of the admin endpoints; beyond loopback they need --ssl-certfile (default: %(default)s)",
    )
    group.add_argument(
        "--admin-api-key-file",
        default="",
        metavar="FILE",
        help=f"file of keys for the admin endpoints, one per line (default: the variable {ADMIN_KEY_VARIABLE})",
    )


def admin_of(options: argparse.Namespace, tls: ServerTls | None = None) -> Admin | None:
    """Bind the port of the admin endpoints. None if the options name none.

    Args:
        tls: The certificate of the public listener, which the admin endpoints show as well.

    Raises:
        StartupError: There is no key and no `--dev`, TLS is missing beyond loopback, or the port is in use.
    """
    if options.admin_port is None and not options.dev:
        return None
    variable = os.environ.get(ADMIN_KEY_VARIABLE, "")
    try:
        keys = ApiKeys(
            [(ADMIN_KEY_VARIABLE, variable)] if variable else [],
            "--admin-api-key-file",
            options.admin_api_key_file,
        )
    except ConfigurationError as error:
        raise StartupError(str(error)) from None
    host: str = options.admin_host
    if options.dev and not is_loopback(host):
        raise StartupError(
            f"--dev serves the admin endpoints without a key, so --admin-host {host} must be an address of loopback; leave out "
            "one of the two"
        )
    if not keys and not options.dev:
        raise StartupError(
            f"--admin-port {options.admin_port} needs a key: set --admin-api-key-file or the variable {ADMIN_KEY_VARIABLE}, or "
            "--dev to do without one on loopback"
        )
    if tls is None and not is_loopback(host) and not options.insecure_http:
        raise StartupError(
            f"--admin-host {host}: beyond loopback this needs TLS (--ssl-certfile, --ssl-keyfile); add --insecure-http to "
            "do without, in a network that you trust"
        )
    return Admin(bind(host, options.admin_port or 0, "--admin-port"), Access(keys, tls))


def admin_application(routes: Iterable[web.RouteDef]) -> web.Application:
    """Return an application with these routes. `serving_admin` asks for the key."""
    app = web.Application(middlewares=[error_middleware])
    app.router.add_routes(list(routes))
    return app


@contextlib.asynccontextmanager
async def serving_admin(app: web.Application, admin: Admin | None) -> AsyncIterator[None]:
    """Serve the admin endpoints inside the block.

    Every path needs the key, if there is one. None: serve nothing.
    """
    if admin is None:
        yield
        return
    with admin.listener:
        async with serving(app, admin.listener, LIMITS, admin.access, open_paths=frozenset()):
            yield
