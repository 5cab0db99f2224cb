"""The aggregator: a request has ended once every rank has reported it, while failed blocks are passed on at
once.
"""

from __future__ import annotations

import pytest

from kvferry.connector import KVConnectorOutput, KVConnectorStats, KVOutputAggregator


def test_a_request_is_finished_when_every_rank_has_reported_it() -> None:
    aggregator = KVOutputAggregator(2)
    first = aggregator.aggregate([KVConnectorOutput(finished_recving={"a", "b"}), None])
    assert first.is_empty()
    second = aggregator.aggregate([None, KVConnectorOutput(finished_recving={"b"}, finished_sending={"c"})])
    assert second.finished_recving == {"b"}
    assert second.finished_sending == set()
    third = aggregator.aggregate(
        [KVConnectorOutput(finished_sending={"c"}), KVConnectorOutput(finished_recving={"a"})]
    )
    assert (third.finished_recving, third.finished_sending) == ({"a"}, {"c"})


def test_a_rank_counts_once_however_often_it_reports() -> None:
    aggregator = KVOutputAggregator(2)
    for _ in range(3):
        output = aggregator.aggregate([KVConnectorOutput(finished_sending={"a"}), KVConnectorOutput()])
        assert output.finished_sending == set()


def test_sending_and_receiving_are_counted_separately() -> None:
    aggregator = KVOutputAggregator(2)
    output = aggregator.aggregate(
        [KVConnectorOutput(finished_sending={"a"}), KVConnectorOutput(finished_recving={"a"})]
    )
    assert output.is_empty()


def test_a_request_id_can_be_used_again() -> None:
    aggregator = KVOutputAggregator(1)
    for _ in range(2):
        assert aggregator.aggregate([KVConnectorOutput(finished_sending={"a"})]).finished_sending == {"a"}


def test_a_failed_load_is_reported_with_its_reason_once_it_has_ended_on_every_rank() -> None:
    aggregator = KVOutputAggregator(2)
    failed = KVConnectorOutput(
        finished_recving={"a"}, invalid_block_ids={1}, load_errors={"a": "the peer is gone"}
    )
    first = aggregator.aggregate([failed, None])
    assert (first.finished_recving, first.load_errors, first.invalid_block_ids) == (set(), {}, {1})
    second = aggregator.aggregate([None, KVConnectorOutput(finished_recving={"a", "b"})])
    assert second.finished_recving == {"a"}
    assert second.load_errors == {"a": "the peer is gone"}
    third = aggregator.aggregate([KVConnectorOutput(finished_recving={"a", "b"}), None])
    assert (third.finished_recving, third.load_errors) == ({"b"}, {})


def test_failures_of_synchronous_loads_are_merged_at_once() -> None:
    output = KVOutputAggregator(2).aggregate(
        [
            KVConnectorOutput(invalid_block_ids={1, 2}, load_errors={"a": "peer lost"}),
            KVConnectorOutput(invalid_block_ids={2, 3}, load_errors={"a": "stale", "b": "stale"}),
        ]
    )
    assert output.invalid_block_ids == {1, 2, 3}
    assert output.load_errors == {"a": "peer lost", "b": "stale"}
    assert not output.is_empty()


def test_stats_are_merged() -> None:
    stats = [KVConnectorStats(counters={"load_failures_total": n}) for n in (1, 2)]
    output = KVOutputAggregator(2).aggregate([KVConnectorOutput(kv_connector_stats=s) for s in stats])
    assert output.kv_connector_stats.counters == {"load_failures_total": 3}


def test_the_ranks_reports_stay_as_they_were() -> None:
    rank = KVConnectorOutput(finished_sending={"a"}, invalid_block_ids={1})
    KVOutputAggregator(1).aggregate([rank, KVConnectorOutput(invalid_block_ids={2})])
    assert rank == KVConnectorOutput(finished_sending={"a"}, invalid_block_ids={1})


def test_no_rank_is_refused() -> None:
    with pytest.raises(ValueError, match="expected_count must be at least 1, got 0"):
        KVOutputAggregator(0)
