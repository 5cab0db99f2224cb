"""What a router and the nodes tell about one request, and how people read it: `kvferry explain`, and the
router's page.
"""

from __future__ import annotations

import json
import urllib.parse
from collections import defaultdict
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from ...connector.spans import PART, PREFIX, ServerSpans, SpanRecord
from ...transports.checked import Refused, json_of, record
from .columns import columns

_TIMEOUT_S: Final = 5.0
#: A server of vLLM answers after the requests that wait before this one.
_VLLM_TIMEOUT_S: Final = 30.0
#: Characters of a bar that is as long as the request.
_BAR: Final = 24
#: What the router calls the parts of the time until the first token (`router/seen/records.py`), and what
#: people call them.
_PARTS: Final = {
    "routing": "router",
    "queue": "queue",
    "prefill": "prompt",
    "exposed": "cache, what the prompt did not hide of it",
    "decode": "first step",
    "lost": "call of a node that was lost",
}
#: The spans of a vLLM node that its router cannot see, and which of these parts they are.
_KINDS: Final = {"queue": "queue", "load_wait": "exposed"}
#: Attributes that are the same in all rows, and the columns of events.
_NOT_SHOWN: Final = (
    "at",
    "name",
    "request_id",
    "client_request_id",
    "phase",
    "placement",
    "http.request.method",
)


class NotToldError(Exception):
    """A server could not be asked, or answered something else than what was asked for."""


@dataclass(frozen=True)
class Question:
    """A request to a server. With a body, which is JSON, it is a POST.

    Attributes:
        is_admin: It goes to the admin endpoints, which have a key of their own.
    """

    url: str
    timeout_s: float = _TIMEOUT_S
    body: bytes = b""
    is_admin: bool = False


T = TypeVar("T")
#: Yields what to ask next. It is sent the text of the answer, or `NotToldError` is thrown into it. The
#: command asks with the standard library, and the router with aiohttp.
Asking = Generator[Question, str, T]


@dataclass(frozen=True)
class Told:
    """What a server told, or why it could not be asked."""

    url: str
    process: str = ""
    engine_id: str = ""
    spans: tuple[SpanRecord, ...] = ()
    error: str = ""


def ask(request: str, url: str) -> Asking[Told]:
    """Return what a server knows of a request."""
    if (yield from _is_vllm(url)):
        return (yield from ask_vllm(request, url))
    admin_url, hint = yield from _admin_url(url)
    page = f"{admin_url}/admin/requests/{urllib.parse.quote(request, safe='')}"
    return (yield from _told(url, _json(Question(page, is_admin=True)), hint))


def ask_vllm(request: str, url: str) -> Asking[Told]:
    """Return what a server of vLLM knows of a request."""
    return (yield from _told(url, _ask_vllm(request, url)))


def _told(url: str, asking: Asking[Any], hint: str = "") -> Asking[Told]:
    try:
        answer = yield from asking
        try:
            return Told(url, **vars(record(ServerSpans).read_known(answer)))
        except Refused as error:
            raise NotToldError(f"it answers what no server of kvferry answers: {error}") from error
    except NotToldError as error:
        return Told(url, error=_message_in(str(error)) + hint)


def nodes_of_router(url: str) -> Asking[list[str]]:
    """Return the URLs of a router's nodes; empty if the server is no router or does not answer, as the next
    request says.
    """
    try:
        nodes = (yield from _json(Question(f"{url}/nodes")))["nodes"]
        return [str(node["url"]).rstrip("/") for node in nodes]
    except (NotToldError, KeyError, TypeError):
        return []


def _is_vllm(url: str) -> Asking[bool]:
    """Whether a server is one of vLLM, which lists its own models so, and whose `/health` has no body."""
    try:
        if (yield Question(f"{url}/health")).strip():
            return False
        models = (yield from _json(Question(f"{url}/v1/models")))["data"]
        return any(model["owned_by"] == "vllm" for model in models)
    except (NotToldError, KeyError, TypeError):
        return False


def _ask_vllm(request: str, url: str) -> Asking[Any]:
    """Return what our connector in a server of vLLM knows: a request of one token is the way to ask it.

    Raises:
        NotToldError: The server does not answer, has another connector, or does not know the request.
    """
    body = {"prompt": [0], "max_tokens": 1, "kv_transfer_params": {"explain": request}}
    question = Question(f"{url}/v1/completions", _VLLM_TIMEOUT_S, json.dumps(body).encode())
    answer = yield from _json(question)
    params = answer.get("kv_transfer_params") if isinstance(answer, dict) else None
    told = params.get("spans") if isinstance(params, dict) else None
    if not isinstance(told, dict):
        raise NotToldError("this server of vLLM has no KvferryConnector, or one that cannot explain requests")
    if not told.get("spans"):
        raise NotToldError(
            f"no spans of request {request!r}; the connector keeps those of its latest requests"
        )
    return told


def _admin_url(url: str) -> Asking[tuple[str, str]]:
    """Return where a server's admin endpoints are, and what to add to an error.

    The given URL may be theirs already.
    """
    try:
        health = yield from _json(Question(f"{url}/health"))
    except NotToldError:
        return url, ""
    port = health.get("admin_port") if isinstance(health, dict) else None
    if type(port) is not int:
        return url, "; the server has no admin endpoints: start it with --admin-port"
    parts = urllib.parse.urlsplit(url)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    return f"{parts.scheme}://{host}:{port}", ""


def _json(question: Question) -> Asking[Any]:
    text = yield question
    try:
        return json_of(text)
    except Refused as error:
        raise NotToldError(error.text("the answer")) from error


def _message_in(text: str) -> str:
    """Return the message of a server's error, or the text if it is no such error."""
    try:
        return str(json_of(text[text.index("{") :])["error"]["message"])
    except (Refused, ValueError, KeyError, TypeError):
        return text


def tell(request: str, servers: Sequence[Told]) -> list[str]:
    """The account for people: a summary per server, then all spans and their events in the order of their
    times.
    """
    lines = [f"request {request}"]
    for server in servers:
        summaries = [server.error] if server.error else [*filter(None, map(_summary, server.spans))]
        if server.spans and not {"router", "node"} & {span.name for span in server.spans}:
            summaries.append("still running")
        first, *more = summaries or [""]
        lines.append(f"  {server.process or '-':8}  {server.url}  {first}".rstrip())
        lines += [f"{'':12}{line}" for line in more]
    spans = [(server.process, span) for server in servers for span in server.spans]
    if not spans:
        return lines
    for _, span in spans:
        if choice := span.attributes.get("placement"):
            lines += ["", f"the router chose {choice} (estimated)"]
        lines += _first_token(span, {server.url: server.spans for server in servers})
    if hint := _hint([span for _, span in spans]):
        lines.append(f"  ({hint})")
    began = min(span.start for _, span in spans)
    scale = _BAR / max(max(span.end for _, span in spans) - began, 1e-6)
    rows: list[tuple[float, Sequence[str]]] = []

    def add(start: float, mark: str, seconds: float, *cells: str) -> None:
        at = start - began
        bar = " " * min(_BAR - 1, int(at * scale)) + mark * max(1, round(seconds * scale))
        lasts = f"{seconds * 1e3:9.1f} ms" if mark == "=" else ""
        rows.append((start, (f"{at * 1e3:9.1f} ms", lasts, bar[:_BAR], *cells)))

    for where, span in spans:
        failed = [f"failed: {span.error}"] if span.error else []
        what = ", ".join(failed + _words(span.attributes))
        add(span.start, "=", span.end - span.start, where, span.name, what)
        for event in span.events:
            if event["name"] == PART:
                continue
            add(float(event["at"]), "|", 0.0, where, f"  {event['name']}", ", ".join(_words(event)))
    rows.sort(key=lambda row: row[0])
    head = ("starts at".rjust(12), "lasts".rjust(12), "", "where", "what")
    table = columns([head, *(row for _, row in rows)])
    return [*lines, "", *table, "", "times of different hosts are as exact as their clocks agree"]


def _hint(spans: Sequence[SpanRecord]) -> str:
    """Say why nothing of a handoff is told; empty if something is, or if the request reached no node."""
    names = {span.name for span in spans}
    if names & {"offer", "claim", "load"}:
        return ""
    if "router" in names:
        if not names & {"prefill_call", "decode_call"}:
            return ""
        is_handed_over = any(span.name == "prefill_call" and not span.error for span in spans)
    else:
        is_handed_over = not any(span.attributes.get("phase") == "alone" for span in spans)
    if not is_handed_over:
        return "nothing was handed over: the node that answered computed the prompt itself"
    return "no claims and reads: start the nodes with the connector option trace=true to see them"


@dataclass(frozen=True)
class _Part:
    """What a part of the time until the first token was spent on, and where.

    Attributes:
        at: When it began, in seconds since 1970.
        also: Other kinds that it contains.
    """

    kind: str
    node: str
    at: float
    seconds: float
    also: tuple[str, ...] = ()

    def split(self, spans: Sequence[SpanRecord]) -> list[_Part]:
        """Return it in the parts that its node's spans tell apart.

        They have the same sum, also if the hosts' clocks differ.
        """
        # A span may begin before this part: a decode node waits while the prompt is computed, which is
        # another part. What no span explains, such as HTTP, stays with this part's own kind.
        parts, end = [], self.at + self.seconds
        found = [(_KINDS[span.name], span) for span in spans if span.name in _KINDS]
        at = self.at
        for kind, span in found:
            seconds = min(span.end, end) - max(span.start, at)
            if kind in self.also and seconds > 0:
                parts.append(_Part(kind, self.node, at, seconds))
                at += seconds
        return [*parts, _Part(self.kind, self.node, at, end - at, () if found else self.also)]


def _first_token(span: SpanRecord, told: Mapping[str, Sequence[SpanRecord]]) -> list[str]:
    """What the time until the first token was spent on, by the router's clock; empty for other spans.

    Args:
        told: The spans of each server, by its URL.
    """
    parts: list[_Part] = []
    at = span.start
    for event in span.events:
        seconds = event.get("seconds")
        if event["name"] == PART and isinstance(seconds, int | float) and seconds > 0:
            also = tuple(word for word in str(event.get("also", "")).split(", ") if word)
            part = _Part(str(event.get("kind")), str(event.get("node", "")), at, float(seconds), also)
            parts += part.split(told.get(part.node, ()))
            at += part.seconds
    total_s = at - span.start
    rows: list[Sequence[str]] = []
    for part in parts:
        bar = " " * int(_BAR * (part.at - span.start) / total_s)
        bar += "=" * max(1, round(_BAR * part.seconds / total_s))
        what = _PARTS.get(part.kind, part.kind)
        if part.also:
            kinds = _and([_PARTS.get(word, word) for word in part.also])
            what += f", and {kinds}, which its node does not tell apart"
        share = f"{part.seconds / total_s:5.0%}"
        rows.append((f"{part.seconds * 1e3:9.1f} ms", share, bar[:_BAR], what, part.node))
    if not rows:
        return []
    return ["", f"the first token came after {total_s * 1e3:.1f} ms:", *columns(rows)]


def _and(words: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _summary(span: SpanRecord) -> str:
    """Return in words what the end of an answer or of a load says; empty for other spans."""
    known: defaultdict[str, Any] = defaultdict(int, span.attributes)
    if span.name in ("load", "load_wait") and span.error:
        return f"the load failed: {span.error}"
    try:
        if span.name == "load" and known["outcome"] != "dropped":
            why = f" ({known['reason']})" if known["reason"] else ""
            return (
                f"loaded by {known['transport']}: {known['mechanism']}{why}: {known['blocks']} blocks in "
                f"{known['regions']} regions, {known['bytes'] / 1e6:.1f} MB, {known['seconds'] * 1e3:.2f} ms, "
                f"exposed {known['exposed_seconds'] * 1e3:.2f} ms"
            )
        if span.name == "generate":
            return (
                f"{known['prompt_tokens']} prompt tokens, {known['cached_tokens']} cached, "
                f"{known['loaded_tokens']} loaded, {known['output_tokens']} generated, first after "
                f"{known['first_token_s'] * 1e3:.1f} ms, ended: {span.error or known['finish_reason']}"
            )
    except TypeError:  # a word in place of a number
        return ""
    return ""


def _words(known: Mapping[str, Any]) -> list[str]:
    return [
        f"{key} {value:.6g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in known.items()
        if not (key in _NOT_SHOWN or key.startswith(PREFIX) or value == "" or (key, value) == ("rank", 0))
    ]
