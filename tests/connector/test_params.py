"""`kv_transfer_params` are parsed strictly, whatever their origin."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvferry.connector.errors import ConnectorError, InvalidTransferParamsError
from kvferry.connector.handoff.events import RemoteOffer
from kvferry.connector.p2p.params import TransferWish, offer_params, parse_transfer_params

OFFER = RemoteOffer("node-p", 2**62 + 1, "request-7", 3, ("shm://@a",), 18, ((4, 5, 9),))


def changed(**values: Any) -> dict[str, Any]:
    return {**offer_params(OFFER), **values}


def without(key: str) -> dict[str, Any]:
    return {name: value for name, value in offer_params(OFFER).items() if name != key}


def test_no_params_ask_for_nothing() -> None:
    assert parse_transfer_params(None) == TransferWish()
    assert parse_transfer_params({}) == TransferWish()


def test_a_prefill_request_asks_for_an_offer() -> None:
    assert parse_transfer_params({"do_remote_decode": True}) == TransferWish(offer_result=True)


def test_a_router_names_an_offer_to_release_it_later() -> None:
    name = "5" * 32
    assert parse_transfer_params({"do_remote_decode": True, "release_as": name}).release_as == name
    assert parse_transfer_params({"do_release": True, "release_as": name}) == TransferWish(release_named=name)
    for malformed in ("", "5", 5, "g" * 32):
        with pytest.raises(InvalidTransferParamsError) as caught:
            parse_transfer_params({"do_release": True, "release_as": malformed})
        assert caught.value.key == "release_as"


def test_an_offer_may_be_for_several_loads() -> None:
    assert parse_transfer_params({"do_remote_decode": True, "num_loads": 3}).num_loads == 3
    assert parse_transfer_params({"do_remote_decode": True}).num_loads == 1


@pytest.mark.parametrize(
    "params",
    [
        {"do_remote_decode": True, "num_loads": 0},
        {"do_remote_decode": True, "num_loads": 65},
        {"do_remote_decode": True, "num_loads": "2"},
        {"do_remote_decode": True, "num_loads": True},
        {"do_remote_decode": True, "num_loads": 2, "rendezvous": "a" * 32},
        {"num_loads": 2},
    ],
    ids=str,
)
def test_a_number_of_loads_that_makes_no_sense_is_refused(params: dict[str, Any]) -> None:
    with pytest.raises(InvalidTransferParamsError, match="num_loads") as caught:
        parse_transfer_params(params)
    assert caught.value.key == "num_loads"


def test_the_nulls_of_vllms_proxies_mean_unset() -> None:
    params = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
    assert parse_transfer_params(params) == TransferWish(offer_result=True)


def test_an_offer_survives_a_router_that_speaks_json() -> None:
    carried = json.loads(json.dumps(offer_params(OFFER)))
    assert parse_transfer_params(carried) == TransferWish(load_from=OFFER)


def test_keys_of_other_connectors_are_ignored() -> None:
    params = changed(remote_host="10.0.0.1", remote_port=5600, dcp_size=1, anything={"at": "all"})
    assert parse_transfer_params(params).load_from == OFFER


def test_parsing_does_not_change_the_params() -> None:
    params = changed()
    before = json.dumps(params)
    parse_transfer_params(params)
    assert json.dumps(params) == before


def test_a_question_about_the_node_and_an_answer_that_another_node_began() -> None:
    assert parse_transfer_params({"describe": True}) == TransferWish(describe=True)
    assert parse_transfer_params({"continues": {"model": "digest"}}) == TransferWish(continues="digest")
    movable = {"continues": {"model": "digest", "move_as": "a" * 32}}
    assert parse_transfer_params(movable) == TransferWish(continues="digest", move_as="a" * 32)
    assert parse_transfer_params({"move": "a" * 32}) == TransferWish(move="a" * 32)


@pytest.mark.parametrize(
    "key",
    [
        "remote_engine_id",
        "remote_epoch",
        "remote_request_id",
        "remote_lease",
        "remote_addresses",
        "remote_num_tokens",
        "remote_block_ids",
        "tp_size",
    ],
)
def test_a_missing_key_is_named(key: str) -> None:
    with pytest.raises(InvalidTransferParamsError, match=f"{key} is missing") as caught:
        parse_transfer_params(without(key))
    assert caught.value.key == key


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("do_remote_prefill", "yes"),
        ("do_remote_prefill", 1),
        ("do_remote_decode", "true"),
        ("describe", 1),
        ("continues", "digest"),
        ("continues", {}),
        ("continues", {"model": 5}),
        ("continues", {"model": "digest", "move_as": "short"}),
        ("continues", {"model": "digest", "move_as": 5}),
        ("move", "short"),
        ("move", ["a" * 32]),
        ("remote_engine_id", ""),
        ("remote_engine_id", 5),
        ("remote_engine_id", "x" * 1025),
        ("remote_request_id", ["r"]),
        ("remote_request_id", "\ud800"),
        ("remote_epoch", 17),
        ("remote_epoch", "0"),
        ("remote_epoch", "-1"),
        ("remote_epoch", "0x1f"),
        ("remote_epoch", " 1f"),
        ("remote_epoch", "f" * 16),
        ("remote_epoch", "1" * 17),
        ("remote_lease", "0"),
        ("remote_lease", f"{2**63:x}"),
        ("remote_lease", True),
        ("remote_lease", 3),
        ("remote_lease", "0x3"),
        ("remote_lease", "-3"),
        ("remote_addresses", "shm://@a"),
        ("remote_addresses", []),
        ("remote_addresses", [""]),
        ("remote_addresses", [7]),
        ("remote_addresses", ["shm://@a\udfff"]),
        ("remote_addresses", ["a"] * 1025),
        ("remote_num_tokens", 0),
        ("remote_num_tokens", -4),
        ("remote_num_tokens", 2**31),
        ("remote_block_ids", []),
        ("remote_block_ids", [4, 5]),
        ("remote_block_ids", {"0": [1]}),
        ("remote_block_ids", [[1, -1]]),
        ("remote_block_ids", [[1, True]]),
        ("remote_block_ids", [["1"]]),
        ("remote_block_ids", [[2**31]]),
        ("remote_block_ids", [[1]] * 65),
        ("tp_size", 2),
        ("tp_size", "1"),
    ],
)
def test_a_malformed_value_is_named(key: str, value: object) -> None:
    with pytest.raises(InvalidTransferParamsError, match=key) as caught:
        parse_transfer_params(changed(**{key: value}))
    assert caught.value.key == key
    assert isinstance(caught.value, ConnectorError)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("params", [[], "do_remote_decode", 7, True])
def test_params_that_are_not_an_object_are_refused(params: Any) -> None:
    with pytest.raises(InvalidTransferParamsError, match="kv_transfer_params must be an object"):
        parse_transfer_params(params)


def test_a_huge_value_does_not_make_a_huge_message() -> None:
    with pytest.raises(InvalidTransferParamsError) as caught:
        parse_transfer_params(changed(remote_engine_id="x" * 10_000_000))
    assert len(str(caught.value)) < 300


JSON = st.recursive(
    st.sampled_from([None, True, False, 0, 1, -1, 2**31, 2**63, 1.5, "", "1f", "shm://@a", "\ud800"]),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=6,
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from(sorted(offer_params(OFFER))), JSON, max_size=4))
def test_any_value_of_a_key_is_read_or_refused(values: dict[str, Any]) -> None:
    try:
        wish = parse_transfer_params(changed(**values))
    except InvalidTransferParamsError:
        return
    if wish.load_from is not None:
        assert parse_transfer_params(offer_params(wish.load_from)).load_from == wish.load_from
