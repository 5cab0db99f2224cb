"""`kv_transfer_params`: what a router carries from the producer's answer to the consumer's request.

A router sends `{"do_remote_decode": true}` to a prefill node. The node answers with the params that
`offer_params` makes, and the router passes those to a decode node unchanged. If no decode node can load the
offer, the router sends it back to the prefill node with `"do_remote_prefill": false, "do_release": true`, and
the blocks become free at once. The names are vLLM's where vLLM has one.

An offer can be loaded once. With `"num_loads": N` beside `"do_remote_decode": true` it can be loaded N times,
by different nodes or by the same one: several answers to one prompt may then be given at several nodes. It
ends after the last of them. A router that has sent it to all that need it sends it back as above: what has
not begun by then is not waited for.

`"describe": true` asks a node what it is. Its answer's params have its `kv_role`, `load_failure_policy` and
`protocol`, and inside vLLM `remote_identity`, a digest of what decides its answers, and `identity_fields`, of
which that is the digest. If the prompt for a decode node ends with tokens of the answer, the router sends the
digest of the node that chose them, as `"continues": {"model": DIGEST}`. A node with another digest refuses to
continue the answer, whatever its load failure policy. `"explain": ID` asks a node inside vLLM when it did
what for the request with this id; its answer's params have `spans`.

A router that hangs up on a prefill node does not know whether the node has made the offer, nor what it is. So
it may send `"release_as": NAME` with `"do_remote_decode": true`, where NAME is 32 hexadecimal digits that
nothing can guess. Another request with `"do_release": true` and the same name releases the offer, or what
would become it.

A router may have a running answer *moved*: it sends the request with `"continues": {..., "move_as": NAME}`,
where NAME is 32 hexadecimal digits that nothing can guess, and later another request to the same node, with
`"move": NAME`. The node then stops the answer after its next token, offers the cache of prompt and answer,
and says so at the end of the stream: a reference node by the `finish_reason` `"moved"` and the params of the
offer, a node inside vLLM by the `finish_reason` `"length"` with a `stop_reason` that begins with `kvferry
moved` and ends with these params. A client's own stop text gives the `finish_reason` `"stop"`. The router
sends them to the node that goes on. If there is no such request any more, nothing happens.

Keys that are not ours are ignored, because proxies add some. What must never break: ours are checked
strictly, because any client can write them, and what is malformed is refused by its name, before anything is
claimed or offered.

A node that publishes the events of its prefix cache with ZeroMQ adds `"kv_events": {"port": 5557,
"replay_port": 0, "topic": "", "models": [NAME]}` to its description; `replay_port` is 0 if it sends no batch
again, and `models` are the names of its own model.

In a *rendezvous* the router asks both nodes at once. It draws a name, 32 hexadecimal digits that nothing can
guess, and sends it to both: `{"do_remote_decode": true, "rendezvous": NAME}` to the prefill node, and what
`rendezvous_params` makes to the decode node. A prefill node that can do this says so in its description and
in each answer, by `"rendezvous_supported": true`, and where it can be reached.

The key `traceparent` is the context of the request's trace (W3C Trace Context), for nodes that a router
reaches without HTTP headers. A value that is not one is ignored, as the standard demands: a trace must not
fail a request.

The key `client_request_id` is the request's `X-Request-Id`, by which its spans are found, for endpoints
whose requests have ids of vLLM's own, such as `/v1/responses`. What is no short text is ignored likewise.

Numbers of 64 bits travel as hexadecimal strings: proxies that keep JSON's numbers as floating point would
round them.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, TypeVar

from ...transports.checked import Record, Refused, each, integer, integers, refuse, shown, text
from ..errors import InvalidTransferParamsError
from ..handoff.events import BlockTables, RemoteOffer
from ..handoff.messages import (
    MAX_EPOCH,
    MAX_GROUP_BLOCKS,
    MAX_GROUPS,
    MAX_LEASE,
    MAX_RANKS,
    MAX_TEXT_CHARS,
    is_traceparent,
)

T = TypeVar("T")

#: Key of the trace context, also the name of the HTTP header.
TRACEPARENT = "traceparent"

#: Key of the `X-Request-Id`.
CLIENT_REQUEST_ID = "client_request_id"
#: Key of the name of a rendezvous, and of a node's answer that it can do this.
RENDEZVOUS, RENDEZVOUS_SUPPORTED = "rendezvous", "rendezvous_supported"
#: Key of the name by which a router releases an offer of which it has not heard.
RELEASE_AS = "release_as"
#: Key of the digest of what decides a node's answers, and of the fields that it was made from.
IDENTITY, IDENTITY_FIELDS = "remote_identity", "identity_fields"
#: Of these fields, a server's limits on an answer's tokens: where the request has none, and in any case. 0:
#: none.
DEFAULT_MAX_TOKENS, MOST_TOKENS = "default_max_tokens", "most_tokens"
#: Key of the tokens of an answer, after which a decode node is to continue.
CONTINUES = "continues"
#: Key of the name by which a running answer can be moved, inside `CONTINUES`, and of the request to move it.
MOVE_AS, MOVE = "move_as", "move"
#: `finish_reason` of an answer that its node has stopped, for another one to go on with.
MOVED: Final = "moved"
#: Inside vLLM such an answer's `stop_reason` begins with this. The offer's params follow, as JSON; null:
#: there is no offer.
STOPPED_TO_MOVE = "kvferry moved the answer: "
#: The `stop_reason` of vLLM's answer begins with this if the node refused to continue another node's answer.
REFUSED_TO_CONTINUE = "kvferry refused to continue: "
#: Key of where a node publishes what its prefix cache stores and removes, in its description.
KV_EVENTS = "kv_events"
#: A key of the answer of a vLLM node whose load has failed, and which computed the prompt itself: why. Text
#: for people.
LOAD_ERROR = "load_error"
#: Key of a request whose spans a vLLM node is to tell, and of these spans in the params of the answer.
EXPLAIN, SPANS = "explain", "spans"

#: Most loads of one offer.
MAX_LOADS: Final = 64

_MAX_INT32 = 2**31 - 1
_RENDEZVOUS_NAME = re.compile("(?!0{16})[0-9a-f]{32}")
_SURROGATE = re.compile("[\ud800-\udfff]")


# -- what parameters may hold ------------------------------------------------------------------------


def _name(value: object) -> str:
    known = _text(value)
    if _SURROGATE.search(known):  # a string to JSON, but it could not be sent to the peer
        refuse("a string without lone surrogates", known)
    return known


def _rendezvous_name(value: object) -> str:
    if not isinstance(value, str) or not _RENDEZVOUS_NAME.fullmatch(value):
        refuse("32 hexadecimal digits in lower case, of which not all of the first 16 are 0", value)
    return value


def _beginning(value: object) -> tuple[str, str]:
    """Read the identity of the nodes whose answer it is, and the name by which it can be moved; empty: it
    cannot be.
    """
    if not isinstance(value, Mapping):
        refuse("an object", value)
    name = value.get(MOVE_AS)
    return _text(value.get("model")), "" if name is None else _rendezvous_name(name)


def _hexadecimal(high: int) -> Callable[[object], int]:
    wanted = f"a hexadecimal string from 1 to {high:x}"

    def check(value: object) -> int:
        if not isinstance(value, str) or not re.fullmatch("[0-9a-fA-F]{1,16}", value):
            refuse(wanted, value)
        if not 1 <= (number := int(value, 16)) <= high:
            refuse(wanted, value)
        return number

    return check


def _not_empty(check: Callable[[object], tuple[T, ...]], wanted: str) -> Callable[[object], tuple[T, ...]]:
    def check_more(value: object) -> tuple[T, ...]:
        known = check(value)
        if not known:
            refuse(wanted, value)
        return known

    return check_more


_text = text(MAX_TEXT_CHARS, min_chars=1)
_addresses = _not_empty(each(_name, MAX_RANKS), f"a list of 1 to {MAX_RANKS} addresses")
_block_tables = _not_empty(
    each(integers(0, _MAX_INT32, MAX_GROUP_BLOCKS), MAX_GROUPS),
    f"a list of 1 to {MAX_GROUPS} lists of block ids",
)


@dataclass(frozen=True)
class _OfferParams:
    """An offer, by the names that travel."""

    remote_engine_id: Annotated[str, _name]
    remote_epoch: Annotated[int, _hexadecimal(MAX_EPOCH)]
    remote_request_id: Annotated[str, _name]
    remote_lease: Annotated[int, _hexadecimal(MAX_LEASE)]
    remote_addresses: Annotated[tuple[str, ...], _addresses]
    remote_num_tokens: Annotated[int, integer(1, _MAX_INT32)]
    remote_block_ids: Annotated[BlockTables, _block_tables]
    tp_size: Annotated[int, integer(1, MAX_RANKS)]

    def require_consistent(self) -> None:
        _require_one_address_per_rank(self.remote_addresses, self.tp_size)


def _require_one_address_per_rank(addresses: tuple[str, ...], tp_size: int) -> None:
    if len(set(addresses)) != len(addresses):
        raise Refused("must have a different address for each rank", ".remote_addresses")
    if tp_size != len(addresses):
        raise Refused(f"must be {len(addresses)}, the number of remote_addresses, got {tp_size}", ".tp_size")


@dataclass(frozen=True)
class _Rendezvous:
    """Where the offer of a rendezvous will be, by the names that travel."""

    rendezvous: Annotated[str, _rendezvous_name]
    remote_engine_id: Annotated[str, _name]
    remote_epoch: Annotated[int, _hexadecimal(MAX_EPOCH)]
    remote_addresses: Annotated[tuple[str, ...], _addresses]
    tp_size: Annotated[int, integer(1, MAX_RANKS)]

    def require_consistent(self) -> None:
        _require_one_address_per_rank(self.remote_addresses, self.tp_size)


@dataclass(frozen=True)
class _Name:
    """The name of a rendezvous alone."""

    rendezvous: Annotated[str, _rendezvous_name]


@dataclass(frozen=True)
class _Flags:
    """What a request asks for. vLLM's proxies send null for a flag that they do not set."""

    do_remote_decode: bool = False
    do_remote_prefill: bool = False
    do_release: bool = False
    num_loads: Annotated[int | None, integer(1, MAX_LOADS)] = None
    describe: bool = False
    explain: Annotated[str | None, _name] = None
    continues: Annotated[tuple[str, str] | None, _beginning] = None
    move: Annotated[str | None, _rendezvous_name] = None
    release_as: Annotated[str | None, _rendezvous_name] = None


_OFFER, _RENDEZVOUS, _NAME, _FLAGS = Record(_OfferParams), Record(_Rendezvous), Record(_Name), Record(_Flags)


# -- reading and writing -----------------------------------------------------------------------------


@dataclass(frozen=True)
class TransferWish:
    """What a request asks its node to do.

    Attributes:
        offer_result: Offer the prompt's blocks to another node when the request has finished.
        load_from: The offer to load the prompt's blocks from; None to compute them here. In a rendezvous its
            number of tokens is 0: the prompt decides.
        num_loads: Loads after which the offered result is over.
        release: An offer of this node that no further consumer will claim.
        release_named: The same by the name that its request had as `release_as`; empty: none.
        release_as: The name by which a router may release the offered result; empty: none.
        rendezvous: The name under which to offer the result, while the prompt is still being computed where
            that is possible; empty: the node names the offer.
        describe: Describe the node in the params of the answer.
        explain: The request whose spans are to be told in the params of this one, if the engine is vLLM;
            empty: none.
        continues: The prompt may end with the beginning of an answer, which must be that of a node with this
            identity. Empty: the identity does not matter.
        move_as: The name by which a router may have the answer moved to another node; empty: it may not.
        move: The name of the answer that is to be moved; empty: none.
    """

    offer_result: bool = False
    num_loads: int = 1
    load_from: RemoteOffer | None = None
    release: RemoteOffer | None = None
    release_named: str = ""
    release_as: str = ""
    rendezvous: str = ""
    describe: bool = False
    explain: str = ""
    continues: str = ""
    move_as: str = ""
    move: str = ""


def rendezvous_lease(name: str) -> int:
    """Return the lease number that both nodes of a rendezvous derive from its name.

    It is no guard's value.
    """
    return (int(name[:16], 16) & MAX_LEASE) or 1


def parse_transfer_params(params: Mapping[str, Any] | None) -> TransferWish:
    """Read a request's `kv_transfer_params`; None asks for nothing.

    Raises:
        InvalidTransferParamsError: a value is missing, of the wrong type, or out of bounds; it names the key.
    """
    if params is None:
        return TransferWish()
    if not isinstance(params, Mapping):
        why = f"kv_transfer_params must be an object, got {shown(params)}"
        raise InvalidTransferParamsError(why, key="kv_transfer_params", value=shown(params))
    flags = _read(_FLAGS, params)
    if flags.do_release and (flags.do_remote_prefill or flags.do_remote_decode):
        why = "do_release must be false beside do_remote_prefill or do_remote_decode: a request that releases an offer can "
        raise invalid_params(f"{why}neither load nor offer", "do_release", True)
    is_rendezvous = params.get(RENDEZVOUS) is not None  # vLLM's proxies send null for what they do not set
    offer = None
    release_as = flags.release_as or ""
    if flags.do_remote_prefill or (flags.do_release and not release_as):
        offer = _rendezvous(params) if is_rendezvous else _remote_offer(params)
    # A request that loads by one name and offers by another would need two, so the name is that of the load.
    name = (
        _read(_NAME, params).rendezvous if is_rendezvous and flags.do_remote_decode and offer is None else ""
    )
    num_loads = flags.num_loads or 1
    if num_loads > 1 and (name or not flags.do_remote_decode):
        why = "num_loads must be 1 in a rendezvous, and where nothing is offered, got "
        raise invalid_params(f"{why}{num_loads}", "num_loads", num_loads)
    return TransferWish(
        offer_result=flags.do_remote_decode,
        num_loads=num_loads,
        rendezvous=name,
        load_from=offer if flags.do_remote_prefill else None,
        release=offer if flags.do_release else None,
        release_named=release_as if flags.do_release else "",
        release_as=release_as if flags.do_remote_decode else "",
        describe=flags.describe,
        explain=flags.explain or "",
        continues="" if flags.continues is None else flags.continues[0],
        move_as="" if flags.continues is None else flags.continues[1],
        move=flags.move or "",
    )


def traceparent_of(params: Mapping[str, Any] | None) -> str:
    """Return the trace context of a request; empty if it has none, or a malformed one."""
    value = params.get(TRACEPARENT) if isinstance(params, Mapping) else None
    return value if isinstance(value, str) and is_traceparent(value) else ""


def offer_params(offer: RemoteOffer, traceparent: str = "") -> dict[str, Any]:
    """Return what a consumer needs to load `offer`, in JSON's types. `parse_transfer_params` reads it back.

    Args:
        traceparent: Of the producer's request, so that the consumer's spans join its trace under a router
            without traces.
    """
    return {
        **({TRACEPARENT: traceparent} if traceparent else {}),
        "do_remote_prefill": True,
        "do_remote_decode": False,
        **place_params(offer.engine_id, offer.epoch, offer.addresses),
        "remote_request_id": offer.request_id,
        "remote_lease": f"{offer.lease:x}",
        "remote_num_tokens": offer.num_tokens,
        "remote_block_ids": [list(table) for table in offer.block_ids],
    }


def place_params(
    engine_id: str,
    epoch: int,
    addresses: Sequence[str],
    *,
    has_rendezvous: bool = False,
) -> dict[str, Any]:
    """Return where a node can be reached, in JSON's types.

    Args:
        has_rendezvous: Whether a router may name the node's next offers in advance.
    """
    return {
        "remote_engine_id": engine_id,
        "remote_epoch": f"{epoch:x}",
        "remote_addresses": list(addresses),
        "tp_size": len(addresses),
        **({RENDEZVOUS_SUPPORTED: True} if has_rendezvous else {}),
    }


def rendezvous_params(name: str, told: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what a consumer needs to claim by name an offer that a prefill node has yet to make.

    Args:
        name: Of the rendezvous; see `draw_offer_name`.
        told: The params of an answer of the prefill node, or its description: either says where it can be
            reached.

    Returns:
        The params; None if the node does not say that it can do this.
    """
    if told.get(RENDEZVOUS_SUPPORTED) is not True:
        return None
    params = {"do_remote_prefill": True, "do_remote_decode": False, RENDEZVOUS: name}
    params |= {key: told[key] for key in _WHERE if key in told}
    try:
        _read(_RENDEZVOUS, params)
    except InvalidTransferParamsError:
        return None
    return params


def draw_offer_name() -> str:
    """Draw a name of 128 random bits. Any peer that knows it may claim the offer."""
    while not _RENDEZVOUS_NAME.fullmatch(name := secrets.token_hex(16)):
        pass
    return name


_WHERE = ("remote_engine_id", "remote_epoch", "remote_addresses", "tp_size")


def _rendezvous(params: Mapping[str, Any]) -> RemoteOffer:
    known = _read(_RENDEZVOUS, params)
    return RemoteOffer(
        engine_id=known.remote_engine_id,
        epoch=known.remote_epoch,
        request_id=known.rendezvous,
        lease=rendezvous_lease(known.rendezvous),
        addresses=known.remote_addresses,
        num_tokens=0,
        block_ids=(),
        is_rendezvous=True,
    )


def _remote_offer(params: Mapping[str, Any]) -> RemoteOffer:
    known = dict(vars(_read(_OFFER, params)))  # not `asdict`, which would copy every block id
    del known["tp_size"]
    return RemoteOffer(**{name.removeprefix("remote_"): value for name, value in known.items()})


def _read(record: Record[T], params: Mapping[str, Any]) -> T:
    try:
        return record.read_known(params)
    except Refused as refused:
        raise invalid_params(refused.text(""), refused.field, params.get(refused.field)) from None


def invalid_params(why: str, key: str, value: object) -> InvalidTransferParamsError:
    """Make the error about one key. `why` is a sentence that begins with the key."""
    return InvalidTransferParamsError(f"kv_transfer_params: {why}", key=key, value=shown(value))
