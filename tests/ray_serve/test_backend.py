"""What the backend for Ray Serve makes of requests and configurations, with Ray's own classes around it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from ray.llm._internal.serve.core.configs.openai_api_models import CompletionRequest

from kvferry.connector.p2p.params import parse_transfer_params
from kvferry.connector.ray import CONNECTOR, MAX_PLACES, PLACE_S, KvferryBackend

pytestmark = pytest.mark.filterwarnings("default")


class Config:
    """The part of Ray's `LLMConfig` that a backend reads."""

    def __init__(self, **transfer: Any) -> None:
        self.engine_kwargs = {"kv_transfer_config": {"kv_connector": CONNECTOR, **transfer}}


class Answer:
    """The answer of a prefill replica."""

    def __init__(self, params: dict[str, Any] | None) -> None:
        self.kv_transfer_params = params


def answer(**changes: Any) -> Answer:
    params = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "p",
        "remote_request_id": "cmpl-1",
        "remote_block_ids": [[1]],
        "remote_num_tokens": 4,
        "remote_addresses": ["shm://@p"],
        "remote_epoch": "5",
        "remote_lease": "7",
        "tp_size": 1,
        "rendezvous_supported": True,
    }
    return Answer({**params, **changes})


PEER = {"kvferry_engine_id": "p-1"}


def request(**fields: Any) -> CompletionRequest:
    return CompletionRequest(model="model", prompt="A ferry", max_tokens=9, stream=True, **fields)


@pytest.fixture
def backend() -> KvferryBackend:
    return KvferryBackend(Config())


def test_the_first_handoff_of_a_pair_is_in_turn(backend: KvferryBackend) -> None:
    prefill = backend.prepare_prefill_request(request=request(), peer=PEER)
    assert (prefill.max_tokens, prefill.stream) == (1, False)
    assert prefill.kv_transfer_params["do_remote_decode"] is True
    assert "rendezvous" not in prefill.kv_transfer_params
    assert backend.concurrent_handoff is False
    decode = backend.prepare_decode_request(request=request(), peer=PEER, prefill_response=answer())
    assert (decode.max_tokens, decode.stream) == (9, True)
    assert decode.kv_transfer_params == answer().kv_transfer_params


def shaped(backend: KvferryBackend, peer: dict[str, str] = PEER) -> tuple[dict[str, Any], dict[str, Any]]:
    """The params of both requests of a handoff in which both are asked at once."""
    prefill = backend.prepare_prefill_request(request=request(), peer=peer)
    assert backend.concurrent_handoff
    decode = backend.prepare_decode_request(request=request(), peer=peer, prefill_response=None)
    return prefill.kv_transfer_params, decode.kv_transfer_params


def test_later_ones_ask_both_replicas_at_once_and_each_by_a_name_of_its_own(backend: KvferryBackend) -> None:
    backend.prepare_decode_request(request=request(), peer=PEER, prefill_response=answer())
    names = set()
    for _ in range(3):
        prefill, decode = shaped(backend)
        assert prefill["rendezvous"] == decode["rendezvous"]
        names.add(decode["rendezvous"])
        offer = parse_transfer_params(decode).load_from
        assert offer is not None
        assert (offer.is_rendezvous, offer.engine_id, offer.addresses) == (True, "p", ("shm://@p",))
    assert len(names) == 3


def test_another_start_of_a_replica_is_another_replica(backend: KvferryBackend) -> None:
    backend.prepare_decode_request(request=request(), peer=PEER, prefill_response=answer())
    backend.prepare_prefill_request(request=request(), peer={"kvferry_engine_id": "p-2"})
    assert not backend.concurrent_handoff


def test_a_place_is_learned_again_after_a_while(
    backend: KvferryBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("kvferry.connector.ray.time.monotonic", lambda: now[0])
    backend.prepare_decode_request(request=request(), peer=PEER, prefill_response=answer())
    now[0] += PLACE_S - 1
    shaped(backend)
    now[0] += 1
    backend.prepare_prefill_request(request=request(), peer=PEER)
    assert not backend.concurrent_handoff
    moved = answer(remote_addresses=["shm://@q"])
    backend.prepare_decode_request(request=request(), peer=PEER, prefill_response=moved)
    assert shaped(backend)[1]["remote_addresses"] == ["shm://@q"]


@pytest.mark.parametrize(
    "found", [answer(rendezvous_supported=False), answer(remote_addresses=7), Answer(None)], ids=str
)
def test_a_replica_that_cannot_be_asked_at_once_is_asked_in_turn(
    backend: KvferryBackend, found: Answer
) -> None:
    decode = backend.prepare_decode_request(request=request(), peer=PEER, prefill_response=found)
    assert decode.kv_transfer_params == found.kv_transfer_params
    backend.prepare_prefill_request(request=request(), peer=PEER)
    assert not backend.concurrent_handoff


async def test_requests_at_the_same_time_do_not_mix(backend: KvferryBackend) -> None:
    backend.prepare_decode_request(request=request(), peer=PEER, prefill_response=answer())

    async def hand_over() -> bool:
        backend.prepare_prefill_request(request=request(), peer={})
        await asyncio.sleep(0)
        return backend.concurrent_handoff

    async def meet() -> tuple[Any, Any]:
        prefill = backend.prepare_prefill_request(request=request(), peer=PEER)
        await asyncio.sleep(0)
        decode = backend.prepare_decode_request(request=request(), peer=PEER, prefill_response=None)
        return prefill.kv_transfer_params["rendezvous"], decode.kv_transfer_params["rendezvous"]

    found = await asyncio.gather(*(f() for f in (meet, hand_over, meet, meet)))
    assert found[1] is False
    assert all(one == other for one, other in (found[0], found[2], found[3]))
    assert len({one for one, _ in (found[0], found[2], found[3])}) == 3


def test_a_clients_own_params_are_dropped(backend: KvferryBackend) -> None:
    foreign = request(kv_transfer_params={"do_remote_prefill": True, "remote_engine_id": "of another client"})
    assert "of another client" not in str(backend.prepare_prefill_request(request=foreign, peer=PEER))
    for found in (Answer(None), None):
        decode = backend.prepare_decode_request(request=foreign, peer=PEER, prefill_response=found)
        assert not decode.kv_transfer_params


def test_places_are_bounded(backend: KvferryBackend) -> None:
    for number in range(MAX_PLACES + 1):
        peer = {"kvferry_engine_id": str(number)}
        backend.prepare_decode_request(request=request(), peer=peer, prefill_response=answer())
    backend.prepare_prefill_request(request=request(), peer={"kvferry_engine_id": "0"})
    assert not backend.concurrent_handoff
    shaped(backend, {"kvferry_engine_id": str(MAX_PLACES)})


def test_each_start_has_an_engine_id_and_the_address_of_its_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "10.0.0.7")
    extra = {"transport": "tcp", "transport_options": {"bind_host": "{node_ip}", "port": 0}}
    backends = [KvferryBackend(Config(engine_id="mine", kv_connector_extra_config=extra)) for _ in range(2)]
    ids = set()
    for backend in backends:
        backend.setup()
        config = backend.kv_transfer_config
        assert config["kv_connector_extra_config"]["transport_options"] == {
            "bind_host": "10.0.0.7",
            "port": 0,
        }
        assert backend.replica_metadata() == {"kvferry_engine_id": config["engine_id"]}
        ids.add(config["engine_id"])
    assert len(ids) == 2
    assert all(each.startswith("mine-") for each in ids)
