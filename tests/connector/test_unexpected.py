"""Each call of the handoff thread raises an undocumented exception in turn: at most one request or peer is
affected.

Whenever it happens, two requests are in flight between different pairs of nodes, and others follow.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch

from kvferry.connector.handoff import node as handoff_node
from kvferry.connector.handoff.consumer import ConsumerProtocol
from kvferry.connector.handoff.producer import ProducerProtocol
from kvferry.connector.p2p import loop, worker
from kvferry.connector.p2p.computed import Mark
from kvferry.connector.p2p.outcomes import Outcomes
from kvferry.connector.testing import CacheShape, ModelFreeNode, Request, assert_whole, engine_config
from kvferry.connector.testing.harness import begin_load
from kvferry.transports.outside import bug_log, log_traceback

pytestmark = pytest.mark.usefixtures("short_backoffs")

#: Deadlines that even a busy machine meets.
OPTIONS: Mapping[str, object] = {
    **dict.fromkeys(("connect_timeout_s", "claim_timeout_s", "read_timeout_s"), 20.0),
    "lease_s": 3.0,
}
INJECTED = "injected by a test"

Pair = tuple[ModelFreeNode, ModelFreeNode]  # consumer, producer


def make_node(stack: ExitStack, *faults: Mapping[str, object], **options: object) -> ModelFreeNode:
    """A node whose transport has these faults."""
    transport = {"inner": "inproc", "faults": faults}
    config = engine_config(
        "FaultyConnector",
        kv_connector_module_path="kvferry.connector.testing",
        kv_connector_extra_config={**OPTIONS, **options, "transport_options": transport},
    )
    return stack.enter_context(ModelFreeNode(config, CacheShape()))


@contextmanager
def around(faulty: str, *faults: Mapping[str, object], **options: object) -> Iterator[list[Pair]]:
    """Two pairs of nodes. They share one node, which has the faults."""
    with ExitStack() as stack:
        middle = make_node(stack, *faults, **options)
        others = [make_node(stack, **options) for _ in range(2)]
        yield [(middle, other) if faulty == "consumer" else (other, middle) for other in others]


def raising(at: str, nth: int, kind: str = "raise") -> Mapping[str, object]:
    return {"kind": kind, "at": at, "nth": nth, "error": "ZeroDivisionError"}


def hand_over(pairs: Sequence[Pair], name: str) -> list[str]:
    """Hand one prompt over in each pair, all at the same time. Check the bytes of every load that succeeds.

    Returns:
        For each load, why it failed. Empty if it succeeded.
    """
    expected: list[torch.Tensor] = []
    tables: list[list[int]] = []
    requests: list[Request] = []
    nodes = {id(node): node for pair in pairs for node in pair}
    for number, (consumer, producer) in enumerate(pairs):
        offered, params = producer.prefill(f"{name}-p{number}", 9 + number, seed=number)
        producer.step()  # so that each request's orders come in a separate step
        expected.append(producer.contents(offered))
        requests.append(Request(f"{name}-d{number}", 9 + number, params))
        consumer.add(requests[-1], is_queued=True, computes=False)
        consumer.step()
    for (consumer, _), request in zip(pairs, requests, strict=True):
        consumer.start(request.request_id)
        consumer.step()
        tables.append(consumer.blocks_of(request.request_id))
    for (consumer, _), request in zip(pairs, requests, strict=True):
        consumer.step_until(
            lambda consumer=consumer, request=request: (
                consumer.num_reports(request.request_id, "recving") > 0
            ),  # type: ignore[misc]
            *nodes.values(),
        )
    errors = []
    for (consumer, _), request, table, right in zip(pairs, requests, tables, expected, strict=True):
        errors.append(consumer.load_error(request.request_id))
        if errors[-1]:
            assert set(table) <= consumer.invalid_block_ids
        else:
            assert torch.equal(consumer.contents(table), right)
        consumer.finish(request.request_id, "stop")
    for node in nodes.values():
        node.step_until(lambda node=node: not node.held, *nodes.values())  # type: ignore[misc]
    for (consumer, _), request in zip(pairs, requests, strict=True):
        assert consumer.num_reports(request.request_id, "recving") == 1
    for node in nodes.values():
        assert_whole(node)
    return errors


def assert_one_thing_ends(
    pairs: Sequence[Pair], caplog: pytest.LogCaptureFixture, num_ended: Sequence[int]
) -> None:
    """Hand over three times.

    Check that the expected number of loads fails, and that none fails in the last round.

    The log contains the exception, and no node reports that its handoff thread died.
    """
    first = hand_over(pairs, "first")
    second = hand_over(pairs, "second")
    assert len([error for error in first + second if error]) in num_ended, first + second
    assert not any(hand_over(pairs, "third"))
    assert "Traceback" in caplog.text
    assert INJECTED in caplog.text
    assert all(node.worker.failure == "" for pair in pairs for node in pair)


class TestTransport:
    """Each call to the transport and to its guards raises, at its first or at a later use."""

    @pytest.mark.parametrize("nth", [1, 3])
    @pytest.mark.parametrize(
        ("call", "num_ended"),
        [
            ("start_connect", [1]),
            ("send", [0, 1]),  # a release is sent after its load succeeded
            ("start_read", [1]),
            ("route_of", [0]),
            ("wait_events", [0]),
            ("wake", [0]),
        ],
    )
    def test_at_the_consumer(
        self, call: str, num_ended: list[int], nth: int, caplog: pytest.LogCaptureFixture
    ) -> None:
        if call == "start_connect":
            nth = min(nth, 2)  # there are only two connections, one to each peer
        with around("consumer", raising(call, nth)) as pairs:
            assert_one_thing_ends(pairs, caplog, num_ended)

    @pytest.mark.parametrize("nth", [1, 3])
    @pytest.mark.parametrize(
        ("call", "num_ended"),
        [
            ("send", [1]),
            ("set_guard", [1]),
            ("clear_guard", [0]),
            ("wait_events", [0]),
            ("wake", [0]),
        ],
    )
    def test_at_the_producer(
        self, call: str, num_ended: list[int], nth: int, caplog: pytest.LogCaptureFixture
    ) -> None:
        with around("producer", raising(call, nth)) as pairs:
            assert_one_thing_ends(pairs, caplog, num_ended)

    @pytest.mark.parametrize("faulty", ["consumer", "producer"])
    def test_a_peer_that_cannot_be_dropped(self, faulty: str, caplog: pytest.LogCaptureFixture) -> None:
        with around(faulty, raising("send", 2), raising("disconnect", 1)) as pairs:
            assert_one_thing_ends(pairs, caplog, [1])

    def test_a_read_that_began_although_its_start_raised(self, caplog: pytest.LogCaptureFixture) -> None:
        with around("consumer", raising("start_read", 1, "raise_late")) as pairs:
            assert_one_thing_ends(pairs, caplog, [1])

    def test_a_transport_that_cannot_be_closed(self, caplog: pytest.LogCaptureFixture) -> None:
        with around("consumer", raising("close", 1, "raise_late")) as pairs:
            assert not any(hand_over(pairs, "r"))
        assert INJECTED in caplog.text

    def test_a_repeated_exception_is_logged_once(self, caplog: pytest.LogCaptureFixture) -> None:
        with around("consumer", *(raising("wake", nth) for nth in range(1, 10))) as pairs:
            assert not any(hand_over(pairs, "r"))
        assert caplog.text.count("Traceback") == 1


#: Functions of this project that the thread calls: where each is looked up, its name, and how many loads may
#: fail.
CALLS: list[tuple[Any, str, list[int]]] = [
    (loop, "encode", [0, 1]),
    (handoff_node, "decode", [0, 1]),
    (ConsumerProtocol, "claim", [1]),
    (ConsumerProtocol, "load", [1]),
    (ConsumerProtocol, "connecting", [1]),
    (ConsumerProtocol, "peer_connected", [1]),
    (ConsumerProtocol, "receive", [0, 1]),
    (ConsumerProtocol, "read_ended", [1]),
    (ConsumerProtocol, "advance", [0]),
    (ConsumerProtocol, "next_deadline", [0]),
    (ProducerProtocol, "offer", [1]),
    (ProducerProtocol, "receive", [0, 1]),
    (ProducerProtocol, "advance", [0]),
    (Outcomes, "read_ended", [0]),
    (Outcomes, "offer_ended", [0]),
    (Outcomes, "load_ended", [0]),
]


def break_nth_call(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, nth: int) -> None:
    """Have a function raise once, when it is called for the nth time."""
    original: Callable[..., Any] = getattr(owner, name)
    lock, calls = threading.Lock(), [0]

    def broken(*args: Any, **kwargs: Any) -> Any:
        with lock:
            calls[0] += 1
            is_nth = calls[0] == nth
        if is_nth:
            raise ZeroDivisionError(INJECTED)
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, broken)


@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize(
    ("owner", "name", "num_ended"), CALLS, ids=lambda value: getattr(value, "__name__", None)
)
def test_functions_of_this_project(
    owner: Any,
    name: str,
    num_ended: list[int],
    nth: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with around("consumer") as pairs:
        break_nth_call(monkeypatch, owner, name, nth)
        if name == "peer_connected" and nth == 2:
            num_ended = [0, 1]  # may be the producer's side of a connection, which has no load
        assert_one_thing_ends(pairs, caplog, num_ended)


@pytest.mark.parametrize("faulty", ["consumer", "producer"])
@pytest.mark.parametrize("nth", [1, 2])
def test_a_gpu_whose_progress_cannot_be_queried(
    faulty: str, nth: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If it is unknown whether a step's blocks are written, none of them is handed over."""
    asked = []

    def has_run() -> bool:
        asked.append(True)
        if len(asked) == nth:
            raise ZeroDivisionError(INJECTED)
        return True

    with ExitStack() as stack:
        monkeypatch.setattr(worker, "mark_computed", lambda device: Mark(has_run, lambda: None))
        middle = make_node(stack)
        monkeypatch.undo()
        others = [make_node(stack) for _ in range(2)]
        pairs = [(middle, other) if faulty == "consumer" else (other, middle) for other in others]
        # The consumer's first two orders are claims, and the producer's first is an announcement: none
        # touches memory.
        assert_one_thing_ends(pairs, caplog, [0] if (faulty, nth) != ("producer", 2) else [1])


class TestTheThreadEnds:
    """If only its end makes the blocks safe to reuse, the thread ends with a message, and nothing waits for
    it.
    """

    def fail(self, pairs: Sequence[Pair]) -> list[str]:
        consumer, producer = pairs[0]
        _, params = producer.prefill("p", 9)
        producer.step()
        request = Request("d", 9, params)
        table = begin_load(consumer, request)
        consumer.step_until(lambda: consumer.num_reports("d", "recving") > 0, producer)
        consumer.finish(request.request_id, "error" if consumer.load_error("d") else "stop")
        return table

    def test_if_a_guard_cannot_be_cleared_its_blocks_stay_held(self) -> None:
        with around("producer", *(raising("clear_guard", nth) for nth in range(1, 5000))) as pairs:
            self.fail(pairs)
            consumer, producer = pairs[0]
            producer.step_until(lambda: producer.worker.failure != "", consumer)
            for _ in range(5):
                producer.step()
            # The guard still holds, so peers would accept whatever is written there next.
            assert producer.held
            assert consumer.worker.failure == ""


def test_repeats_are_counted_not_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    log = bug_log(logging.getLogger(__name__))
    for second in (0.0, 1.0, 59.0, 60.0, 61.0):
        now = second
        log_traceback(ZeroDivisionError(INJECTED), "one call failed", log)
        log_traceback(ZeroDivisionError(INJECTED), f"call {second} failed", log)
    said = [text.splitlines()[0] for text in caplog.messages if "one call" in text or "suppressed" in text]
    line = "one call failed:"
    assert said == [line, "suppressed 2 more lines of this kind; at most 1 are logged per 60 s", line]
