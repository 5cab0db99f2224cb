"""A node that asks to be pushed to gets the same bytes, written by the producer; and nobody writes when it is over."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from importlib.util import find_spec
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from kvferry.connector.handoff.messages import (
    PROTOCOL_VERSION,
    Claim,
    Grant,
    Hello,
    Message,
    NotWritten,
    Reserve,
    Welcome,
    decode,
    encode,
)
from kvferry.connector.testing import CacheShape, ModelFreeNode, Request, engine_config
from kvferry.transports.base import MessageReceived
from kvferry.transports.inproc import InProcTransport
from kvferry.transports.regions import Pool
from kvferry.transports.registry import register_transport
from tests.support.client import is_stopped

UNIFORM = CacheShape()
PER_LAYER = replace(UNIFORM, layout="per-layer")
PUSH = {"transfer": "push"}
NUM_TOKENS = 14
DEADLINE_S = 20.0
#: Short where a fault is waited out; long where only a busy machine would be late.
DEADLINES = {
    "lease_s": 2.0,
    "heartbeat_s": 0.1,
    "read_timeout_s": 0.5,
    "backoff_s": 0.02,
    "max_backoff_s": 0.1,
}

UCX = pytest.param("ucx", marks=pytest.mark.skipif(find_spec("ucxx") is None, reason="ucxx is not installed"))
MakeNode = Callable[..., ModelFreeNode]


class ReadsOnly(InProcTransport):
    """A transport that cannot write."""

    scheme = "reads-only"

    def can_write(self, peer_id: int) -> bool:
        return False


register_transport("reads-only", f"{__name__}:ReadsOnly")


@pytest.fixture
def make_node() -> Iterator[MakeNode]:
    """Makes nodes, over a scheme, that are shut down after the test."""
    with ExitStack() as stack:

        def make(
            scheme: str, shape: CacheShape = UNIFORM, options: dict[str, Any] | None = None, **fields: Any
        ) -> ModelFreeNode:
            config = engine_config(
                scheme, block_size=shape.block_size, kv_connector_extra_config=options or {}, **fields
            )
            return stack.enter_context(ModelFreeNode(config, shape))

        yield make


@pytest.fixture
def make_faulty(make_node: MakeNode) -> MakeNode:
    """Makes nodes whose transports go wrong as told."""

    def make(*faults: dict[str, object]) -> ModelFreeNode:
        options = {**DEADLINES, **PUSH, "transport": {"faults": list(faults)}}
        module = "kvferry.connector.testing"
        return make_node("FaultyConnector", options=options, kv_connector_module_path=module)

    return make


def start_load(consumer: ModelFreeNode, params: dict[str, Any] | None, name: str = "d") -> list[int]:
    request = Request(name, NUM_TOKENS, params)
    consumer.scheduler.on_new_request(request)
    blocks, num_tokens = consumer.start_load(request)
    assert num_tokens == NUM_TOKENS
    return blocks


def is_reported(consumer: ModelFreeNode, name: str = "d") -> Callable[[], bool]:
    return lambda: consumer.num_reports(name, "recving") > 0


@pytest.mark.parametrize("scheme", ["inproc", "shm", "zeromq", UCX, "auto"])
@pytest.mark.parametrize("shapes", [(UNIFORM, UNIFORM), (PER_LAYER, UNIFORM)], ids=["alike", "unlike"])
def test_the_bytes_arrive(make_node: MakeNode, scheme: str, shapes: tuple[CacheShape, CacheShape]) -> None:
    producer, consumer = make_node(scheme, shapes[0]), make_node(scheme, shapes[1], PUSH)
    for number in range(3):  # guards and blocks are used again
        offered, params = producer.prefill(f"p{number}", NUM_TOKENS, seed=number)
        expected = producer.contents(offered)
        blocks = start_load(consumer, params, f"d{number}")
        consumer.step_until(is_reported(consumer, f"d{number}"), producer)
        assert consumer.load_error(f"d{number}") == ""
        assert torch.equal(consumer.contents(blocks), expected)
        consumer.finish(Request(f"d{number}", NUM_TOKENS), blocks, "stop")
    producer.step_until(lambda: not producer.held, consumer)
    for record in consumer.stats.transfers:
        assert record.mechanism.startswith("push/")
        assert record.num_bytes == expected.numel() * expected.element_size()
        assert record.seconds > 0
    assert producer.stats.counters["offers_delivered_total"] == 3


def test_nodes_with_other_block_sizes_push_too(make_node: MakeNode) -> None:
    producer = make_node("inproc")
    consumer = make_node("inproc", replace(UNIFORM, block_size=8), PUSH)
    offered, params = producer.prefill("p", NUM_TOKENS, seed=3)
    blocks = start_load(consumer, params)
    consumer.step_until(is_reported(consumer), producer)
    theirs = producer.contents(offered).transpose(1, 2).flatten(2, 3)
    ours = consumer.contents(blocks).transpose(1, 2).flatten(2, 3)
    assert torch.equal(ours[:, :, :NUM_TOKENS], theirs[:, :, :NUM_TOKENS])
    assert consumer.stats.transfers[0].mechanism.startswith("push/")


def test_one_node_may_push_while_the_other_reads(make_node: MakeNode) -> None:
    nodes = make_node("shm"), make_node("shm", options=PUSH)
    for producer, consumer in (nodes, nodes[::-1]):
        offered, params = producer.prefill("p", NUM_TOKENS, seed=4)
        blocks = start_load(consumer, params)
        consumer.step_until(is_reported(consumer), producer)
        assert torch.equal(consumer.contents(blocks), producer.contents(offered))
    mechanisms = [node.stats.transfers[0].mechanism for node in nodes]
    assert mechanisms == ["mapped", "push/mapped"]


def test_where_nobody_can_write_it_is_read_and_the_record_says_why(make_node: MakeNode) -> None:
    options = {**PUSH, "transport": {"inner": "reads-only"}}
    nodes = [
        make_node("FaultyConnector", options=options, kv_connector_module_path="kvferry.connector.testing")
        for _ in range(2)
    ]
    offered, params = nodes[0].prefill("p", NUM_TOKENS, seed=5)
    blocks = start_load(nodes[1], params)
    nodes[1].step_until(is_reported(nodes[1]), nodes[0])
    assert torch.equal(nodes[1].contents(blocks), nodes[0].contents(offered))
    (record,) = nodes[1].stats.transfers
    assert "push" not in record.mechanism
    assert "push was asked for, pulled: the transport does not write" in record.reason


#: What can befall the producer's write, and whether the load can end well all the same.
FAULTS: list[dict[str, object]] = [
    {"kind": "drop"},
    {"kind": "stall"},
    {"kind": "fail", "error": "StaleRegionError"},
    {"kind": "fail", "error": "TransferTimeoutError"},
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: " ".join(map(str, fault.values())))
def test_a_write_that_goes_wrong_fails_its_load_once(make_faulty: MakeNode, fault: dict[str, object]) -> None:
    producer, consumer = make_faulty(fault), make_faulty()
    _, params = producer.prefill("p", NUM_TOKENS)
    blocks = start_load(consumer, params)
    consumer.step_until(is_reported(consumer), producer)
    assert consumer.load_error("d")
    assert consumer.invalid_block_ids == set(blocks)
    producer.step_until(lambda: not producer.held, consumer)
    assert consumer.num_reports("d", "recving") == producer.num_reports("p", "sending") == 1


def test_a_load_that_is_aborted_while_it_is_written_drains(make_faulty: MakeNode) -> None:
    producer, consumer = make_faulty({"kind": "stall"}), make_faulty()
    offered, params = producer.prefill("p", NUM_TOKENS)
    blocks = start_load(consumer, params)
    right = producer.contents(offered)
    consumer.step_until(lambda: torch.equal(consumer.contents(blocks), right), producer)
    assert not is_reported(consumer)()  # all is there, but nobody has said so
    consumer.finish(Request("d", NUM_TOKENS, params), blocks, "abort")
    consumer.step_until(is_reported(consumer), producer)
    assert not consumer.invalid_block_ids
    producer.step_until(lambda: not producer.held, consumer)
    for _ in range(3):
        consumer.step()
    assert consumer.num_reports("d", "recving") == 1


def test_a_producer_that_shuts_down_while_it_writes(make_node: MakeNode, make_faulty: MakeNode) -> None:
    consumer = make_faulty()
    options = {**DEADLINES, "read_timeout_s": 20.0, "transport": {"faults": [{"kind": "stall"}]}}
    config = engine_config(
        "FaultyConnector",
        kv_connector_module_path="kvferry.connector.testing",
        kv_connector_extra_config=options,
    )
    with ModelFreeNode(config, UNIFORM) as producer:
        offered, params = producer.prefill("p", NUM_TOKENS)
        blocks, right = start_load(consumer, params), producer.contents(offered)
        consumer.step_until(lambda: torch.equal(consumer.contents(blocks), right), producer)
    consumer.step_until(is_reported(consumer))
    assert consumer.load_error("d")
    assert consumer.num_reports("d", "recving") == 1


# -- a consumer that asks for what it must not have --------------------------------------------------


def ask(transport: InProcTransport, producer: ModelFreeNode, peer_id: int, *messages: Message) -> Message:
    """Send messages; return the next one that comes."""
    for message in messages:
        transport.send(peer_id, encode(message))
    answers: list[Message] = []

    def has_answer() -> bool:
        events = transport.wait_events(0.01)
        answers.extend(decode(event.message) for event in events if isinstance(event, MessageReceived))
        return bool(answers)

    producer.step_until(has_answer)
    return answers[0]


@pytest.fixture
def stranger() -> Iterator[InProcTransport]:
    transport = InProcTransport()
    arena = transport.allocate(4096)
    transport.register(Pool([arena.segment]))
    yield transport
    transport.close()


def test_a_reservation_that_cannot_be_written_is_answered(
    make_node: MakeNode, stranger: InProcTransport
) -> None:
    producer = make_node("inproc")
    _, params = producer.prefill("p", NUM_TOKENS)
    assert params is not None
    producer.step()
    lease = int(params["remote_lease"], 16)
    peer_id = stranger.start_connect(params["remote_addresses"][0], timeout_s=DEADLINE_S)
    assert isinstance(ask(stranger, producer, peer_id, Hello(PROTOCOL_VERSION, "stranger", 1, "")), Welcome)
    grant = ask(stranger, producer, peer_id, Claim(params["remote_request_id"], lease, 0, 1))
    assert isinstance(grant, Grant)
    whole = Reserve(grant.request_id, lease, 0, 5, 500, (0,), (0,), (64,))
    for reserve in (
        replace(whole, sources=(2**60,)),
        replace(whole, targets=(4090,)),
        replace(whole, guard_index=2**31 - 1),
        whole,  # within both pools, but nobody accepts it
    ):
        assert isinstance(ask(stranger, producer, peer_id, reserve), NotWritten)
    stranger.disconnect(peer_id)
    producer.step_until(lambda: not producer.held)


# -- killed processes --------------------------------------------------------------------------------


def produce(pipe: Connection) -> None:
    """A producer in a process of its own, which offers one prompt and stops in the middle of writing it."""
    torch.set_num_threads(1)
    config = engine_config(
        "StoppingConnector",
        kv_connector_module_path="kvferry.connector.testing",
        kv_connector_extra_config={"transport": {"inner": "shm"}},
    )
    with ModelFreeNode(config, UNIFORM) as node:
        _, params = node.prefill("p", NUM_TOKENS, seed=6)
        node.step()
        pipe.send(params)
        while not pipe.poll(0.001):
            node.step()


@pytest.mark.slow
def test_a_producer_that_is_killed_while_it_writes(make_node: MakeNode) -> None:
    consumer = make_node("shm", options=PUSH)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=produce, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    try:
        assert ours.poll(60)
        blocks = start_load(consumer, ours.recv())
        pid = process.pid
        assert pid is not None
        consumer.step_until(lambda: is_stopped(pid))
        os.kill(pid, signal.SIGKILL)
        consumer.step_until(is_reported(consumer))
        after = consumer.contents(blocks)
        for _ in range(20):
            consumer.step()
        assert torch.equal(consumer.contents(blocks), after)
        assert consumer.num_reports("d", "recving") == 1
        assert consumer.invalid_block_ids == set(blocks)
        # The last third of a region was still to be written; of the rest as much as got here.
        elsewhere = [1, 2, 3, 4]
        consumer.fill(elsewhere, seed=6)
        share = (after == consumer.contents(elsewhere)).float().mean().item()
        assert 0.3 < share < 0.7
    finally:
        process.kill()
        process.join(DEADLINE_S)
        process.close()
        ours.close()
