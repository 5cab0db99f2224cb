"""kvferry's figures in vLLM's metrics and logs."""

from __future__ import annotations

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1

from kvferry.connector.stats import BUILD_INFO, METRICS
from tests.support.metrics_page import Declared, assert_promtool_is_content, declared

pytestmark = pytest.mark.timeout(600)

OFFERED = next(each for each in METRICS if each.name == "kvferry_offered_requests_total")
#: Labels by transport. UCX chooses its mechanism itself.
LABELS = {
    "shm": {"transport": "shm", "mechanism": "mapped"},
    "zeromq": {"transport": "zeromq", "mechanism": "tcp"},
    "ucx": {"transport": "ucx"},
}
FIGURES = (
    "kvferry_load_seconds_count",
    "kvferry_load_bytes_sum",
    "kvferry_load_blocks_sum",
    "kvferry_load_regions_sum",
)


@pytest.fixture(
    scope="module",
    params=[
        "shm",
        pytest.param("zeromq", marks=pytest.mark.slow),
        pytest.param("ucx", marks=pytest.mark.slow),
    ],
)
def transport(request):
    return request.param


@pytest.fixture(scope="module")
def running_pair(pair_over, transport):
    return pair_over(transport)


def test_both_nodes_count_and_the_mechanism_is_visible(pair, prompt, transport):
    """Over shared memory, blocks are read directly from vLLM's pool, if vLLM lets the transport
    allocate it.
    """
    labels = LABELS[transport]
    if transport == "shm" and not hasattr(KVConnectorBase_V1, "get_mem_pool_context"):
        labels = labels | {"mechanism": "process_vm_readv"}
    before = {name: pair.decode.metric(name, **labels) for name in FIGURES}
    delivered = pair.prefill.metric("kvferry_offers_delivered_total")
    pair.hand_over(prompt(100))
    added = {name: pair.decode.metric(name, **labels) - value for name, value in before.items()}
    assert added.pop("kvferry_load_seconds_count") == 1
    assert all(added.values())
    pair.prefill.wait_for_status(lambda status: status["num_requests"] == 0)
    assert pair.prefill.metric("kvferry_offers_delivered_total") == delivered + 1
    assert pair.prefill.metric("kvferry_live_leases") == pair.decode.metric("kvferry_live_loads") == 0


@pytest.fixture(scope="module")
def recomputing(start_module_pair):
    return start_module_pair(transfer={"kv_load_failure_policy": "recompute"})


@pytest.mark.slow
def test_a_node_counts_what_became_of_each_offer(recomputing, prompt):
    """So behind any router, too, an operator sees that a pair does nothing."""
    pair = recomputing
    tokens = prompt(97)  # three blocks, which may be cached, and the token that is always computed

    def counted():
        return {each: pair.decode.metric(OFFERED.name, outcome=each) for each in OFFERED.values}

    def added(params):
        before = counted()
        answer = pair.decode.ask(next(pair.names), tokens, 2, params)
        pair.assert_like_alone(tokens, answer, 2)
        return {each: count - before[each] for each, count in counted().items() if count > before[each]}

    assert added(pair.prefilled(tokens)) == {"loaded": 1}
    for epoch, outcome in (("1", "failed"), ("one", "refused")):
        pair.decode.order("forget")
        assert added({**pair.prefilled(tokens), "remote_epoch": epoch}) == {outcome: 1}
    assert added(pair.prefilled(tokens)) == {"cached": 1}
    assert added(None) == {}


def test_a_running_engine_exports_every_metric_of_the_table(pair, prompt):
    """The same metrics as those of a reference node; see `tests/examples/test_metrics.py`."""
    pair.hand_over(prompt(100))
    page = pair.decode.order("metrics_page")["text"]
    shown = declared(page, without=("model_name", "engine"))
    expected = {
        metric.name: Declared(metric.kind, metric.text, tuple(sorted(metric.labels)))
        for metric in (*METRICS, BUILD_INFO)
    }
    assert shown == expected
    assert_promtool_is_content(page)


def test_stats_reach_the_log_line(pair, prompt):
    pair.hand_over(prompt(100))
    pair.decode.order("log_stats")
    assert "KV Transfer metrics: num_transfers=" in pair.decode.log
