"""kvferry as a child of vLLM's MultiConnector, beside vLLM's own connectors and one that fails, in both
orders.
"""

from __future__ import annotations

import shutil
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

from kvferry.connector.stats import KVConnectorStats, TransferRecord
from kvferry.connector.vllm.stats import KvferryStats
from kvferry.transports.errors import ConfigurationError
from tests.vllm.conftest import EXTRA
from tests.vllm.test_adapter import _request, _side
from tests.vllm.test_failures import VALID

KVFERRY = {
    "kv_connector": "KvferryConnector",
    "kv_connector_module_path": "kvferry.connector.vllm",
    "kv_role": "kv_both",
}
RECORD = TransferRecord("r", "shm", "mapped", "per-layer", 2, 8, 8, 4096, 0.5)


def _parent(*children):
    """Configure vLLM with a MultiConnector."""
    extra = {"connectors": list(children)}
    transfer = KVTransferConfig(
        kv_connector="MultiConnector", kv_role="kv_both", kv_connector_extra_config=extra
    )
    return SimpleNamespace(kv_transfer_config=transfer)


def _sent(stats):
    """Return what the front end gets of a MultiConnector's figures; before 0.29 each child's object is sent
    as it is.
    """
    return stats.to_dict() if hasattr(stats, "to_dict") else asdict(stats)["data"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # importing older vLLM's ExampleConnector
class TestFigures:
    """MultiConnector keeps the figures of each child under the name of its class, and looks the class up by
    this name.
    """

    @pytest.fixture(autouse=True)
    def _unregistered(self, monkeypatch):
        """vLLM as it is with `VLLM_PLUGINS` empty, or where kvferry is only on the path."""
        others = {name: made for name, made in KVConnectorFactory._registry.items() if "Kvferry" not in name}
        monkeypatch.setattr(KVConnectorFactory, "_registry", others)

    def test_they_add_up_and_are_exported_under_their_names(self):
        registry = CollectorRegistry()
        kinds = {kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
        example = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
        labels = ["model_name", "engine"]
        metrics = MultiConnector.build_prom_metrics(
            _parent(example, KVFERRY), kinds, labels, {0: ["tiny", "0"]}
        )
        figures = KvferryStats(data=KVConnectorStats((RECORD,), {"offers_delivered_total": 2}).to_dict())
        both = MultiConnector.build_kv_connector_stats({"KvferryConnector": figures})
        both = both.aggregate(MultiConnector.build_kv_connector_stats(_sent(both)))
        assert both.reduce()["KvferryConnector"]["offers_delivered_total"] == 4
        metrics.observe(_sent(both), 0)
        page = generate_latest(registry).decode()
        assert 'kvferry_offers_delivered_total{engine="0",model_name="tiny"} 4.0' in page
        assert "kvferry_load_seconds_count{" in page


def test_a_wrong_option_of_the_child_is_reported_while_vllm_reads_its_configuration():
    child = {**KVFERRY, "kv_connector_extra_config": {"leas_s": 1}}
    with pytest.raises(ConfigurationError, match="did you mean 'lease_s'"):
        MultiConnector.requires_piecewise_for_cudagraph({"connectors": [child]})


def test_the_handshake_of_another_connector_is_refused_by_name():
    """MultiConnector hands all its children the handshake of the first child that has one."""

    class NixlHandshakePayload:
        pass

    with pytest.raises(ConfigurationError, match="'NixlHandshakePayload'"):
        _side().set_handshake_metadata({0: NixlHandshakePayload()})


def test_a_refused_request_keeps_the_params_of_the_other_children():
    side, params = _side(), {"do_remote_prefill": True, "max_load_tokens": 5}
    request = _request("r", params)
    side.on_new_request(request)
    assert side.get_num_new_matched_tokens(request, 0) == (40, True)
    assert request.kv_transfer_params == params


# -- real engines -------------------------------------------------------------------------------------


def _children(store):
    """The configurations of all children, with those that load nothing at both ends."""
    return [
        {**KVFERRY, "kv_connector_extra_config": EXTRA},
        {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "cpu_bytes_to_use": 1 << 26,
                "spec_name": "HostMemorySpec",
                "spec_module_path": "kvferry.connector.testing.host_memory",
            },
        },
        {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(store)},
        },
        {
            "kv_connector": "Planted",
            "kv_connector_module_path": "tests.vllm.children",
            "kv_role": "kv_both",
        },
    ]


@pytest.fixture(scope="module")
def stores(tmp_path_factory) -> list[Path]:
    """Where the ExampleConnectors of the two nodes keep what they save."""
    return [tmp_path_factory.mktemp("store") for _ in range(2)]


@pytest.fixture(scope="module")
def nodes(start_module_pair, stores):
    """Two nodes. kvferry's is the first child of one and the last child of the other."""
    first, last = (_children(store) for store in stores)
    settings = (
        {"connector": ("MultiConnector", None), "extra": {"connectors": children}}
        for children in (first, last[::-1])
    )
    prefill, decode = settings
    return start_module_pair(prefill=prefill, decode=decode)


@pytest.fixture(scope="module", params=["kvferry decodes last", "kvferry decodes first"])
def running_pair(request, nodes):
    if request.param == "kvferry decodes last":
        return nodes
    return type(nodes)(nodes.decode, nodes.prefill, nodes.names)


@pytest.fixture
def forget(pair, stores):
    """Empty every cache of both nodes, so that a prompt is computed or handed over."""

    def forget():
        for store in stores:
            for folder in store.iterdir():
                shutil.rmtree(folder)
        for node in (pair.prefill, pair.decode):
            assert node.order("forget_everywhere")["done"]

    forget()
    return forget


@pytest.mark.slow
@pytest.mark.timeout(600)
class TestEngines:
    @pytest.mark.parametrize("num_tokens", [5, 33, 400])
    def test_tokens_equal_those_of_one_node(self, pair, prompt, forget, num_tokens):
        tokens, before = prompt(num_tokens), pair.decode.order("figures")["num_loads"]
        answer = pair.hand_over(tokens)
        assert (answer["reason"], pair.decode.order("figures")["num_loads"]) == ("length", before + 1)
        forget()
        pair.assert_like_alone(tokens, answer)

    def test_the_other_children_keep_what_was_handed_over(self, pair, prompt, forget):
        tokens = prompt(400)
        first = pair.hand_over(tokens)
        pair.decode.order("forget")
        before = {name: pair.decode.metric(name) for name in (HITS, LOADS)}
        again = pair.decode.ask(next(pair.names), tokens, 8)
        assert pair.decode.metric(HITS) > before[HITS]
        assert pair.decode.metric(LOADS) == before[LOADS]
        pair.assert_like_alone(tokens, again, alone=first)

    def test_what_another_child_has_replaces_a_failed_load(self, pair, prompt, forget):
        """The policy `recompute` asks all children once more; the first child that has the prompt may even be
        asked before.
        """
        tokens = prompt(400)
        alone = pair.decode.ask(next(pair.names), tokens, 8)
        pair.decode.order("forget")
        pair.decode.order("policy", policy="recompute")
        before = pair.decode.metric(HITS)
        answer = pair.decode.ask(next(pair.names), tokens, 8, VALID)
        assert answer["reason"] == "length"
        assert pair.decode.metric(HITS) > before
        pair.assert_like_alone(tokens, answer, alone=alone)

    def test_a_failed_load_of_another_child_ends_by_the_policy(self, pair, prompt, forget, policy):
        """A handover at the same time is not lost."""
        tokens, others = prompt(400), prompt(100)
        params = pair.prefilled(tokens)
        failing, loading = next(pair.names), next(pair.names)
        pair.decode.start(failing, others, 8, {"planted_load": True})
        pair.decode.start(loading, tokens, 8, params)
        failed, loaded = pair.decode.result(failing), pair.decode.result(loading)
        assert loaded["reason"] == "length"
        forget()
        pair.assert_like_alone(tokens, loaded)
        forget()
        pair.assert_ended_by(policy, failed, others)

    def test_blocks_are_kept_until_every_child_is_done(self, pair, prompt, forget, is_at_rest):
        """Two children hold the blocks of one request, whichever of them ends first."""
        tokens = prompt(400)
        answers = [
            pair.prefill.ask(
                next(pair.names), tokens, params={"do_remote_decode": True, "planted_save": True}
            )
            for _ in range(2)
        ]
        assert all(answer["params"]["planted_name"] for answer in answers)
        answer = pair.decode.ask(next(pair.names), tokens, 8, answers[0]["params"])
        assert answer["reason"] == "length"
        pair.prefill.wait_for_status(is_at_rest)  # the second offer ends with its lease
        forget()
        pair.assert_like_alone(tokens, answer)

    def test_blocks_are_not_reused_while_another_child_reads_them(self, pair, prompt, forget):
        """OffloadingConnector copies the blocks of finished requests late; loads go into blocks that were
        free.
        """
        prompts = [prompt(900, seed) for seed in range(6)]
        first = [pair.hand_over(tokens)["tokens"] for tokens in prompts]
        pair.decode.order("forget")
        assert [pair.decode.ask(next(pair.names), tokens, 8)["tokens"] for tokens in prompts] == first

    def test_the_figures_of_all_children_are_exported(self, pair, prompt, forget):
        pair.hand_over(prompt(400))
        pair.decode.ask(next(pair.names), prompt(400, seed=1))
        pair.decode.order("log_stats")
        page = pair.decode.order("metrics_page")["text"]
        assert pair.decode.metric("kvferry_load_bytes_sum") > 0
        assert "vllm:kv_offload" in page
        # The child whose figures came first in vLLM's interval is named first.
        line = next(line for line in pair.decode.log.splitlines() if "KV Transfer metrics: " in line)
        assert "KvferryConnector={'num_transfers':" in line
        assert "OffloadingConnector={" in line


HITS = "vllm:external_prefix_cache_hits_total"
LOADS = "kvferry_load_seconds_count"
