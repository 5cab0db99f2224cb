"""Typed access to a JSON object. A value of the wrong type is refused."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from .errors import ApiError, bad_request


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
