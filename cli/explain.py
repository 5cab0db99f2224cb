"""`kvferry explain`: what the router and every node did for one request."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

from .access import Get, add_access, fetch, getter
from .errors import FAILED, OK, CommandError, UsageError
from .output import add_json, print_json, say

if TYPE_CHECKING:
    from kvferry.router.seen.explain import Told

_DESCRIPTION: Final = """\
Tell what the router and each node did for one request and when: its calls, offers, claims, reads and guards, what moved its KV
cache, how much of that time nothing hid, and why something failed. REQUEST is the answer's id, or the X-Request-Id of the
request. Reference nodes and routers keep the spans of their latest requests, and tell them at their admin port (--admin-port
there). Servers of vLLM tell them in the answer to a request of one token. The URL of a router stands for it and all of its nodes.
"""

T = TypeVar("T")


def add(commands: Any) -> argparse.ArgumentParser:
    """Declare the command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "explain",
        help="tell what router and nodes did for one request",
        description=_DESCRIPTION,
        allow_abbrev=False,
    )
    parser.add_argument("request", metavar="REQUEST", help="id of the answer, or X-Request-Id of the request")
    parser.add_argument("urls", nargs="+", metavar="URL", help="of a node or a router: http://HOST:PORT")
    add_access(parser, has_admin=True)
    add_json(parser)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Ask every server, and print one account."""
    for url in arguments.urls:
        if not url.startswith(("http://", "https://")):
            raise UsageError(
                f"URL must begin with http:// or https://, got {url!r}; did you mean 'http://{url}'?"
            )
    get, get_admin = getter(arguments), getter(arguments, is_admin=True)
    told = ask(arguments.request, [url.rstrip("/") for url in arguments.urls], get, get_admin)
    found = any(server.spans for server in told)
    if arguments.json:
        print_json({"request": arguments.request, "servers": [dataclasses.asdict(server) for server in told]})
    else:
        from kvferry.router.seen.explain import tell

        say(*tell(arguments.request, told))
    return OK if found else FAILED


def ask(request: str, urls: Sequence[str], get: Get = fetch, get_admin: Get | None = None) -> list[Told]:
    """Return what each server knows, with the nodes of each router.

    Args:
        get: Fetches the text at a URL.
        get_admin: The same for admin endpoints. None: `get`.
    """
    # Not above, because it brings NumPy, which most commands do not need.
    from kvferry.router.seen import explain

    def answered(asking: explain.Asking[T]) -> T:
        try:
            question = next(asking)
            while True:
                by = get_admin if get_admin is not None and question.is_admin else get
                try:
                    text = by(question.url, question.timeout_s, question.body)
                except CommandError as error:
                    question = asking.throw(explain.NotToldError(str(error)))
                else:
                    question = asking.send(text)
        except StopIteration as end:
            value: T = end.value
            return value

    servers: dict[str, None] = {}
    for url in urls:
        servers |= dict.fromkeys([url, *answered(explain.nodes_of_router(url))])
    return [answered(explain.ask(request, url)) for url in servers]
