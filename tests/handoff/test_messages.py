"""Every message survives encoding and decoding, and all other bytes are refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import get_args

import hypothesis.strategies as st
import msgpack
import pytest
from hypothesis import given, settings

from kvferry.connector.handoff import messages
from kvferry.connector.handoff.messages import (
    MAX_GROUP_BLOCKS,
    MAX_GROUPS,
    MAX_LEASE,
    MAX_RANKS,
    MAX_TEXT_CHARS,
    PROTOCOL_VERSION,
    Claim,
    Deny,
    Grant,
    Heartbeat,
    Hello,
    Parked,
    Progress,
    Release,
    Revoke,
    Welcome,
    decode,
    encode,
)
from kvferry.transports.base import MAX_MESSAGE_BYTES
from kvferry.transports.errors import ProtocolError, VersionMismatchError
from tests.support.ranks import ONLY_RANK

EXAMPLES = [
    Hello(PROTOCOL_VERSION, "decode-0", 7, "abc"),
    Welcome(
        PROTOCOL_VERSION, "prefill-0", 9, "abc", {"model": "m", "block_size": 16}, {"layers": (1, ("a", {}))}
    ),
    Claim("r", 1, **ONLY_RANK),
    Grant("r", 1, guard_index=0, num_tokens=20, num_ready=16, block_ids=((1, 2), ()), content="abc"),
    Parked("r", 1),
    Progress("r", 1, num_ready=20, more_block_ids=((3,), ())),
    Deny("r", 1, "it is over"),
    Heartbeat((1, 2, MAX_LEASE)),
    Release("r", 1, delivered=True, **ONLY_RANK),
    Revoke("r", 1, "it expired"),
]
BY_TAG = {msgpack.unpackb(encode(message))[0]: message for message in EXAMPLES}

TRACEPARENT = f"00-{'5' * 32}-{'6' * 16}-01"

text = st.text(st.characters(codec="utf-8"), max_size=40)
lease = st.integers(1, MAX_LEASE)
rank, num_ranks = st.integers(0, MAX_RANKS - 1), st.integers(1, MAX_RANKS)
tables = st.lists(st.lists(st.integers(0, 2**31 - 1)).map(tuple), max_size=4).map(tuple)
any_message = st.one_of(
    st.builds(Hello, st.just(PROTOCOL_VERSION), text, lease, text),
    st.builds(
        Welcome,
        st.just(PROTOCOL_VERSION),
        text,
        lease,
        text,
        st.dictionaries(text, text | st.integers(-(2**63) + 1, 2**63 - 1), max_size=5),
        st.dictionaries(text, tables, max_size=5),
    ),
    st.builds(Claim, text, lease, rank, num_ranks, st.sampled_from(["", TRACEPARENT])),
    st.builds(
        Grant,
        text,
        lease,
        st.integers(0, 1 << 20),
        st.integers(1, 1 << 20),
        st.integers(0, 1 << 20),
        tables,
        text,
    ),
    st.builds(Parked, text, lease),
    st.builds(Progress, text, lease, st.integers(1, 1 << 20), tables),
    st.builds(Deny, text, lease, text),
    st.builds(Heartbeat, st.lists(lease).map(tuple)),
    st.builds(Release, text, lease, st.booleans(), rank, num_ranks),
    st.builds(Revoke, text, lease, text),
)
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.binary() | text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text | st.integers(0, 9), inner, max_size=4),
)


def packed(tag: object, **fields_: object) -> bytes:
    return msgpack.packb([tag, fields_])


def plain_fields(tag: str) -> dict[str, object]:
    return dict(vars(BY_TAG[tag]))


def test_there_is_an_example_of_every_message() -> None:
    assert {type(message) for message in EXAMPLES} == set(get_args(messages.Message))
    assert len(BY_TAG) == len(EXAMPLES)


@pytest.fixture
def renamed() -> Iterator[None]:
    """All message classes are renamed."""
    names = {type(message): type(message).__name__ for message in EXAMPLES}
    for kind in names:
        kind.__name__ = "Renamed"
    yield
    for kind, name in names.items():
        kind.__name__ = name


ENCODED = [encode(message) for message in EXAMPLES]


@pytest.mark.usefixtures("renamed")
def test_the_wire_does_not_change_when_a_class_is_renamed() -> None:
    assert [encode(message) for message in EXAMPLES] == ENCODED
    assert [decode(data) for data in ENCODED] == EXAMPLES


def test_any_version_knows_the_first_message_of_any_other() -> None:
    """These two tags and the field `version` are all that every version must share."""
    for tag in ("Hello", "Welcome"):
        assert "version" in vars(BY_TAG[tag])


@given(any_message)
def test_any_message_survives(message: messages.Message) -> None:
    assert decode(encode(message)) == message


@pytest.mark.parametrize("nested", [b"\x91", b"\x81\xa1a"], ids=["arrays", "maps"])
def test_nesting_is_bounded_before_it_takes_time(nested: bytes) -> None:
    """A long message of nested containers. The test counts arrays and maps, not seconds."""
    deep = nested * 400 + b"\xc0"
    num_deep = (MAX_MESSAGE_BYTES - 100) // len(deep)
    data = b"\x92\xa7Welcome\x81\xa1x\xdd" + num_deep.to_bytes(4, "big") + deep * num_deep
    with pytest.raises(ProtocolError, match="malformed message: more than 65536 arrays and maps"):
        decode(data)


def test_the_largest_layout_is_within_the_bound() -> None:
    layer = ("layer", {f"field{index}": (1, (2, 3)) for index in range(8)})
    welcome = Welcome(PROTOCOL_VERSION, "p", 9, "abc", {}, {"layers": (layer,) * 2000})
    assert decode(encode(welcome)) == welcome


@given(any_message, st.data())
@settings(max_examples=300)
def test_damage_never_raises_anything_else(message: messages.Message, data: st.DataObject) -> None:
    whole = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    damaged = bytes(whole[: data.draw(st.integers(0, len(whole)))])
    try:
        decode(damaged)
    except (ProtocolError, VersionMismatchError):
        pass


@given(st.sampled_from(sorted(BY_TAG)), st.data())
@settings(max_examples=300)
def test_fields_of_any_type_never_raise_anything_else(tag: str, data: st.DataObject) -> None:
    values = plain_fields(tag)
    values[data.draw(st.sampled_from(sorted(values)))] = data.draw(plain)
    try:
        decode(packed(tag, **values))
    except (ProtocolError, VersionMismatchError):
        pass


@given(plain)
def test_any_plain_value_is_a_protocol_error(value: object) -> None:
    with pytest.raises((ProtocolError, VersionMismatchError)):
        decode(msgpack.packb(value))


EVERY_FIELD = [(tag, field.name) for tag, message in BY_TAG.items() for field in fields(message)]


@pytest.mark.parametrize(("tag", "name"), [named for named in EVERY_FIELD if named[1] != "traceparent"])
def test_a_missing_field_is_named(tag: str, name: str) -> None:
    values = plain_fields(tag)
    del values[name]
    with pytest.raises(ProtocolError, match=rf"^{tag}\.{name} is missing$"):
        decode(packed(tag, **values))


@pytest.mark.parametrize(("tag", "name"), EVERY_FIELD)
@pytest.mark.parametrize("wrong", [None, 1.5, b"x"], ids=repr)
def test_an_ill_typed_field_is_named(tag: str, name: str, wrong: object) -> None:
    with pytest.raises(ProtocolError, match=r"MessagePack" if wrong == b"x" else rf"^{tag}\.{name} "):
        decode(packed(tag, **(plain_fields(tag) | {name: wrong})))


@pytest.mark.parametrize(
    "bad",
    [
        TRACEPARENT + "0",
        TRACEPARENT.upper().replace("5", "A"),
        TRACEPARENT.replace("5", "0"),
        TRACEPARENT.replace("6", "0"),
        "01" + TRACEPARENT[2:],
    ],
)
def test_a_malformed_traceparent_is_refused(bad: str) -> None:
    with pytest.raises(ProtocolError, match=r"^Claim\.traceparent must be a traceparent"):
        decode(
            packed("Claim", request_id="r", lease=1, rank=0, num_ranks=1, traceparent=bad, rendezvous=False)
        )


@pytest.mark.parametrize("tag", sorted(BY_TAG))
def test_an_unknown_field_is_named(tag: str) -> None:
    with pytest.raises(ProtocolError, match=rf"^{tag}\.extra is unknown$"):
        decode(packed(tag, **plain_fields(tag), extra=1))


@pytest.mark.parametrize(
    ("tag", "change", "message"),
    [
        ("Claim", {"lease": True}, "Claim.lease must be an integer from 1 to 9223372036854775807, got True"),
        ("Claim", {"lease": 0}, "Claim.lease must be an integer from 1"),
        ("Claim", {"lease": 2**63}, "Claim.lease must be an integer from 1"),
        (
            "Claim",
            {"request_id": "x" * (MAX_TEXT_CHARS + 1)},
            "Claim.request_id must be a string of at most 1024 characters, got 1025",
        ),
        ("Claim", {"rank": MAX_RANKS}, "Claim.rank must be an integer from 0"),
        ("Release", {"num_ranks": 0}, "Release.num_ranks must be an integer from 1"),
        ("Release", {"delivered": 1}, "Release.delivered must be true or false, got 1"),
        (
            "Heartbeat",
            {"leases": [1, True]},
            r"Heartbeat.leases\[1\] must be an integer from 1 to 9223372036854775807, got True",
        ),
        ("Heartbeat", {"leases": [1, -1]}, r"Heartbeat.leases\[1\] must be an integer from 1"),
        (
            "Heartbeat",
            {"leases": [1] * (messages.MAX_HEARTBEAT_LEASES + 1)},
            "Heartbeat.leases must be a list of at most 65536 entries, got 65537",
        ),
        ("Grant", {"block_ids": [[1], 2]}, r"Grant.block_ids\[1\] must be a list, got 2"),
        (
            "Grant",
            {"block_ids": [[]] * (MAX_GROUPS + 1)},
            "Grant.block_ids must be a list of at most 64 entries, got 65",
        ),
        ("Grant", {"block_ids": [[-1]]}, r"Grant.block_ids\[0\]\[0\] must be an integer from 0"),
        ("Grant", {"block_ids": [[1] * (MAX_GROUP_BLOCKS + 1)]}, "within the limits"),
        ("Progress", {"num_ready": 0}, "Progress.num_ready must be an integer from 1"),
        (
            "Progress",
            {"more_block_ids": [[-1]]},
            r"Progress.more_block_ids\[0\]\[0\] must be an integer from 0",
        ),
        ("Grant", {"num_tokens": 0}, "Grant.num_tokens must be an integer from 1"),
        ("Welcome", {"fields": [1]}, r"Welcome.fields must be a mapping, got \(1,\)"),
        ("Welcome", {"fields": {"a": True}}, "Welcome.fields.a must be a string, got True"),
        ("Welcome", {"fields": {str(i): i for i in range(300)}}, "within the limits"),
        ("Welcome", {"layout": {1: 2}}, "not allowed for map key"),
        ("Hello", {"epoch": 0}, "Hello.epoch must be an integer from 1"),
    ],
)
def test_a_bad_value_is_named(tag: str, change: dict[str, object], message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        decode(packed(tag, **(plain_fields(tag) | change)))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not MessagePack"),
        (packed("Nothing"), "unknown message 'Nothing'"),
        (packed(1), "array of a tag"),
        (msgpack.packb({"a": 1}), "array of a tag"),
        (msgpack.packb(["Claim", {}, 1]), "array of a tag"),
        (encode(Claim("r", 1, **ONLY_RANK)) + b"\x00", "not MessagePack"),
        (b"\x91" * 5000 + b"\xc0", "not MessagePack"),
        (b"\x92\xa5Claim\x82\xa5lease\x01\xa5lease\x01", "'lease' appears twice"),
        (b"\x92\xa5Claim\x81\xc4\x00\x01", "name must be a string, got bytes"),
        (b"\x00" * (MAX_MESSAGE_BYTES + 1), "at most"),
        (b"\xdd\xff\xff\xff\xff", "not MessagePack"),
        (msgpack.packb(msgpack.ExtType(1, b"x")), "not MessagePack"),
    ],
)
def test_bytes_that_are_not_a_message_are_refused(data: bytes, message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        decode(data)


@pytest.mark.parametrize("tag", ["Hello", "Welcome"])
def test_another_version_is_reported_before_anything_else(tag: str) -> None:
    with pytest.raises(VersionMismatchError) as caught:
        decode(packed(tag, version=PROTOCOL_VERSION + 1, something="new"))
    assert (caught.value.local, caught.value.remote) == (PROTOCOL_VERSION, PROTOCOL_VERSION + 1)


@pytest.mark.parametrize(
    "message",
    [
        Claim("x" * (MAX_TEXT_CHARS + 1), 1, **ONLY_RANK),
        Claim("r", 0, **ONLY_RANK),
        Claim("\ud800", 1, **ONLY_RANK),
        Grant(
            "r", 1, guard_index=0, num_tokens=1, num_ready=1, block_ids=((2**31 - 1,) * MAX_GROUP_BLOCKS,) * 8
        ),
        replace(EXAMPLES[1], layout={"x": object()}),
    ],
    ids=["long", "lease", "surrogate", "size", "object"],
)
def test_a_message_that_could_not_be_decoded_is_not_encoded(message: messages.Message) -> None:
    with pytest.raises(ProtocolError):
        encode(message)
