"""Pages that describe a server: `/version`, `/openapi.json`, and `/docs`, which shows the latter to people.

They are made from the server's own routes. `/docs` is plain HTML and fetches nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from html import escape
from typing import Any

from aiohttp import web

import kvferry

from .endpoints import CHATS, COMPLETIONS, ENDPOINTS, endpoint_at

_TEXT, _NUMBER, _INTEGER, _FLAG = ({"type": kind} for kind in ("string", "number", "integer", "boolean"))
_TEXTS: Mapping[str, Any] = {"type": "array", "items": _TEXT}
_TOKENS: Mapping[str, Any] = {"type": "array", "items": _INTEGER}

#: Fields of the bodies of both endpoints: schema, default, and what it does.
_COMMON: Mapping[str, tuple[Mapping[str, Any], object, str]] = {
    "model": (_TEXT, None, "name of the model; absent means the model that is served"),
    "n": (_INTEGER, 1, "answers to each prompt, at most 256 in all"),
    "max_completion_tokens": (_INTEGER, None, "same as max_tokens, and wins over it"),
    "temperature": (_NUMBER, 1.0, "0 always takes the likeliest token, 0 to 100"),
    "top_p": (_NUMBER, 1.0, "sample from the likeliest tokens that together reach this probability, above 0 to 1"),
    "seed": (_INTEGER, None, "the same seed gives the same answer"),
    "stop": ({"oneOf": [_TEXT, _TEXTS]}, None, "the answer ends before the first of these texts, at most 16"),
    "ignore_eos": (_FLAG, False, "continue past the model's end token"),
    "stream": (_FLAG, False, "answer as server-sent events"),
    "stream_options": (
        {"type": "object", "properties": {"include_usage": _FLAG}},
        None,
        "include_usage: a last event has the token counts",
    ),
    "return_token_ids": (_FLAG, False, "choices have token_ids, and those of whole answers prompt_token_ids"),
    "return_tokens_as_token_ids": (_FLAG, False, "log probabilities call each token token_id:N"),
    "cache_salt": ({**_TEXT, "minLength": 1}, None, "share cached prompts only with requests that have the same salt"),
    "kv_transfer_params": ({"type": "object"}, None, "what a router carries between two nodes; not for clients"),
}  # fmt: skip
_COMPLETION: Mapping[str, tuple[Mapping[str, Any], object, str]] = {
    "prompt": (
        {"oneOf": [_TEXT, _TEXTS, _TOKENS, {"type": "array", "items": _TOKENS}]},
        None,
        "required: a text or token ids, or a list of several of one kind",
    ),
    "max_tokens": (_INTEGER, 16, "longest answer"),
    "logprobs": (_INTEGER, None, "log probability of each token and of this many of the likeliest, 0 to 20"),
}
_CHAT: Mapping[str, tuple[Mapping[str, Any], object, str]] = {
    "messages": (
        {
            "type": "array",
            "items": {"type": "object", "properties": {"role": _TEXT, "content": {"oneOf": [_TEXT, {"type": "array"}]}}},
        },
        None,
        "required: the turns so far, each with role and content",
    ),
    "max_tokens": (_INTEGER, None, "longest answer; absent means as long as the model allows"),
    "logprobs": (_FLAG, False, "return the log probability of each token"),
    "top_logprobs": (_INTEGER, 0, "and of this many of the likeliest, 0 to 20; needs logprobs"),
}  # fmt: skip
_BODIES: Mapping[str, Mapping[str, tuple[Mapping[str, Any], object, str]]] = {
    COMPLETIONS: {**_COMPLETION, **_COMMON},
    CHATS: {**_CHAT, **_COMMON},
}
_SUMMARIES: Mapping[str, str] = {
    **{endpoint.path: endpoint.summary for endpoint in ENDPOINTS},
    "/v1/models": "List the models that are served.",
    "/v1/models/{model}": "Describe one model.",
    "/health": "Say whether the server can answer requests: 200 if it can, otherwise 503 and why.",
    "/metrics": "Return metrics in the format of Prometheus.",
    "/version": "Return the version.",
    "/docs": "Show this page.",
    "/openapi.json": "Describe the API in the format of OpenAPI.",
}
_STYLE = (
    "body{font:16px/1.5 sans-serif;max-width:60em;margin:2em auto;padding:0 1em}code{background:#eee;padding:0 .2em}"
    "table{border-collapse:collapse}td,th{border:1px solid #ccc;padding:.2em .6em;text-align:left;vertical-align:top}"
)


def add_api_pages(app: web.Application, title: str) -> None:
    """Add the pages to a server. They describe the routes that it has when they are asked for."""

    async def version(request: web.Request) -> web.Response:
        return web.json_response({"version": kvferry.__version__})

    async def description(request: web.Request) -> web.Response:
        return web.json_response(openapi_of(app, title))

    async def docs(request: web.Request) -> web.Response:
        return web.Response(text=_html(openapi_of(app, title)), content_type="text/html", charset="utf-8")

    app.router.add_get("/version", version)
    app.router.add_get("/openapi.json", description)
    app.router.add_get("/docs", docs)


def fields_of(path: str) -> AbstractSet[str]:
    """Return the names of the fields that an endpoint serves."""
    return _BODIES[path].keys()


def openapi_of(app: web.Application, title: str) -> dict[str, Any]:
    """Describe a server's routes in the format of OpenAPI 3.1."""
    paths: dict[str, dict[str, Any]] = {}
    for method, path, handler in _routes(app):
        first_line = (handler.__doc__ or "").strip().partition("\n")[0]
        operation: dict[str, Any] = {
            "summary": _SUMMARIES.get(path) or first_line,
            "responses": {
                "200": {"description": "The answer"},
                "default": {"description": "An error object"},
            },
        }
        if names := [part[1:-1] for part in path.split("/") if part.startswith("{")]:
            operation["parameters"] = [
                {"name": name, "in": "path", "required": True, "schema": _TEXT} for name in names
            ]
        if path in _BODIES or (method == "POST" and endpoint_at(path)):
            operation["requestBody"] = {
                "required": True,
                "content": {"application/json": {"schema": _schema(path)}},
            }
        paths.setdefault(path, {})[method.lower()] = operation
    return {"openapi": "3.1.0", "info": {"title": title, "version": kvferry.__version__}, "paths": paths}


def _routes(app: web.Application) -> Iterator[tuple[str, str, Any]]:
    for route in app.router.routes():
        if route.method != "HEAD" and route.resource is not None:
            yield route.method, route.resource.canonical, route.handler


def _schema(path: str) -> dict[str, Any]:
    endpoint = endpoint_at(path)
    assert endpoint is not None, "it has a body"
    if (fields := _BODIES.get(path)) is None:
        return {"type": "object", "required": list(endpoint.required)}
    properties = {
        name: {**schema, "description": about, **({} if default is None else {"default": default})}
        for name, (schema, default, about) in fields.items()
    }
    return {"type": "object", "required": list(endpoint.required), "properties": properties}


def _html(description: Mapping[str, Any]) -> str:
    title = escape(f"{description['info']['title']} {description['info']['version']}")
    parts = [
        f"<!DOCTYPE html><html lang=en><meta charset=utf-8><title>{title}</title><style>{_STYLE}</style>"
    ]
    parts.append(f'<h1>{title}</h1><p>The same for programs: <a href="openapi.json">openapi.json</a></p>')
    for path, methods in description["paths"].items():
        for method, operation in methods.items():
            parts.append(
                f"<h2><code>{method.upper()} {escape(path)}</code></h2><p>{escape(operation['summary'])}</p>"
            )
            if "requestBody" in operation:
                schema = operation["requestBody"]["content"]["application/json"]["schema"]
                parts += _table(schema["properties"]) if "properties" in schema else ()
    return "\n".join([*parts, "</html>"])


def _table(properties: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    yield "<table><tr><th>field<th>type<th>default<th>what it does</tr>"
    for name, schema in properties.items():
        cells = (name, _kind(schema), str(schema.get("default", "")), schema["description"])
        yield "<tr>" + "".join(f"<td>{escape(cell)}" for cell in cells) + "</tr>"
    yield "</table>"


def _kind(schema: Mapping[str, Any]) -> str:
    if "oneOf" in schema:
        return " or ".join(map(_kind, schema["oneOf"]))
    return f"list of {_kind(schema['items'])}s" if "items" in schema else str(schema["type"])
