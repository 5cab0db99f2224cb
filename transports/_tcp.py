"""Hosts and ports: what a user may write, and how to bind to them."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable

from ._outside import outside
from .errors import ConfigurationError


def is_loopback(host: str) -> bool:
    """Return whether traffic to `host` never leaves this machine. The only name that counts is `localhost`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_wildcard(host: str) -> bool:
    """Return whether `host` is an IP address that stands for every interface."""
    return ipaddress.ip_address(host).is_unspecified


def authority(host: str, port: int) -> str:
    """Return `host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def ports_of(port: int, port_range: str) -> range:
    """Return the ports to try, in order.

    Args:
        port: The only port to try; 0 lets the system choose.
        port_range: `"low-high"`, instead of `port`.

    Raises:
        ConfigurationError: `port_range` is malformed, or set beside `port`.
    """
    if not port_range:
        return range(port, port + 1)
    low, dash, high = port_range.partition("-")
    is_range = dash and low.isdecimal() and high.isdecimal() and 0 < int(low) <= int(high) < 65536
    if port or not is_range:
        raise ConfigurationError(
            f"port_range must be 'low-high' within 1-65535, and port must not be set; got port_range={port_range!r}, "
            f"port={port}",
            key="port_range",
            value=port_range,
        )
    return range(int(low), int(high) + 1)


def bind_first(
    host: str, ports: range, backlog: int, prepare: Callable[[socket.socket], None] = lambda _: None
) -> socket.socket:
    """Listen on the first of `ports` that is free.

    Args:
        prepare: Called with the socket before it is bound. If it raises an `OSError`, the next port is tried.

    Raises:
        ConfigurationError: `host` is not an address of this machine, or no port is free.
    """
    try:
        found = socket.getaddrinfo(host, ports[0], type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigurationError(
            f"cannot resolve bind_host={host!r}: {error}", key="bind_host", value=host
        ) from error
    family, _, _, _, address = found[0]
    for port in ports:
        with outside(f"cannot listen on {host} port {port}", ConfigurationError):
            bound = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            prepare(bound)
            bound.bind((address[0], port, *address[2:]))
            bound.listen(backlog)
        except OSError as error:
            bound.close()
            reason = error
        else:
            return bound
    tried = str(ports[0]) if len(ports) == 1 else f"{ports[0]}-{ports[-1]}, the last one"
    raise ConfigurationError(
        f"cannot listen on {host} port {tried}: {reason}", key="port", value=ports[0]
    ) from reason
