"""Keys and CAs for asking nodes and routers over HTTP, with nothing but the standard library."""

from __future__ import annotations

import argparse
import contextlib
import http.client
import os
import socket
import ssl
import threading
import time
import urllib.parse
from contextlib import ExitStack
from typing import Final, Protocol

from kvferry.router.http.files import text_of

from .errors import CommandError, UsageError

#: As servers of the reference engine name them.
API_KEY_VARIABLE: Final = "KVFERRY_API_KEY"
ADMIN_KEY_VARIABLE: Final = "KVFERRY_ADMIN_API_KEY"
#: More than any page of ours has.
MAX_BYTES: Final = 16 << 20


class Get(Protocol):
    """Fetches the text at a URL within a time, in seconds. With a body, which is JSON, it is a POST."""

    def __call__(self, url: str, timeout_s: float, body: bytes = b"") -> str: ...


def add_access(parser: argparse.ArgumentParser, *, has_admin: bool = False) -> None:
    """Add the options for keys and TLS.

    Args:
        has_admin: The command asks admin endpoints as well.
    """
    parser.add_argument(
        "--api-key-file",
        default="",
        metavar="FILE",
        help=f"file whose first line is the servers' API key (default: the variable {API_KEY_VARIABLE})",
    )
    if has_admin:
        parser.add_argument(
            "--admin-api-key-file",
            default="",
            metavar="FILE",
            help=f"file whose first line is the key of the nodes' admin endpoints (default: the variable {ADMIN_KEY_VARIABLE})",
        )
    parser.add_argument(
        "--ca-certs",
        default="",
        metavar="FILE",
        help="PEM file of the CAs that signed the certificates of https servers (default: the CAs of the system)",
    )


def getter(arguments: argparse.Namespace, *, is_admin: bool = False) -> Get:
    """Return what fetches the text at a URL, with the key and the CAs of the options.

    The key goes to the hosts in `arguments.urls`, which the user wrote. A router's page names others, and
    those get it only over TLS: any process that the page names would have it otherwise.

    Args:
        is_admin: Present the key of the admin endpoints.

    Raises:
        UsageError: A file cannot be used.
    """
    option, variable = (
        ("--admin-api-key-file", ADMIN_KEY_VARIABLE) if is_admin else ("--api-key-file", API_KEY_VARIABLE)
    )
    file = arguments.admin_api_key_file if is_admin else arguments.api_key_file
    key = _key_in(option, file) if file else os.environ.get(variable, "")
    if not all("!" <= char <= "~" for char in key):
        raise UsageError(
            f"{option if file else variable} has a key that no HTTP header can carry: use printable ASCII characters without "
            "spaces"
        )
    context = _context(arguments.ca_certs) if arguments.ca_certs else None
    written = {host for url in arguments.urls if (host := _host_of(url))}

    def get(url: str, timeout_s: float, body: bytes = b"") -> str:
        if not key or url.startswith("https://") or (_host_of(url) or "") in written:
            return fetch(url, timeout_s, body, key, context)
        try:
            return fetch(url, timeout_s, body, "", context)
        except CommandError as error:
            raise CommandError(
                f"{error}; it was asked without the key, because a router named it and it has no TLS: give its URL as well"
            ) from error

    return get


def _host_of(url: str) -> str | None:
    try:
        return urllib.parse.urlsplit(url).hostname
    except ValueError:
        return None


def _key_in(option: str, path: str) -> str:
    try:
        lines = [line.strip() for line in text_of(path, errors="replace").splitlines()]
    except OSError as error:
        raise UsageError(f"{option}={path!r} cannot be read: {error.strerror}; correct the path") from error
    for line in lines:
        if line and not line.startswith("#"):
            return line
    raise UsageError(f"{option}={path!r} has no key: write it into the first line")


def _context(path: str) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=path)
    except OSError as error:  # an error of TLS is one as well
        raise UsageError(f"--ca-certs={path!r} cannot be used: {error.strerror or error}") from error


def fetch(
    url: str, timeout_s: float, body: bytes = b"", key: str = "", context: ssl.SSLContext | None = None
) -> str:
    """Return the text at a URL.

    Redirects are not followed, and no proxy is used. With a body, which is JSON, it is a POST.

    Raises:
        CommandError: there is none within the time, or it is too long. The message names neither the URL nor
            the key.
    """
    until = time.monotonic() + timeout_s
    try:
        status, reason, data = _answer(urllib.parse.urlsplit(url), until, body, key, context)
    except (OSError, ValueError, http.client.HTTPException) as error:
        if time.monotonic() >= until:
            raise CommandError(f"timed out after {timeout_s:g} s waiting for the whole answer") from error
        raise CommandError(str(error) or type(error).__name__) from error
    if not 200 <= status < 300:
        text = data[:2000].decode(errors="replace").strip()
        raise CommandError(f"HTTP status {status}: {text or reason}")
    if time.monotonic() >= until:  # a page without a length ends where it was cut off
        raise CommandError(f"timed out after {timeout_s:g} s waiting for the whole answer")
    if len(data) > MAX_BYTES:
        raise CommandError(f"the answer is longer than {MAX_BYTES} bytes")
    return data.decode(errors="replace")


def _answer(
    url: urllib.parse.SplitResult, until: float, body: bytes, key: str, context: ssl.SSLContext | None
) -> tuple[int, str, bytes]:
    """Return status, reason and body of the answer.

    Raises:
        OSError, ValueError, HTTPException: there is none, or not until then.
    """
    is_tls = url.scheme == "https"
    if not (is_tls or url.scheme == "http") or not url.hostname:
        raise ValueError(f"not an http:// or https:// URL: {url.geturl()!r}")
    host, port = url.hostname, url.port or (443 if is_tls else 80)
    sock = socket.create_connection((host, port), timeout=max(0.0, until - time.monotonic()))
    with ExitStack() as opened:
        # Each byte that drips in would begin the socket's own timeout anew. Of a copy, because TLS takes the
        # socket over.
        handle = opened.enter_context(sock.dup())
        timer = threading.Timer(max(0.0, until - time.monotonic()), _cut, (handle,))
        timer.daemon = True
        opened.callback(timer.join)
        opened.callback(timer.cancel)
        opened.callback(sock.close)
        timer.start()
        if is_tls:
            sock = (context or ssl.create_default_context()).wrap_socket(sock, server_hostname=host)
            opened.callback(sock.close)
        connection = http.client.HTTPConnection(host, port)
        connection.sock = sock
        path = urllib.parse.urlunsplit(("", "", url.path or "/", url.query, ""))
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        if body:
            headers["Content-Type"] = "application/json"
        connection.request("POST" if body else "GET", path, body or None, headers)
        response = opened.enter_context(connection.getresponse())
        return response.status, response.reason, response.read(MAX_BYTES + 1)


def _cut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the other side may have closed it
        sock.shutdown(socket.SHUT_RDWR)
