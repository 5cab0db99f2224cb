"""`kv_transfer_params`: what a router carries from the producer's answer to the consumer's request.

To a prefill node: `{"do_remote_decode": true}`, and `"overlap": true` to be answered while the prompt is still
computed, where the node can do that. It answers with what `offer_params` makes; the router hands
that to a decode node unchanged. If no decode node can load the offer, the router sends it back to the prefill node with
`"do_remote_prefill": false, "do_release": true`, and the blocks come free at once. The names are vLLM's where vLLM has one.
Keys that are not ours are ignored, because proxies add some; ours are checked strictly, because anybody can write them.

Numbers of 64 bits travel as hexadecimal text: proxies that keep JSON's numbers as floating point would round them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from .checks import MAX_TEXT_CHARS
from .errors import InvalidTransferParamsError
from .handoff.events import BlockTables, RemoteOffer
from .handoff.messages import MAX_EPOCH, MAX_GROUP_BLOCKS, MAX_GROUPS, MAX_LEASE, MAX_RANKS

_MAX_INT32 = 2**31 - 1
_SHOWN_CHARS = 80
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class TransferWish:
    """What a request asks of its node.

    Attributes:
        offer_result: Offer the prompt's blocks to another node when the request has finished.
        offer_early: Offer them while the prompt is still computed, where that can be.
        load_from: The offer to load the prompt's blocks from; None to compute them here.
        release: An offer of this node that no consumer will come for.
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
        raise _error("kv_transfer_params", params, "it must be an object")
    load_from = _remote_offer(params) if _flag(params, "do_remote_prefill") else None
    release = _remote_offer(params) if _flag(params, "do_release") else None
    offer_result, offer_early = _flag(params, "do_remote_decode"), _flag(params, "overlap")
    if release is not None and (load_from is not None or offer_result):
        raise _error("do_release", True, "a request that releases an offer can neither load nor offer")
    return TransferWish(offer_result, load_from, offer_result and offer_early, release)


def offer_params(offer: RemoteOffer) -> dict[str, Any]:
    """Say what a consumer needs to load `offer`, in JSON's types. `parse_transfer_params` reads it back."""
    return {
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
    addresses = _addresses(params)
    _integer(params, "tp_size", len(addresses), len(addresses))
    return RemoteOffer(
        engine_id=_text(params, "remote_engine_id"),
        epoch=_hexadecimal(params, "remote_epoch", MAX_EPOCH),
        request_id=_text(params, "remote_request_id"),
        lease=_hexadecimal(params, "remote_lease", MAX_LEASE),
        addresses=addresses,
        num_tokens=_integer(params, "remote_num_tokens", 1, _MAX_INT32),
        block_ids=_block_tables(params),
    )


def _flag(params: Mapping[str, Any], key: str) -> bool:
    value = params.get(key)
    if value is None:
        return False  # vLLM's proxies send null for what they do not set
    if not isinstance(value, bool):
        raise _error(key, value, "it must be true or false")
    return value


def _text(params: Mapping[str, Any], key: str) -> str:
    value = params.get(key)
    if not _is_text(value):
        raise _error(key, value, f"it must be a string of 1 to {MAX_TEXT_CHARS} characters")
    return cast(str, value)


def _is_text(value: object) -> bool:
    # A lone surrogate is a string to JSON, but could not be sent to the peer.
    return isinstance(value, str) and 1 <= len(value) <= MAX_TEXT_CHARS and not _SURROGATE.search(value)


def _integer(params: Mapping[str, Any], key: str, low: int, high: int) -> int:
    value = params.get(key)
    if type(value) is not int or not low <= value <= high:
        wanted = f"{low}" if low == high else f"an integer from {low} to {high}"
        raise _error(key, value, f"it must be {wanted}")
    return value


def _hexadecimal(params: Mapping[str, Any], key: str, high: int) -> int:
    value = params.get(key)
    if isinstance(value, str) and re.fullmatch("[0-9a-fA-F]{1,16}", value):
        number = int(value, 16)
        if 1 <= number <= high:
            return number
    raise _error(key, value, f"it must be a hexadecimal string from 1 to {high:x}")


def _addresses(params: Mapping[str, Any]) -> tuple[str, ...]:
    value = params.get("remote_addresses")
    if not isinstance(value, list | tuple) or not 1 <= len(value) <= MAX_RANKS:
        raise _error("remote_addresses", value, f"it must be a list of 1 to {MAX_RANKS} addresses")
    if not all(map(_is_text, value)):
        raise _error("remote_addresses", value, f"each must be a string of 1 to {MAX_TEXT_CHARS} characters")
    if len(set(value)) != len(value):
        raise _error("remote_addresses", value, "each rank has an address of its own")
    return tuple(value)


def _block_tables(params: Mapping[str, Any]) -> BlockTables:
    key, value = "remote_block_ids", params.get("remote_block_ids")
    if not isinstance(value, list | tuple) or not 1 <= len(value) <= MAX_GROUPS:
        raise _error(key, value, f"it must be a list of 1 to {MAX_GROUPS} lists of block ids")
    for table in value:
        if not isinstance(table, list | tuple) or len(table) > MAX_GROUP_BLOCKS:
            raise _error(key, value, f"each group must be a list of at most {MAX_GROUP_BLOCKS} block ids")
        if any(type(block) is not int or not 0 <= block <= _MAX_INT32 for block in table):
            raise _error(key, value, f"each block id must be an integer from 0 to {_MAX_INT32}")
    return tuple(tuple(table) for table in value)


def _error(key: str, value: object, why: str) -> InvalidTransferParamsError:
    text = "is missing" if value is None else f"is {_shown(value)}"
    return InvalidTransferParamsError(
        f"kv_transfer_params: {key} {text}: {why}", key=key, value=_shown(value)
    )


def _shown(value: object) -> str:
    # A long list is not turned into text as a whole only to be cut: the value may be megabytes.
    if isinstance(value, list | tuple | dict | str) and len(value) > _SHOWN_CHARS:
        return f"{type(value).__name__} of length {len(value)}"
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…"
