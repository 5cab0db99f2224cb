"""Several connectors in one: which child loads, which children hold blocks, and that each end is reported once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvferry.connector import KVConnectorOutput, KVConnectorRole, MultiConnector
from kvferry.connector.base import KVConnectorMetadata, SchedulerHalf, WorkerHalf
from kvferry.connector.errors import ConnectorError, InvalidTransferParamsError
from kvferry.connector.multi.accounting import Ledger, MultiMetadata, OwedReports
from kvferry.connector.multi.scheduler import MultiScheduler
from kvferry.connector.multi.worker import MultiWorker
from kvferry.connector.testing import (
    CacheShape,
    ModelFreeNode,
    Request,
    assert_whole,
    engine_config,
    load,
)
from kvferry.connector.testing.node import Step
from kvferry.transports.errors import ConfigurationError

SHM, ZEROMQ = {"kv_connector": "shm"}, {"kv_connector": "zeromq"}
SHORT_LEASE = {"lease_s": 0.3}
OFFER = {"do_remote_decode": True}

MakeNode = Callable[..., ModelFreeNode]


@pytest.fixture
def make_node() -> Iterator[MakeNode]:
    """Make nodes with these children, or with another connector."""
    with ExitStack() as stack:

        def make(*children: dict[str, Any], connector: str = "MultiConnector") -> ModelFreeNode:
            options = {"connectors": list(children)} if children else {}
            config = engine_config(connector, kv_connector_extra_config=options)
            return stack.enter_context(ModelFreeNode(config, CacheShape()))

        yield make


def make_scheduler(*children: dict[str, Any], **more: Any) -> MultiConnector:
    options = {"connectors": list(children), **more}
    config = engine_config("MultiConnector", kv_connector_extra_config=options)
    return MultiConnector(config, KVConnectorRole.SCHEDULER, CacheShape().kv_cache_config())


class TestHandoff:
    @pytest.mark.parametrize(("first", "second"), [(SHM, ZEROMQ), (ZEROMQ, SHM)], ids=["shm", "zeromq"])
    def test_the_first_child_loads_and_all_release_the_blocks(
        self, make_node: MakeNode, first: dict[str, Any], second: dict[str, Any]
    ) -> None:
        producer, consumer = make_node(first, second), make_node(first, second)
        offered, params = producer.prefill("p", 10, seed=1)
        expected = producer.contents(offered)
        request = Request("d", 10, params)
        blocks = load(consumer, producer, request)
        assert torch.equal(consumer.contents(blocks), expected)
        producer.step_until(lambda: not producer.held, consumer)
        consumer.finish(request, blocks, "stop")
        assert [record.transport for record in consumer.stats.transfers] == [first["kv_connector"]]
        assert (consumer.num_reports("d", "recving"), producer.num_reports("p", "sending")) == (1, 1)
        assert producer.stats.counters == {"offers_delivered_total": 1, "offers_aborted_total": 1}
        assert_whole(producer)
        assert_whole(consumer)

    def test_blocks_are_held_until_the_last_child_releases_them(self, make_node: MakeNode) -> None:
        slow = {**ZEROMQ, "kv_connector_extra_config": SHORT_LEASE}
        producer, consumer = make_node(SHM, slow), make_node(connector="shm")
        _, params = producer.prefill("p", 10)
        load(consumer, producer, Request("d", 10, params))
        producer.step_until(lambda: not producer.held, consumer)
        # The consumer does not use zeromq, so that child's offer ends with its lease.
        assert producer.stats.counters == {"offers_delivered_total": 1, "offers_expired_total": 1}
        assert producer.num_reports("p", "sending") == 1

    @pytest.mark.parametrize("connector", ["shm", "zeromq"])
    def test_a_producer_with_one_connector_is_read_by_the_child_of_that_kind(
        self, make_node: MakeNode, connector: str
    ) -> None:
        producer, consumer = make_node(connector=connector), make_node(SHM, ZEROMQ)
        offered, params = producer.prefill("p", 10, seed=2)
        expected = producer.contents(offered)
        blocks = load(consumer, producer, Request("d", 10, params))
        assert torch.equal(consumer.contents(blocks), expected)
        assert [record.transport for record in consumer.stats.transfers] == [connector]

    def test_params_that_no_child_can_read_fail_the_load_by_name(self, make_node: MakeNode) -> None:
        producer, consumer = make_node(connector="zeromq"), make_node(SHM)
        _, params = producer.prefill("p", 10)
        blocks = load(consumer, producer, Request("d", 10, params))
        assert "zeromq://" in consumer.load_error("d")
        assert consumer.invalid_block_ids == set(blocks)

    def test_an_aborted_request_frees_every_offer(self, make_node: MakeNode) -> None:
        producer, consumer = make_node(SHM, ZEROMQ), make_node(SHM, ZEROMQ)
        _, params = producer.prefill("p", 10)
        request = Request("d", 10, params)
        consumer.scheduler.on_new_request(request)
        consumer.step()
        consumer.finish(request, [], "abort")
        producer.step_until(lambda: not producer.held, consumer)
        assert producer.num_reports("p", "sending") == 1


class TestParams:
    def test_each_child_has_a_section_and_the_first_is_also_at_the_top_level(
        self, make_node: MakeNode
    ) -> None:
        _, params = make_node(SHM, {**ZEROMQ, "name": "net"}).prefill("p", 10)
        assert params is not None
        sections = params.pop("connectors")
        assert list(sections) == ["SharedMemoryConnector", "net"]
        assert sections["SharedMemoryConnector"] == params
        assert sections["net"]["remote_addresses"][0].startswith("zeromq://")

    @pytest.mark.parametrize("sections", [7, ["shm"], {"SharedMemoryConnector": "x"}])
    def test_malformed_sections_are_refused_by_name(self, sections: Any) -> None:
        scheduler = make_scheduler(SHM)
        with pytest.raises(InvalidTransferParamsError, match="connectors"):
            scheduler.on_new_request(Request("d", 10, {"do_remote_prefill": True, "connectors": sections}))

    def test_a_refused_request_leaves_nothing_with_the_children_asked_before(
        self, make_node: MakeNode
    ) -> None:
        producer, consumer = make_node(SHM, ZEROMQ), make_node(SHM, ZEROMQ)
        _, params = producer.prefill("p", 10)
        assert params is not None
        sections = params["connectors"]
        broken = {**params, "connectors": {**sections, "ZeroMQConnector": {"do_remote_prefill": 1}}}
        with pytest.raises(InvalidTransferParamsError, match="do_remote_prefill"):
            consumer.scheduler.on_new_request(Request("d", 10, broken))
        consumer.step()
        request = Request("d", 10, params)
        assert consumer.load_error("d") == ""
        consumer.scheduler.on_new_request(request)  # the id is free again

    def test_an_id_in_use_is_refused(self) -> None:
        scheduler = make_scheduler(SHM)
        scheduler.on_new_request(Request("d", 10))
        with pytest.raises(ConnectorError, match="in use"):
            scheduler.on_new_request(Request("d", 10))


class TestOptions:
    @pytest.mark.parametrize(
        ("connectors", "named"),
        [
            ((), "at least one"),
            (("shm",), "must be a mapping"),
            (({},), "kv_connector"),
            (({"kv_connector": "shm", "colour": 1},), "colour"),
            (({"kv_connector": "shm", "kv_connector_extra_config": 1},), "kv_connector_extra_config"),
            (({"kv_connector": "shm", "kv_connector_extra_config": {"wings": 2}},), "wings"),
            (({"kv_connector": "pigeon"},), "pigeon"),
            ((SHM, SHM), "two children"),
        ],
    )
    def test_bad_children_are_named(self, connectors: tuple[Any, ...], named: str) -> None:
        with pytest.raises(ConfigurationError, match=named):
            make_scheduler(*connectors)

    def test_unknown_options_are_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="lease_s"):
            make_scheduler(SHM, lease_s=3)

    def test_a_child_that_cannot_start_closes_the_others(self) -> None:
        bad = {**ZEROMQ, "kv_connector_extra_config": {"transport_options": {"wings": 2}}}
        config = engine_config("MultiConnector", kv_connector_extra_config={"connectors": [SHM, bad]})
        with pytest.raises(ConfigurationError, match="wings"):  # the leak checks cover the rest
            MultiConnector(config, KVConnectorRole.WORKER, CacheShape().kv_cache_config())


NAMES = ["a", "b", "c"]
REQUESTS = ["r1", "r2", "r3"]
REPORTS = st.lists(
    st.tuples(
        st.sampled_from(NAMES),
        st.sets(st.sampled_from([*REQUESTS, "stranger"])),
        st.sets(st.sampled_from([*REQUESTS, "stranger"])),
    ),
    max_size=30,
)


class TestExactlyOnce:
    """Each end is passed on once and not too early, even if children report twice, late, early or for other requests."""

    @given(
        loads=st.dictionaries(st.sampled_from(REQUESTS), st.sampled_from(NAMES)),
        holds=st.dictionaries(st.sampled_from(REQUESTS), st.frozensets(st.sampled_from(NAMES), min_size=1)),
        reports=REPORTS,
    )
    def test_by_random_reports(
        self,
        loads: dict[str, str],
        holds: dict[str, frozenset[str]],
        reports: list[tuple[str, set[str], set[str]]],
    ) -> None:
        ledger, owed = Ledger(), OwedReports()
        for request_id, name in loads.items():
            ledger.load(request_id, name)
        for request_id, names in holds.items():
            ledger.hold(request_id, names)
        owed.expect(ledger.take_metadata({}))
        sent: Counter[str] = Counter()
        received: Counter[str] = Counter()
        said: dict[str, set[str]] = {request_id: set() for request_id in [*REQUESTS, "stranger"]}
        for name, sending, recving in reports:
            for request_id in sending:
                said[request_id].add(name)
            output = KVConnectorOutput(owed.finish_sending(name, sending), owed.finish_recving(name, recving))
            sent.update(output.finished_sending)
            received.update(output.finished_recving)
            for request_id in output.finished_sending:
                assert holds[request_id] <= said[request_id]
                assert all(
                    request_id in ledger.share_of(n, output).finished_sending for n in holds[request_id]
                )
            for request_id in output.finished_recving:
                assert loads[request_id] == name
            ledger.settle(output)
        assert max(sent.values(), default=1) == max(received.values(), default=1) == 1
        assert sent.keys() == {r for r, names in holds.items() if names <= said[r]}
        open_ends = (holds.keys() - sent.keys()) | (loads.keys() - received.keys())
        assert {request_id for request_id in REQUESTS if request_id in ledger} == open_ends
        assert owed.num_owed == len(holds) - len(sent) + len(loads) - len(received)


class Child(WorkerHalf, SchedulerHalf):
    """Both halves; the next call of one of its methods raises, if a test says so."""

    def __init__(self) -> None:
        self.is_broken = False
        self.calls: list[str] = []

    def note(self, call: str) -> None:
        self.calls.append(call)
        if self.is_broken:
            self.is_broken = False
            raise OSError("disk full")

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        self.note("bind")
        super().bind_connector_metadata(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self.note("start_load_kv")

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        self.note("get_finished")
        return set(), {"r"}

    def take_load_errors(self) -> dict[str, str]:
        self.note("take_load_errors")
        return {"r": "gone"}

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, block_ids: Any, num_external_tokens: int) -> None:
        """Nothing is to be loaded."""

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        self.note("build")
        return KVConnectorMetadata()


class TestAChildRaises:
    """It does not keep the others from their orders, and their reports are not lost."""

    def test_in_the_worker_half(self) -> None:
        sound, broken = Child(), Child()
        worker = MultiWorker({"sound": sound, "broken": broken, "last": Child()})
        metadata = MultiMetadata(dict.fromkeys(worker.children, KVConnectorMetadata()), {"r": "sound"}, {})
        broken.is_broken = True
        with pytest.raises(OSError, match="disk full"):
            worker.bind_connector_metadata(metadata)
        worker.start_load_kv(None)
        assert [child.calls[1:] for child in worker.children.values()] == [  # type: ignore[attr-defined]
            ["start_load_kv"],
            [],
            ["start_load_kv"],
        ]
        for take, answer in (
            (lambda: worker.get_finished(set()), (set(), {"r"})),
            (worker.take_load_errors, {"r": "gone"}),
        ):
            broken.is_broken = True
            with pytest.raises(OSError, match="disk full"):
                take()
            assert take() == answer

    def test_in_the_scheduler_half(self) -> None:
        sound, broken = Child(), Child()
        scheduler = MultiScheduler({"sound": sound, "broken": broken})
        broken.is_broken = True
        with pytest.raises(OSError, match="disk full"):
            scheduler.build_connector_meta(Step())
        assert scheduler.build_connector_meta(Step()).children.keys() == {"sound", "broken"}
        assert (sound.calls, broken.calls) == (["build"], ["build", "build"])
