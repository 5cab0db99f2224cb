"""Faults in the transport: each load is reported once, its bytes are right or it fails, and nothing leaks."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch

from kvferry.connector.testing import CacheShape, ModelFreeNode, Request, engine_config
from tests.support.gpu_pools import GpuPools

pytestmark = pytest.mark.usefixtures("short_backoffs")

NUM_LOADS = 4
MAX_TURNS = 6

#: `DEADLINES` are short, because tests wait until they expire. `PATIENT` ones expire only on a machine that
#: is too busy.
DEADLINES = {
    "lease_s": 0.4,
    "connect_timeout_s": 1.0,
    "claim_timeout_s": 0.6,
    "read_timeout_s": 0.4,
}
PATIENT = {
    **dict.fromkeys(("connect_timeout_s", "claim_timeout_s", "read_timeout_s", "lease_s"), 20.0),
}

Fault = Mapping[str, object]

AT_THE_CONSUMER: list[Fault] = [
    *({"kind": "drop", "at": "message", "nth": nth} for nth in (1, 2, 4, 6)),
    *({"kind": "stall", "at": "message", "nth": nth} for nth in (1, 3)),
    *({"kind": "drop", "nth": nth} for nth in (1, 4)),
    *({"kind": "corrupt", "nth": nth} for nth in (1, 4)),
    {"kind": "stall", "nth": 2},
    *(
        {"kind": "fail", "nth": 2, "error": error}
        for error in (
            "StaleRegionError",
            "TransferTimeoutError",
            "PeerLostError",
            "RegionError",
            "TransportError",
        )
    ),
]
AT_THE_PRODUCER: list[Fault] = [
    {"kind": kind, "at": "message", "nth": nth} for kind in ("drop", "stall") for nth in (1, 2, 5)
]


@contextmanager
def pair(
    consumer: Mapping[str, object], producer: Mapping[str, object], deadlines: Mapping[str, float] = DEADLINES
) -> Iterator[tuple[ModelFreeNode, ModelFreeNode]]:
    """Make a consumer and a producer whose transports have these options."""
    with ExitStack() as stack:

        def make(transport: Mapping[str, object]) -> ModelFreeNode:
            options: dict[str, Any] = {**deadlines, "transport_options": transport}
            config = engine_config(
                "FaultyConnector",
                kv_connector_module_path="kvferry.connector.testing",
                kv_connector_extra_config=options,
            )
            return stack.enter_context(ModelFreeNode(config, CacheShape()))

        yield make(consumer), make(producer)


def hand_over(consumer: ModelFreeNode, producer: ModelFreeNode) -> list[str]:
    """Hand several prompts over at once, and check that every promise about them holds.

    Returns:
        For each load, why it failed. Empty if it succeeded.
    """
    expected, requests = [], []
    for number in range(NUM_LOADS):
        offered, params = producer.prefill(f"p{number}", 9 + number, seed=number)
        expected.append(producer.contents(offered))
        requests.append(Request(f"d{number}", 9 + number, params))
        consumer.add(requests[-1], computes=False)
    names = [request.request_id for request in requests]
    consumer.step_until(lambda: all(consumer.num_reports(name, "recving") for name in names), producer)
    errors = [consumer.load_error(name) for name in names]
    blocks = [consumer.blocks_of(name) for name in names]
    for table, right, error in zip(blocks, expected, errors, strict=True):
        if error:
            assert set(table) <= consumer.invalid_block_ids
        else:
            assert torch.equal(consumer.contents(table), right)
    for name in names:
        consumer.finish(name, "stop")
    producer.step_until(lambda: not producer.held, consumer)
    for _ in range(5):
        consumer.step()
        producer.step()
    assert [consumer.num_reports(name, "recving") for name in names] == [1] * NUM_LOADS
    for node in (consumer, producer):
        assert sorted(node.pool.free_blocks) == list(range(1, node.shape.num_blocks))
    return errors


def named(fault: Fault) -> str:
    return " ".join(str(value) for value in fault.values())


@pytest.mark.parametrize("fault", AT_THE_CONSUMER, ids=named)
def test_a_fault_at_the_consumer(fault: Fault) -> None:
    with pair({"faults": [fault]}, {}) as (consumer, producer):
        errors = hand_over(consumer, producer)
    if fault.get("at") != "message":
        assert any(errors)  # every fault of a read fails its load


@pytest.mark.parametrize("fault", AT_THE_PRODUCER, ids=named)
def test_a_fault_at_the_producer(fault: Fault) -> None:
    with pair({}, {"faults": [fault]}) as (consumer, producer):
        hand_over(consumer, producer)


@pytest.mark.parametrize(
    "fault",
    # The CPU cannot corrupt bytes of a GPU. Of five errors that end a read in the same way, one will do.
    [
        fault
        for fault in AT_THE_CONSUMER
        if fault.get("at") != "message"
        and fault["kind"] != "corrupt"
        and fault.get("error") in (None, "RegionError")
    ],
    ids=named,
)
def test_a_fault_of_a_read_between_gpus(gpu_pools: GpuPools, fault: Fault) -> None:
    with pair({"inner": "zeromq", "faults": [fault]}, {"inner": "zeromq"}) as nodes:
        assert any(hand_over(*nodes))


@pytest.mark.parametrize("seed", range(3))
def test_a_late_network_delivers_right_bytes(seed: int) -> None:
    late = {"inner": "delayed", "options": {"seed": seed, "max_turns": MAX_TURNS}}
    with pair(late, late, {**DEADLINES, **PATIENT}) as nodes:
        assert hand_over(*nodes) == [""] * NUM_LOADS


@pytest.mark.parametrize("seed", range(4))
def test_several_faults_on_a_late_network(seed: int) -> None:
    random_faults = random.Random(seed)

    def options() -> dict[str, object]:
        return {
            "inner": "delayed",
            "options": {"seed": seed, "max_turns": MAX_TURNS},
            "faults": random_faults.sample(AT_THE_CONSUMER, 3),
        }

    with pair(options(), options()) as nodes:
        hand_over(*nodes)


def test_a_pair_recovers_after_its_faults() -> None:
    with pair({"faults": [{"kind": "drop", "nth": 1}]}, {}, {**DEADLINES, **PATIENT}) as nodes:
        assert any(hand_over(*nodes))
        assert not any(_again(*nodes))


def _again(consumer: ModelFreeNode, producer: ModelFreeNode) -> list[str]:
    consumer.outputs.clear()
    producer.outputs.clear()
    return hand_over(consumer, producer)
