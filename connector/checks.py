"""Strict checks of plain values from a peer: each returns the value, or raises a `ProtocolError` that names it.

Types are exact: a bool is not an integer. Sizes are limited before anything is walked.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, cast

from ..transports.errors import ProtocolError

#: Longest text of any kind, in characters.
MAX_TEXT_CHARS: Final = 1024

#: A check: (name of the field, value) → the value.
Check = Callable[[str, object], Any]


def integer(low: int, high: int) -> Callable[[str, object], int]:
    """A check for an integer from `low` to `high`."""

    def check(name: str, value: object) -> int:
        number = cast(int, _of_type(name, value, int))
        if not low <= number <= high:
            raise ProtocolError(f"{name} is from {low} to {high}, got {number}")
        return number

    return check


def integers(low: int, high: int, max_count: int) -> Callable[[str, object], tuple[int, ...]]:
    """A check for an array of at most `max_count` integers from `low` to `high`."""

    def check(name: str, value: object) -> tuple[int, ...]:
        numbers = array(name, value, max_count)
        if any(type(number) is not int for number in numbers):
            raise ProtocolError(f"{name} holds only integers")
        known = cast(tuple[int, ...], numbers)
        if known and not low <= min(known) <= max(known) <= high:
            raise ProtocolError(f"{name} holds integers from {low} to {high}")
        return known

    return check


def text(name: str, value: object) -> str:
    """A check for a string of at most `MAX_TEXT_CHARS` characters."""
    known = cast(str, _of_type(name, value, str))
    if len(known) > MAX_TEXT_CHARS:
        raise ProtocolError(f"{name} has {len(known)} characters; at most {MAX_TEXT_CHARS} are allowed")
    return known


def boolean(name: str, value: object) -> bool:
    """A check for true or false."""
    return cast(bool, _of_type(name, value, bool))


def array(name: str, value: object, max_count: int) -> tuple[object, ...]:
    """Check that a value is a tuple of at most `max_count` entries, of any type."""
    entries = cast(tuple[object, ...], _of_type(name, value, tuple))
    if len(entries) > max_count:
        raise ProtocolError(f"{name} has {len(entries)} entries; at most {max_count} are allowed")
    return entries


def checked_fields(name: str, plain: Mapping[str, object], checks: Mapping[str, Check]) -> dict[str, Any]:
    """Check that `plain` has exactly the fields of `checks`, and each field with its check."""
    _require_names(name, plain, checks)
    return {field: check(f"{name}.{field}", plain[field]) for field, check in checks.items()}


def _require_names(name: str, plain: Mapping[str, object], wanted: Collection[str]) -> None:
    for field in wanted:
        if field not in plain:
            raise ProtocolError(f"{name}.{field} is missing")
    for field in plain:
        if field not in wanted:
            raise ProtocolError(f"{name}.{str(field)[:40]} is unknown")


def _of_type(name: str, value: object, wanted: type) -> object:
    if type(value) is not wanted:
        raise ProtocolError(f"{name} must be {_NOUNS[wanted]}, got {type(value).__name__}")
    return value


_NOUNS = {int: "an integer", str: "a string", bool: "a boolean", tuple: "an array"}
