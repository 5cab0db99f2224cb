"""Part of the suite for any connector (see `suite`): how its two halves work together, and with the
engine.
"""

from __future__ import annotations

import pickle

from ...transports.errors import ConfigurationError
from ..base import KVConnectorRole, SchedulerHalf, WorkerHalf
from ..factory import KVConnectorFactory
from .broken import BrokenPromiseError, promise
from .harness import PER_LAYER, MakeNode, compute, eventually, finish, num_whole_blocks
from .shapes import Request, Step


class ConnectorPromises:
    """The two halves agree, survive any order of calls, and refuse what they cannot do."""

    def test_asking_changes_nothing(self, make_node: MakeNode) -> None:
        producer, consumer = make_node(PER_LAYER), make_node(PER_LAYER)
        params = compute(producer, Request("p", 18))
        request, ask = Request("d", 18, params), consumer.scheduler.get_num_new_matched_tokens
        consumer.add(request, is_queued=True)
        wanted = num_whole_blocks(PER_LAYER, 18)
        eventually(
            "a prompt that one node computed can be loaded by another in the end",
            lambda: (ask(request, 0)[0] or 0) >= wanted,
            consumer,
            producer,
        )
        answers = [ask(request, num_here) for num_here in (0, 0, 8, 4, 0)]
        num_tokens = answers[0][0] or 0
        promise(
            "get_num_new_matched_tokens has no side effects: the same question has the same answer, and each token that "
            "the node has itself is one less to load",
            kept=[num for num, _ in answers] == [num_tokens - num_here for num_here in (0, 0, 8, 4, 0)],
            seen=f"asked with 0, 0, 8, 4 and 0 tokens that the node has, it answered {answers}",
        )
        consumer.start("d")
        finish(consumer, "d", producer)
        ordered = consumer.num_loaded_tokens.get("d", 0)
        promise(
            "asking changes nothing", kept=ordered == num_tokens, seen=f"{num_tokens} tokens became {ordered}"
        )

    def test_orders_may_travel_between_processes(self, make_node: MakeNode) -> None:
        producer, consumer = make_node(PER_LAYER), make_node(PER_LAYER)
        params = compute(producer, Request("p", 18))
        request = Request("d", 18, params)
        consumer.scheduler.on_new_request(request)
        consumer.scheduler.get_num_new_matched_tokens(request, 0)
        for node in (producer, consumer):
            orders = node.scheduler.build_connector_meta(Step())
            copy = pickle.loads(pickle.dumps(orders))
            promise(
                "orders can be sent to another process and are equal there",
                # A set may come out of a pickle in another order, and orders need not know when they are
                # equal.
                kept=type(copy) is type(orders)
                and (copy == orders or pickle.dumps(copy) == pickle.dumps(pickle.loads(pickle.dumps(copy)))),
                seen=f"{orders!r} became {copy!r}",
            )

    def test_a_node_without_requests_reports_nothing(self, make_node: MakeNode) -> None:
        node = make_node(PER_LAYER)
        for _ in range(5):
            output = node.step()
            promise("a step without transfers reports nothing", kept=output.is_empty(), seen=output)
        events = list(node.events)
        promise("nothing happens to the cache of a node without requests", kept=not events, seen=events)

    def test_an_unknown_option_is_named(self, make_node: MakeNode) -> None:
        error: Exception | None = None
        try:
            make_node(PER_LAYER, options={"no_such_option": 1})
        except Exception as raised:  # noqa: BLE001 - any other error is part of the message
            error = raised
        promise(
            "an unknown option is refused with a ConfigurationError that names it",
            kept=isinstance(error, ConfigurationError) and "no_such_option" in str(error),
            seen="the connector was made" if error is None else repr(error),
        )

    def test_shutting_down_is_harmless_at_any_time(self, make_node: MakeNode) -> None:
        node = make_node(PER_LAYER)
        node.prefill("p", 18)
        for role in KVConnectorRole:
            fresh = KVConnectorFactory.create_connector(node.config, role, node.kv_cache_config)
            _shut_down(fresh, f"before anything was registered, as {role}")
        for half in (node.worker, node.scheduler):
            _shut_down(half, "once")
            _shut_down(half, "twice")


def _shut_down(half: SchedulerHalf | WorkerHalf, when: str) -> None:
    try:
        half.shutdown()
    except Exception as error:
        raise BrokenPromiseError(
            "a half can be shut down at any time, and twice",
            f"shutting down a {type(half).__name__} {when} raised {error!r}",
        ) from error
