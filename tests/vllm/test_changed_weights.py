"""Weights that change in the memory of running vLLM engines: nothing that was computed with other weights is
handed over.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.support.engine_process import Answer, Node

from .conftest import Pair

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

#: A weight that the keys and values of a prompt's tokens depend on.
WEIGHT = "model.layers.0.input_layernorm.weight"
#: No parameter, and in no checkpoint: vLLM computes it from the configuration.
ANGLES = "model.layers.0.self_attn.rotary_emb.cos_sin_cache"
FACTOR = 4.0
SEEDS = count(1)


@pytest.fixture(scope="module")
def running_pair(start_module_pair) -> Pair:
    # The worker of one node is in its engine's process, that of the other in a process of its own.
    return start_module_pair(
        prefill={"distributed_executor_backend": "mp"}, extra={"connect_timeout_s": 20, "claim_timeout_s": 20}
    )


@pytest.fixture
def pair(pair: Pair) -> Iterator[Pair]:
    """Each test begins and ends with two nodes that have the weights of their files."""
    tokens = [7] * 40
    pair.decode.order("policy", policy="fail")
    assert pair.hand_over(tokens)["reason"] == "length"
    yield pair
    for node in (pair.prefill, pair.decode):
        forget(node)


def change(node: Node, factor: float = FACTOR, tensor: str = WEIGHT) -> None:
    """Change the weights in memory, and do what vLLM's documentation asks for after that."""
    node.order("scale", parameter=tensor, factor=factor)
    forget(node)


def forget(node: Node) -> None:
    """Reset the prefix cache.

    That fails while blocks are in use, and those of offers that end are freed with the next step.
    """
    node.wait_for_status(lambda status: status["num_requests"] == 0)
    assert node.order("forget")["done"]


def load_failures(node: Node) -> list[str]:
    return [line for line in node.log.splitlines() if "failed: " in line and "load of request" in line]


def refused(pair: Pair, tokens: list[int], params: Answer | None = None) -> str:
    """Have the decode node load a prompt that it must not load, and return why it did not."""
    params = params or pair.prefilled(tokens)
    assert params is not None
    before = pair.decode.order("figures")["num_bytes"]
    answer = pair.decode.ask(next(pair.names), tokens, 8, params)
    assert answer["reason"] == "error"
    assert pair.decode.order("figures")["num_bytes"] == before
    return load_failures(pair.decode)[-1]


@pytest.mark.parametrize(
    ("changed", "tensor"), [("prefill", WEIGHT), ("decode", WEIGHT), ("prefill", ANGLES)]
)
def test_unlike_weights_are_refused_until_both_nodes_have_them(
    pair: Pair, prompt, changed: str, tensor: str
) -> None:
    nodes = [pair.prefill, pair.decode]
    if changed == "decode":
        nodes.reverse()
    change(nodes[0], tensor=tensor)
    reason = refused(pair, prompt(100, next(SEEDS)))
    assert "weights" in reason
    assert "changed in memory to" in reason
    change(nodes[1], tensor=tensor)
    tokens = prompt(100, next(SEEDS))
    loads = pair.decode.order("figures")["num_loads"]
    answer = pair.hand_over(tokens)
    assert pair.decode.order("figures")["num_loads"] == loads + 1
    pair.assert_like_alone(tokens, answer)
    for node in nodes:
        change(node, 1 / FACTOR, tensor)
    tokens = prompt(100, next(SEEDS))
    answer = pair.hand_over(tokens)
    pair.assert_like_alone(tokens, answer)


def test_an_offer_ends_with_its_weights(pair: Pair, prompt) -> None:
    """It does not come back when the weights do, and its blocks are free at once."""
    tokens = prompt(100, next(SEEDS))
    params = pair.prefilled(tokens)
    aborted = pair.prefill.metric("kvferry_offers_aborted_total")
    change(pair.prefill)
    change(pair.prefill, 1 / FACTOR)
    assert pair.prefill.metric("kvferry_offers_aborted_total") == aborted + 1
    assert "the offer is over" in refused(pair, tokens, params)


@pytest.mark.parametrize("changed", ["prefill", "decode"])
def test_nothing_is_handed_over_before_the_prefix_cache_is_reset(pair: Pair, prompt, changed: str) -> None:
    """Until then a prompt may begin with blocks of the old weights."""
    both = (pair.prefill, pair.decode)
    node = getattr(pair, changed)
    tokens, more = prompt(100, next(SEEDS)), prompt(100, next(SEEDS))
    params = pair.prefilled(more)
    node.order("scale", parameter=WEIGHT, factor=FACTOR)
    if changed == "prefill":
        assert pair.prefilled(tokens) is None
    else:
        assert "reset the prefix cache" in refused(pair, more, params)
    node.order("scale", parameter=WEIGHT, factor=1 / FACTOR)
    for each in both:
        forget(each)
    answer = pair.hand_over(tokens)
    pair.assert_like_alone(tokens, answer)


def test_a_change_while_nothing_is_computed_needs_no_reset_after_it(pair: Pair, prompt) -> None:
    """As in vLLM's own order: pause, which resets the cache; change the weights; resume."""
    for node in (pair.prefill, pair.decode):
        forget(node)
        node.order("scale", parameter=WEIGHT, factor=FACTOR)
    tokens = prompt(100, next(SEEDS))
    answer = pair.hand_over(tokens)
    pair.assert_like_alone(tokens, answer)
    for node in (pair.prefill, pair.decode):
        change(node, 1 / FACTOR)


def test_calls_that_change_no_weights_end_nothing(pair: Pair, prompt) -> None:
    tokens = prompt(100, next(SEEDS))
    params = pair.prefilled(tokens)
    pair.prefill.order("call", method="reset_mm_cache")
    pair.prefill.order("call", method="reload_weights")
    answer = pair.decode.ask(next(pair.names), tokens, 8, params)
    pair.assert_like_alone(tokens, answer)


def test_a_reset_of_the_connectors_cache_ends_offers(pair: Pair, prompt, is_at_rest) -> None:
    tokens = prompt(100, next(SEEDS))
    params = pair.prefilled(tokens)
    aborted = pair.prefill.metric("kvferry_offers_aborted_total")
    pair.prefill.order("forget_everywhere")
    pair.prefill.wait_for_status(is_at_rest)
    assert pair.prefill.metric("kvferry_offers_aborted_total") == aborted + 1
    assert "the offer is over" in refused(pair, tokens, params)


class TestReloads:
    """On a CPU the weights of linear layers are in a form that cannot be read, so only the names of their
    files tell them apart.
    """

    @pytest.fixture
    def other_model(self, model: Path, tmp_path: Path) -> Path:
        """A model that differs only in weights that a CPU's kernels hide."""
        folder = tmp_path / "other"
        shutil.copytree(model, folder)
        (file,) = folder.glob("*.safetensors")
        weights = load_file(file)
        weights["model.layers.0.self_attn.k_proj.weight"] *= FACTOR
        save_file(weights, file, {"format": "pt"})
        return folder

    def test_other_files_are_other_weights(self, pair: Pair, prompt, model: Path, other_model: Path) -> None:
        nodes = (pair.prefill, pair.decode)
        for node in nodes:
            node.order("call", method="reload_weights", arguments={"weights_path": str(other_model)})
            forget(node)
            if node is pair.prefill:
                assert "loaded over" in refused(pair, prompt(100, next(SEEDS)))
        tokens = prompt(100, next(SEEDS))
        answer = pair.hand_over(tokens)
        pair.assert_like_alone(tokens, answer)
        for node in nodes:
            node.order("call", method="reload_weights", arguments={"weights_path": str(model)})
            forget(node)

    def test_a_replaced_kernel_is_not_known(self, pair: Pair, prompt) -> None:
        """Until the weights are loaded from their files again."""
        pair.prefill.order("pack_anew", layer="model.layers.0.self_attn.qkv_proj", factor=FACTOR)
        forget(pair.prefill)
        assert pair.prefilled(prompt(100, next(SEEDS))) is None
        pair.prefill.order("call", method="reload_weights")
        forget(pair.prefill)
        tokens = prompt(100, next(SEEDS))
        answer = pair.hand_over(tokens)
        pair.assert_like_alone(tokens, answer)
