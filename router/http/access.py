"""API keys and TLS: which clients a server admits, and which servers a client trusts.

Keys and files are read again when a file changes, at the next request or connection, so that they can be
replaced without a restart. If a changed file cannot be used, what was loaded last stays in use, and the log
has a warning.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import hmac
import ipaddress
import logging
import os
import re
import ssl
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import ClientHandlerType, web
from aiohttp.typedefs import Handler, Middleware
from yarl import URL

from ...transports.errors import ConfigurationError
from ...transports.network import is_loopback
from ...transports.tls_files import load_ca, load_chain, require_readable, versions_of
from .endpoints import has_form_of_messages
from .errors import ApiError
from .files import text_of

#: Environment variables that hold a key. Unlike an option, no other user can read them.
API_KEY_VARIABLE = "KVFERRY_API_KEY"
ADMIN_KEY_VARIABLE = "KVFERRY_ADMIN_API_KEY"
NODE_KEY_VARIABLE = "KVFERRY_NODE_API_KEY"

#: Paths that need no key, as with vLLM: probes and scrapers have none. The router's page, `/`, has no figures
#: of its own and asks for the key. Routes are compared as they were declared.
OPEN_PATHS = frozenset({"/", "/health", "/ready", "/metrics", "/version"})

#: Whether a request, also one to an open path, has one of the server's keys, or needs none.
HAS_KEY: Any = web.RequestKey("has_key", bool) if hasattr(web, "RequestKey") else "has_key"

MAX_PORT = 65535
#: How long a browser need not ask again whether a page may send a request.
PREFLIGHT_S = 600
#: An origin as browsers send it.
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s?#@]+")

logger = logging.getLogger(__name__)


# == keys ==========================================================================================


class ApiKeys:
    """The keys that a server accepts. Only their hashes are kept.

    Args:
        keys: Pairs of where a key comes from and the key.
        file_option, file: An option that names a file with more keys, and the file; empty if there is none.

    Raises:
        ConfigurationError: A key cannot be sent in a header, or the file cannot be read or has no key. No key
            is part of the message.
    """

    def __init__(self, keys: Iterable[tuple[str, str]] = (), file_option: str = "", file: str = "") -> None:
        self._fixed = [_hash(_checked(source, key)) for source, key in keys]
        self._file = _File(file_option, file)
        self._from_file = [_hash(key) for key in self._file.read()] if file else []

    def __bool__(self) -> bool:
        return bool(self._fixed or self._from_file)

    def admits(self, authorization: str | None) -> bool:
        """Return whether an `Authorization` header has one of the keys.

        The time that this takes does not depend on how much of a key is right, nor on which key it is.
        """
        if self._file.has_changed:
            with self._file.keeping_the_last():
                self._from_file = [_hash(key) for key in self._file.read()]
        scheme, _, key = (authorization or "").partition(" ")
        given = _hash(key.strip())
        matches = [hmac.compare_digest(given, known) for known in (*self._fixed, *self._from_file)]
        return scheme.lower() == "bearer" and any(matches)


class OwnKey:
    """The key that a client presents to servers; empty if it has none.

    Raises:
        ConfigurationError: see `ApiKeys`.
    """

    def __init__(self, source: str, key: str = "", file_option: str = "", file: str = "") -> None:
        self._key = _checked(source, key) if key else ""
        self._file = _File(file_option, file)
        if file:
            self._key = self._file.read()[0]

    def __bool__(self) -> bool:
        return bool(self._key)

    @property
    def headers(self) -> dict[str, str]:
        """The headers that present the key."""
        if self._file.has_changed:
            with self._file.keeping_the_last():
                self._key = self._file.read()[0]
        return {"Authorization": f"Bearer {self._key}"} if self._key else {}


class _File:
    """A file of keys, one per line. Empty lines, and lines that begin with `#`, are ignored."""

    def __init__(self, option: str, path: str) -> None:
        self._option = option
        self._path = path
        self._version: object = None

    @property
    def has_changed(self) -> bool:
        return bool(self._path) and versions_of([self._path]) != self._version

    def read(self) -> list[str]:
        """Return the keys. Raises ConfigurationError: there are none, or one is malformed."""
        self._version = versions_of([self._path])
        require_readable(self._option, self._path, is_secret=True)
        where = f"{self._option}={self._path!r}"
        try:
            lines = [line.strip() for line in text_of(self._path, errors="replace").splitlines()]
        except OSError as error:
            raise ConfigurationError(
                f"{where} cannot be read: {error.strerror}; correct the path",
                key=self._option,
                value=self._path,
            ) from error
        keys = [_checked(where, line) for line in lines if line and not line.startswith("#")]
        if not keys:
            raise ConfigurationError(f"{where} has no key: write one per line", key=self._option, value="")
        return keys

    @contextlib.contextmanager
    def keeping_the_last(self) -> Iterator[None]:
        try:
            yield
            logger.info("loaded the changed keys of %s", self._option)
        except ConfigurationError as error:
            logger.warning("cannot load the changed keys, the old ones stay in use: %s", error)


def _checked(source: str, key: str) -> str:
    if not key or not all("!" <= char <= "~" for char in key):
        raise ConfigurationError(
            f"{source} has a key that no HTTP header can carry: use printable ASCII characters without spaces",
            key=source,
            value="",
        )
    return key


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="replace")).digest()


def require_key(keys: ApiKeys, open_paths: frozenset[str] = frozenset()) -> Middleware:
    """Return a middleware that answers 401 to requests without one of the keys.

    Args:
        open_paths: Routes that need no key.
    """

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        request[HAS_KEY] = not keys or has_key(request, keys)
        if request[HAS_KEY] or _path_of(request) in open_paths:
            return await handler(request)
        given = "the API key is wrong" if "Authorization" in request.headers else "an API key is required"
        message = f"{given}: send the header 'Authorization: Bearer KEY' with a key of this server"
        raise ApiError(401, message, kind="invalid_request_error", code="invalid_api_key")

    return check


def has_key(request: web.Request, keys: ApiKeys) -> bool:
    """Return whether a request has one of the keys. Anthropic's clients have a header of their own for it."""
    own = request.headers.get("X-Api-Key") if has_form_of_messages(request.path) else None
    return keys.admits(request.headers.get("Authorization") if own is None else f"Bearer {own}")


def require_own_name(access: Access, *, is_loopback_only: bool) -> Middleware:
    """Return a middleware that answers 400 to a malformed `Host`, and without keys 403 to pages of other
    origins.

    Without a key any website could use a server of its visitor. Its page reaches loopback by the server's
    address, and then the browser says its origin. Or it reaches it by a name of its own that leads there (DNS
    rebinding), and then `Host` is that name.

    Args:
        is_loopback_only: The server listens on loopback. Elsewhere it cannot know its names, and anyone can
            reach it anyway.
    """

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        hosts = request.headers.getall("Host", ())  # a program may send none, a browser always sends one
        name = _name_in(hosts[0]) if hosts else "localhost"
        if name is None or len(hosts) > 1:
            raise ApiError(
                400,
                f"the header Host is {', '.join(hosts)[:80]!r}: send one host name or address, and at most one port",
                kind="invalid_request_error",
            )
        origin = request.headers.get("Origin")
        if access.keys or (origin is not None and access.allows(origin)):
            return await handler(request)
        if is_loopback_only and access.names is not None and not (is_loopback(name) or name in access.names):
            raise _forbidden(
                f"without a key this server answers only to names of this machine, and {name[:80]!r} is none: call it by "
                "'localhost' or its address, set a key, or let --insecure-http allow every name"
            )
        if origin is not None and not _is_origin_of(origin, hosts[0] if hosts else ""):
            raise _forbidden(
                f"without a key this server answers no page of another origin, here {origin[:80]!r}: set a key, or let your proxy "
                "pass the header Host on"
            )
        return await handler(request)

    return check


@web.middleware
async def answer_preflights(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer a browser that asks whether a page may send a request. It asks without a key."""
    access = request.app[ACCESS]
    missing = request.match_info.http_exception
    is_asked = request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers
    if (
        not is_asked
        or not isinstance(missing, web.HTTPMethodNotAllowed)
        or not access.allows(request.headers.get("Origin", ""))
    ):
        return await handler(request)
    headers = {
        "Access-Control-Allow-Methods": ", ".join(sorted(missing.allowed_methods)),
        "Access-Control-Allow-Headers": request.headers.get("Access-Control-Request-Headers", "")
        or "Authorization, Content-Type",
        "Access-Control-Max-Age": str(PREFLIGHT_S),
    }
    return web.Response(status=204, headers=headers)


async def name_allowed_origin(request: web.Request, response: web.StreamResponse) -> None:
    """Let pages of allowed origins read an answer. This is a handler of `on_response_prepare`."""
    access = request.app[ACCESS]
    if not access.origins:
        return
    response.headers["Vary"] = "Origin"
    if access.allows(origin := request.headers.get("Origin", "")):
        response.headers["Access-Control-Allow-Origin"] = origin
        response.headers["Access-Control-Expose-Headers"] = "*"


def _forbidden(message: str) -> ApiError:
    return ApiError(403, message, kind="permission_error")


#: A name or an address of version 4, or an address of version 6 in brackets, and perhaps a port.
_HOST = re.compile(r"(?:([a-z0-9._-]+)|\[([0-9a-f:.]+)\])(?::([0-9]{0,5}))?", re.IGNORECASE | re.ASCII)


def _name_in(host: str) -> str | None:
    """Return the name or address in a `Host` header, in lower case. None if it is malformed."""
    if (found := _HOST.fullmatch(host)) is None or int(found[3] or 0) > MAX_PORT:
        return None
    if found[1]:
        return found[1].lower().removesuffix(".") or None
    try:
        return str(ipaddress.IPv6Address(found[2]))
    except ValueError:
        return None


def _is_origin_of(origin: str, host: str) -> bool:
    """Return whether a page of this origin came from the server that has this `Host`, or from a proxy before
    it.
    """
    scheme, _, authority = origin.lower().partition("://")
    port = {"http": ":80", "https": ":443"}.get(scheme)
    return port is not None and authority.removesuffix(port) == host.lower().removesuffix(port)


def _path_of(request: web.Request) -> str:
    """Return the path of a request's route, so that no other way to write a path makes it an open one."""
    resource = request.match_info.route.resource
    return "" if resource is None else resource.canonical


# == TLS ===========================================================================================


class ServerTls:
    """The certificate that a server shows, and the CA that client certificates must be signed by.

    Args:
        client_ca: A file of CAs. If given, each client must show a certificate of one of them.

    Raises:
        ConfigurationError: a file cannot be used, or the certificate has expired. The message names the
            option.
    """

    def __init__(self, certificate: str, key: str, client_ca: str = "") -> None:
        self._certificate, self._key, self._client_ca = certificate, key, client_ca
        self._files = [path for path in (certificate, key, client_ca) if path]
        self._version = versions_of(self._files)
        #: For the listener. Each handshake continues with the files as they are then.
        self.context = self._current = self._load()
        self.context.sni_callback = self._choose

    def _choose(
        self, connection: ssl.SSLSocket | ssl.SSLObject, name: str | None, context: ssl.SSLContext
    ) -> None:
        connection.context = self._fresh()

    def _fresh(self) -> ssl.SSLContext:
        version = versions_of(self._files)
        if version != self._version:
            self._version = version
            try:
                self._current = self._load()
                logger.info("loaded the changed TLS files")
            except ConfigurationError as error:
                logger.warning("cannot load the changed TLS files, the old ones stay in use: %s", error)
        return self._current

    def _load(self) -> ssl.SSLContext:
        require_readable("--ssl-certfile", self._certificate)
        require_readable("--ssl-keyfile", self._key, is_secret=self._key != self._certificate)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        load_chain(context, "--ssl-certfile", self._certificate, "--ssl-keyfile", self._key)
        _require_usable(context, self._certificate)
        if self._client_ca:
            require_readable("--ssl-ca-certs", self._client_ca)
            load_ca(context, "--ssl-ca-certs", self._client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
            context.num_tickets = 0  # no session is resumed, so each connection checks the certificate
        return context


def _require_usable(server: ssl.SSLContext, path: str) -> None:
    """Check by a handshake in memory that a client which trusts this certificate accepts it.

    Raises:
        ConfigurationError: It would not, for example because the certificate has expired.
    """
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # the file may lack the CA
    client.load_verify_locations(cafile=path)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = client.wrap_bio(to_client, to_server), server.wrap_bio(to_server, to_client, server_side=True)
    try:
        for side in (*sides, *sides):
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
    except ssl.SSLCertVerificationError as error:
        raise ConfigurationError(
            f"clients cannot verify --ssl-certfile={path!r}: {error.verify_message}; renew it, with serverAuth if it has "
            "extended key usages",
            key="--ssl-certfile",
            value=path,
        ) from error


class ClientTls:
    """The CAs that a client trusts, and the certificate that it shows.

    Files that change apply to later connections. CAs that are removed from the file stay trusted until a
    restart.

    Args:
        ca: A file of CAs. Empty: those of the system.
        certificate, key: The client's own; empty if servers do not ask for one.
        prefix: What the names of the options begin with, for errors.

    Raises:
        ConfigurationError: a file cannot be used. The message names the option.
    """

    def __init__(
        self, ca: str = "", certificate: str = "", key: str = "", *, prefix: str = "--node-"
    ) -> None:
        self._ca, self._certificate, self._key, self._prefix = ca, certificate, key, prefix
        self._files = [path for path in (ca, certificate, key) if path]
        self.version = versions_of(self._files)
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        if not ca:
            self.context.load_default_certs()
        self._load_into(self.context)

    def refresh(self) -> None:
        """Load files that have changed."""
        version = versions_of(self._files)
        if version == self.version:
            return
        self.version = version
        try:
            # Try elsewhere first: a failure in the middle would leave a certificate without its key.
            self._load_into(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
            self._load_into(self.context)
            logger.info("loaded the changed TLS files for connections to nodes")
        except ConfigurationError as error:
            logger.warning("cannot load the changed TLS files, the old ones stay in use: %s", error)

    def _load_into(self, context: ssl.SSLContext) -> None:
        if self._ca:
            option = f"{self._prefix}ca-certs"
            require_readable(option, self._ca)
            load_ca(context, option, self._ca)
        if self._certificate:
            names = f"{self._prefix}certfile", f"{self._prefix}keyfile"
            require_readable(names[0], self._certificate)
            require_readable(names[1], self._key, is_secret=self._key != self._certificate)
            load_chain(context, names[0], self._certificate, names[1], self._key)


# == towards nodes =================================================================================


class NodeAccess:
    """What a router presents to nodes, and how it verifies them.

    Args:
        tls: None: verify by the CAs of the system, and show no certificate.
        may_send_plainly: Send the key to nodes beyond loopback over plain HTTP, too.
    """

    def __init__(
        self, key: OwnKey | None = None, tls: ClientTls | None = None, *, may_send_plainly: bool = False
    ) -> None:
        self._key = key or OwnKey(NODE_KEY_VARIABLE)
        self._tls = tls
        self._may_send_plainly = may_send_plainly

    @property
    def ssl_context(self) -> ssl.SSLContext | bool:
        """For the connections of the client session.

        True: as aiohttp does by itself, by the CAs of the system.
        """
        return True if self._tls is None else self._tls.context

    def refusal(self, url: URL) -> str:
        """Return why the key must not be sent to a node; empty if it may be."""
        if not self._key or url.scheme == "https" or self._may_send_plainly or is_loopback(url.host or ""):
            return ""
        return (
            f"the router does not send its key over plain HTTP: give the node's URL with https ({url.origin()}), or add "
            "--insecure-http in a network that you trust"
        )

    async def present(
        self, request: aiohttp.ClientRequest, handler: ClientHandlerType
    ) -> aiohttp.ClientResponse:
        """Present the key. This is a middleware of the client session."""
        self.prepare(request.url)
        request.headers.update(self.key_headers)
        return await handler(request)

    @property
    def key_headers(self) -> Mapping[str, str]:
        """The headers that present the key; empty if there is none."""
        return self._key.headers

    @property
    def tls_version(self) -> object:
        """Changes with the files of TLS, whose changes apply to later connections."""
        return None if self._tls is None else self._tls.version

    def prepare(self, url: URL) -> None:
        """Prepare for a request to a node: look for changed files.

        Raises:
            aiohttp.ClientConnectionError: The key must not be sent there.
        """
        if refusal := self.refusal(url):
            raise aiohttp.ClientConnectionError(refusal)
        if self._tls is not None:
            self._tls.refresh()


def add_node_access_arguments(group: argparse._ArgumentGroup) -> None:
    """Add the options for what a router presents to nodes."""
    group.add_argument(
        "--node-api-key-file",
        default="",
        metavar="FILE",
        help="file whose first line is the key that the router presents to nodes; read again when it changes (default: the "
        f"variable {NODE_KEY_VARIABLE}; without either, the client's own key, unless the router asks for one itself)",
    )
    group.add_argument(
        "--node-ca-certs",
        default="",
        metavar="FILE",
        help="PEM file of the CAs that signed the certificates of https nodes (default: the CAs of the system)",
    )
    group.add_argument(
        "--node-certfile",
        default="",
        metavar="FILE",
        help="PEM file of the certificate that the router shows to nodes with --ssl-ca-certs (default: none)",
    )
    group.add_argument(
        "--node-keyfile",
        default="",
        metavar="FILE",
        help="PEM file of that certificate's key (default: the file of --node-certfile)",
    )


def node_access_of(options: argparse.Namespace) -> NodeAccess:
    """Return what the options of `add_node_access_arguments` say.

    Raises:
        ConfigurationError: A file or a key cannot be used.
    """
    certificate, key = options.node_certfile, options.node_keyfile
    if key and not certificate:
        raise ConfigurationError("--node-keyfile needs --node-certfile", key="--node-keyfile", value=key)
    return NodeAccess(
        OwnKey(
            NODE_KEY_VARIABLE,
            os.environ.get(NODE_KEY_VARIABLE, ""),
            "--node-api-key-file",
            options.node_api_key_file,
        ),
        ClientTls(options.node_ca_certs, certificate, key or certificate)
        if options.node_ca_certs or certificate
        else None,
        may_send_plainly=options.insecure_http,
    )


# == options =======================================================================================


@dataclass(frozen=True)
class Access:
    """What a server asks of its clients.

    Attributes:
        keys: The keys that it accepts. If there are none, it asks for no key.
        tls: Its certificate. None: plain HTTP.
        names: Without keys, and on loopback: by which names it may be called besides those of loopback. None:
            by every name.
        origins: Of pages that may use the server in a browser; `*` stands for all.
    """

    keys: ApiKeys = field(default_factory=ApiKeys)
    tls: ServerTls | None = None
    names: frozenset[str] | None = frozenset()
    origins: frozenset[str] = frozenset()

    def allows(self, origin: str) -> bool:
        """Whether pages of an origin may use the server."""
        return bool(origin) and (origin.lower() in self.origins or "*" in self.origins)

    @property
    def scheme(self) -> str:
        """The scheme of the server's URL."""
        return "http" if self.tls is None else "https"

    @property
    def ssl_context(self) -> ssl.SSLContext | None:
        """For the listener."""
        return None if self.tls is None else self.tls.context


#: What clients must present at an application.
ACCESS = web.AppKey("access", Access)


def add_access_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options for keys and TLS. Their names are vLLM's, where vLLM has them."""
    group = parser.add_argument_group("access", "docs/security.md says what is protected by what.")
    group.add_argument(
        "--api-key",
        action="extend",
        nargs="+",
        default=[],
        metavar="KEY",
        help="a key that clients must present; may be repeated; other users of the machine can read it in the list of "
        f"processes, so prefer the variable {API_KEY_VARIABLE} or --api-key-file (default: no key)",
    )
    group.add_argument(
        "--api-key-file",
        default="",
        metavar="FILE",
        help="file of keys that clients must present, one per line; read again when it changes (default: none)",
    )
    group.add_argument(
        "--ssl-certfile",
        default="",
        metavar="FILE",
        help="PEM file of the certificate, with intermediate ones, for HTTPS; read again when it changes (default: plain HTTP)",
    )
    group.add_argument(
        "--ssl-keyfile",
        default="",
        metavar="FILE",
        help="PEM file of the certificate's key (default: the file of --ssl-certfile)",
    )
    group.add_argument(
        "--ssl-ca-certs",
        default="",
        metavar="FILE",
        help="PEM file of CAs; if given, each client must show a certificate of one of them (default: clients need none)",
    )
    group.add_argument(
        "--allowed-origins",
        action="extend",
        nargs="+",
        default=[],
        metavar="ORIGIN",
        help="origins of pages that may use this server from a browser, e.g. https://chat.example; * allows every page, so combine "
        "it with a key (default: none)",
    )
    group.add_argument(
        "--insecure-http",
        action="store_true",
        help="listen beyond loopback without TLS or without a key, in a network that you trust; on loopback without a key, answer "
        "every Host, as a proxy may send it (default: refuse)",
    )


def access_of(options: argparse.Namespace) -> Access:
    """Return what the options of `add_access_arguments` say.

    Raises:
        ConfigurationError: A file or a key cannot be used, or the server would listen beyond loopback without
            TLS or a key.
    """
    fixed = [("--api-key", key) for key in options.api_key]
    if key := os.environ.get(API_KEY_VARIABLE, ""):
        fixed.append((API_KEY_VARIABLE, key))
    keys = ApiKeys(fixed, "--api-key-file", options.api_key_file)
    names = None if options.insecure_http else frozenset({options.host.lower()})
    access = Access(keys, server_tls_of(options), names, _origins_of(options.allowed_origins))
    if is_loopback(options.host) or options.insecure_http:
        return access
    missing = [] if access.tls else ["TLS (--ssl-certfile, --ssl-keyfile)"]
    missing += [] if access.keys else [f"a key (--api-key-file or the variable {API_KEY_VARIABLE})"]
    if missing:
        raise ConfigurationError(
            f"--host {options.host}: beyond loopback this needs {' and '.join(missing)}; add --insecure-http to do "
            "without, in a network that you trust",
            key="host",
            value=options.host,
        )
    return access


def _origins_of(origins: Iterable[str]) -> frozenset[str]:
    for origin in origins:
        if origin != "*" and not _ORIGIN.fullmatch(origin.lower()):
            raise ConfigurationError(
                f"--allowed-origins has {origin!r}, which is no origin: write it as in 'https://chat.example:8443', without a path",
                key="--allowed-origins",
                value=origin,
            )
    return frozenset(map(str.lower, origins))


def server_tls_of(options: argparse.Namespace) -> ServerTls | None:
    """Return the certificate that the options name.

    None if they name none. Raises ConfigurationError: see `ServerTls`.
    """
    certificate, key, client_ca = options.ssl_certfile, options.ssl_keyfile, options.ssl_ca_certs
    if certificate:
        return ServerTls(certificate, key or certificate, client_ca)
    for name, value in (("--ssl-keyfile", key), ("--ssl-ca-certs", client_ca)):
        if value:
            raise ConfigurationError(f"{name} needs --ssl-certfile", key=name, value=value)
    return None
