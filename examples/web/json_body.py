"""The JSON body of a request."""

from __future__ import annotations

import json
from typing import Any

from .errors import bad_request

__all__ = ["MAX_BODY_BYTES", "parse_json"]

MAX_BODY_BYTES = 8 << 20


def parse_json(raw: bytes) -> dict[str, Any]:
    """Read a request's body.

    Raises:
        ApiError: it is not a JSON object (400).
    """
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise bad_request(f"the request body is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise bad_request(f"the request body must be a JSON object, got {type(body).__name__}")
    return body
