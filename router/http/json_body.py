"""The JSON body of a request."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

import orjson
from aiohttp import web

from .errors import ApiError, bad_request

#: The application's limit on the size of a body, in bytes.
MAX_BODY = web.AppKey("max_body_bytes", int)
MAX_BODY_BYTES = 8 << 20
#: The most values that another server's JSON may have. Small ones need twenty times their text in memory.
MAX_VALUES = 4 << 20
#: The deepest nesting of JSON. Python can read more than it can write again, in the middle of a request.
MAX_DEPTH = 128
#: The application's limit on the time of a body, in seconds.
BODY_TIMEOUT = web.AppKey("body_timeout_s", float)
DEFAULT_BODY_TIMEOUT_S = 30.0


async def read_json(request: web.Request) -> dict[str, Any]:
    """Receive and parse a request's body.

    Raises:
        ApiError: The body is not JSON by its type or is encoded (415), too large (413), too slow (408) or not
            a JSON object (400). The connection is closed after the answer, and the rest of the body is not
            read.
    """
    # A page in a browser can send other types to any server. For this one it must ask first, and no server
    # here allows it.
    if request.content_type != "application/json":
        given = request.headers.get("Content-Type", "")
        raise _refusal(
            415,
            f"the header Content-Type is {given[:80]!r}: send the body with 'Content-Type: application/json'",
        )
    # Refuse before anything is decompressed: a small body could become a very large one.
    encoding = ", ".join(request.headers.getall("Content-Encoding", ())).strip().lower()
    if encoding not in ("", "identity"):
        raise _refusal(
            415, f"content encoding {encoding[:80]!r} is not supported: send the body without encoding"
        )
    most_bytes = request.app.get(MAX_BODY, MAX_BODY_BYTES)
    if (request.content_length or 0) > most_bytes:
        raise _too_large(most_bytes)
    timeout_s = request.app.get(BODY_TIMEOUT, DEFAULT_BODY_TIMEOUT_S)
    try:
        async with asyncio.timeout(timeout_s):
            raw = await _read(request, most_bytes)
    except TimeoutError:
        raise _refusal(408, f"the request body did not arrive within {timeout_s:g} s") from None
    except web.RequestPayloadError as error:
        raise bad_request(f"the request body is malformed: {error}") from None
    return parse_json(raw)


async def _read(request: web.Request, most_bytes: int) -> bytes:
    """Read a body piece by piece, because it need not say how long it is."""
    body = bytearray()
    while piece := await request.content.readany():
        body += piece
        if len(body) > most_bytes:
            raise _too_large(most_bytes)
    return bytes(body)


def _too_large(most_bytes: int) -> ApiError:
    return _refusal(413, f"the request body is too large: the limit is {most_bytes} bytes (--max-body-bytes)")


def _refusal(status: int, message: str) -> ApiError:
    return ApiError(status, message, kind="invalid_request_error")


def loads(raw: bytes, constant: Callable[[str], float] = float) -> Any:
    """Parse JSON. Integers of more than 64 bits become floats, which no node takes for an integer.

    Args:
        constant: What `NaN` and `Infinity` become, which Python writes although JSON has no such numbers.

    Raises:
        ValueError, RecursionError: As `json.loads`.
    """
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError:
        # Python's own knows more, such as a mark at the beginning, and says better what is wrong.
        return json.loads(raw.decode("utf-8-sig"), parse_constant=constant)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


def dumps(value: Mapping[str, Any]) -> bytes:
    """Write JSON."""
    try:
        return orjson.dumps(value)
    except TypeError:  # an integer of more than 64 bits, or half of a surrogate pair
        return json.dumps(value).encode()


def parse_json(raw: bytes) -> dict[str, Any]:
    """Parse a request's body.

    Raises:
        ApiError: It is not a JSON object (400).
    """
    # A body may hold millions of small lists. The collector would scan them again and again, for seconds, and
    # find no garbage.
    gc.disable()
    try:
        body = loads(raw, _refuse_constant)
    except (ValueError, RecursionError) as error:
        raise bad_request(f"the request body is not valid JSON: {error}") from None
    finally:
        gc.enable()
    if not isinstance(body, dict):
        raise bad_request(f"the request body must be a JSON object, got {type(body).__name__}")
    for name, value in body.items() if _may_be_unwritable(raw) else ():
        if is_deeper_than(value, MAX_DEPTH - 1):
            raise bad_request(f"{name!r} is nested too deep: at most {MAX_DEPTH} levels are possible", name)
        if not _is_unicode([name, value]):
            raise bad_request(
                f"{name!r} has half of a surrogate pair, such as '\\ud800', which is no character", name
            )
    return body


def _may_be_unwritable(raw: bytes) -> bool:
    """Return whether a body must be looked through.

    Most need not be, and they may have millions of values.
    """
    return raw.count(b"[") + raw.count(b"{") > MAX_DEPTH or _HALF_PAIR.search(raw) is not None


_HALF_PAIR = re.compile(rb"\\u[dD][89a-fA-F]")


def is_deeper_than(value: object, depth: int) -> bool:
    """Return whether lists and objects in a JSON value are nested deeper than this."""
    level = [value] if isinstance(value, list | dict) else []
    while level and depth:
        depth -= 1
        level = [
            child
            for item in level
            for child in (item.values() if isinstance(item, dict) else item)
            if isinstance(child, list | dict)
        ]
    return bool(level)


def _is_unicode(value: object) -> bool:
    """Return whether all texts in a JSON value are characters, so that they can be encoded."""
    level = [value]
    while level:
        children: list[object] = []
        for item in level:
            if isinstance(item, dict):
                children += item.keys()
                children += item.values()
            elif isinstance(item, list):
                children += item
            elif isinstance(item, str) and not _is_text(item):
                return False
        level = children
    return True


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def object_of(payload: bytes) -> Mapping[str, Any]:
    """Parse a JSON object that another server sent.

    Anything else becomes an empty one, and so does one that has too many values or is nested too deep.
    """
    if _has_too_many_values(payload):
        return {}
    try:
        value = loads(payload)
    except (ValueError, RecursionError):
        return {}
    if payload.count(b"[") + payload.count(b"{") > MAX_DEPTH and is_deeper_than(value, MAX_DEPTH):
        return {}
    return value if isinstance(value, dict) else {}


def is_object(payload: bytes) -> bool:
    """Return whether bytes are one JSON object to its end.

    One with too many values or levels is judged by its two ends.
    """
    if not _has_too_many_values(payload):
        try:
            return isinstance(loads(payload), dict)
        except ValueError:
            return False
        except RecursionError:
            pass
    text = payload.strip()
    return text.startswith(b"{") and text.endswith(b"}")


def _has_too_many_values(payload: bytes) -> bool:
    return len(payload) > MAX_VALUES and sum(map(payload.count, (b",", b"[", b"{"))) > MAX_VALUES


# -- typed access ------------------------------------------------------------------------------------


class Fields:
    """The fields of a JSON object. An absent field and `null` both mean the default.

    Every method raises `ApiError` (400, naming the field) when the value has another type.
    """

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._body = body

    def text(self, name: str, default: str) -> str:
        value = self._body.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self._wrong(name, "a string")
        return value

    def boolean(self, name: str, default: bool) -> bool:
        value = self._body.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._wrong(name, "true or false")
        return value

    def integer(self, name: str, default: int) -> int:
        value = self.optional_integer(name)
        return default if value is None else value

    def optional_integer(self, name: str) -> int | None:
        value = self._body.get(name)
        if value is not None and type(value) is not int:
            raise self._wrong(name, "an integer")
        return value

    def number(self, name: str, default: float) -> float:
        value = self._body.get(name)
        if value is None:
            return default
        if type(value) not in (int, float) or not abs(value) <= sys.float_info.max:
            raise self._wrong(name, "a number")
        return float(value)

    def mapping(self, name: str) -> Mapping[str, Any]:
        return self.optional_mapping(name) or {}

    def optional_mapping(self, name: str) -> Mapping[str, Any] | None:
        value = self._body.get(name)
        if value is not None and not isinstance(value, dict):
            raise self._wrong(name, "an object")
        return value

    def _wrong(self, name: str, expected: str) -> ApiError:
        return bad_request(f"{name!r} must be {expected}, got {str(self._body[name])[:80]!r}", name)


def refuse_stream_options_alone(body: Mapping[str, Any]) -> None:
    """Refuse `stream_options` of a request that asks for no stream, as OpenAI and vLLM do.

    Raises:
        ApiError: It has some (400).
    """
    if body.get("stream_options") and not body.get("stream"):
        raise bad_request("stream_options need 'stream': true", "stream_options")
