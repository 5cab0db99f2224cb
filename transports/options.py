"""Options: a mapping that a user wrote becomes a frozen dataclass, or an error that names the key.

A field with the metadata `INTERNAL` is no option: no user could choose its value without a profiler. A test
sets it in the dataclass itself.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any, Final, TypeVar

from .checked import Refused, defaults_of, record, shown
from .errors import ConfigurationError

Options = TypeVar("Options")

#: `size: int = field(default=7, metadata=INTERNAL)`; see the module.
INTERNAL: Final[Mapping[str, bool]] = MappingProxyType({"internal": True})


def option_names(cls: Any) -> tuple[str, ...]:
    """Return the fields of a dataclass that users set, in their order."""
    return tuple(option.name for option in fields(cls) if option.metadata != INTERNAL)


def parse_options(cls: type[Options], options: Mapping[str, object], scheme: str) -> Options:
    """Build the dataclass `cls` from the options of a transport. See `from_mapping`."""
    return from_mapping(cls, options, "option", f" of transport {scheme!r}")


def from_mapping(cls: type[Options], mapping: object, noun: str, place: str = "") -> Options:
    """Build the dataclass `cls` from a mapping that a user wrote.

    Args:
        noun: What a key is, in an error message, e.g. `"option"`.
        place: Where it stands, in an error message, e.g. `" of transport 'shm'"`.

    Raises:
        ConfigurationError: `mapping` is no mapping; a key is not among `option_names`, or a required one is
            missing; or what `cls` itself refuses.
    """
    if not isinstance(mapping, Mapping):
        raise ConfigurationError(f"the {noun}s{place} must be a mapping, got {shown(mapping)}", value=mapping)
    require_known(mapping, option_names(cls), noun, place)
    for name, has_default in defaults_of(cls).items():
        if name not in mapping and not has_default:
            raise ConfigurationError(f"{noun} {name!r}{place} is missing", key=name)
    return cls(**mapping)


def require_known(mapping: Mapping[str, object], known: Iterable[str], noun: str, place: str = "") -> None:
    """Refuse a key that is not among `known`.

    Raises:
        ConfigurationError: there is one; the error names it, and the known key that looks most like it.
    """
    known = tuple(known)
    for key, value in mapping.items():
        if key not in known:
            raise unknown_key(f"unknown {noun} {key!r}{place}", str(key), known, key=str(key), value=value)


def require_valid(options: object) -> None:
    """Check the fields of a dataclass as its annotations declare them (`checked`). For `__post_init__`.

    Raises:
        ConfigurationError: a field is not what it must be; the error names it and its value.
    """
    kind: Any = type(options)
    try:
        record(kind).checked(vars(options))
    except Refused as refused:
        key = refused.field
        raise ConfigurationError(refused.text(""), key=key, value=getattr(options, key)) from None


def unknown_key(what: str, name: str, known: Iterable[str], *, key: str, value: object) -> ConfigurationError:
    """Make the error about an unknown name.

    Its message ends with the known names, the most similar one first.

    Args:
        what: What failed, e.g. `"unknown connector option 'leas_s'"`.
        key, value: Of the error.
    """
    names = sorted(known)
    nearest = difflib.get_close_matches(name, names, n=1)
    hint = f": did you mean {nearest[0]!r}?" if nearest else ";"
    return ConfigurationError(f"{what}{hint} known: {', '.join(names)}", key=key, value=value)
