"""The messages of the handoff protocol, and their form on the wire.

A message travels as a MessagePack array of its tag and a map of its fields. Everything that arrives is
hostile until `decode` has returned: sizes are limited, types are strict (a bool is not an integer), and
a field that is missing, unknown or ill-typed is named in the error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Final, cast

import msgpack

from ...transports.base import MAX_MESSAGE_BYTES
from ...transports.errors import ProtocolError, VersionMismatchError
from ..checks import MAX_TEXT_CHARS, Check, array, boolean, checked_fields, integer, integers, text

PROTOCOL_VERSION: Final = 6

#: Lease numbers and epochs are positive and fit a signed 64-bit word, like the guard that holds them.
MAX_LEASE: Final = 2**63 - 1
MAX_EPOCH: Final = 2**63 - 1
MAX_GROUPS: Final = 64
MAX_GROUP_BLOCKS: Final = 1 << 18
MAX_HEARTBEAT_LEASES: Final = 1 << 16
MAX_RANKS: Final = 1024

_MAX_FIELDS = 256
#: Arrays and maps in one message. A layout has a few for each layer, and block tables one for each group. Without a bound,
#: a message of nothing but nested arrays would take seconds to decode.
_MAX_CONTAINERS = 1 << 16
_MAX_BLOCK_ID = 2**31 - 1


@dataclass(frozen=True)
class Hello:
    """Consumer: who I am, and the digest of what must be equal on both sides."""

    version: int
    engine_id: str
    epoch: int
    digest: str


@dataclass(frozen=True)
class Welcome:
    """Producer: who I am, what must be equal, in clear, and my pool's layout.

    Attributes:
        fields: The compatibility fields that `digest` covers.
        layout: A `KVLayout` in plain form; meaningful only to a peer whose fields are equal.
    """

    version: int
    engine_id: str
    epoch: int
    digest: str
    fields: Mapping[str, str | int]
    layout: Mapping[str, object]


@dataclass(frozen=True)
class Claim:
    """Consumer: I shall read this offer; from now on its lease follows my heartbeats.

    Attributes:
        rank: Which rank of its node the consumer is.
        num_ranks: Ranks of that node; each claims and releases the offer for itself.
    """

    request_id: str
    lease: int
    rank: int
    num_ranks: int


@dataclass(frozen=True)
class Grant:
    """Producer: you may read these blocks for as long as the guard holds the lease number.

    Attributes:
        content: Digest of what the blocks were computed from; see `content_digest`. The consumer compares it with that of
            its own prompt before it reads anything.
        num_tokens: Tokens of the request that are offered.
        num_ready: How many of them, from the first on, have their keys and values in the blocks by now.
        block_ids: Per group, the request's block table; for the tokens that are ready, and perhaps for more.
    """

    request_id: str
    lease: int
    guard_index: int
    num_tokens: int
    num_ready: int
    block_ids: tuple[tuple[int, ...], ...]
    content: str = ""


@dataclass(frozen=True)
class Parked:
    """Producer: I know this offer's request, and shall answer your claim when I make the offer. Said again and again until then."""

    request_id: str
    lease: int


@dataclass(frozen=True)
class Progress:
    """Producer: more of a granted offer is ready.

    Attributes:
        num_ready: As in `Grant`; more than said before.
        more_block_ids: Per group, what comes behind the block table that was said so far.
    """

    request_id: str
    lease: int
    num_ready: int
    more_block_ids: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Deny:
    """Producer: the offer is over, was never made, or is claimed by another."""

    request_id: str
    lease: int
    reason: str


@dataclass(frozen=True)
class Heartbeat:
    """Consumer: renew these leases."""

    leases: tuple[int, ...]


@dataclass(frozen=True)
class Release:
    """Consumer: I am done with this offer, which I claimed.

    Attributes:
        delivered: Whether the rank has all it wanted.
        rank: As in `Claim`.
        num_ranks: As in `Claim`.
    """

    request_id: str
    lease: int
    delivered: bool
    rank: int
    num_ranks: int


@dataclass(frozen=True)
class Revoke:
    """Producer: the offer ended on my side."""

    request_id: str
    lease: int
    reason: str


ConsumerMessage = Hello | Claim | Heartbeat | Release
ProducerMessage = Welcome | Grant | Parked | Progress | Deny | Revoke
Message = ConsumerMessage | ProducerMessage


def encode(message: Message) -> bytes:
    """Turn a message into bytes that `decode` accepts.

    Raises:
        ProtocolError: a field is over its limits, or the whole is longer than `MAX_MESSAGE_BYTES`.
    """
    tag = type(message).__name__
    fields = checked_fields(tag, vars(message), _CHECKS[tag])
    try:
        data = cast(bytes, msgpack.packb([tag, fields]))
    except (ValueError, TypeError, OverflowError) as error:
        raise ProtocolError(f"{tag} cannot be encoded: {error}") from error
    if len(data) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"{tag} has {len(data)} bytes; at most {MAX_MESSAGE_BYTES} are allowed")
    return data


def decode(data: bytes) -> Message:
    """Turn bytes from a peer into a message.

    Raises:
        VersionMismatchError: a `Hello` or `Welcome` of another version; its other fields were not looked at.
        ProtocolError: anything else that is not exactly one message; the error names the field.
    """
    tag, fields = _unpack(data)
    checks = _CHECKS.get(tag)
    if checks is None:
        raise ProtocolError(f"unknown message {tag[:40]!r}")
    if "version" in checks:
        _require_version(tag, fields)
    return _TYPES[tag](**checked_fields(tag, fields, checks))


def _unpack(data: bytes) -> tuple[str, dict[str, object]]:
    """Unpack the array of tag and fields, under the limits."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"a message of {len(data)} bytes; at most {MAX_MESSAGE_BYTES} are allowed")
    numbers = count(1)

    def counted(entries: object) -> object:
        if next(numbers) > _MAX_CONTAINERS:
            raise ProtocolError(f"a message of more than {_MAX_CONTAINERS} arrays and maps")
        return entries

    try:
        parts = msgpack.unpackb(
            data,
            use_list=False,
            list_hook=counted,
            object_pairs_hook=lambda pairs: _map_without_duplicates(counted(pairs)),
            max_str_len=4 * MAX_TEXT_CHARS,
            max_array_len=MAX_GROUP_BLOCKS,
            max_map_len=_MAX_FIELDS,
            max_bin_len=0,
            max_ext_len=0,
        )
    except ProtocolError:
        raise
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise ProtocolError(f"a message that is not MessagePack within the limits: {error}") from error
    if type(parts) is not tuple or len(parts) != 2 or type(parts[0]) is not str or type(parts[1]) is not dict:
        raise ProtocolError("a message is an array of a tag and a map of fields")
    return parts[0], parts[1]


def _map_without_duplicates(pairs: object) -> dict[str, object]:
    result: dict[str, object] = {}
    for key, value in cast(Iterable[tuple[object, object]], pairs):
        if type(key) is not str:
            raise ProtocolError(f"a field's name is a string, got {type(key).__name__}")
        if key in result:
            raise ProtocolError(f"field {key[:40]!r} appears twice")
        result[key] = value
    return result


def _require_version(tag: str, fields: Mapping[str, object]) -> None:
    if "version" not in fields:
        raise ProtocolError(f"{tag}.version is missing")
    version = integer(0, MAX_LEASE)(f"{tag}.version", fields["version"])
    if version != PROTOCOL_VERSION:
        raise VersionMismatchError(local=PROTOCOL_VERSION, remote=version)


# -- checks of fields that only messages have --------------------------------------------------------


def _block_tables(name: str, value: object) -> tuple[tuple[int, ...], ...]:
    check = integers(0, _MAX_BLOCK_ID, MAX_GROUP_BLOCKS)
    tables = array(name, value, MAX_GROUPS)
    return tuple(check(f"{name}[{index}]", table) for index, table in enumerate(tables))


def _compatibility_fields(name: str, value: object) -> dict[str, str | int]:
    fields = _plain_map(name, value)
    for key, entry in fields.items():
        if type(entry) is int:
            integer(-MAX_LEASE, MAX_LEASE)(f"{name}.{key[:40]}", entry)
        else:
            text(f"{name}.{key[:40]}", entry)
    return cast(dict[str, str | int], fields)


def _plain_map(name: str, value: object) -> dict[str, object]:
    if not isinstance(value, Mapping):
        raise ProtocolError(f"{name} must be a map, got {type(value).__name__}")
    if len(value) > _MAX_FIELDS:
        raise ProtocolError(f"{name} has {len(value)} entries; at most {_MAX_FIELDS} are allowed")
    for key in value:
        text(f"a key of {name}", key)
    return dict(value)


_lease = integer(1, MAX_LEASE)
_TYPES: dict[str, type[Message]] = {
    kind.__name__: kind
    for kind in (
        *(Hello, Claim, Heartbeat, Release),
        *(Welcome, Grant, Parked, Progress, Deny, Revoke),
    )
}
_IDENTITY: dict[str, Check] = {
    "version": integer(0, MAX_LEASE),
    "engine_id": text,
    "epoch": integer(1, MAX_EPOCH),
    "digest": text,
}
_OFFER: dict[str, Check] = {"request_id": text, "lease": _lease}
_SPEAKER: dict[str, Check] = {"rank": integer(0, MAX_RANKS - 1), "num_ranks": integer(1, MAX_RANKS)}
_CHECKS: dict[str, dict[str, Check]] = {
    "Hello": _IDENTITY,
    "Welcome": {**_IDENTITY, "fields": _compatibility_fields, "layout": _plain_map},
    "Claim": {**_OFFER, **_SPEAKER},
    "Grant": {
        **_OFFER,
        "guard_index": integer(0, _MAX_BLOCK_ID),
        "num_tokens": integer(1, _MAX_BLOCK_ID),
        "num_ready": integer(0, _MAX_BLOCK_ID),
        "block_ids": _block_tables,
        "content": text,
    },
    "Parked": _OFFER,
    "Progress": {**_OFFER, "num_ready": integer(1, _MAX_BLOCK_ID), "more_block_ids": _block_tables},
    "Deny": {**_OFFER, "reason": text},
    "Heartbeat": {"leases": integers(1, MAX_LEASE, MAX_HEARTBEAT_LEASES)},
    "Release": {**_OFFER, "delivered": boolean, **_SPEAKER},
    "Revoke": {**_OFFER, "reason": text},
}
