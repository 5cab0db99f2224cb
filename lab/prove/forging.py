"""Change one value of `kv_transfer_params`, whatever a connector puts there. This module is pure."""

from __future__ import annotations

import copy
import random
from typing import Any, Final

#: Keys that say what is asked for. Without them a request is another request, and not a forged one.
KEPT: Final = frozenset({"do_remote_prefill", "do_remote_decode"})
_WRONG: Final[tuple[Any, ...]] = (None, "", "x", -1, 1 << 70, 0.5, [], {}, [[-1]], True)


def forged(params: Any, chance: random.Random) -> tuple[Any, str]:
    """Replace one value by another one of the same type and size. Returns the params, and what was done."""
    changed = copy.deepcopy(params)
    path, value = chance.choice(_leaves(changed))
    other = _other(value, chance)
    _set(changed, path, other)
    return changed, f"{_named(path)} = {_short(other)} instead of {_short(value)}"


def malformed(params: Any, chance: random.Random) -> tuple[Any, str]:
    """Remove one value, or replace it by one of another type. Returns the params, and what was done."""
    changed = copy.deepcopy(params)
    path, value = chance.choice(_leaves(changed))
    if len(path) == 1 and chance.random() < 0.3:
        del changed[path[0]]
        return changed, f"{_named(path)} removed"
    other = chance.choice([each for each in _WRONG if type(each) is not type(value)])
    _set(changed, path, other)
    return changed, f"{_named(path)} = {_short(other)} instead of {_short(value)}"


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[tuple[Any, ...], Any]]:
    """Return all values that are not None, with the keys that lead to them.

    A list of numbers is one value.
    """
    if isinstance(value, dict):
        return [
            leaf
            for key, each in value.items()
            if path or key not in KEPT
            for leaf in _leaves(each, (*path, key))
        ]
    if isinstance(value, list) and any(isinstance(each, list | dict) for each in value):
        return [leaf for at, each in enumerate(value) for leaf in _leaves(each, (*path, at))]
    return [] if value is None else [(path, value)]


def _other(value: Any, chance: random.Random) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + chance.choice((-1, 1, 7))
    if isinstance(value, float):
        return value + chance.choice((-60.0, 60.0))
    if isinstance(value, list):
        # Block ids that exist, in another order or one further.
        moved = (
            value[::-1]
            if len(value) > 1 and chance.random() < 0.5
            else [_other(each, chance) for each in value]
        )
        return moved
    at = chance.randrange(len(value)) if value else 0
    letters = [each for each in "0123456789abcdef" if not value or each != value[at]]
    return value[:at] + chance.choice(letters) + value[at + 1 :]


def _set(params: Any, path: tuple[Any, ...], value: Any) -> None:
    for key in path[:-1]:
        params = params[key]
    params[path[-1]] = value


def _named(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
