"""Whether the KV caches of two nodes mean the same. A digest decides first, named fields second."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Final

from ...transports.errors import IncompatiblePeerError, VersionMismatchError

#: The version of the rules by which a node describes its model and its cache: what each field below means and
#: how it is computed, and the plain form of `KVLayout`. It travels as the field `protocol`. Raise it with the
#: rules: otherwise two releases would report a difference of their models that is none.
DESCRIPTION_VERSION: Final = 6

#: The order in which differences are reported: what a person would fix first comes first.
FIELD_ORDER: Final = (
    "protocol",
    "model",
    "configuration",
    "weights",
    "adapters",
    "dtype",
    "cache_dtype",
    "num_groups",
    "num_layers",
    "num_kv_heads",
    "head_size",
    "byte_order",
)

#: Fields that may differ: a cache depends on them only through the tokens of each prompt, which are compared.
ADVISORY: Final = ("tokenizer", "chat_template")

_ABSENT = "(absent)"


def digest(fields: Mapping[str, str | int]) -> str:
    """Return a fingerprint of the fields that must be equal, in any order: 64 hexadecimal digits."""
    required = {field: value for field, value in fields.items() if field not in ADVISORY}
    canonical = json.dumps(required, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


def answers_digest(fields: Mapping[str, str | int], *, of_one_start: str) -> str:
    """Return a fingerprint of everything that decides which tokens a node answers with, in any order: 64
    hexadecimal digits.

    Args:
        of_one_start: Names this start of this node. It stands for a tokenizer that is not known, so that no
            other node has it.
    """
    return digest(
        {f"answers {field}": value for field, value in fields.items()}
        | {"answers tokenizer": fields.get("tokenizer") or f"not known, of {of_one_start}"}
    )


def require_compatible(local: Mapping[str, str | int], remote: Mapping[str, str | int]) -> None:
    """Compare two nodes field by field, except for advisory fields.

    Raises:
        VersionMismatchError: the nodes describe themselves by different rules, so nothing else was compared.
        IncompatiblePeerError: a field differs, or only one side has it. The error names the first such field,
            in `FIELD_ORDER` and then by name.
    """
    for field in _ordered({*local, *remote}):
        ours, theirs = local.get(field, _ABSENT), remote.get(field, _ABSENT)
        if ours != theirs:
            if field == "protocol" and isinstance(ours, int) and isinstance(theirs, int):
                raise VersionMismatchError(local=ours, remote=theirs)
            raise IncompatiblePeerError(field=field, local=ours, remote=theirs)


def advisory_differences(
    local: Mapping[str, str | int], remote: Mapping[str, str | int]
) -> tuple[tuple[str, str | int, str | int], ...]:
    """List the advisory fields that differ, each with our value and the peer's.

    A field that is absent or empty on either side is unknown there, and is not compared.
    """
    pairs = ((field, local.get(field, ""), remote.get(field, "")) for field in ADVISORY)
    return tuple((field, ours, theirs) for field, ours, theirs in pairs if ours and theirs and ours != theirs)


def _ordered(fields: Iterable[str]) -> list[str]:
    fields = set(fields).difference(ADVISORY)
    rank = {field: index for index, field in enumerate(FIELD_ORDER)}
    return sorted(fields, key=lambda field: (rank.get(field, len(rank)), field))
