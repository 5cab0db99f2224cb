"""Options of a transport: a mapping from the user becomes a frozen dataclass, or an error that names the key."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import TypeVar

from .errors import ConfigurationError

Options = TypeVar("Options")


def parse_options(cls: type[Options], options: Mapping[str, object], scheme: str) -> Options:
    """Build the dataclass `cls` from `options`.

    Raises:
        ConfigurationError: a key that `cls` has no field for; or what `cls` itself refuses.
    """
    known = [field.name for field in fields(cls)]  # type: ignore[arg-type]
    for key, value in options.items():
        if key not in known:
            what = f"unknown option {key!r} of transport {scheme!r}"
            raise unknown_key(what, str(key), known, key=key, value=value)
    return cls(**options)


def unknown_key(what: str, name: str, known: Iterable[str], *, key: str, value: object) -> ConfigurationError:
    """The error about a name that nothing knows, with the known one that looks most like it.

    Args:
        what: What failed, e.g. `"unknown connector option 'leas_s'"`.
        key, value: Of the error.
    """
    names = sorted(known)
    nearest = difflib.get_close_matches(name, names, n=1)
    hint = f": did you mean {nearest[0]!r}?" if nearest else ";"
    return ConfigurationError(f"{what}{hint} known: {', '.join(names)}", key=key, value=value)


def require_int(key: str, value: object, low: int, high: int) -> None:
    """Check that an option is a whole number from `low` to `high`.

    Raises:
        ConfigurationError: it is not.
    """
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ConfigurationError(
            f"{key} must be a whole number from {low} to {high}, got {value!r}", key=key, value=value
        )
