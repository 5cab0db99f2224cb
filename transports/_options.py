"""Options of a transport: a mapping from the user becomes a frozen dataclass, or an error that names the key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TypeVar

from .errors import ConfigurationError

__all__ = ["parse_options", "require_int"]

Options = TypeVar("Options")


def parse_options(cls: type[Options], options: Mapping[str, object], scheme: str) -> Options:
    """Build the dataclass `cls` from `options`.

    Raises:
        ConfigurationError: a key that `cls` has no field for; or what `cls` itself refuses.
    """
    known = [field.name for field in fields(cls)]  # type: ignore[arg-type]
    for key, value in options.items():
        if key not in known:
            raise ConfigurationError(
                f"unknown option {key!r} of transport {scheme!r}; it knows {', '.join(known)}",
                key=key,
                value=value,
            )
    return cls(**options)


def require_int(key: str, value: object, low: int, high: int) -> None:
    """Check that an option is a whole number from `low` to `high`.

    Raises:
        ConfigurationError: it is not.
    """
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ConfigurationError(
            f"{key} must be a whole number from {low} to {high}, got {value!r}", key=key, value=value
        )
