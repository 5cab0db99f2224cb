"""Keys and CAs for asking nodes and routers over HTTP, with nothing but the standard library."""

from __future__ import annotations

import argparse
import os
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any, Final

from .errors import CommandError, UsageError

#: As servers of the reference engine name them.
API_KEY_VARIABLE: Final = "KVFERRY_API_KEY"
ADMIN_KEY_VARIABLE: Final = "KVFERRY_ADMIN_API_KEY"
#: More than any page of ours has.
MAX_BYTES: Final = 16 << 20

Get = Callable[[str, float], str]


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
    return lambda url, timeout_s: fetch(url, timeout_s, key, context)


def _key_in(option: str, path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            lines = [line.strip() for line in file]
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


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Makes a redirect an error. It could lead to any server that the command's host can reach."""

    def redirect_request(self, *_: Any) -> None:
        return None


def fetch(url: str, timeout_s: float, key: str = "", context: ssl.SSLContext | None = None) -> str:
    """Return the text at a URL.

    Raises:
        CommandError: there is none within the time, it is too long, or the server redirects. The message names neither the URL nor the key.
    """
    try:
        request = urllib.request.Request(url)
        if key:
            request.add_header("Authorization", f"Bearer {key}")
        opener = urllib.request.build_opener(_NoRedirects, urllib.request.HTTPSHandler(context=context))
        with opener.open(request, timeout=timeout_s) as response:
            data: bytes = response.read(MAX_BYTES + 1)
    except urllib.error.HTTPError as error:
        with error:
            text = error.read(2000).decode(errors="replace").strip()
        raise CommandError(f"HTTP status {error.code}: {text or error.reason}") from error
    except (OSError, ValueError) as error:
        raise CommandError(str(getattr(error, "reason", error))) from error
    if len(data) > MAX_BYTES:
        raise CommandError(f"the answer is longer than {MAX_BYTES} bytes")
    return data.decode(errors="replace")
