"""The messages of the handoff protocol, and their form on the wire.

A message travels as a MessagePack array of a tag and a map of fields. Its class declares both: the tag in the
decorator, and for each field its type and bounds. Everything that arrives is hostile until `decode` has
returned: sizes are limited before anything is walked, types are strict (a bool is not an integer), and the
error names a field that is missing, unknown or ill-typed.

Two nodes speak the newest version that both know; the handshake finds it (`peers`). A field that a later
version added says so (`Since`): `encode` leaves it out for a peer that speaks an earlier one, and `decode`
gives it its default. So such a field must have a default, and no check that keeps a wrong cache from being
loaded may depend on it. A change that an earlier version cannot ignore raises `OLDEST_VERSION`.
docs/upgrades.md has the policy.

What must never break: a message means the same to both nodes, or one of them refuses it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Annotated, Any, Final, TypeVar, cast, get_type_hints

import msgpack

from ...transports.base import MAX_MESSAGE_BYTES
from ...transports.checked import Record, Refused, each, integer, integers, mapping, refuse, text
from ...transports.errors import ProtocolError, VersionMismatchError

#: The newest version of the protocol, and the oldest one that this node speaks. There is one version so far.
PROTOCOL_VERSION: Final = 7
OLDEST_VERSION: Final = 7
SPOKEN_VERSIONS: Final = range(OLDEST_VERSION, PROTOCOL_VERSION + 1)

#: Lease numbers and epochs are positive and fit a signed 64-bit word, like the guard that holds them.
MAX_LEASE: Final = 2**63 - 1
MAX_EPOCH: Final = 2**63 - 1
MAX_GROUPS: Final = 64
MAX_GROUP_BLOCKS: Final = 1 << 18
MAX_HEARTBEAT_LEASES: Final = 1 << 16
MAX_RANKS: Final = 1024
#: Longest text of any kind, in characters.
MAX_TEXT_CHARS: Final = 1024

_MAX_FIELDS = 256
#: Arrays and maps in one message. A layout has a few per layer, and block tables one per group. Without a
#: bound, a message of nothing but nested arrays would take seconds to decode.
_MAX_CONTAINERS = 1 << 16
_MAX_INT32 = 2**31 - 1


# -- what fields may hold ----------------------------------------------------------------------------


def _plain_map(value: object) -> dict[str, object]:
    known = mapping(value)
    if len(known) > _MAX_FIELDS:
        raise Refused(f"must be a mapping of at most {_MAX_FIELDS} entries, got {len(known)}")
    for key in known:
        if type(key) is not str or len(key) > MAX_TEXT_CHARS:
            refuse(f"a mapping whose keys are strings of at most {MAX_TEXT_CHARS} characters", key)
    return dict(known)


def _compatibility_fields(value: object) -> dict[str, str | int]:
    known = _plain_map(value)
    for key, entry in known.items():
        try:
            (_number if type(entry) is int else _text)(entry)
        except Refused as refused:
            refused.path = f".{key[:40]}{refused.path}"
            raise
    return cast(dict[str, str | int], known)


#: W3C Trace Context of version 00: trace id, span id and flags. Neither id may be zero.
_TRACEPARENT = re.compile("00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


def is_traceparent(value: object) -> bool:
    """Return whether a value from outside is a `traceparent` of W3C Trace Context."""
    return isinstance(value, str) and _TRACEPARENT.fullmatch(value) is not None


def _traceparent_or_nothing(value: object) -> str:
    if value == "" or is_traceparent(value):
        return cast(str, value)
    refuse("a traceparent of W3C Trace Context, or empty", value)


_text = text(MAX_TEXT_CHARS)
_number = integer(-MAX_LEASE, MAX_LEASE)

Text = Annotated[str, _text]
Lease = Annotated[int, integer(1, MAX_LEASE)]
Epoch = Annotated[int, integer(1, MAX_EPOCH)]
Version = Annotated[int, integer(0, MAX_LEASE)]
Rank = Annotated[int, integer(0, MAX_RANKS - 1)]
NumRanks = Annotated[int, integer(1, MAX_RANKS)]
GuardIndex = Annotated[int, integer(0, _MAX_INT32)]
BlockTables = Annotated[
    tuple[tuple[int, ...], ...], each(integers(0, _MAX_INT32, MAX_GROUP_BLOCKS), MAX_GROUPS)
]


@dataclass(frozen=True)
class Since:
    """Annotates a field that this version of the protocol added. The field has a default."""

    version: int


class _Form:
    """How one class travels.

    Attributes:
        since: The version that added a field, of the fields that were added.
    """

    def __init__(self, cls: type) -> None:
        self.record: Record[Any] = Record(cls)
        hints = get_type_hints(cls, include_extras=True)
        self.since = {
            name: extra.version
            for name in self.record.has_default
            for extra in getattr(hints[name], "__metadata__", ())
            if isinstance(extra, Since)
        }
        assert all(self.record.has_default[name] for name in self.since)

    def newer_than(self, version: int) -> frozenset[str]:
        """The fields that this version does not have."""
        return frozenset(name for name, since in self.since.items() if since > version)


_FORMS: dict[str, _Form] = {}
_TAGS: dict[type, str] = {}
_Class = TypeVar("_Class", bound=type)


def _message(tag: str) -> Callable[[_Class], _Class]:
    """Let a class travel under a tag. The tag is the protocol's, so the class may be renamed."""

    def add(cls: _Class) -> _Class:
        assert tag not in _FORMS
        _FORMS[tag], _TAGS[cls] = _Form(cls), tag
        return cls

    return add


# -- the messages ------------------------------------------------------------------------------------
# A node of any version must recognize the first message of any other version, to find the version that both
# speak, or to report that there is none. So the tags "Hello" and "Welcome" and their fields `version` and
# `release` never change.


@_message("Hello")
@dataclass(frozen=True)
class Hello:
    """Consumer: my identity, and the digest of what must be equal on both sides.

    Attributes:
        version: The version that I want to speak: first my newest, then the one that a `Welcome` named.
        release: The release of kvferry that I am, for error messages only.
    """

    version: Version
    engine_id: Text
    epoch: Epoch
    digest: Text
    release: Text = ""


@_message("Welcome")
@dataclass(frozen=True)
class Welcome:
    """Producer: my identity, what must be equal on both sides, in clear, and my pool's layout.

    Attributes:
        version: The version of the `Hello` that this answers, or the one nearest to it that I speak.
        fields: The compatibility fields that `digest` covers.
        layout: A `KVLayout` in plain form; meaningful only to a peer whose fields are equal.
        release: As in `Hello`.
    """

    version: Version
    engine_id: Text
    epoch: Epoch
    digest: Text
    fields: Annotated[Mapping[str, str | int], _compatibility_fields]
    layout: Annotated[Mapping[str, object], _plain_map]
    release: Text = ""


@_message("Claim")
@dataclass(frozen=True)
class Claim:
    """Consumer: I shall read this offer; from now on its lease follows my heartbeats.

    Attributes:
        rank: The consumer's rank in its node.
        num_ranks: Ranks of that node; each claims and releases the offer for itself.
        traceparent: The span of this claim, if the consumer traces the request.
        rendezvous: The offer is named by a router, and its request may not have arrived yet. Then
            `request_id` is that name here and in every other message about the offer.
    """

    request_id: Text
    lease: Lease
    rank: Rank
    num_ranks: NumRanks
    traceparent: Annotated[str, _traceparent_or_nothing] = ""
    rendezvous: bool = False


@_message("Grant")
@dataclass(frozen=True)
class Grant:
    """Producer: you may read these blocks for as long as the guard holds the lease number.

    Attributes:
        num_tokens: Tokens of the request that are offered.
        num_ready: The first tokens, this many, have their keys and values in the blocks by now.
        block_ids: Per group, the request's block table. It covers the tokens that are ready, and may cover
            more.
        content: Digest of what the blocks were computed from; see `content_digest`. The consumer compares it
            with the digest of its own prompt before it reads anything.
        guard_value: What the guard holds while the bytes are valid; 0: the lease number. It is another number
            in a rendezvous, whose lease number comes from outside: a value that could repeat would make stale
            bytes look valid.
    """

    request_id: Text
    lease: Lease
    guard_index: GuardIndex
    num_tokens: Annotated[int, integer(1, _MAX_INT32)]
    num_ready: Annotated[int, integer(0, _MAX_INT32)]
    block_ids: BlockTables
    content: Text = ""
    guard_value: Annotated[int, integer(0, MAX_LEASE)] = 0


@_message("Parked")
@dataclass(frozen=True)
class Parked:
    """Producer: I still compute what you claimed. Repeated until the whole prompt is offered.

    Before a `Grant` it means that the offer is still to be made: I know its request or, in a rendezvous,
    still wait for it.
    """

    request_id: Text
    lease: Lease


@_message("Progress")
@dataclass(frozen=True)
class Progress:
    """Producer: more of a granted offer is ready.

    Attributes:
        num_ready: As in `Grant`, and greater than in the message before.
        more_block_ids: Per group, the blocks that follow the block table sent so far.
    """

    request_id: Text
    lease: Lease
    num_ready: Annotated[int, integer(1, _MAX_INT32)]
    more_block_ids: BlockTables


@_message("Deny")
@dataclass(frozen=True)
class Deny:
    """Producer: the offer is over, was never made, or is claimed by another node."""

    request_id: Text
    lease: Lease
    reason: Text


@_message("Heartbeat")
@dataclass(frozen=True)
class Heartbeat:
    """Consumer: renew these leases."""

    leases: Annotated[tuple[int, ...], integers(1, MAX_LEASE, MAX_HEARTBEAT_LEASES)]


@_message("Release")
@dataclass(frozen=True)
class Release:
    """Consumer: I am done with this offer, which I claimed.

    Attributes:
        delivered: Whether the rank has all it wanted.
        rank: As in `Claim`.
        num_ranks: As in `Claim`.
    """

    request_id: Text
    lease: Lease
    delivered: bool
    rank: Rank
    num_ranks: NumRanks


@_message("Revoke")
@dataclass(frozen=True)
class Revoke:
    """Producer: the offer ended on my side."""

    request_id: Text
    lease: Lease
    reason: Text


ConsumerMessage = Hello | Claim | Heartbeat | Release
ProducerMessage = Welcome | Grant | Parked | Progress | Deny | Revoke
Message = ConsumerMessage | ProducerMessage


# -- bytes -------------------------------------------------------------------------------------------


def encode(message: Message, version: int = PROTOCOL_VERSION) -> bytes:
    """Turn a message into bytes that `decode` accepts.

    Args:
        version: The version that the peer speaks with us. Fields that were added after it are left out.

    Raises:
        ProtocolError: a field is over its limits, or the whole is longer than `MAX_MESSAGE_BYTES`.
    """
    tag = _TAGS[type(message)]
    form = _FORMS[tag]
    try:
        fields = form.record.checked(vars(message))
        for name in form.newer_than(version):
            del fields[name]
        data = cast(bytes, msgpack.packb([tag, fields]))
    except Refused as refused:
        raise ProtocolError(refused.text(tag)) from None
    except (ValueError, TypeError, OverflowError) as error:
        raise ProtocolError(f"{tag} cannot be encoded: {error}") from error
    if len(data) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"{tag} has {len(data)} bytes; at most {MAX_MESSAGE_BYTES} are allowed")
    return data


def decode(data: bytes, version: int = PROTOCOL_VERSION, spoken: range = SPOKEN_VERSIONS) -> Message:
    """Turn bytes from a peer into a message.

    Args:
        version: The version that the peer speaks with us. A `Hello` and a `Welcome` name their own.
        spoken: The versions that we speak.

    Raises:
        VersionMismatchError: a `Hello` or `Welcome` of a version that we do not speak; of its other fields
            only `release` was looked at.
        ProtocolError: anything else that is not exactly one message; the error names the field.
    """
    tag, fields = _unpack(data)
    form = _FORMS.get(tag)
    if form is None:
        raise ProtocolError(f"unknown message {tag[:40]!r}")
    try:
        if "version" in form.record.has_default:
            version = _spoken_version(form.record, fields, spoken)
        return cast(Message, form.record.read(fields, absent=form.newer_than(version)))
    except Refused as refused:
        raise ProtocolError(refused.text(tag)) from None


def _spoken_version(record: Record[Any], fields: Mapping[str, object], spoken: range) -> int:
    """Return the version that a message names.

    It comes before anything else: another version may have other fields.
    """
    if "version" not in fields:
        raise Refused("is missing", ".version")
    version: int = record.checked({"version": fields["version"]})["version"]
    if version not in spoken:
        release = record.checked({"release": fields.get("release", "")})["release"]
        raise VersionMismatchError(local=spoken[-1], oldest=spoken[0], remote=version, release=release)
    return version


def _unpack(data: bytes) -> tuple[str, dict[str, object]]:
    """Unpack the array of tag and fields, under the limits."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"malformed message: {len(data)} bytes; at most {MAX_MESSAGE_BYTES} are allowed")
    numbers = count(1)

    def counted(entries: object) -> object:
        if next(numbers) > _MAX_CONTAINERS:
            raise ProtocolError(f"malformed message: more than {_MAX_CONTAINERS} arrays and maps")
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
        raise ProtocolError(f"malformed message: not MessagePack within the limits: {error}") from error
    if type(parts) is not tuple or len(parts) != 2 or type(parts[0]) is not str or type(parts[1]) is not dict:
        raise ProtocolError("malformed message: it must be an array of a tag and a map of fields")
    return parts[0], parts[1]


def _map_without_duplicates(pairs: object) -> dict[str, object]:
    result: dict[str, object] = {}
    for key, value in cast(Iterable[tuple[object, object]], pairs):
        if type(key) is not str:
            raise ProtocolError(
                f"malformed message: a field's name must be a string, got {type(key).__name__}"
            )
        if key in result:
            raise ProtocolError(f"malformed message: field {key[:40]!r} appears twice")
        result[key] = value
    return result
