"""Whether two nodes' KV caches mean the same, decided by a digest first and by named fields second."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Final

from ...transports.errors import IncompatiblePeerError

#: The order in which differences are told: what a person would mend first comes first.
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

#: Fields that may differ: the tokens of each prompt are compared, and a cache depends on nothing else of these.
ADVISORY: Final = ("tokenizer", "chat_template")

_ABSENT = "(absent)"


def digest(fields: Mapping[str, str | int]) -> str:
    """Fingerprint of the fields that must be equal, whatever their order: 64 hexadecimal digits."""
    required = {field: value for field, value in fields.items() if field not in ADVISORY}
    canonical = json.dumps(required, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


def require_compatible(local: Mapping[str, str | int], remote: Mapping[str, str | int]) -> None:
    """Compare two nodes field by field; advisory fields are left out.

    Raises:
        IncompatiblePeerError: a field differs, or only one side has it; names the first in `FIELD_ORDER`,
            then by name.
    """
    for field in _ordered({*local, *remote}):
        ours, theirs = local.get(field, _ABSENT), remote.get(field, _ABSENT)
        if ours != theirs:
            raise IncompatiblePeerError(field=field, local=ours, remote=theirs)


def advisory_differences(
    local: Mapping[str, str | int], remote: Mapping[str, str | int]
) -> tuple[tuple[str, str | int, str | int], ...]:
    """List the advisory fields that differ, each with our value and the peer's.

    A field that either side does not know, because it is absent or empty, is not compared.
    """
    pairs = ((field, local.get(field, ""), remote.get(field, "")) for field in ADVISORY)
    return tuple((field, ours, theirs) for field, ours, theirs in pairs if ours and theirs and ours != theirs)


def _ordered(fields: Iterable[str]) -> list[str]:
    fields = set(fields).difference(ADVISORY)
    rank = {field: index for index, field in enumerate(FIELD_ORDER)}
    return sorted(fields, key=lambda field: (rank.get(field, len(rank)), field))
