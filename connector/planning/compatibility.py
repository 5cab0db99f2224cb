"""Whether two nodes' KV caches mean the same, decided by a digest first and by named fields second."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Final

from ...transports.errors import IncompatiblePeerError

__all__ = ["FIELD_ORDER", "digest", "require_compatible"]

#: The order in which differences are told: what a person would mend first comes first.
FIELD_ORDER: Final = (
    "protocol",
    "model",
    "dtype",
    "cache_dtype",
    "num_groups",
    "num_layers",
    "num_kv_heads",
    "head_size",
    "byte_order",
)

_ABSENT = "(absent)"


def digest(fields: Mapping[str, str | int]) -> str:
    """Fingerprint of the fields, whatever their order: 64 hexadecimal digits."""
    canonical = json.dumps(dict(fields), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


def require_compatible(local: Mapping[str, str | int], remote: Mapping[str, str | int]) -> None:
    """Compare two nodes field by field.

    Raises:
        IncompatiblePeerError: a field differs, or only one side has it; names the first in `FIELD_ORDER`,
            then by name.
    """
    for field in _ordered({*local, *remote}):
        ours, theirs = local.get(field, _ABSENT), remote.get(field, _ABSENT)
        if ours != theirs:
            raise IncompatiblePeerError(field=field, local=ours, remote=theirs)


def _ordered(fields: Iterable[str]) -> list[str]:
    rank = {field: index for index, field in enumerate(FIELD_ORDER)}
    return sorted(fields, key=lambda field: (rank.get(field, len(rank)), field))
