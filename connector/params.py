"""`kv_transfer_params`: what a router carries from the producer's answer to the consumer's request.

A router sends `{"do_remote_decode": true}` to a prefill node, and adds `"overlap": true` to be answered while the prompt is
still being computed, where the node can do that. The node answers with the params that `offer_params` makes, and the router
passes those to a decode node unchanged. If no decode node can load the offer, the router sends it back to the prefill node
with `"do_remote_prefill": false, "do_release": true`, and the blocks become free at once. The names are vLLM's where vLLM
has one. Keys that are not ours are ignored, because proxies add some. Ours are checked strictly, because any client can
write them.

The key `traceparent` is the context of the request's trace (W3C Trace Context), for nodes that a router reaches without
HTTP headers. A value that is not one is ignored, as the standard demands: a trace must not fail a request.

Numbers of 64 bits travel as hexadecimal strings: proxies that keep JSON's numbers as floating point would round them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from ..transports.checked import Record, Refused, each, integer, integers, refuse, shown, text
from .errors import InvalidTransferParamsError
from .handoff.events import BlockTables, RemoteOffer
from .handoff.messages import (
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

_MAX_INT32 = 2**31 - 1
_SURROGATE = re.compile("[\ud800-\udfff]")


# -- what parameters may hold ------------------------------------------------------------------------


def _name(value: object) -> str:
    known = _text(value)
    if _SURROGATE.search(known):  # a string to JSON, but it could not be sent to the peer
        refuse("a string without lone surrogates", known)
    return known


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
        if len(set(self.remote_addresses)) != len(self.remote_addresses):
            raise Refused("must have a different address for each rank", ".remote_addresses")
        if self.tp_size != len(self.remote_addresses):
            raise Refused(
                f"must be {len(self.remote_addresses)}, the number of remote_addresses, got {self.tp_size}",
                ".tp_size",
            )


@dataclass(frozen=True)
class _Flags:
    """What a request asks for. vLLM's proxies send null for a flag that they do not set."""

    do_remote_decode: bool = False
    do_remote_prefill: bool = False
    do_release: bool = False
    overlap: bool = False


_OFFER, _FLAGS = Record(_OfferParams), Record(_Flags)


# -- reading and writing -----------------------------------------------------------------------------


@dataclass(frozen=True)
class TransferWish:
    """What a request asks its node to do.

    Attributes:
        offer_result: Offer the prompt's blocks to another node when the request has finished.
        offer_early: Offer them while the prompt is still being computed, where that is possible.
        load_from: The offer to load the prompt's blocks from; None to compute them here.
        release: An offer of this node that no consumer will claim.
    """

    offer_result: bool = False
    load_from: RemoteOffer | None = None
    offer_early: bool = False
    release: RemoteOffer | None = None


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
    offer = _remote_offer(params) if flags.do_remote_prefill or flags.do_release else None
    return TransferWish(
        offer_result=flags.do_remote_decode,
        offer_early=flags.do_remote_decode and flags.overlap,
        load_from=offer if flags.do_remote_prefill else None,
        release=offer if flags.do_release else None,
    )


def traceparent_of(params: Mapping[str, Any] | None) -> str:
    """Return the trace context of a request; empty if it has none, or a malformed one."""
    value = params.get(TRACEPARENT) if isinstance(params, Mapping) else None
    return value if isinstance(value, str) and is_traceparent(value) else ""


def offer_params(offer: RemoteOffer, traceparent: str = "") -> dict[str, Any]:
    """Return what a consumer needs to load `offer`, in JSON's types. `parse_transfer_params` reads it back.

    Args:
        traceparent: Of the producer's request, so that the consumer's spans join its trace under a router without traces.
    """
    return {
        **({TRACEPARENT: traceparent} if traceparent else {}),
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": offer.engine_id,
        "remote_epoch": f"{offer.epoch:x}",
        "remote_request_id": offer.request_id,
        "remote_lease": f"{offer.lease:x}",
        "remote_addresses": list(offer.addresses),
        "remote_num_tokens": offer.num_tokens,
        "remote_block_ids": [list(table) for table in offer.block_ids],
        "tp_size": len(offer.addresses),
    }


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
