"""Encode plain values and dataclasses as MessagePack.

This is meant for a process and the workers that it started itself. The decoder constructs dataclasses only,
and only those of modules that are already imported, so no input can make it import or call anything else.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from functools import reduce
from typing import Any

import msgpack

_DATACLASS, _TUPLE, _SET, _FROZENSET = range(1, 5)
_COLLECTIONS: Mapping[int, type] = {_TUPLE: tuple, _SET: set, _FROZENSET: frozenset}
_CODES = {collection: code for code, collection in _COLLECTIONS.items()}


def encode(value: object) -> bytes:
    """Encode dataclasses, tuples, sets, lists, dicts, and the types that MessagePack knows.

    Raises:
        TypeError: `value` contains another type; the message names it.
    """
    encoded: bytes = msgpack.packb(value, default=_extension, strict_types=True)
    return encoded


def decode(data: bytes) -> Any:
    """Invert `encode`: return an equal value of the same types.

    Raises:
        ValueError: `data` is malformed, or names a dataclass that this process does not have.
    """
    return msgpack.unpackb(data, ext_hook=_restored, strict_map_key=False)


def _extension(value: object) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        kind = type(value)
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return msgpack.ExtType(_DATACLASS, encode([kind.__module__, kind.__qualname__, fields]))
    if isinstance(value, tuple | set | frozenset) and type(value) in _CODES:
        return msgpack.ExtType(_CODES[type(value)], encode(list(value)))
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(
        f"a {type(value).__module__}.{type(value).__qualname__} cannot be sent to a worker process: "
        "only plain values and dataclasses are supported"
    )


def _restored(code: int, data: bytes) -> object:
    content = decode(data)
    if code in _COLLECTIONS:
        return _COLLECTIONS[code](content)
    if code != _DATACLASS:
        raise ValueError(f"malformed message: unknown extension type {code}")
    module, name, fields = content
    kind = reduce(lambda scope, part: getattr(scope, part, None), name.split("."), sys.modules.get(module))
    if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
        raise ValueError(f"malformed message: this process has no dataclass {module}.{name}")
    return kind(**fields)
