"""A field is declared on one line, and an invalid value is refused with the name of the field."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest

from kvferry.transports.checked import Record, Refused, each, integer, integers, seconds, shown, text
from kvferry.transports.errors import ConfigurationError
from kvferry.transports.options import INTERNAL, option_names, parse_options, require_valid


@dataclass(frozen=True)
class Inner:
    low: Annotated[int, integer(0, 9)]
    high: Annotated[int, integer(0)]

    def require_consistent(self) -> None:
        if self.low > self.high:
            raise Refused(f"goes from {self.low} to {self.high}")


@dataclass(frozen=True)
class Outer:
    name: Annotated[str, text(4, 1)]
    inner: Inner
    inners: Annotated[tuple[Inner, ...], each(Record(Inner), 2)] = ()
    numbers: Annotated[tuple[int, ...], integers(1, 5, 3)] = ()
    mode: Literal["on", "off"] = "on"
    flag: bool = False
    more: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Options:
    timeout_s: Annotated[float, seconds(0.1, 60)] = 1.0
    rest_s: Annotated[float, seconds()] = 1.0
    folder: str = ""
    mode: Literal["on", "off"] = "on"

    def __post_init__(self) -> None:
        require_valid(self)


OUTER = Record(Outer)
PLAIN: dict[str, Any] = {
    "name": "x",
    "inner": {"low": 1, "high": 2},
    "inners": [{"low": 3, "high": 3}],
    "numbers": [1, 5],
    "mode": "off",
    "flag": True,
    "more": {},
}


def test_a_mapping_with_exactly_the_fields_becomes_an_instance() -> None:
    assert OUTER.read(PLAIN) == Outer("x", Inner(1, 2), (Inner(3, 3),), (1, 5), "off", True, {})


@pytest.mark.parametrize(
    ("change", "words", "field"),
    [
        ({"name": ""}, "it.name must be a string of 1 to 4 characters, got 0", "name"),
        ({"name": 1}, "it.name must be a string, got 1", "name"),
        ({"inner": 1}, "it.inner must be a mapping, got 1", "inner"),
        ({"inner": {"low": 1}}, "it.inner.high is missing", "inner"),
        ({"inner": {"low": 10, "high": 11}}, "it.inner.low must be an integer from 0 to 9, got 10", "inner"),
        ({"inner": {"low": 1, "high": -1}}, "it.inner.high must be an integer of at least 0, got -1", "inner"),
        ({"inner": {"low": 2, "high": 1}}, "it.inner goes from 2 to 1", "inner"),
        ({"inners": [{"low": 0, "high": 0}, {"low": 2, "high": 1}]}, "it.inners[1] goes from 2 to 1", "inners"),
        ({"inners": [1, 2, 3]}, "it.inners must be a list of at most 2 entries, got 3", "inners"),
        ({"numbers": [1, 2.0]}, "it.numbers[1] must be an integer from 1 to 5, got 2.0", "numbers"),
        ({"numbers": [1, True]}, "it.numbers[1] must be an integer from 1 to 5, got True", "numbers"),
        ({"numbers": ["1", 2]}, "it.numbers[0] must be an integer from 1 to 5, got '1'", "numbers"),
        ({"numbers": {}}, "it.numbers must be a list, got {}", "numbers"),
        ({"mode": "auto"}, "it.mode must be one of 'on', 'off', got 'auto'", "mode"),
        ({"flag": 1}, "it.flag must be true or false, got 1", "flag"),
        ({"extra": 1}, "it.extra is unknown", "extra"),
    ],
)  # fmt: skip
def test_a_refusal_names_the_field_the_rule_and_the_value(
    change: dict[str, Any], words: str, field: str
) -> None:
    with pytest.raises(Refused) as caught:
        OUTER.read(PLAIN | change)
    assert caught.value.text("it") == words
    assert caught.value.field == field


def test_a_mapping_of_another_program_may_have_more_fields_and_omit_those_with_defaults() -> None:
    assert OUTER.read_known({"name": "x", "inner": Inner(1, 2).__dict__, "flag": None, "theirs": 1}) == Outer(
        "x", Inner(1, 2)
    )
    with pytest.raises(Refused, match="^inner is missing$"):
        OUTER.read_known({"name": "x", "inner": None})


@pytest.mark.parametrize(
    "value",
    ["x" * 10**7, [[0] * 10**6] * 9, 10**5000, {"a": {"b": {"c": [1]}}}, object()],
    ids=["text", "lists", "digits", "depth", "object"],
)
def test_the_text_for_a_value_is_short_whatever_its_size(value: object) -> None:
    assert len(shown(value)) < 300


@pytest.mark.parametrize("value", [0, -1.0, math.inf, -math.inf, math.nan, True, "5", None])
def test_a_time_is_a_positive_finite_number(value: object) -> None:
    with pytest.raises(Refused, match="must be a positive number of seconds, got "):
        seconds()(value)


def test_options_are_checked_however_they_are_created() -> None:
    assert parse_options(Options, {"timeout_s": 2}, "x") == Options(timeout_s=2)
    for make in (lambda: Options(timeout_s=0), lambda: parse_options(Options, {"timeout_s": 0}, "x")):
        with pytest.raises(ConfigurationError) as caught:
            make()
        assert str(caught.value) == "timeout_s must be a number of seconds from 0.1 to 60, got 0"
        assert (caught.value.key, caught.value.value) == ("timeout_s", 0)


def test_internal_fields_are_set_in_the_dataclass_and_never_by_a_mapping() -> None:
    @dataclass(frozen=True)
    class Tuned:
        size: Annotated[int, integer(0, 9)] = 1
        spins: Annotated[int, integer(0, 9)] = field(default=2, metadata=INTERNAL)

    assert option_names(Tuned) == ("size",)
    assert parse_options(Tuned, {"size": 3}, "x") == Tuned(size=3, spins=2)
    assert Tuned(spins=4).spins == 4
    with pytest.raises(ConfigurationError, match="unknown option 'spins' of transport 'x'; known: size"):
        parse_options(Tuned, {"spins": 4}, "x")


def test_a_field_for_a_number_must_declare_bounds() -> None:
    @dataclass(frozen=True)
    class Careless:
        count: int

    with pytest.raises(TypeError, match="count declares no check"):
        Record(Careless)
