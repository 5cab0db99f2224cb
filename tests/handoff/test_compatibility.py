"""Two nodes are compatible exactly if their fields are equal. The error names the difference to fix first."""

from __future__ import annotations

import pytest

from kvferry.connector.planning.compatibility import (
    ADVISORY,
    advisory_differences,
    digest,
    require_compatible,
)
from kvferry.transports.errors import IncompatiblePeerError

FIELDS: dict[str, str | int] = {"model": "m", "cache_dtype": "float16", "block_size": 16, "zebra": 1}


def test_the_digest_covers_names_values_and_types_but_no_order() -> None:
    assert digest(FIELDS) == digest(dict(reversed(FIELDS.items())))
    others = [FIELDS | {"block_size": 32}, FIELDS | {"block_size": "16"}, FIELDS | {"more": 1}, {}]
    assert len({digest(fields) for fields in [FIELDS, *others]}) == 5


def test_equal_fields_are_compatible() -> None:
    require_compatible(FIELDS, dict(FIELDS))


@pytest.mark.parametrize(
    ("remote", "field", "theirs"),
    [
        (FIELDS | {"block_size": 32}, "block_size", 32),
        (FIELDS | {"block_size": 32, "model": "n", "zebra": 2}, "model", "n"),
        (FIELDS | {"zebra": 2, "cache_dtype": "bfloat16"}, "cache_dtype", "bfloat16"),
        (FIELDS | {"ant": 1, "zebra": 2}, "ant", 1),
        ({key: FIELDS[key] for key in FIELDS if key != "zebra"}, "zebra", "(absent)"),
    ],
)
def test_the_first_difference_is_named(remote: dict[str, str | int], field: str, theirs: object) -> None:
    with pytest.raises(IncompatiblePeerError) as caught:
        require_compatible(FIELDS, remote)
    assert (caught.value.field, caught.value.remote) == (field, theirs)
    assert caught.value.local == FIELDS.get(field, "(absent)")


@pytest.mark.parametrize("field", ADVISORY)
def test_an_allowed_difference_is_reported_and_refuses_nothing(field: str) -> None:
    ours, theirs = FIELDS | {field: "x"}, FIELDS | {field: "y"}
    require_compatible(ours, theirs)
    assert digest(ours) == digest(theirs) == digest(FIELDS)
    assert advisory_differences(ours, theirs) == ((field, "x", "y"),)


@pytest.mark.parametrize("unknown", [{}, {"tokenizer": ""}])
def test_a_field_that_one_side_does_not_know_is_not_compared(unknown: dict[str, str | int]) -> None:
    known = FIELDS | {"tokenizer": "x"}
    for pair in [(known, FIELDS | unknown), (FIELDS | unknown, known), (known, known)]:
        assert advisory_differences(*pair) == ()
