"""`kvferry explain`: one request's story on every node that took part in it."""

from __future__ import annotations

import argparse
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any, Final

from .access import Get, add_access, fetch, getter, json_of
from .errors import FAILED, OK, CommandError, UsageError
from .output import add_json, columns, print_json, say

_DESCRIPTION: Final = """\
Tell one request's story: what each node did for it and when, its claims, reads and guards, what moved its KV cache, and how
much of that time nothing hid. REQUEST is the answer's id, or the X-Request-Id of the request. Nodes are reference nodes; each
keeps the stories of its latest requests, and tells them at its admin port (--admin-port there). The URL of a router stands for
all of its nodes.
"""

_TIMEOUT_S: Final = 5.0


def add(commands: Any) -> argparse.ArgumentParser:
    """Declare the command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "explain",
        help="tell one request's story on every node",
        description=_DESCRIPTION,
        allow_abbrev=False,
    )
    parser.add_argument("request", metavar="REQUEST", help="id of the answer, or X-Request-Id of the request")
    parser.add_argument("urls", nargs="+", metavar="URL", help="of a node or a router: http://HOST:PORT")
    add_access(parser, has_admin=True)
    add_json(parser)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Ask every node, and print one story."""
    for url in arguments.urls:
        if not url.startswith(("http://", "https://")):
            raise UsageError(
                f"URL must begin with http:// or https://, got {url!r}; did you mean 'http://{url}'?"
            )
    get, get_admin = getter(arguments), getter(arguments, is_admin=True)
    told = ask(arguments.request, [url.rstrip("/") for url in arguments.urls], get, get_admin)
    found = any(node["stories"] for node in told)
    if arguments.json:
        print_json({"request": arguments.request, "nodes": told})
    else:
        say(*tell(arguments.request, told))
    return OK if found else FAILED


def ask(
    request: str, urls: Sequence[str], get: Get = fetch, get_admin: Get | None = None
) -> list[dict[str, Any]]:
    """Return what each node knows: `url`, `engine_id`, `stories`, and `error` if it could not be asked.

    Args:
        get: Fetches the text at a URL.
        get_admin: The same for admin endpoints. None: `get`.
    """
    nodes: dict[str, None] = {}
    for url in urls:
        nodes |= dict.fromkeys(_nodes_of_router(url, get) or [url])
    return [_ask_node(request, url, get, get_admin or get) for url in nodes]


def _nodes_of_router(url: str, get: Get) -> list[str]:
    """Return the URLs of a router's nodes; empty if the server is no router or does not answer, as the next request says."""
    try:
        return [str(node["url"]).rstrip("/") for node in json_of(get(f"{url}/nodes", _TIMEOUT_S))["nodes"]]
    except (CommandError, KeyError, TypeError):
        return []


def _ask_node(request: str, url: str, get: Get, get_admin: Get) -> dict[str, Any]:
    known: dict[str, Any] = {"url": url, "engine_id": "", "stories": [], "error": ""}
    hint = ""
    try:
        admin_url, hint = _admin_url(url, get)
        page = get_admin(f"{admin_url}/admin/requests/{urllib.parse.quote(request, safe='')}", _TIMEOUT_S)
        # Not above, because it brings NumPy, which most commands do not need.
        from .stories import checked_answer

        answer = checked_answer(json_of(page))
        return known | {"engine_id": answer["engine_id"], "stories": answer["stories"]}
    except CommandError as error:
        return known | {"error": _message_in(str(error)) + hint}


def _admin_url(url: str, get: Get) -> tuple[str, str]:
    """Return where a node's admin endpoints are, and what to add to an error. The given URL may be theirs already."""
    try:
        health = json_of(get(f"{url}/health", _TIMEOUT_S))
    except CommandError:
        return url, ""
    port = health.get("admin_port") if isinstance(health, dict) else None
    if type(port) is not int:
        return url, "; the node has no admin endpoints: start it with --admin-port"
    parts = urllib.parse.urlsplit(url)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    return f"{parts.scheme}://{host}:{port}", ""


def _message_in(text: str) -> str:
    """Return the message of a node's error, or the text if it is no such error."""
    try:
        return str(json_of(text[text.index("{") :])["error"]["message"])
    except (CommandError, ValueError, KeyError, TypeError):
        return text


def tell(request: str, nodes: Sequence[Mapping[str, Any]]) -> list[str]:
    """The story for people: a summary per node, then all events in the order of their times."""
    lines = [f"request {request}"]
    events: list[tuple[float, str, Mapping[str, Any]]] = []
    for node in nodes:
        for story in node["stories"]:
            who = story["phase"]
            summary, *more = _summary(story)
            lines += [f"  {who:8}{node['url']}  {summary}", *(f"          {line}" for line in more)]
            events.append((story["arrived"], who, {"name": "arrived", "request": story["request_id"]}))
            events += [(event["at"], who, event) for event in story["events"]]
        if node["error"]:
            lines.append(f"  {'-':8}{node['url']}  {node['error']}")
    if not events:
        return lines
    events.sort(key=lambda entry: entry[0])
    began = events[0][0]
    rows = [
        (f"{(at - began) * 1e3:9.1f} ms", who, str(event["name"]), _details(event))
        for at, who, event in events
    ]
    if not any(event["name"].startswith(("claim", "offer made")) for _, _, event in events):
        lines.append(
            "  (no claims and reads: start the nodes with --connector-option trace=true to see them)"
        )
    return [*lines, "", *columns(rows), "", "times of different hosts are as exact as their clocks agree"]


def _summary(story: Mapping[str, Any]) -> list[str]:
    ending = story["ending"]
    text = f"{story['num_prompt_tokens']} prompt tokens"
    if not ending:
        return [f"{text}, still running, or its client left"]
    metrics = ending["metrics"]
    text += f", {metrics['num_cached_tokens']} cached, {metrics['num_loaded_tokens']} loaded"
    text += f", {metrics['num_output_tokens']} generated, first after {metrics['ttft_s'] * 1e3:.1f} ms"
    text += f", ended: {ending['error'] or ending['finish_reason']}"
    transfer = metrics["transfer"]
    if transfer is None:
        return [text]
    if transfer["error"]:
        return [text, f"the load failed: {transfer['error']}"]
    why = f" ({transfer['reason']})" if transfer["reason"] else ""
    return [
        text,
        (
            f"loaded by {transfer['transport']}: {transfer['mechanism']}{why}: "
            f"{transfer['num_blocks']} blocks in {transfer['num_regions']} regions, {transfer['num_bytes'] / 1e6:.1f} MB, "
            f"{transfer['seconds'] * 1e3:.2f} ms, exposed {transfer['exposed_seconds'] * 1e3:.2f} ms"
        ),
    ]


def _details(event: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in event.items() if key not in ("at", "name"))
