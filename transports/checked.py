"""Dataclasses whose annotations say what each field must be, so that a field is declared on one line.

    @dataclass(frozen=True)
    class Options:
        copy_threads: Annotated[int, integer(1, 64)] = 1
        socket_dir: str = ""

A *check* takes a value from outside and returns it, converted where the check says so; or it raises
`Refused`. The annotation of a field carries its check. `bool`, `str`, `Mapping`, `Literal[...]` and checked
dataclasses need none; numbers always do, because their bounds must be written down. A dataclass may also have
a method `require_consistent`, which raises `Refused` if its fields do not fit together.

There are three ways to use such a class, each with the errors of its caller: `Record.read` for a peer's
messages, which must have exactly these fields; `Record.read_known` for a mapping that may have others; and
`require_valid` for options, which are checked however they were made (`options`). Sizes are checked before
contents, because a peer chooses both.
"""

from __future__ import annotations

import json
import math
import re
import reprlib
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from types import MappingProxyType
from typing import (
    Annotated,
    Any,
    Final,
    Generic,
    Literal,
    NoReturn,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

#: Returns the value, or raises `Refused`.
Check = Callable[[object], Any]

T = TypeVar("T")

_SHOWN_CHARS: Final = 80
#: That a JSON of ours nests, with some to spare.
_MAX_LEVELS: Final = 16
#: Of an integer. TOML may write a longer one in hexadecimal, which Python reads and refuses to print.
_MAX_BITS: Final = 4096
_TOO_MUCH: Final = f"it has more than {_MAX_LEVELS} levels, or a number of more than {_MAX_BITS} bits"


class Refused(Exception):
    """A value is not what it must be. Callers turn this into an error of their own tree.

    Attributes:
        why: The end of a sentence that begins with the field's name, e.g. `"must be an integer from 1 to 64,
            got 0"`.
        path: Where in the outermost value, e.g. `".layers[3].name"`; empty for the value itself.
    """

    def __init__(self, why: str, path: str = "") -> None:
        super().__init__(why)
        self.why = why
        self.path = path

    def __str__(self) -> str:
        return self.text("")

    def text(self, name: str) -> str:
        """Say what is wrong with a value called `name`, or, without a name, with its field."""
        return f"{name}{self.path}".lstrip(".") + f" {self.why}"

    @property
    def field(self) -> str:
        """Name of the outermost field; empty if no field is to blame."""
        found = re.match(r"\.([^.\[]*)", self.path)
        return found[1] if found else ""


def refuse(wanted: str, value: object) -> NoReturn:
    """Refuse a value that is not `wanted`, e.g. `"a string"`."""
    raise Refused(f"must be {wanted}, got {shown(value)}")


def shown(value: object) -> str:
    """Like `repr`, but short and quick for a value of any size."""
    try:
        return _REPR.repr(value)
    except ValueError:  # Python refuses to print an integer of very many digits
        return f"a value of type {type(value).__name__}"


def printable(text: str, keep: str = "") -> str:
    """Return foreign text for a terminal or a log: what could move the cursor or begin a line becomes its
    escape.

    Args:
        keep: Characters that stay as they are, for example a newline.
    """
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in keep else char.encode("unicode_escape").decode()
        for char in text
    )


# -- checks of single values -------------------------------------------------------------------------


def json_of(text: str | bytes) -> Any:
    """Return the value that another program or a user wrote as JSON.

    Raises:
        Refused: It is no JSON, or printing it would fail: it is nested very deeply, or has a number of very
            many digits.
    """
    return _read("JSON", json.loads, text)


def toml_of(text: str) -> dict[str, Any]:
    """Return the tables that a user wrote as TOML. Raises `Refused` as `json_of` does."""
    tables: dict[str, Any] = _read("TOML", tomllib.loads, text)
    return tables


def _read(form: str, parse: Callable[[Any], Any], text: str | bytes) -> Any:
    try:
        value = parse(text)
    except (json.JSONDecodeError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise Refused(f"is no {form}: {error}") from error
    except (ValueError, RecursionError) as error:  # an integer beyond Python's own limit of digits
        raise Refused(f"is no {form} of ours: {_TOO_MUCH}") from error
    if not _is_printable(value, _MAX_LEVELS):
        raise Refused(f"is no {form} of ours: {_TOO_MUCH}")
    return value


def _is_printable(value: object, levels: int) -> bool:
    """Whether `repr` and `json.dumps` of a value surely work."""
    if isinstance(value, int):
        return value.bit_length() <= _MAX_BITS
    if not isinstance(value, dict | list):
        return True
    parts = value.values() if isinstance(value, dict) else value
    return levels > 0 and all(_is_printable(part, levels - 1) for part in parts)


def integer(low: int, high: int | None = None) -> Callable[[object], int]:
    """Accept an integer from `low` to `high`. A bool is not an integer."""
    wanted = f"an integer of at least {low}" if high is None else f"an integer from {low} to {high}"
    top = math.inf if high is None else high

    def check(value: object) -> int:
        if type(value) is not int or not low <= value <= top:
            refuse(wanted, value)
        return value

    return check


def seconds(low: float | None = None, high: float = math.inf) -> Callable[[object], float]:
    """Accept a finite number from `low` to `high`; without `low`, any positive one."""
    wanted = "a positive number of seconds" if low is None else f"a number of seconds from {low} to {high}"

    def check(value: object) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool) or not -math.inf < value < math.inf:
            refuse(wanted, value)
        if value > high or (value <= 0 if low is None else value < low):
            refuse(wanted, value)
        return value

    return check


def text(max_chars: int, min_chars: int = 0) -> Callable[[object], str]:
    """Accept a string of `min_chars` to `max_chars` characters."""
    wanted = f"a string of {f'{min_chars} to' if min_chars else 'at most'} {max_chars} characters"

    def check(value: object) -> str:
        if type(value) is not str:
            refuse("a string", value)
        if not min_chars <= len(value) <= max_chars:
            raise Refused(f"must be {wanted}, got {len(value)}")
        return value

    return check


def string(value: object) -> str:
    """Accept any string."""
    if not isinstance(value, str):
        refuse("a string", value)
    return value


def boolean(value: object) -> bool:
    """Accept true or false."""
    if value is True or value is False:
        return value
    refuse("true or false", value)


def mapping(value: object) -> Mapping[Any, Any]:
    """Accept any mapping."""
    if not isinstance(value, Mapping):
        refuse("a mapping", value)
    return value


def one_of(*choices: object) -> Check:
    """Accept one of several values."""
    wanted = f"one of {', '.join(map(repr, choices))}"

    def check(value: object) -> object:
        if not any(type(value) is type(choice) and value == choice for choice in choices):
            refuse(wanted, value)
        return value

    return check


# -- checks of lists ---------------------------------------------------------------------------------


def entries(value: object, max_count: int) -> tuple[object, ...]:
    """Accept a list or tuple of at most `max_count` entries of any kind, and return a tuple."""
    if not isinstance(value, (tuple, list)):
        refuse("a list", value)
    if len(value) > max_count:
        raise Refused(f"must be a list of at most {max_count} entries, got {len(value)}")
    return tuple(value)


def each(check: Callable[[object], T], max_count: int) -> Callable[[object], tuple[T, ...]]:
    """Accept a list of at most `max_count` entries that `check` accepts, and return a tuple."""

    def check_each(value: object) -> tuple[T, ...]:
        known = entries(value, max_count)
        checked: list[T] = []
        try:
            for entry in known:
                checked.append(check(entry))
        except Refused as refused:
            refused.path = f"[{len(checked)}]{refused.path}"
            raise
        return tuple(checked)

    return check_each


def integers(low: int, high: int, max_count: int) -> Callable[[object], tuple[int, ...]]:
    """Accept a list of at most `max_count` integers from `low` to `high`, and return a tuple.

    It does what `each(integer(low, high), max_count)` does, but block tables have too many entries for a call
    each.
    """
    check_each = each(integer(low, high), max_count)

    def check_all(value: object) -> tuple[int, ...]:
        known: tuple[Any, ...] = entries(value, max_count)
        # The types come first: what is not an integer may not be comparable.
        if known and not (
            _ONLY_INT.issuperset(map(type, known)) and low <= min(known) and max(known) <= high
        ):
            check_each(known)  # finds the entry to blame
        return known

    return check_all


# -- dataclasses -------------------------------------------------------------------------------------


class Record(Generic[T]):
    """Reads values of one dataclass by the checks that its annotations declare.

    They are looked up once, here.

    A `Record` is a check itself, so that dataclasses nest.

    Raises:
        TypeError: a field declares no check.
    """

    def __init__(self, cls: type[T]) -> None:
        hints = get_type_hints(cls, include_extras=True)
        #: The fields in their order; True if the field has a default.
        self.has_default: Mapping[str, bool] = MappingProxyType(defaults_of(cls))
        self._make = cls
        self._checks = {name: _check_of(cls, name, hints[name]) for name in self.has_default}
        self._has_rules = hasattr(cls, "require_consistent")

    def __call__(self, value: object) -> T:
        """Accept an instance as it is, and read anything else."""
        return value if isinstance(value, self._make) else self.read(value)

    def read(self, plain: object, absent: frozenset[str] = frozenset()) -> T:
        """Make an instance of a mapping that must have exactly the fields of the class.

        Args:
            absent: Fields that the mapping must not have. They get their defaults.

        Raises:
            Refused: `plain` is no mapping; a field is missing, unknown, or not what it must be.
        """
        known = mapping(plain)
        expected = self._checks.keys() - absent if absent else self._checks.keys()
        if known.keys() != expected:
            self._refuse_names(known, absent)
        return self._made(self.checked(known))

    def read_known(self, plain: object) -> T:
        """Make an instance of a mapping that may have other keys as well. Null means that a field is not set.

        Raises:
            Refused: `plain` is no mapping; a field without a default is not set; or one is not what it must
                be.
        """
        known = mapping(plain)
        present = {name: value for name in self.has_default if (value := known.get(name)) is not None}
        for name, has_default in self.has_default.items():
            if name not in present and not has_default:
                raise Refused("is missing", f".{name}")
        return self._made(self.checked(present))

    def checked(self, values: Mapping[str, object]) -> dict[str, Any]:
        """Check the fields that `values` has; it has no others.

        Returns:
            The fields, as the checks return them.

        Raises:
            Refused: one of them is not what it must be.
        """
        result: dict[str, Any] = {}
        name = ""
        try:
            for name, value in values.items():
                result[name] = self._checks[name](value)
        except Refused as refused:
            refused.path = f".{name}{refused.path}"
            raise
        return result

    def _made(self, checked: dict[str, Any]) -> T:
        made = self._make(**checked)
        if self._has_rules:
            made.require_consistent()  # type: ignore[attr-defined]
        return made

    def _refuse_names(self, plain: Mapping[object, object], absent: frozenset[str]) -> NoReturn:
        expected = [name for name in self.has_default if name not in absent]
        for name in expected:
            if name not in plain:
                raise Refused("is missing", f".{name}")
        unknown = next(key for key in plain if key not in expected)
        raise Refused("is unknown", f".{str(unknown)[:40]}")


@cache
def record(cls: Any) -> Record[Any]:
    """The one `Record` of a class."""
    return Record(cls)


def defaults_of(cls: type) -> dict[str, bool]:
    """Return the names of a dataclass's fields in their order, and whether each has a default."""
    own: tuple[Field[Any], ...] = fields(cls)
    return {f.name: f.default is not MISSING or f.default_factory is not MISSING for f in own}


def _check_of(cls: type, name: str, hint: Any) -> Check:
    if get_origin(hint) is Annotated:
        checks = [extra for extra in hint.__metadata__ if callable(extra)]
        if len(checks) == 1:
            return checks[0]  # type: ignore[no-any-return]
        hint = hint.__origin__
    if get_origin(hint) is Literal:
        return one_of(*get_args(hint))
    check = _CHECK_OF_TYPE.get(get_origin(hint) or hint)
    if check is not None:
        return check
    if isinstance(hint, type) and is_dataclass(hint):
        return record(hint)
    raise TypeError(
        f"{cls.__name__}.{name} declares no check: annotate it, e.g. Annotated[int, integer(0, 9)]"
    )


_ONLY_INT: Final = frozenset({int})
_CHECK_OF_TYPE: Final[Mapping[Any, Check]] = {bool: boolean, str: string, Mapping: mapping}
_REPR: Final = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = _SHOWN_CHARS
_REPR.maxlevel = 2
