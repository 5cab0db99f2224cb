"""Which source names which node, and how sources write nodes down. Pure: no clock, no socket, no file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from yarl import URL

from ...transports.checked import Refused, json_of, toml_of

Role = Literal["prefill", "decode"]
ROLES: tuple[Role, ...] = get_args(Role)
#: The names of the sources, apart from DNS names, which are called as the option writes them.
OPTION, FILE, ADMIN = "option", "file", "admin"
#: Schemes of DNS names, and how to speak to their nodes.
DNS_SCHEMES: Mapping[str, str] = {"dns": "http", "dns+https": "https"}
MAX_PORT = 65535


class BadNodesError(ValueError):
    """What a user wrote names no node. The message says what is wrong with it."""


@dataclass(frozen=True)
class Change:
    """What an update changes: nodes that no source named before, and nodes that none names now."""

    added: frozenset[str]
    dropped: frozenset[str]


class Contributions:
    """The URLs that each source names. A node exists as long as at least one source names it."""

    def __init__(self) -> None:
        self._urls: dict[str, frozenset[str]] = {}

    def urls(self) -> frozenset[str]:
        """Return the URLs that any source names."""
        return frozenset().union(*self._urls.values())

    def named_by(self, source: str) -> frozenset[str]:
        """Return the URLs that one source names."""
        return self._urls.get(source, frozenset())

    def sources_of(self, url: str) -> tuple[str, ...]:
        """Return the names of the sources that name a node, in alphabetical order."""
        return tuple(sorted(source for source, urls in self._urls.items() if url in urls))

    def update(self, source: str, urls: Iterable[str]) -> Change:
        """Replace everything that one source names."""
        before = self.urls()
        self._urls[source] = frozenset(urls)
        after = self.urls()
        return Change(after - before, before - after)


@dataclass(frozen=True)
class DnsTarget:
    """A DNS name, each address of which is a node that listens on `port`.

    Attributes:
        scheme: One of `DNS_SCHEMES`. With `dns+https` the nodes' certificates must have the name, not the
            addresses.
    """

    name: str
    port: int
    scheme: str = "dns"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.name}:{self.port}"

    def url_of(self, address: str) -> str:
        """Return the URL of the node at an address of the name."""
        return str(URL.build(scheme=DNS_SCHEMES[self.scheme], host=address, port=self.port))


def server_name_of(source: str) -> str:
    """Return the name in the certificates of the nodes that a source names.

    Empty if each has the host of its own URL.
    """
    is_dns = source.startswith("dns+https://")
    return (URL(source).host or "") if is_dns else ""


def parse_target(text: str) -> str | DnsTarget:
    """Parse what an option names: the URL of a node, or `dns://NAME:PORT`, or `dns+https://NAME:PORT`.

    Raises:
        BadNodesError: It is neither.
    """
    scheme = text.partition("://")[0]
    if scheme in DNS_SCHEMES:
        parts = _parts(text)
        if not _ADDRESS.fullmatch(text) or not parts.host or not parts.explicit_port:
            raise BadNodesError(
                f"{_shown(text)!r} is not a DNS name with a port, and nothing else: give one such as dns://prefill:8100"
            )
        return DnsTarget(parts.host, parts.explicit_port, scheme)
    return parse_url(text)


def parse_url(text: str) -> str:
    """Return the URL of a node without a slash at its end.

    `/nodes`, `/health` and `/metrics` show the URLs of nodes without asking for a key, so nothing in them may
    be a secret.

    Raises:
        BadNodesError: It is not an HTTP URL, or has more than a host and a port. The message has no
            credentials.
    """
    parts = _parts(text)
    shown = _shown(text)
    if parts.user is not None or parts.password is not None:
        raise BadNodesError(
            f"{shown!r} has credentials, which anyone could read at /nodes: give the URL without them, and a key with "
            "--node-api-key-file"
        )
    if parts.scheme not in ("http", "https") or not parts.host:
        raise BadNodesError(f"{shown!r} is not the URL of a node: give one such as http://127.0.0.1:8100")
    if not _ADDRESS.fullmatch(text):
        raise BadNodesError(
            f"{shown!r} has more than a scheme, a host and a port: give one such as http://127.0.0.1:8100"
        )
    return text.rstrip("/")


#: A URL with a host, perhaps a port, and nothing else. Other characters would need quoting wherever it is
#: shown.
_ADDRESS = re.compile(r"[a-z+]+://([\w.-]+|\[[0-9a-f:.]+(%25[\w.-]+)?\])(:[0-9]{1,5})?/?", re.IGNORECASE)


def _shown(text: object) -> str:
    """Return what a message may show of something that may contain a URL: neither credentials nor a query."""
    return re.sub(
        r"[?#].*", "?***", re.sub(r"(//|^).*@", r"\1***@", str(text), flags=re.DOTALL), flags=re.DOTALL
    )[:200]


def _parts(text: str) -> URL:
    try:
        return URL(text)
    except (ValueError, IndexError):
        # yarl looks at the first character of a host that is not there, as in `//@[o]@`.
        return URL()


def parse_nodes(raw: bytes, *, is_json: bool) -> Mapping[Role, tuple[str, ...]]:
    """Parse a list of nodes: a TOML or JSON object with the lists `prefill` and `decode`, each of URLs.

    Returns:
        The URLs of both roles. A list that is not there is empty.

    Raises:
        BadNodesError: The list is malformed. The message says where.
    """
    try:
        # An empty file names no node, in JSON as in TOML.
        text = raw.decode()
        parsed: Any = (json_of(text) if text.strip() else {}) if is_json else toml_of(text)
    except UnicodeDecodeError as error:
        raise BadNodesError(f"it is not text in UTF-8: {error}") from None
    except Refused as refused:
        raise BadNodesError(f"it {refused.why}") from None
    if not isinstance(parsed, dict):
        raise BadNodesError(
            f"it must be an object with the lists 'prefill' and 'decode', got {_kind(parsed)}"
        )
    if unknown := sorted(set(parsed) - set(ROLES)):
        raise BadNodesError(f"unknown key {_shown(unknown[0])!r}: the keys are 'prefill' and 'decode'")
    return {role: tuple(_urls(role, parsed.get(role, []))) for role in ROLES}


def _urls(role: Role, value: object) -> Iterable[str]:
    if not isinstance(value, list):
        raise BadNodesError(f"{role!r} must be a list of URLs, got {_kind(value)}")
    for url in value:
        if not isinstance(url, str):
            raise BadNodesError(f"{role!r} must contain URLs, got {_kind(url)}")
        yield parse_url(url)


def _kind(value: object) -> str:
    return f"{type(value).__name__} {_shown(value)[:80]!r}"
